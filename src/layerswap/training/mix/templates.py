r"""Placeholders in a mix: templates that turn a row into text, and parameters that the user sets.

A plain template such as `"{question}\n\n{context[title]}"` names columns and, in brackets, keys or
indices within a value. A doubled brace is a literal one. An empty field leaves no blank lines. The
other syntax is Jinja, in its sandbox.

`${name}` is a parameter, and `$${name}` for the literal text `${name}`:

    parameters: {language: null, code: null, row_tokens: 55}
    name: ${language}-news
    row_tokens: ${row_tokens}
    sources:
      text: {id: masakhane/mafand, config: "en-${code}", text: "{translation[${code}]}"}

A parameter whose default is null must be set. A text that is only `${name}` becomes the value
itself, so a number stays a number. A mix without `parameters` has none of these.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan
from string import Formatter
from typing import Any

import yaml

from layerswap.ground.errors import DataError, RecipeError, error_context
from layerswap.ground.placeholders import fill
from layerswap.ground.yaml_file import KeyPath, nearest
from layerswap.reading.origins import only

DatasetRow = Mapping[str, Any]
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_KEY = re.compile(r"\[([^\[\]]+)\]")
_BLANK_LINES = re.compile(r"\n{3,}")
PARAMETERS = "parameters"
Values = Mapping[str, Any]
Lines = dict[KeyPath, int]
_PLACEHOLDER = re.compile(r"\$(\$?)\{([\w-]+)\}")


@dataclass(frozen=True)
class Template:
    """A parsed template."""

    columns: frozenset[str]  # that it reads
    render: Callable[[DatasetRow], str]  # raises DataError if the row lacks a part
    texts: frozenset[str] = frozenset()  # columns that a bare {column} inserts


def parse_template(text: str, syntax: str) -> Template:
    """Parse a template in the `plain` or `jinja` syntax."""
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
        parts = [(literal, _field(row, path) if path else None) for literal, path in pieces]
        joined = "".join(literal + (value or "") for literal, value in parts)
        if any(value == "" for _, value in parts):
            joined = _BLANK_LINES.sub("\n\n", joined)
            joined = joined.rstrip() if parts[-1][1] == "" else joined
            joined = joined.lstrip() if parts[0] == ("", "") else joined
        return joined

    columns = frozenset(path[0] for _, path in pieces if path)
    return Template(columns, render, frozenset(path[0] for _, path in pieces if len(path) == 1))


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


def _field(row: DatasetRow, path: tuple[str, ...]) -> str:
    value: Any = row
    for step in path:
        try:
            value = value[int(step)] if isinstance(value, list) else value[step]
        except (KeyError, IndexError, TypeError, ValueError):
            raise DataError(f"a row has no {path[0]}[{']['.join(path[1:])}]") from None
    return text_of(value, ".".join(path))


def text_of(value: Any, name: str) -> str:
    """Convert a text or number, or a list of one, to a string, a missing value to an empty one."""
    value = only(value)
    if isinstance(value, list | dict | bytes):
        raise DataError(f"{name} is not a text, but {value!s:.40}")
    missing = value is None or (isinstance(value, float) and isnan(value))
    return "" if missing else str(value).strip()


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


def fill_parameters(data: Any, lines: Lines, settings: Values, *, where: str) -> tuple[Any, Lines]:
    """Replace the placeholders in a parsed mix, and in the key paths of its lines.

    Refuses a setting that is not a parameter, and a parameter without a value; errors name `where`.
    """
    declared = data.get(PARAMETERS) if isinstance(data, dict) else None
    if declared is None and not settings:
        return data, lines
    with error_context(where):
        values = _merge_settings(declared or {}, settings)
        mix = {key: value for key, value in data.items() if key != PARAMETERS}

        def filled(node: Any) -> Any:
            return fill(node, _PLACEHOLDER, lambda match: _value(match, values))

        return filled(mix), {filled(path): line for path, line in lines.items()}


def _merge_settings(declared: Any, settings: Values) -> dict[str, Any]:
    """Merge the settings into the defaults."""
    if not isinstance(declared, dict):
        raise RecipeError(f"{PARAMETERS}: write a mapping of names to defaults")
    unknown = next((name for name in settings if name not in declared), None)
    if unknown is not None:
        hint = nearest(unknown, list(declared)) or "; the mix has none"
        raise RecipeError(f"{PARAMETERS}: no parameter {unknown!r}{hint}")
    values = {
        name: _like_default(settings.get(name, default), default)
        for name, default in declared.items()
    }
    missing = [f"--set {name}=VALUE" for name, value in values.items() if value is None]
    if missing:
        raise RecipeError(f"{PARAMETERS}: a value is missing; give {' '.join(missing)}")
    return values


def _like_default(value: Any, default: Any) -> Any:
    """Read a text from the command line as YAML where the default is not a text."""
    if default is None or isinstance(default, str) or not isinstance(value, str):
        return value
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError:
        return value


def _value(match: re.Match[str], values: Values) -> Any:
    escaped, name = match.groups()
    if escaped:
        return f"${{{name}}}"
    if name not in values:
        raise RecipeError(f"${{{name}}}: no parameter {name!r}{nearest(name, list(values))}")
    return values[name]
