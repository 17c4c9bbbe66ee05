"""Maps rows of a data set to examples, and examples to the rows that a trainer reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.errors import DataError
from layerswap.training.mix.schema import (
    DatasetRow,
    Messages,
    Mix,
    MixSource,
    check_columns,
    make_renderer,
    template_columns,
)

if TYPE_CHECKING:
    from datasets import Dataset

Turn = tuple[str, str]
"""A role (system, user, assistant) and its message."""


class MixExample(NamedTuple):
    """One training example, before it becomes a row.

    Attributes:
        turns: the conversation; empty for raw text.
        text: the raw text; empty for a conversation.
        language: ISO 639-1 code of its source, if known.
        source: name of its source.
    """

    turns: tuple[Turn, ...]
    text: str = ""
    language: str | None = None
    source: str = ""

    @property
    def prompt(self) -> str:
        """The model's input: everything before the last turn; empty for raw text."""
        return "\n".join(content for _, content in self.turns[:-1])

    @property
    def completion(self) -> str:
        """The model's target: the last turn, or the raw text."""
        return self.turns[-1][1] if self.turns else self.text

    @property
    def whole(self) -> str:
        """The complete text."""
        return "\n".join(content for _, content in self.turns) or self.text


def used_columns(source: MixSource) -> set[str]:
    """The columns that a source's mapping reads."""
    if source.messages is not None:
        return {source.messages.column}
    templates = filter(None, (source.prompt, source.completion, source.text))
    return set[str]().union(*(template_columns(text, source.template) for text in templates))


def example_maker(
    source: MixSource, name: str, columns: list[str]
) -> Callable[[DatasetRow], MixExample | None]:
    """A function from a row of `source` to its example, or None if a part of it is empty.

    Args:
        source: the source.
        name: its name in the mix.
        columns: the columns that its rows have.

    Raises:
        DataError: a template or the mapping names a column that does not exist.
    """

    def renderer(key: str) -> Callable[[DatasetRow], str]:
        return make_renderer(getattr(source, key), source.template, columns, key)

    def example(turns: tuple[Turn, ...], text: str = "") -> MixExample:
        return MixExample(turns, text, source.language, name)

    mapping = source.messages
    if mapping is not None:
        check_columns({mapping.column}, columns, "messages.column")

        def from_messages(row: DatasetRow) -> MixExample | None:
            turns = _turns(row[mapping.column], mapping)
            return example(turns) if turns else None

        return from_messages
    if source.text is not None:
        text = renderer("text")

        def from_text(row: DatasetRow) -> MixExample | None:
            rendered = text(row)
            return example((), rendered) if rendered.strip() else None

        return from_text
    prompt, completion = renderer("prompt"), renderer("completion")

    def from_pair(row: DatasetRow) -> MixExample | None:
        ask, answer = prompt(row), completion(row)
        if not ask.strip() or not answer.strip():
            return None
        return example((("user", ask), ("assistant", answer)))

    return from_pair


def row_maker(mix: Mix, folder: Path) -> Callable[[list[MixExample]], Dataset]:
    """A function from examples to the rows of the mix's kind.

    - `chat`: prompt and completion as lists of messages; the trainer applies the model's chat
      template and trains on the completion alone.
    - `prompt-completion`: two texts, joined by the separator or written by the chat template.
    - `messages`: one list of messages.
    - `text`: one text.

    Args:
        mix: with its kind, separator and chat template.
        folder: base folder of the chat template's path.

    Raises:
        DataError: the chat template cannot be read or fails.
    """
    pair = _joined(mix.separator)
    if mix.chat_template is not None:
        pair = _templated(folder / Path(mix.chat_template).expanduser())

    def row(example: MixExample) -> tuple[Any, ...]:
        if mix.kind == "chat":
            return _messages(example.turns[:-1]), _messages(example.turns[-1:])
        if mix.kind == "messages":
            return (_messages(example.turns),)
        if mix.kind == "prompt-completion":
            return pair(example)
        return ("".join(pair(example)) if example.turns else example.text,)

    def rows(examples: list[MixExample]) -> Dataset:
        from datasets import Dataset, Features, Value

        chat = mix.kind in ("chat", "messages")
        value = [{"role": Value("string"), "content": Value("string")}] if chat else Value("string")
        paired = mix.kind in ("chat", "prompt-completion")
        names = ("prompt", "completion") if paired else (mix.kind,)
        made = [row(example) for example in examples]
        data = {name: [values[i] for values in made] for i, name in enumerate(names)}
        return Dataset.from_dict(data, features=Features(dict.fromkeys(names, value)))

    return rows


def _turns(value: Any, mapping: Messages) -> tuple[Turn, ...]:
    if mapping.layout == "messages":
        turns = [_message(item, mapping) for item in value or ()]
    else:
        said = list(value or ())
        if mapping.layout == "pairs":
            said = [text for pair in said for text in (pair or ())]
        roles = ("user", "assistant")
        turns = [(roles[i % 2], str(text or "").strip()) for i, text in enumerate(said)]
    # Only a conversation that ends with an answer can be trained on; its beginning is kept.
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    whole = len(turns) > 1 and all(text for _, text in turns)
    return tuple(turns) if whole else ()


def _message(item: Any, mapping: Messages) -> Turn:
    try:
        role, content = item[mapping.role], item[mapping.content]
    except (KeyError, TypeError):
        keys = ", ".join(sorted(item)) if isinstance(item, dict) else type(item).__name__
        raise DataError(
            f"messages: a message has no {mapping.role!r} and {mapping.content!r}; it has {keys}"
        ) from None
    role = mapping.roles.get(str(role), str(role))
    if role not in ("system", "user", "assistant"):
        raise DataError(
            f"messages.roles: says nothing about the role {role!r}; "
            "write which of system, user, assistant it is"
        )
    return role, str(content or "").strip()


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _joined(separator: str) -> Callable[[MixExample], tuple[str, str]]:
    def pair(example: MixExample) -> tuple[str, str]:
        prompt = separator.join(content for _, content in example.turns[:-1])
        # A prompt that ends in white space already separates itself from the completion.
        apart = "" if prompt != prompt.rstrip() else separator
        return prompt + apart, example.completion

    return pair


def _templated(path: Path) -> Callable[[MixExample], tuple[str, str]]:
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

    def pair(example: MixExample) -> tuple[str, str]:
        prompt, whole = render(example.turns[:-1], True), render(example.turns, False)
        if not whole.startswith(prompt):
            raise DataError(
                f"chat_template: {path}: the prompt is not the beginning of the whole; "
                "the template must write the same prompt with and without the answer"
            )
        return prompt, whole[len(prompt) :]

    return pair
