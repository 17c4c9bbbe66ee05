"""The safetensors header, read as hostile input, and written.

The format: 8 bytes little-endian header length n, n bytes of JSON, then the tensors' bytes without
a gap. This reader is stricter than the safetensors library. It also refuses duplicate names and
unknown fields, so that two readers never see two different models.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from layerswap.checkpoint.remote import RemoteFile, WeightFile
from layerswap.ground.errors import CheckpointError, error_context
from layerswap.ground.strict_json import (
    MAX_JSON_BYTES,
    mistaken,
    open_source,
    parse_json,
    quoted,
)

TABLES = json.loads(Path(__file__).with_name("dtypes.json").read_text("utf-8"))
DTYPE_BITS: dict[str, int] = TABLES["bits"]
"""Bits of one element, for every dtype of the safetensors format."""

BLOCKS: dict[str, tuple[int, int]] = {n: tuple(block) for n, block in TABLES["blocks"].items()}
"""Elements and bytes of one block, for every quantised type of the GGUF format."""

EMPTY = "has 0 bytes, as an interrupted download leaves it; download it again"
MAX_ELEMENTS = 2**63 - 1
"""More elements than any file can hold; keeps products of hostile shapes small."""
MAX_TENSORS = 200_000
"""Most tensors of one file; the largest models have that number over sixty files."""


@dataclass(frozen=True)
class TensorInfo:
    """The position of one tensor in a file, with its dtype and shape.

    `dtype` is a key of `DTYPE_BITS`, or of `BLOCKS` for a quantised GGUF type. `offset` is the
    absolute position of the first byte in `file`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: WeightFile
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a scalar."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class RowOrder:
    """Order of the rows of a transformers tensor in a GGUF file.

    `rotary`: the file alternates the two halves of a head. `heads`: the file separates queries,
    keys and values, which transformers keeps together per head. `groups`: the same for groups of
    query heads that share keys and values. `heads` counts query heads; for `rotary`, the heads of
    this tensor. `inverse` is the order of the rows of a GGUF tensor in a transformers file.
    """

    kind: Literal["rotary", "heads", "groups"]
    rows: int
    heads: int
    groups: int = 0
    inverse: bool = False


@dataclass(frozen=True)
class Translated(TensorInfo):
    """A tensor of a GGUF file with the name, dtype and shape that it has in transformers.

    Or a tensor of a transformers file with the name and the row order of a GGUF file.

    `stored` is the tensor in the file, and `shift` is added to every element.
    """

    stored: TensorInfo
    order: RowOrder | None
    shift: float


@dataclass(frozen=True)
class Requantised(Translated):
    """A matrix that is read through 4-bit rounding; `double` rounds its scales to 8 bits."""

    double: bool = False


def as_stored(info: TensorInfo) -> TensorInfo:
    """The tensor as stored in the file."""
    return info.stored if isinstance(info, Translated) else info


def is_gguf(source: str | os.PathLike[str]) -> bool:
    """True for the path of a GGUF file, existing or not."""
    return os.fspath(source).lower().endswith(".gguf")


def read_header(path: WeightFile) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file: its tensors, in the order of their bytes.

    Every offset lies inside the file, tensors neither overlap nor leave gaps, and each byte length
    agrees with dtype and shape.
    """
    size, raw = _read_raw(path)
    if not raw.startswith(b"{"):
        raise CheckpointError(f"{path}: the header does not begin with '{{'")
    if raw.count(b"{") > MAX_TENSORS:  # before objects are made of them
        raise CheckpointError(f"{path}: holds more than {MAX_TENSORS:,} tensors")
    entries = parse_json(raw, str(path))
    data_start = 8 + len(raw)
    with error_context(str(path)):
        return _tensors(entries, path, data_start=data_start, data_bytes=size - data_start)


def _read_raw(path: WeightFile) -> tuple[int, bytes]:
    """Read a file's size, and its header without the length prefix."""
    if isinstance(path, RemoteFile):
        length = _header_length(path.read(0, min(8, path.size)), path.size, path)
        return path.size, path.read(8, 8 + length)
    with open_source(path) as handle, os.fdopen(handle, "rb", closefd=False) as file:
        size = os.fstat(handle).st_size
        try:
            length = _header_length(file.read(8), size, path)
            raw = file.read(length)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if len(raw) != length:
        raise CheckpointError(f"{path}: the file ended inside its header")
    return size, raw


def _header_length(prefix: bytes, size: int, path: WeightFile) -> int:
    if not size:
        raise CheckpointError(f"{path}: {EMPTY}")
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: shorter than a safetensors header (8 bytes)")
    length = int.from_bytes(prefix, "little")
    if (what := mistaken(prefix)) is not None:
        raise CheckpointError(f"{path}: {what}")
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{path}: the header claims {length} bytes; at most {MAX_JSON_BYTES} allowed"
        )
    if 8 + length > size:
        raise CheckpointError(f"{path}: the header claims {length} bytes but the file has {size}")
    return length


