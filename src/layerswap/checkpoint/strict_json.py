"""JSON as this package reads it: UTF-8, no duplicate keys, no NaN, of bounded size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from layerswap.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
"""Largest JSON document read, in bytes: the safetensors format's own limit for a header."""


def parse_json(data: bytes, where: str) -> Any:
    """The value of a JSON document.

    Args:
        data: the document, UTF-8.
        where: what to call it in an error, for example `"expert/config.json"`.

    Raises:
        CheckpointError: not UTF-8, not JSON, nested too deep, a key given twice, or a number
            that JSON does not have (NaN, Infinity).

    Example: `parse_json(b'{"a": 1}', "x")` gives `{"a": 1}`;
    `parse_json(b'{"a": 1, "a": 2}', "x")` raises.
    """
    try:
        return json.loads(
            data.decode("utf-8"), object_pairs_hook=_unique_pairs, parse_constant=_refuse_constant
        )
    except CheckpointError as error:
        raise error.within(where) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{where}: not UTF-8 text") from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        CheckpointError: the file is missing, larger than `MAX_JSON_BYTES`, not JSON as
            `parse_json` reads it, or its value is not an object.
    """
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {_json_type(value)}, not an object")
    return value


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CheckpointError(f"key {twice!r} is given twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is not a JSON number")


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
