"""Pydantic's findings as one clear line each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from layerswap.compose.mistakes import Mistake, nearest
from layerswap.compose.yaml_file import KeyPath

UNSAID = ("[key]", "constrained-str")
"""Parts of Pydantic's key paths that stand in no file."""


def explain(
    error: ValidationError,
    where: str,
    lines: Mapping[KeyPath, int],
    keys_at: Callable[[KeyPath], list[str]],
) -> str:
    """Every mistake that Pydantic found, one line each: file, line, key path, what, what else.

    Args:
        error: what Pydantic raised.
        where: the file.
        lines: line of each key path.
        keys_at: the keys that are valid at a key path, to find the nearest to a wrong one.
    """
    messages = []
    for item in error.errors(include_url=False):
        path = tuple(part for part in item["loc"] if part not in UNSAID)
        key = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")
        at = next((lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in lines), None)
        place = f"{where}, line {at}" if at else where
        for text in _phrase(item, keys_at(path[:-1]), path).split("\n"):
            messages.append(f"{place}: {key + ': ' if key else ''}{text}")
    return "\n".join(dict.fromkeys(messages))


_WANTED = {
    "dict_type": "write a mapping",
    "model_type": "write a mapping",
    "list_type": "write a list",
    "string_type": "write a text",
    "int_type": "write a whole number",
    "greater_than_equal": "write a number from {ge}",
    "too_short": "write at least one",
    "string_too_short": "write a text that is not empty",
}
"""Our words for the kinds of Pydantic's findings, so that none of its own reach a person."""


def _phrase(item: Any, keys: list[str], path: KeyPath) -> str:
    kind, found = item["type"], item["input"]
    if kind == "extra_forbidden":
        return f"unknown key{nearest(str(path[-1]), keys)}"
    if kind == "missing":
        return "is missing"
    if kind in {"value_error", "layerswap"}:
        return str(item["ctx"]["error"] if kind == "value_error" else item["msg"])
    if kind == "invalid_key" or "[key]" in item["loc"]:
        return f"a key is a text; write it in quotes: '{path[-1]}'"
    if kind == "literal_error":
        known = [word.strip("'") for word in re.split(", | or ", item["ctx"]["expected"])]
        return f"{found!r:.60} is not allowed{nearest(str(found), known)}"
    wanted = f"{item['msg'][0].lower()}{item['msg'][1:]}"
    if kind in _WANTED:
        wanted = _WANTED[kind].format(**item.get("ctx", {}))
    return f"{wanted}; found {found!r:.60}"


Checked = TypeVar("Checked")


def joined(
    title: str,
    data: Any,
    handler: Callable[[Any], Checked],
    mistakes: Callable[[Mapping[Any, Any]], list[Mistake]],
) -> Checked:
    """What Pydantic makes of raw data, its findings and ours reported together.

    Pydantic checks a model's own rules only once its fields are valid; a person wants to see
    every mistake at once, so ours look at the raw data and join Pydantic's list.

    Args:
        title: the model's name.
        data: the raw data.
        handler: Pydantic's own check.
        mistakes: our rules.

    Raises:
        ValidationError: what both found.
    """
    ours = [
        InitErrorDetails(type=PydanticCustomError("layerswap", text), loc=path, input=data)
        for path, text in (mistakes(data) if isinstance(data, dict) else ())
    ]
    try:
        checked = handler(data)
    except ValidationError as error:
        ours = [as_detail(item) for item in error.errors(include_url=False)] + ours
    if ours:
        raise ValidationError.from_exception_data(title, ours)
    return checked


def as_detail(item: Any) -> InitErrorDetails:
    """One of `ValidationError.errors()` in the form that a new ValidationError is built from."""
    detail = InitErrorDetails(type=item["type"], loc=item["loc"], input=item["input"])
    if "ctx" in item:
        detail["ctx"] = item["ctx"]
    return detail