def _tensors(
    entries: Any, path: WeightFile, data_start: int, data_bytes: int
) -> dict[str, TensorInfo]:
    if not isinstance(entries, dict):
        raise CheckpointError("the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(not isinstance(v, str) for v in metadata.values()):
        raise CheckpointError("__metadata__ is not a mapping from text to text")
    spans = sorted(
        (_entry(name, entry) for name, entry in entries.items()), key=lambda span: span[3:]
    )
    expected = 0
    tensors: dict[str, TensorInfo] = {}
    for name, dtype, shape, begin, end in spans:
        check_span(name, begin, expected, end, data_bytes)
        expected = end
        tensors[name] = TensorInfo(name, dtype, shape, path, data_start + begin, end - begin)
    if expected != data_bytes:
        raise CheckpointError(f"{data_bytes - expected} bytes follow the last tensor")
    return tensors


def check_span(name: str, begin: int, expected: int, end: int, length: int) -> None:
    """Refuse a tensor that does not follow the one before it, or ends behind the file."""
    if begin != expected:
        fault = "overlaps the tensor before it" if begin < expected else "leaves a gap"
        raise CheckpointError(f"tensor {quoted(name)}: begins at {begin}, which {fault}")
    if end > length:
        raise CheckpointError(
            f"tensor {quoted(name)}: ends at byte {end} of {length}; the file is cut short"
        )


def _entry(name: str, entry: Any) -> tuple[str, str, tuple[int, ...], int, int]:
    """Check one entry of a header; return name, dtype, shape, begin and end."""
    if not name or "\0" in name:
        raise CheckpointError(f"tensor name {quoted(name)} is not allowed")
    try:
        if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
            raise CheckpointError("needs exactly the fields dtype, shape and data_offsets")
        dtype = entry["dtype"]
        if not isinstance(dtype, str):
            raise CheckpointError("dtype is not text")
        if dtype not in DTYPE_BITS:
            raise CheckpointError(f"unknown dtype {quoted(dtype, 40)}")
        shape = _naturals(entry["shape"], "shape")
        offsets = _naturals(entry["data_offsets"], "data_offsets")
        if len(offsets) != 2 or offsets[1] < offsets[0]:
            raise CheckpointError(f"data_offsets {quoted(list(offsets))} are not [begin, end]")
        begin, end = offsets
        if byte_length(dtype, shape) != end - begin:
            raise CheckpointError(
                f"{end - begin} bytes do not hold shape {quoted(list(shape))} of {dtype}"
            )
    except CheckpointError as error:
        raise error.within(f"tensor {quoted(name)}") from None
    return name, dtype, shape, begin, end


def _naturals(value: Any, field: str) -> tuple[int, ...]:
    if not isinstance(value, list) or any(
        type(item) is not int or not 0 <= item <= MAX_ELEMENTS for item in value
    ):
        raise CheckpointError(f"{field} is not a list of whole numbers from 0 to 2**63 - 1")
    return tuple(value)


def header_bytes(
    tensors: Iterable[tuple[str, str, tuple[int, ...], int]],
    metadata: Mapping[str, str],
    *,
    multiple: int = 8,
    remainder: int = 0,
) -> bytes:
    """Build a safetensors header with its length prefix, padded with spaces.

    Each tensor has name, dtype, shape and length in bytes, in the order of the tensors' bytes. The
    header has `remainder` bytes more than a multiple of `multiple` bytes.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, dtype, shape, nbytes in tensors:
        offsets = [begin, begin + nbytes]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": offsets}
        begin += nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * ((remainder - 8 - len(text)) % multiple)
    return len(text).to_bytes(8, "little") + text


@cache
def block_of(dtype: str) -> tuple[int, int]:
    """Return the elements and the bytes of the smallest whole-byte block of a dtype.

    Example: `block_of("F4")` gives `(2, 1)`, and `block_of("Q4_K")` gives `(256, 144)`.
    """
    if dtype in BLOCKS:
        return BLOCKS[dtype]
    bits = math.lcm(DTYPE_BITS[dtype], 8)
    return bits // DTYPE_BITS[dtype], bits // 8


def byte_length(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor; refuse partly filled bytes and impossibly large shapes."""
    elements = 1
    for size in shape:
        # A zero would hide the other sizes, whose product another reader may compute first.
        elements *= size or 1
        if elements > MAX_ELEMENTS:
            raise CheckpointError(f"shape {quoted(list(shape))} has too many elements")
    elements = 0 if 0 in shape else elements
    length, nbytes = block_of(dtype)
    if elements % length:
        unit = "blocks" if dtype in BLOCKS else "bytes"
        raise CheckpointError(f"{elements} elements of {dtype} do not fill whole {unit}")
    return elements // length * nbytes
