"""Parameters of a mix: `${name}` in its YAML stands for a value that the user sets.

    parameters: {language: null, code: null, row_tokens: 55}
    name: ${language}-news
    row_tokens: ${row_tokens}
    sources:
      text: {id: masakhane/mafand, config: "en-${code}", text: "{translation[${code}]}"}

A parameter whose default is null must be set. A text that is only `${name}` becomes the value
itself, so a number stays a number. `$${name}` stands for the literal text `${name}`. A mix without
`parameters` has no placeholders.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from layerswap.compose.yaml_file import KeyPath, nearest
from layerswap.errors import RecipeError

PARAMETERS = "parameters"
Values = Mapping[str, Any]
Lines = dict[KeyPath, int]
_PLACEHOLDER = re.compile(r"\$(\$?)\{([\w-]+)\}")


def fill_parameters(data: Any, lines: Lines, settings: Values, *, where: str) -> tuple[Any, Lines]:
    """Replace the placeholders in a parsed mix, and in the key paths of its lines.

    Refuses a setting that is not a parameter, and a parameter without a value; errors name `where`.
    """
    declared = data.get(PARAMETERS) if isinstance(data, dict) else None
    try:
        if declared is None and not settings:
            return data, lines
        values = _values(declared or {}, settings)
        mix = {key: value for key, value in data.items() if key != PARAMETERS}
        return _fill(mix, values), {_fill(path, values): line for path, line in lines.items()}
    except RecipeError as error:
        raise error.within(where) from None


def _values(declared: Any, settings: Values) -> dict[str, Any]:
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


def _fill(value: Any, values: Values) -> Any:
    """Replace the placeholders in the keys and values of plain data."""
    if isinstance(value, dict):
        return {_fill(key, values): _fill(inner, values) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_fill(inner, values) for inner in value)
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    if whole and not whole[1]:
        return _value(whole, values)
    return _PLACEHOLDER.sub(lambda match: str(_value(match, values)), value)


def _value(match: re.Match[str], values: Values) -> Any:
    escaped, name = match.groups()
    if escaped:
        return f"${{{name}}}"
    if name not in values:
        raise RecipeError(f"${{{name}}}: no parameter {name!r}{nearest(name, list(values))}")
    return values[name]
