"""Options of prompts and generation, with lm-eval's names, and prompts outside of tasks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from layerswap._types import Log
from layerswap.compose.schema import Strict
from layerswap.errors import EvaluationError


class PromptOptions(Strict):
    """The prompts and the generation of tasks, in the words and with the meaning of lm-eval.

    Attributes:
        apply_chat_template: write prompts with the tokenizer's chat template; a text names one of
            several templates.
        system_instruction: the system message of a chat; without a template, text before a prompt.
        fewshot_as_multiturn: write examples as turns of the chat; as `apply_chat_template` when
            None.
        gen_kwargs: settings that replace those of the tasks for generation, such as
            `temperature=0.7,do_sample=true` or a mapping.
    """

    apply_chat_template: bool | str = False
    system_instruction: str | None = None
    fewshot_as_multiturn: bool | None = None
    gen_kwargs: str | dict[str, Any] | None = None

    @property
    def multiturn(self) -> bool:
        """True if examples are turns of the chat."""
        given = self.fewshot_as_multiturn
        return bool(self.apply_chat_template) if given is None else given

    @property
    def generation(self) -> dict[str, Any]:
        """`gen_kwargs` as a mapping.

        Raises:
            EvaluationError: the text is not `name=value,name=value`.
        """
        return parse_arguments("gen_kwargs", self.gen_kwargs)

    def tokenizer(self, tokenizer: Any, log: Log = lambda line: None) -> Any:
        """The tokenizer with the chat template that is asked for.

        Args:
            tokenizer: a transformers tokenizer.
            log: called with a line where there is a template that is not applied.

        Raises:
            EvaluationError: there is no such chat template.
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
        """Token ids of a prompt outside of a task, with the chat template where it is applied.

        Args:
            tokenizer: as `tokenizer` gives it.
            prompt: the text, the user's message in a chat.

        Raises:
            EvaluationError: the chat template cannot be applied.
        """
        if not self.apply_chat_template:
            before = f"{self.system_instruction}\n\n" if self.system_instruction else ""
            return list(tokenizer(before + prompt).input_ids)
        turns = [{"role": "user", "content": prompt}]
        if self.system_instruction:
            turns.insert(0, {"role": "system", "content": self.system_instruction})
        try:
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and raises whatever it likes
            raise EvaluationError(template_refusal(error)) from None
        # The template writes the special tokens itself.
        return list(tokenizer(text, add_special_tokens=False).input_ids)


def parse_arguments(option: str, given: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings by name, from `name=value,name=value` or from a mapping.

    Raises:
        EvaluationError: the text is something else; the message names the option.
    """
    if not isinstance(given, str):
        return dict(given or {})
    from lm_eval.utils import simple_parse_args_string

    if not all("=" in part for part in given.split(",")):
        raise EvaluationError(f"{option}: {given!r} is not name=value,name=value")
    return dict(simple_parse_args_string(given))


def template_refusal(error: Exception) -> str:
    """One line for what a chat template raised."""
    return f"the chat template cannot be applied ({' '.join(str(error).split())[:160]})"
