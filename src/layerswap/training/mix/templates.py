"""Templates that turn a row of a data set into text: `{column}` fields, or sandboxed Jinja."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from string import Formatter
from typing import Any

from layerswap.compose.yaml_file import nearest
from layerswap.errors import DataError

DatasetRow = Mapping[str, Any]

_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_BLANK_LINES = re.compile(r"\n{3,}")


def template_mistake(text: str, syntax: str, *, constant: bool = False) -> str | None:
    """What is wrong with a template, or None; one that is `constant` need not name a column."""
    try:
        columns = template_columns(text, syntax)
    except ValueError as error:
        return str(error)
    return None if columns or constant else "names no column, so every row would be the same"


def template_columns(text: str, syntax: str) -> set[str]:
    """The columns that a template reads.

    Args:
        text: the template.
        syntax: `plain` or `jinja`.

    Raises:
        ValueError: the text is not a template.
    """
    if syntax == "jinja":
        from jinja2 import Environment, meta

        _compile_jinja(text)
        return meta.find_undeclared_variables(Environment().parse(text))
    return {path[0] for _, path in _parse_plain(text) if path}


def make_renderer(
    text: str, syntax: str, columns: list[str], key: str
) -> Callable[[DatasetRow], str]:
    """A function from a row to the text that a template makes of it.

    Args:
        text: the template.
        syntax: `plain` or `jinja`.
        columns: the columns of the rows.
        key: key of the template, for messages.

    Raises:
        DataError: the template names a column that the rows do not have.
    """
    check_columns(template_columns(text, syntax), columns, key)
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


def check_columns(names: set[str], columns: list[str], key: str) -> None:
    """Refuse names that are not columns.

    Raises:
        DataError: naming the key and the nearest column.
    """
    for name in sorted(names - set(columns)):
        raise DataError(f"{key}: no column {name!r}{nearest(name, columns)}")


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
