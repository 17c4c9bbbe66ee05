"""Opens checkpoints' files as hostile input, and parses strict JSON.

JSON is UTF-8 of bounded size and depth, without duplicate keys, with finite numbers. Two readers
of a file must never see two different documents. No text from a file may fail later, when it is
written or shown.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from layerswap.ground import system
from layerswap.ground.errors import CheckpointError

MAX_JSON_BYTES = 100_000_000
"""Largest JSON document to read, in bytes: the limit of the safetensors format for a header."""


INFINITIES = {"Infinity": math.inf, "-Infinity": -math.inf}
DOWNLOADED = {
    (b"version https://git-lfs",): "this is a Git LFS pointer, not the file; run `git lfs pull` in "
    "its folder",
    (
        b"<!doctype",
        b"<html",
        b"<?xml",
    ): "this is a web page or XML, not the file; download it again",
}
"""Leftovers of downloads, by their first bytes in lower case."""


def parse_json(data: bytes, where: str, *, infinities: bool = False) -> Any:
    """Parse strict JSON; errors name the document `where`.

    With `infinities`, accepts the words `Infinity` and `-Infinity`, which Python's writer and
    transformers 4 write.
    """
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_pairs,
            parse_constant=partial(_constant, INFINITIES if infinities else {}),
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
        reason = mistaken(data) or f"not valid JSON ({error})"
        if not data.strip(b"\0 \n"):
            reason = "empty, as an interrupted download leaves it; download it again"
    raise CheckpointError(f"{where}: {reason}")


def mistaken(data: bytes) -> str | None:
    """Return what a file is that a download left in place of another; None if unknown.

    `data` are at least the first eight bytes of the file; more are compared as far as they go.
    """
    start = data.lstrip()[:200].lower()
    for words, what in DOWNLOADED.items():
        begun = len(start) >= 8 and any(word.startswith(start) for word in words)
        if start.startswith(words) or begun:
            return what
    return None


def read_json_object(path: Path, *, infinities: bool = False) -> dict[str, Any]:
    """Read the JSON object in a regular file of at most `MAX_JSON_BYTES`; see `parse_json`."""
    value = parse_json(read_source(path), str(path), infinities=infinities)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value


@contextmanager
def open_source(path: Path) -> Iterator[int]:
    """Open a checkpoint's file, which must be a regular file inside its folder.

    Refuses pipes and devices, which might never end, and links that lead out of the folder, which
    could copy a private file into an output. Links into the blobs of the Hub's cache are allowed.
    """
    try:
        handle = system.open_to_read(path)
    except OSError as error:
        reason = f"cannot be read ({error.strerror})"
        if path.is_dir():  # Windows opens no folder
            reason = "not a regular file"
        raise CheckpointError(f"{path}: {reason}") from None
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise CheckpointError(f"{path}: not a regular file")
        if path.is_symlink():
            _check_link(path)
        yield handle
    finally:
        os.close(handle)


def _check_link(path: Path) -> None:
    target, home = path.resolve(), path.parent.resolve()
    inside = [home]
    # Blobs of the repository, and those that several share.
    snapshots = (folder for folder in home.parents if folder.name == "snapshots")
    inside += [above / "blobs" for folder in snapshots for above in [*folder.parents][:2]]
    if not any(target.is_relative_to(folder) for folder in inside):
        raise CheckpointError(
            f"{path}: links to {target}, outside its folder; replace the link by a copy"
        )


def read_source(path: Path) -> bytes:
    """Read a checkpoint's file, of at most `MAX_JSON_BYTES`."""
    with open_source(path) as handle, os.fdopen(handle, "rb", closefd=False) as file:
        try:
            data = file.read(MAX_JSON_BYTES + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > MAX_JSON_BYTES:
        raise CheckpointError(f"{path}: larger than {MAX_JSON_BYTES} bytes")
    return data


def clipped(text: str, limit: int = 200) -> str:
    """Shorten a text to `limit` characters: names in files can have megabytes."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def quoted(name: object, limit: int = 200) -> str:
    """Quote a name or value from a file, shortened to `limit` characters."""
    return clipped(repr(name), limit)


def unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the mapping of a JSON object; refuse a key that occurs twice."""
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        duplicate = next(key for key, count in counts.items() if count > 1)
        raise CheckpointError(f"key {quoted(duplicate)} is given twice")
    return mapping


def _constant(allowed: Mapping[str, float], name: str) -> float:
    if name not in allowed:
        raise CheckpointError(f"{name} is not a JSON number")
    return allowed[name]


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise CheckpointError(f"{clipped(digits)} is too large for a number")
    return number
