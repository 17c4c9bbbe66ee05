"""Settings of an evaluation, built and checked once by a command, a sweep or a study."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt, model_validator

from layerswap._types import Log
from layerswap.compose.schema import DTYPES, Strict
from layerswap.compose.yaml_file import validate
from layerswap.engine.vllm import NOT_VLLM
from layerswap.errors import EvaluationError


def _check_arguments(given: object) -> object:
    if isinstance(given, str) and not all("=" in part for part in given.split(",")):
        raise ValueError(f"{given!r} is not name=value,name=value")
    return given


Arguments = Annotated[str | dict[str, Any], BeforeValidator(_check_arguments)]
"""Settings by name: a mapping, or text as `name=value,name=value`."""


class PromptOptions(Strict):
    """Prompts and generation, in the words and with the meaning of lm-eval.

    Attributes:
        num_fewshot: number of examples in a prompt; the task's own when not given.
        apply_chat_template: write prompts with the tokenizer's chat template; a text names one of
            several templates.
        system_instruction: system message of a chat; without a template, text before the prompt.
        fewshot_as_multiturn: write examples as turns of the chat; by default, if a template is
            applied.
        gen_kwargs: generation settings that replace those of the tasks, such as
            `temperature=0.7,do_sample=true` or a mapping.
    """

    num_fewshot: NonNegativeInt | None = None
    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: Arguments | None = None

    @classmethod
    def taken_from(cls, values: Mapping[str, Any], **others: Any) -> Self:
        """Take the settings from a mapping with further keys, such as a study step's."""
        own = {name: values[name] for name in cls.model_fields if name in values}
        return validate(cls, {**own, **others}, where="evaluate", expected="settings")

    @property
    def multiturn(self) -> bool:
        """True if examples are turns of the chat."""
        given = self.fewshot_as_multiturn
        return bool(self.apply_chat_template) if given is None else given

    def with_chat_template(self, tokenizer: Any, log: Log = lambda line: None) -> Any:
        """Copy a tokenizer with only the chat template that the prompts use.

        `log` is called with a line if the tokenizer has a template that is not applied.
        """
        templates = getattr(tokenizer, "chat_template", None)
        if not self.apply_chat_template:
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
        return chosen

    def prompt_ids(self, tokenizer: Any, prompt: str) -> list[int]:
        """Tokenize a prompt outside a task; in a chat, it is the user's message.

        The tokenizer is from `with_chat_template`.
        """
        if not self.apply_chat_template:
            before = f"{self.system_instruction}\n\n" if self.system_instruction else ""
            return list(tokenizer(before + prompt).input_ids)
        turns = [{"role": "user", "content": prompt}]
        if self.system_instruction:
            turns.insert(0, {"role": "system", "content": self.system_instruction})
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and raises anything
            raise template_error(error) from None
        # The template writes the special tokens itself.
        return list(tokenizer(text, add_special_tokens=False).input_ids)


class EvaluationSettings(PromptOptions):
    """Settings of an evaluation.

    Attributes:
        limit: largest number of documents of a task.
        batch_size: rows that a model reads together; `auto` is 16, or as many as fit.
        device: device of the models; a GPU if there is one when not given.
        dtype: dtype of the models; as stored when not given, or the widest of several.
        engine: `sweep` answers for all compositions of the same experts together; `vllm` starts
            vLLM once and swaps its weights; `hf` loads each model through transformers.
        engine_args: arguments of `vllm.LLM`, such as `gpu_memory_utilization=0.8` or a mapping.
        allow_code: let tasks run programs that a model writes, in the sandbox.
    """

    limit: PositiveInt | None = None
    batch_size: PositiveInt | Literal["auto"] = "auto"
    device: str | None = None
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    engine: Literal["sweep", "vllm", "hf"] = "sweep"
    engine_args: Arguments = {}
    allow_code: bool = False

    @model_validator(mode="after")
    def _arguments_of_vllm(self) -> Self:
        if self.engine_args and self.engine != "vllm":
            raise ValueError(NOT_VLLM)
        return self


def parse_arguments(given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Read settings by name; values in text are read as by lm-eval."""
    if not isinstance(given, str):
        return dict(given or {})
    from lm_eval.utils import simple_parse_args_string

    return dict(simple_parse_args_string(given))


def template_error(error: Exception) -> EvaluationError:
    """Describe an error of a chat template in one line."""
    why = " ".join(str(error).split())[:160]
    return EvaluationError(f"the chat template cannot be applied ({why})")
