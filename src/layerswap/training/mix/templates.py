r"""Templates that turn a row of a data set into text: `{column}` fields, or sandboxed Jinja.

A plain template such as `"{question}\n\n{context[title]}"` names columns and, in brackets, keys or
indices within a value. A doubled brace is a literal one. An empty field leaves no blank lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from string import Formatter
from typing import Any

from layerswap.errors import DataError

DatasetRow = Mapping[str, Any]
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_BLANK_LINES = re.compile(r"\n{3,}")


@dataclass(frozen=True)
class Template:
    """A parsed template.

    Attributes:
        columns: names of the columns that it reads.
        render: returns the text for a row; raises DataError if the row lacks a part.
    """

    columns: frozenset[str]
    render: Callable[[DatasetRow], str]


def parse_template(text: str, syntax: str) -> Template:
    """Parse a template in the `plain` or `jinja` syntax.

    Raises:
        ValueError: the text is not a template.
    """
    return _parse_jinja(text) if syntax == "jinja" else _parse_plain(text)


def template_mistake(text: str, syntax: str, *, constant: bool = False) -> str | None:
    """Describe the mistake in a template, or return None; `constant` allows one without columns."""
    try:
        columns = parse_template(text, syntax).columns
    except ValueError as error:
        return str(error)
    return None if columns or constant else "names no column, so every row would be the same"


def _parse_plain(text: str) -> Template:
    pieces = _pieces(text)

    def render(row: DatasetRow) -> str:
        parts = [(literal, _value(row, path) if path else None) for literal, path in pieces]
        joined = "".join(literal + (value or "") for literal, value in parts)
        if any(value == "" for _, value in parts):
            joined = _BLANK_LINES.sub("\n\n", joined)
            joined = joined.rstrip() if parts[-1][1] == "" else joined
            joined = joined.lstrip() if parts[0] == ("", "") else joined
        return joined

    return Template(frozenset(path[0] for _, path in pieces if path), render)


def _pieces(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Split a template into literal texts, each with the path of the field after it."""
    pieces: list[tuple[str, tuple[str, ...]]] = []
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        raise ValueError(f"not a template ({error}); write a literal brace twice") from None
    for literal, field, layout, conversion in parsed:
        if field is None:
            pieces.append((literal, ()))
            continue
        match = _FIELD.fullmatch(field)
        if match is None or layout or conversion:
            whole = field + (f"!{conversion}" if conversion else "")
            whole += f":{layout}" if layout else ""
            raise ValueError(
                f"{{{whole}}} is not {{column}} or {{column[key]}}; for more write template: jinja"
            )
        pieces.append((literal, (match[1], *_KEY.findall(match[2]))))
    return pieces


def _value(row: DatasetRow, path: tuple[str, ...]) -> str:
    value: Any = row
    for step in path:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(f"a row has no {path[0]}[{']['.join(path[1:])}]") from None
    return "" if value is None else str(value).strip()


def _parse_jinja(text: str) -> Template:
    from jinja2 import StrictUndefined, TemplateError, meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=True
    )
    try:
        template = environment.from_string(text)
    except TemplateError as error:
        raise ValueError(f"not a jinja template ({error})") from None

    def render(row: DatasetRow) -> str:
        try:
            return str(template.render(dict(row)))
        except Exception as error:  # jinja2 lets every error of the expression through
            raise DataError(f"the template fails on a row ({error})") from None

    columns = meta.find_undeclared_variables(environment.parse(text))
    return Template(frozenset(columns), render)
