"""From the rows of a data set to examples: templates and conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.compose.yaml_file import nearest
from layerswap.errors import DataError

if TYPE_CHECKING:
    from layerswap.training.mix.schema import Messages, MixSource

Turn = tuple[str, str]
"""A role (system, user, assistant) and what it says."""
DatasetRow = Mapping[str, Any]

_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_BLANK_LINES = re.compile(r"\n{3,}")


class MixExample(NamedTuple):
    """One training example before it is given its final form.

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
        """What the model is given: everything before the last turn, or nothing for raw text."""
        return "\n".join(content for _, content in self.turns[:-1])

    @property
    def completion(self) -> str:
        """What the model learns to say: the last turn, or the raw text."""
        return self.turns[-1][1] if self.turns else self.text

    @property
    def whole(self) -> str:
        """All of its text."""
        return "\n".join(content for _, content in self.turns) or self.text


def template_mistake(text: str, syntax: str, *, constant: bool = False) -> str | None:
    """What is wrong with a template, or None; one that is `constant` need not name a column."""
    try:
        _compile_jinja(text) if syntax == "jinja" else _parse_plain(text)
        columns = _columns_of(text, syntax)
    except ValueError as error:
        return str(error)
    return None if columns or constant else "names no column, so every row would be the same"


def used_columns(source: MixSource) -> set[str]:
    """The columns that a source's mapping reads."""
    if source.messages is not None:
        return {source.messages.column}
    templates = (source.prompt, source.completion, source.text)
    return {
        column
        for text in templates
        if text is not None
        for column in _columns_of(text, source.template)
    }


def example_maker(
    source: MixSource, name: str, columns: list[str]
) -> Callable[[DatasetRow], MixExample | None]:
    """A function from a row of `source` to its example, or None if a part of it is empty.

    Args:
        source: the source.
        name: its name in the mix.
        columns: the columns that its rows have.

    Raises:
        DataError: a template or the mapping names a column that is not there.
    """

    def example(turns: tuple[Turn, ...], text: str = "") -> MixExample:
        return MixExample(turns, text, source.language, name)

    if source.messages is not None:
        mapping = source.messages
        _refuse_unknown({mapping.column}, columns, "messages.column")

        def from_messages(row: DatasetRow) -> MixExample | None:
            turns = _turns(row[mapping.column], mapping)
            return example(turns) if turns else None

        return from_messages
    if source.text is not None:
        text = _renderer(source.text, source.template, columns, "text")

        def from_text(row: DatasetRow) -> MixExample | None:
            rendered = text(row)
            return example((), rendered) if rendered.strip() else None

        return from_text
    assert source.prompt is not None, "the schema lets no source without a mapping through"
    assert source.completion is not None, "prompt and completion go together"
    prompt = _renderer(source.prompt, source.template, columns, "prompt")
    completion = _renderer(source.completion, source.template, columns, "completion")

    def from_pair(row: DatasetRow) -> MixExample | None:
        ask, answer = prompt(row), completion(row)
        if not ask.strip() or not answer.strip():
            return None
        return example((("user", ask), ("assistant", answer)))

    return from_pair


def _renderer(text: str, syntax: str, columns: list[str], key: str) -> Callable[[DatasetRow], str]:
    _refuse_unknown(_columns_of(text, syntax), columns, key)
    if syntax == "jinja":
        template = _compile_jinja(text)

        def jinja(row: DatasetRow) -> str:
            try:
                return str(template.render(dict(row)))
            except Exception as error:  # jinja2 lets every error of the expression through
                raise DataError(f"{key}: the template fails on a row ({error})") from None

        return jinja
    pieces = _parse_plain(text)

    def plain(row: DatasetRow) -> str:
        parts = [(literal, _value(row, path, key) if path else None) for literal, path in pieces]
        joined = "".join(literal + (value or "") for literal, value in parts)
        if any(value == "" for _, value in parts):
            # An optional input that is empty leaves no hole, and no loose end.
            joined = _BLANK_LINES.sub("\n\n", joined)
            joined = joined.rstrip() if parts[-1][1] == "" else joined
            joined = joined.lstrip() if parts[0] == ("", "") else joined
        return joined

    return plain


def _columns_of(text: str, syntax: str) -> set[str]:
    if syntax == "jinja":
        from jinja2 import Environment, meta

        return meta.find_undeclared_variables(Environment().parse(text))
    return {path[0] for _, path in _parse_plain(text) if path}


def _parse_plain(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Pieces of literal text, each followed by the path of a field (empty at the end)."""
    pieces: list[tuple[str, tuple[str, ...]]] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(
            f"not a template ({error}); a brace of the text is written twice"
        ) from None
    for literal, field, layout, conversion in parsed:
        if field is None:
            pieces.append((literal, ()))
            continue
        match = _FIELD.fullmatch(field)
        if match is None or layout or conversion:
            found = f"{field}!{conversion}" if conversion else field
            found = f"{{{found}:{layout}}}" if layout else f"{{{found}}}"
            raise ValueError(
                f"{found} is not {{column}} or {{column[key]}}; for more write template: jinja"
            )
        pieces.append((literal, (match[1], *_KEY.findall(match[2]))))
    return pieces


def _compile_jinja(text: str) -> Any:
    from jinja2 import StrictUndefined, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True
        )
        return environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"not a jinja template ({error})") from None


def _value(row: DatasetRow, path: tuple[str, ...], key: str) -> str:
    value: Any = row
    for step in path:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(f"{key}: a row has no {path[0]}[{']['.join(path[1:])}]") from None
    return "" if value is None else str(value).strip()


def _turns(value: Any, mapping: Messages) -> tuple[Turn, ...]:
    if mapping.layout == "messages":
        turns = [_message(item, mapping) for item in value or ()]
    else:
        if mapping.layout == "pairs":
            said = [text for pair in value or () for text in (pair or ())]
        else:
            said = list(value or ())
        roles = ("user", "assistant")
        turns = [(roles[i % 2], str(text or "").strip()) for i, text in enumerate(said)]
    # Only what ends with an answer can be learnt from; what stands before it is kept.
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


def _refuse_unknown(names: set[str], columns: list[str], key: str) -> None:
    for name in sorted(names - set(columns)):
        raise DataError(f"{key}: no column {name!r}{nearest(name, columns)}")
