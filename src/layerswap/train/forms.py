"""The final form of examples: the rows that a trainer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import DataError

if TYPE_CHECKING:
    from datasets import Dataset

    from layerswap.train.mapping import Example, Turn
    from layerswap.train.mix_schema import Mix

Form = Callable[["Example"], dict[str, Any]]


def former(mix: Mix, folder: Path) -> Callable[[list[Example]], Dataset]:
    """A function from examples to the rows of the mix's kind.

    - `chat`: prompt and completion as lists of messages; a trainer applies the model's chat
      template and learns the completion alone.
    - `prompt-completion`: both as text, joined by the separator or made by the chat template.
    - `messages`: one list of messages.
    - `text`: one text.

    Args:
        mix: with its kind, separator and chat template.
        folder: what the path of the chat template is relative to.

    Raises:
        DataError: the chat template cannot be read or is wrong.
    """
    form = _form(mix, folder)
    columns = ("prompt", "completion") if mix.kind in ("chat", "prompt-completion") else (mix.kind,)

    def rows(examples: list[Example]) -> Dataset:
        from datasets import Dataset, Features, Value

        message = {"role": Value("string"), "content": Value("string")}
        value = [message] if mix.kind in ("chat", "messages") else Value("string")
        formed = [form(example) for example in examples]
        data = {column: [row[column] for row in formed] for column in columns}
        return Dataset.from_dict(data, features=Features(dict.fromkeys(columns, value)))

    return rows


def _form(mix: Mix, folder: Path) -> Form:
    if mix.kind == "chat":
        return lambda example: {
            "prompt": _messages(example.turns[:-1]), "completion": _messages(example.turns[-1:])
        }  # fmt: skip
    if mix.kind == "messages":
        return lambda example: {"messages": _messages(example.turns)}
    if mix.chat_template is None:
        pair = _joined(mix.separator)
    else:
        pair = _templated(folder / Path(mix.chat_template).expanduser())
    if mix.kind == "prompt-completion":
        return lambda example: dict(zip(("prompt", "completion"), pair(example), strict=True))
    return lambda example: {"text": "".join(pair(example)) if example.turns else example.text}


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _joined(separator: str) -> Callable[[Example], tuple[str, str]]:
    def pair(example: Example) -> tuple[str, str]:
        prompt = separator.join(content for _, content in example.turns[:-1])
        # A prompt that ends in white space says itself how the completion follows.
        apart = "" if prompt != prompt.rstrip() else separator
        return prompt + apart, example.completion

    return pair


def _templated(path: Path) -> Callable[[Example], tuple[str, str]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        template = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise DataError(f"chat_template: {path}: cannot be read ({reason})") from None

    def render(turns: tuple[Turn, ...], prompt: bool) -> str:
        try:
            rendered: Any = render_jinja_template(
                conversations=[_messages(turns)],
                chat_template=template,
                add_generation_prompt=prompt,
            )
        except Exception as error:  # jinja2 lets every error of the template through
            raise DataError(f"chat_template: {path}: fails on a row ({error})") from None
        return str(rendered[0][0])

    def pair(example: Example) -> tuple[str, str]:
        prompt, whole = render(example.turns[:-1], True), render(example.turns, False)
        if not whole.startswith(prompt):
            raise DataError(
                f"chat_template: {path}: the prompt is not the beginning of the whole; "
                "the template must write the same prompt with and without the answer"
            )
        return prompt, whole[len(prompt) :]

    return pair
