"""Strict JSON: UTF-8, bounded size and depth, no duplicate keys, finite numbers.

Two readers of a file must never see two different documents. No text from a file may fail later,
when it is written or shown.
"""

from __future__ import annotations

import json
import math
import stat
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

from layerswap.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
"""Largest JSON document to read, in bytes: the limit of the safetensors format for a header."""


def parse_json(data: bytes, where: str) -> Any:
    """Parse a JSON document, which errors call `where`."""
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_pairs,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
        if b"\\ud" in data.lower():  # only an escape can be half of a pair
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except CheckpointError as error:
        raise error.within(where) from None
    except UnicodeDecodeError:
        reason = "not UTF-8 text"
    except UnicodeEncodeError:
        reason = "holds half of a surrogate pair"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:
        reason = f"not valid JSON ({error})"
    raise CheckpointError(f"{where}: {reason}")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in a regular file of at most `MAX_JSON_BYTES`."""
    try:
        if regular_size(path) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    value = parse_json(data, str(path))
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


def regular_size(path: Path) -> int:
    """Return the bytes of a regular file; refuse pipes and devices, which might never end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path}: not a regular file")
    return status.st_size


def clipped(text: str, limit: int = 200) -> str:
    """Return a text of at most `limit` characters: names in files can have megabytes."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(name: object, limit: int = 200) -> str:
    """Return the representation of a name or value from a file, of at most `limit` characters."""
    return clipped(repr(name), limit)


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise CheckpointError(f"key {quoted(duplicate)} is given twice")
    return mapping


def _refuse_constant(name: str) -> NoReturn:
    raise CheckpointError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise CheckpointError(f"{clipped(digits)} is too large for a number")
    return number
