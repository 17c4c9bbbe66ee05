"""Settings of an evaluation, built and checked once by a command, a sweep or a study."""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from layerswap.checkpoint.loading import with_thinking
from layerswap.compose.schema import DTYPES
from layerswap.evaluation.asked import AskedFields
from layerswap.ground.errors import EvaluationError, one_line
from layerswap.ground.strict import Extended, once
from layerswap.ground.types import Log
from layerswap.ground.yaml_file import validate

PROMPTS = ("num_fewshot", "apply_chat_template", "think", "system_instruction",
           "fewshot_as_multiturn", "gen_kwargs", "fewshot_seed")  # fmt: skip
"""The settings of prompts that are recorded with each answer, in the order of earlier runs."""


class Asked(Extended, AskedFields):
    """`AskedFields`, checked, for every evaluation of a command, a sweep or a study."""

    new_fields = frozenset({"think", "batch_size", "fewshot_seed"})
    fewest: ClassVar[int] = 1  # documents

    _once = field_validator("tasks")(once)

    @field_validator("num_fewshot", "limit", "batch_size")
    @classmethod
    def _enough(cls, given: Any, info: ValidationInfo) -> Any:
        least = {"num_fewshot": 0, "limit": cls.fewest}.get(info.field_name or "", 1)
        if isinstance(given, int) and given < least:
            raise ValueError(f"write a number from {least}; found {given}")
        return given

    @field_validator("gen_kwargs", "engine_args")
    @classmethod
    def _by_name(cls, given: Any) -> Any:
        if isinstance(given, str) and not all("=" in part for part in given.split(",")):
            raise ValueError(f"{given!r} is not name=value,name=value")
        return given

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.engine_args and self.engine != "vllm":
            raise ValueError(
                "--engine-args (engine_args) needs the engine vllm; add --engine vllm, or leave it "
                "out"
            )
        return self

    def described(self, shots: int, template: str, description: str | None = None) -> str:
        """Return the prompt settings that are not defaults, and the hash of the template."""
        used = {name: value for name in PROMPTS
                if (value := getattr(self, name)) != Asked.model_fields[name].default}  # fmt: skip
        if self.apply_chat_template:
            used["apply_chat_template"] = hashlib.sha256(template.encode()).hexdigest()[:8]
        used |= {"description": description} if description else {}
        return ", ".join(f"{k}={v!r}" for k, v in {**used, "num_fewshot": shots}.items())

    def with_chat_template(self, tokenizer: Any, log: Log = lambda line: None) -> Any:
        """Copy a tokenizer with only the chat template that the prompts use.

        `log` is called with a line if the tokenizer has a template that is not applied.
        """
        templates = getattr(tokenizer, "chat_template", None)
        if not self.apply_chat_template:
            if self.think is not None:
                raise EvaluationError("think belongs to a chat template; give apply_chat_template")
            if templates:
                log(
                    "the tokenizer has a chat template, which is not applied: prompts are plain "
                    "text (--apply-chat-template)"
                )
            return tokenizer
        if not templates:
            raise EvaluationError("the tokenizer has no chat template to apply")
        name = "default" if self.apply_chat_template is True else self.apply_chat_template
        named = templates if isinstance(templates, dict) else {"default": templates}
        if name not in named:
            raise EvaluationError(f"no chat template {name!r}; there are {', '.join(named)}")
        chosen = copy.copy(tokenizer)
        chosen.chat_template = named[name]
        if self.think is not None:
            chosen.chat_template = with_thinking(named[name], self.think)
        chosen.apply_chat_template = _guarded(chosen.apply_chat_template)
        return chosen


class EvaluationSettings(Asked):
    """Settings of an evaluation, with the device and the dtype of its models."""

    device: str | None = None  # a GPU if there is one when not given
    # As stored when not given, or the widest of several.
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]

    @classmethod
    def taken_from(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Select the settings from a mapping with more keys, such as a study step's."""
        own = {name: values[name] for name in cls.model_fields if name in values}
        return validate(cls, {**own, **others}, where="evaluate", expected="settings")


def parse_arguments(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Read settings by name; values in text are read as by lm-eval."""
    if not isinstance(given, str):
        return dict(given or {})
    from lm_eval.utils import simple_parse_args_string

    return dict(simple_parse_args_string(given))


def _guarded(apply: Callable[..., str]) -> Callable[..., str]:
    """Name the template in its errors, and warn where lm-eval drops the system role."""

    def applied(turns: Any, **settings: Any) -> str:
        from jinja2 import TemplateError

        try:
            return apply(turns, **settings)
        except TemplateError as error:
            if any(turn["role"] == "system" for turn in turns):
                warnings.warn(
                    f"{template_error(error)}; prompts omit the system instruction",
                    stacklevel=2,
                )
            raise
        except Exception as error:  # a template is a program, and raises anything
            raise template_error(error) from None

    return applied


def template_error(error: Exception) -> EvaluationError:
    """Describe an error of a chat template in one line."""
    why = one_line(error, 160) or type(error).__name__
    return EvaluationError(f"the chat template cannot be applied ({why})")
