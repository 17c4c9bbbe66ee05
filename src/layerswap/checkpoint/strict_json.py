"""JSON as this package reads it: UTF-8, no duplicate keys, no NaN, of bounded size."""

from __future__ import annotations

import json
import math
import stat
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
        CheckpointError: not UTF-8, not JSON, nested too deep, a key given twice, half of a
            surrogate pair, or a number that JSON does not have (NaN, Infinity, 1e999).

    Example: `parse_json(b'{"a": 1}', "x")` gives `{"a": 1}`;
    `parse_json(b'{"a": 1, "a": 2}', "x")` raises.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if b"\\ud" in data.lower():  # only an escape can hide half of a pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except CheckpointError as error:
        raise error.within(where) from None
    except UnicodeDecodeError:
        raise CheckpointError(f"{where}: not UTF-8 text") from None
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: holds half of a surrogate pair") from None
    except RecursionError:
        raise CheckpointError(f"{where}: nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: not valid JSON ({error})") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file at `path`.

    Raises:
        CheckpointError: the file is missing, not a regular file, larger than `MAX_JSON_BYTES`,
            not JSON as `parse_json` reads it, or its value is not an object.
    """
    try:
        if regular_size(path) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {_json_type(value)}, not an object")
    return value


def regular_size(path: Path) -> int:
    """Bytes of the regular file at `path`.

    Raises:
        CheckpointError: it is a folder, or a pipe or device, which could block or never end.
        OSError: it cannot be looked at.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size


def clipped(text: str, limit: int = 200) -> str:
    """`text`, or its beginning and an ellipsis: what a file holds can be megabytes long."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise CheckpointError(f"key {clipped(repr(twice))} is given twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise CheckpointError(f"{clipped(digits)} is too large for a number")
    return number


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
