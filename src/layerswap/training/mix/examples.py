"""Makes training examples from rows of a data set, and a trainer's rows from examples."""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.ground.errors import DataError, error_context
from layerswap.reading.origins import check_columns, check_texts
from layerswap.training.mix.schema import Messages, Mix, MixSource
from layerswap.training.mix.templates import DatasetRow, Template, parse_template, text_of

if TYPE_CHECKING:
    from datasets import Dataset

Turn = tuple[str, str]
"""A role (system, user, assistant) and its message."""
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles; its messages have the keys `from` and `value`."""


PROMPT_COLUMN = re.compile("(?i)system(.?(prompt|message|instructions?))?|history|tools|functions")
"""Matches a column beside a prompt or a conversation that changes what a model is asked."""


class MixExample(NamedTuple):
    """One training example, before it becomes a row."""

    turns: tuple[Turn, ...]  # empty for raw text
    text: str = ""  # empty for a conversation
    language: str | None = None  # ISO 639-1 code of its source, if known
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


class ExampleMaker:
    """Makes examples from the rows of a source with a name."""

    def __init__(self, source: MixSource, name: str) -> None:
        self._source, self._name = source, name
        self._templates: dict[str, Template] = {
            key: parse_template(text, source.template)
            for key in ("prompt", "completion", "text")
            if (text := getattr(source, key)) is not None
        }

    @property
    def columns(self) -> set[str]:
        """The columns that the templates or the conversation read."""
        if self._source.messages is not None:
            return {self._source.messages.column}
        return set[str]().union(*(template.columns for template in self._templates.values()))

    def check(self, rows: Dataset) -> None:
        """Refuse a template, or a conversation, whose column is missing or holds no texts."""
        from datasets import Value

        columns = rows.column_names
        if self._source.messages is not None:
            check_columns(self.columns, columns, "messages.column")
            for column in filter(PROMPT_COLUMN.fullmatch, columns):
                warnings.warn(f"source {self._name!r}: its column {column!r} is not read; write it "
                              "into the messages, with the role system", stacklevel=2)  # fmt: skip
        for key, template in self._templates.items():
            check_columns(template.columns, columns, key)
            for column in sorted(template.texts):
                if not isinstance(rows.features[column], Value):
                    check_texts(rows[column], column)

    def make(self, row: DatasetRow) -> MixExample | None:
        """Make the example of a row; None if a part of it is empty."""
        turns: tuple[Turn, ...] = ()
        text, messages = "", self._source.messages
        if messages is not None:
            turns = conversation(row[messages.column], messages)
        elif "text" in self._templates:
            text = self._render("text", row)
        else:
            prompt, completion = self._render("prompt", row), self._render("completion", row)
            if prompt.strip() and completion.strip():
                turns = (("user", prompt), ("assistant", completion))
        if not turns and not text.strip():
            return None
        return MixExample(turns, text, self._source.language, self._name)

    def _render(self, key: str, row: DatasetRow) -> str:
        with error_context(key):
            return self._templates[key].render(row)


def mix_rows(mix: Mix, examples: list[MixExample]) -> Dataset:
    """Make the rows of examples, in the mix's kind."""
    from datasets import Dataset, Features, Value

    def row(example: MixExample) -> tuple[Any, ...]:
        if mix.kind == "chat":
            return _messages(example.turns[:-1]), _messages(example.turns[-1:])
        if mix.kind == "messages":
            return (_messages(example.turns),)
        if mix.kind == "prompt-completion":
            return _pair(example, mix.separator)
        return ("".join(_pair(example, mix.separator)) if example.turns else example.text,)

    chat = mix.kind in ("chat", "messages")
    value = [{"role": Value("string"), "content": Value("string")}] if chat else Value("string")
    paired = mix.kind in ("chat", "prompt-completion")
    names = ("prompt", "completion") if paired else (mix.kind,)
    values = [row(example) for example in examples]
    data = {name: [row[i] for row in values] for i, name in enumerate(names)}
    return Dataset.from_dict(data, features=Features(dict.fromkeys(names, value)))


def shown(row: DatasetRow) -> str:
    """Format a training row or document on one line; long parts lose their middle."""
    parts: list[tuple[str, str]] = []
    for name, value in row.items():
        turns = isinstance(value, list) and all(isinstance(turn, dict) for turn in value)
        parts += [(t["role"], t["content"]) for t in value] if turns else [(name, str(value))]
    cut = (text if len(text) <= 100 else f"{text[:60]} [...] {text[-40:]}" for _, text in parts)
    return ", ".join(f"{name} {text!r}" for (name, _), text in zip(parts, cut, strict=True))


def conversation(value: Any, mapping: Messages) -> tuple[Turn, ...]:
    """Return the turns up to the last answer; empty if a turn or the answer is missing."""
    items = _listed(value)
    if mapping.layout == "messages":
        turns = [_turn(item, mapping) for item in items]
    else:
        if mapping.layout == "pairs":
            items = [text for pair in items for text in _listed(pair)]
        roles = ("user", "assistant")
        turns = [(roles[i % 2], text_of(text, "messages: a turn")) for i, text in enumerate(items)]
    while turns and turns[-1][0] != "assistant":
        turns.pop()
    complete = len(turns) > 1 and all(text for _, text in turns)
    return tuple(turns) if complete else ()


def _turn(item: Any, mapping: Messages) -> Turn:
    names = (mapping.role, mapping.content)
    sharegpt = isinstance(item, dict) and {"from", "value"} <= item.keys()
    if sharegpt and names == ("role", "content") and item.get("role") is None:
        names = ("from", "value")
    try:
        role, content = (item[name] for name in names)
    except (KeyError, TypeError):
        keys = ", ".join(sorted(item)) if isinstance(item, dict) else type(item).__name__
        raise DataError(
            f"messages: a message has no {mapping.role!r} and {mapping.content!r}; it has {keys}"
        ) from None
    role = {**SHAREGPT, **mapping.roles}.get(str(role), str(role))
    if role not in ("system", "user", "assistant"):
        raise DataError(
            f"messages.roles: unknown role {role!r}; map it to system, user or assistant"
        )
    return role, text_of(content, "messages: the content of a message")


def _listed(value: Any) -> list[Any]:
    if value is None or isinstance(value, list | tuple):
        return list(value or ())
    raise DataError(f"messages: {value!s:.40} is not a list")


def _messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def _pair(example: MixExample, separator: str) -> tuple[str, str]:
    prompt = separator.join(content for _, content in example.turns[:-1])
    # A prompt that ends in white space already separates itself from the completion.
    end = "" if prompt != prompt.rstrip() else separator
    return prompt + end, example.completion
