"""Tensors on disk: positioned reads, conversion of dtypes, hashes and comparison of files.

Files are read by position and not with a memory map. If a mapped file shrinks, or a network
filesystem fails, SIGBUS kills the process, and no program can catch that.

NumPy has no bfloat16: its elements are held as bits in uint16, and 8-bit floats in uint8. Quantised
types of GGUF are held as the bytes of their blocks, in uint8. `widened` and `narrowed` convert
between the stored form and the form for arithmetic.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.header import (
    BLOCKS,
    DTYPE_BITS,
    TABLES,
    Requantised,
    RowOrder,
    TensorInfo,
    Translated,
    block_of,
)
from layerswap.checkpoint.remote import RemoteFile, RemoteHandle, WeightFile
from layerswap.ground import system
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import open_source
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
    Stored = npt.NDArray[Any]

Handle = int | RemoteHandle
"""An open file: a descriptor, or a remote file."""
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
"""The safetensors dtypes that support arithmetic; all others are only ever copied."""
SMALL = bytes(byte for byte in range(256) if byte & 0x7F != 0x7F)
SMALL_F16 = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)
"""Last bytes of elements whose exponent is not all ones, in float16 and in other dtypes."""
FLOAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The dtypes that a recipe can ask for, with their safetensors names."""
FLOAT_CODES = {code: name for name, code in FLOAT_NAMES.items()}
"""The same dtypes by their safetensors names."""
CACHED = 1 << 12
"""Elements that are quantised at a time."""
QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4", "TQ2_0", "TQ1_0")
"""The quantised types that can be written, widest first; all of `BLOCKS` but `UNREAD` are read."""
UNREAD = ("Q8_1", "Q8_K")
"""Quantised types that no weights have; they are only ever copied."""
READ_DTYPES = (*FLOAT_DTYPES, *(dtype for dtype in BLOCKS if dtype not in UNREAD))
"""All dtypes that can be read as floats."""
KEPT_BYTES = 1 << 24
"""Size up to which freed memory is kept for reuse; see `reuse_chunk_memory`."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16
"""Blocks of a file in its fingerprint, and bytes of a block."""
GLANCED_BLOCKS, GLANCED_BYTES = 4, 1 << 12
"""Blocks of a tensor that show if it can be zero or equal to another, and bytes of a block."""
SCALED_ELEMENTS = 1 << 22
"""Elements to read at a time for the scales of a whole matrix; a multiple of a block."""
HASHERS = 8
"""Files to fingerprint at a time, since they wait for the disk."""

# --- bytes ---


@contextmanager
def open_file(path: WeightFile) -> Iterator[Handle]:
    """Open a file for positioned reads."""
    if isinstance(path, RemoteFile):
        yield RemoteHandle(path)
        return
    with open_source(path) as handle:
        yield handle


def read_into(handle: Handle, offset: int, buffer: memoryview, path: WeightFile) -> None:
    """Fill `buffer` with the bytes of an open file from `offset` on."""
    if isinstance(handle, RemoteHandle):
        handle.read_into(offset, buffer)
        return
    done = 0
    while done < len(buffer):
        try:
            count = system.read_at(handle, buffer[done:], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was being read")
        done += count


def read_bytes(handle: Handle, start: int, stop: int, path: WeightFile) -> bytearray:
    """Read bytes [start, stop) of an open file."""
    buffer = bytearray(stop - start)
    read_into(handle, start, memoryview(buffer), path)
    return buffer


def fingerprint(path: WeightFile) -> str:
    """Hash a file's length and 64 blocks of 64 KiB, spread evenly over it, with SHA-256.

    The first block holds the header. The fingerprint reads 4 MiB whatever the file's size. It
    distinguishes any two fine-tuned checkpoints, but need not notice an edit of single bytes.
    """
    digest = hashlib.sha256()
    with open_file(path) as handle:
        size = path.size if isinstance(path, RemoteFile) else path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        for start in _sample_starts(size, SAMPLE_BLOCKS, SAMPLE_BYTES):
            digest.update(read_bytes(handle, start, min(start + SAMPLE_BYTES, size), path))
    return digest.hexdigest()


def _sample_starts(size: int, blocks: int, length: int) -> list[int]:
    """Spread blocks of a length evenly from the beginning to the end."""
    last = max(0, size - length)
    return sorted({last * i // max(1, blocks - 1) for i in range(blocks)})


def fingerprints(files: Iterable[WeightFile]) -> dict[WeightFile, str]:
    """Return the fingerprint of every file; several are read at a time."""
    listed = list(files)
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="fingerprint") as pool:
        return dict(zip(listed, pool.map(fingerprint, listed), strict=True))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a whole file in hexadecimal."""
    with open_source(path) as handle, os.fdopen(handle, "rb", closefd=False) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --- elements ---


def read_stored(handle: Handle, info: TensorInfo, start: int, stop: int) -> Stored:
    """Read elements [start, stop) of a tensor in row-major order, in their stored form.

    For a quantised type, `start` and `stop` are multiples of its block length. The result is a
    vector of `numpy_dtype(info.dtype)` in fresh memory.
    """
    import numpy as np

    if isinstance(info, Translated):
        return narrowed(read_floats(handle, info, start, stop), info.dtype)
    length, nbytes = block_of(info.dtype)
    stored_dtype = numpy_dtype(info.dtype)
    values = np.empty((stop - start) // length * nbytes // stored_dtype.itemsize, stored_dtype)
    if len(values):
        position = info.offset + start // length * nbytes
        read_into(handle, position, values.view(np.uint8).data, info.file)
    return values


def read_floats(handle: Handle, info: TensorInfo, start: int, stop: int) -> Floats:
    """Read elements [start, stop) of a floating-point tensor for arithmetic; see `widened`."""
    if isinstance(info, Translated):
        return _read_translated(handle, info, start, stop)
    length, _ = block_of(info.dtype)
    first = start // length * length
    last = min(-(-stop // length) * length, info.elements)
    return widened(read_stored(handle, info, first, last), info.dtype)[start - first : stop - first]


def _read_translated(handle: Handle, info: Translated, start: int, stop: int) -> Floats:
    """Read elements of a tensor of a GGUF file, in transformers' order."""
    import numpy as np

    if isinstance(info, Requantised):
        return _read_requantised(handle, info, start, stop)
    if info.order is None or start == stop:
        values: Floats = read_floats(handle, info.stored, start, stop)
    else:
        width = info.elements // info.order.rows
        first, last = start // width, -(-stop // width)
        file_rows = row_order(info.order)[first:last]
        by_file = np.argsort(file_rows)
        dtype = np.float64 if info.stored.dtype == "F64" else np.float32
        rows: Stored = np.empty((len(file_rows), width), dtype)
        # Neighbours in the file are read together.
        for run in np.split(by_file, np.flatnonzero(np.diff(file_rows[by_file]) != 1) + 1):
            begin, end = int(file_rows[run[0]]), int(file_rows[run[-1]]) + 1
            part = read_floats(handle, info.stored, begin * width, end * width)
            rows[run] = part.reshape(-1, width)
        values = rows.reshape(-1)[start - first * width : stop - first * width]
    return values + values.dtype.type(info.shift) if info.shift else values


def _read_requantised(handle: Handle, info: Requantised, start: int, stop: int) -> Floats:
    """Read elements rounded to 4 bits, and then to the stored dtype as in training."""
    import numpy as np

    from layerswap.checkpoint import nf4

    first, last = start // nf4.BLOCK, min(-(-stop // nf4.BLOCK) * nf4.BLOCK, info.elements)
    stored = read_floats(handle, info.stored, first * nf4.BLOCK, last)
    values = stored.astype(np.float32, copy=False)
    scales = nf4.block_scales(values)
    if info.double:
        scales = _double_scales(info).astype(np.float32, copy=False)[first : first + len(scales)]
    rounded = widened(narrowed(nf4.given_back(values, scales), info.dtype), info.dtype)
    return rounded[start - first * nf4.BLOCK : stop - first * nf4.BLOCK]


@lru_cache(maxsize=8)
def _double_scales(info: Requantised) -> Floats:
    """The scales of a whole matrix: their mean and their own scales need all of them."""
    import numpy as np

    from layerswap.checkpoint import nf4

    step = SCALED_ELEMENTS
    with open_file(info.file) as handle:
        parts = [
            nf4.block_scales(
                read_floats(handle, info.stored, i, min(i + step, info.elements)).astype(np.float32)
            )
            for i in range(0, info.elements, step)
        ]
    return nf4.double_quantised(np.concatenate(parts))


@lru_cache(maxsize=8)
def row_order(order: RowOrder) -> npt.NDArray[np.int64]:
    """Map each row of the transformers tensor (`inverse`: of the GGUF tensor) to its file's row.

    Example: for two heads of four rows, `RowOrder("rotary", 8, 2)` gives
    `[0, 2, 1, 3, 4, 6, 5, 7]`.
    """
    import numpy as np

    if order.inverse:
        return np.argsort(row_order(replace(order, inverse=False)))
    rows, heads = np.arange(order.rows), order.heads
    if order.kind == "rotary":  # [head, half, pair] from [head, pair, half]
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if order.kind == "heads":  # [head, part, ...] from [part, head, ...]
        return rows.reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    size = order.rows // (heads + 2 * order.groups)
    queries, keys, values = np.split(rows, [heads * size, (heads + order.groups) * size])
    parts = [part.reshape(order.groups, -1, size) for part in (queries, keys, values)]
    return np.concatenate(parts, axis=1).reshape(-1)


def first_floats(info: TensorInfo, size: int) -> tuple[float, ...]:
    """Read the first `size` elements of a tensor of `FLOAT_DTYPES`; does not import numpy."""
    stop = info.offset + size * info.nbytes // info.elements
    with open_file(info.file) as handle:
        raw = read_bytes(handle, info.offset, stop, info.file)
    if info.dtype == "BF16":  # the upper half of a float32
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[::2], raw[1::2]
        raw = wide
    code = {"F64": "d", "F16": "e"}.get(info.dtype, "f")
    return struct.unpack(f"<{size}{code}", raw)


def read_tensor(info: TensorInfo) -> Stored:
    """Read a whole tensor in its stored form and shape, in fresh memory."""
    with open_file(info.file) as handle:
        return read_stored(handle, info, 0, info.elements).reshape(info.shape)


def read_matrix(info: TensorInfo) -> npt.NDArray[np.float64]:
    """Read a whole floating-point tensor in float64."""
    import numpy as np

    return widened(read_tensor(info), info.dtype).astype(np.float64, copy=False)


# --- dtypes ---


def widened(stored: Stored, dtype: str) -> Floats:
    """Convert stored elements of a `READ_DTYPES` dtype to float32, or to float64 for F64.

    The result is fresh memory, except for F32 and F64.
    """
    import numpy as np

    if dtype in BLOCKS:
        if not len(stored):  # the package refuses to dequantise nothing
            return np.empty(0, np.float32)
        package = gguf_package()
        values: Floats = package.quants.dequantize(stored, package.GGMLQuantizationType[dtype])
        return values
    if dtype != "BF16":
        return stored if dtype in ("F32", "F64") else stored.astype(np.float32)
    bits = np.left_shift(stored, 16, dtype=np.uint32)  # the upper half of a float32
    return bits.view(np.float32)


def narrowed(values: Floats, dtype: str) -> Stored:
    """Convert floats to their stored form, rounded to nearest, ties to even.

    Values that are too large become infinite. A float64 goes through float32 on its way to 16 bits.
    For a `QUANTISED` type, the values must be finite and fill whole blocks.
    """
    import numpy as np

    if dtype in BLOCKS:
        package = gguf_package()
        single = values.astype(np.float32, copy=False)
        # The package works row by row, and long rows leave the cache.
        rows = single.reshape(-1, math.gcd(values.size, CACHED))
        blocks: Stored = package.quants.quantize(rows, package.GGMLQuantizationType[dtype])
        return blocks.reshape(-1)
    if dtype == "F64":
        return values.astype(np.float64, copy=False)
    with np.errstate(over="ignore"):
        single = values.astype(np.float32, copy=False)
        if dtype != "BF16":
            return single.astype(numpy_dtype(dtype), copy=False)
    bits = single.view(np.uint32)
    rounded = np.right_shift(bits, 16)
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    short = rounded.astype(np.uint16)
    if single.size and np.isnan(single.max()):
        short[np.isnan(single)] = 0x7FC0  # rounding the bits of a NaN may give a number
    return short


def reuse_chunk_memory() -> None:
    """Let the allocator reuse the memory of freed chunks.

    glibc keeps blocks no larger than the largest that it has seen freed. By default it returns a
    chunk's memory to the system, and clearing the same pages again takes most of the time.
    """
    import numpy as np

    np.empty(KEPT_BYTES, np.uint8)


def glance_is_finite(stored: bytes | bytearray, dtype: str) -> bool:
    """Check without NumPy that no exponent is near the range of NaN and infinity.

    False needs `is_finite`. Weights are never so large, so copies need no import of NumPy.
    """
    last = stored[DTYPE_BITS[dtype] // 8 - 1 :: DTYPE_BITS[dtype] // 8]  # sign and exponent
    return not last.translate(None, SMALL_F16 if dtype == "F16" else SMALL)


def is_finite(stored: Stored, dtype: str = "F32") -> bool:
    """True if no stored floating-point element is NaN or infinite."""
    import numpy as np

    if stored.size == 0:
        return True
    if dtype == "BF16":
        return int(np.bitwise_and(stored, 0x7FFF).max()) < 0x7F80
    # A NaN is both the minimum and the maximum.
    return bool(np.isfinite(stored.min()) and np.isfinite(stored.max()))


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of the stored form: elements, their bits, or bytes of blocks."""
    import numpy as np

    if dtype in BLOCKS:
        return np.dtype("u1")
    bits = DTYPE_BITS[dtype]
    if bits < 8:
        raise CheckpointError(f"elements of {dtype} cannot be read one by one")
    kinds = {"F": "f", "I": "i", "U": "u", "C": "c"}
    letter = "u" if dtype == "BF16" or bits == 8 else kinds[dtype[0]]
    return np.dtype(
        "bool" if dtype == "BOOL" else f"<{'i' if dtype == 'I8' else letter}{bits // 8}"
    )


def as_torch(stored: Stored, dtype: str) -> torch.Tensor:
    """Wrap stored elements in a torch tensor that shares their memory."""
    import torch

    return torch.from_numpy(stored).view(torch_dtype(dtype))


def torch_dtype(dtype: str) -> torch.dtype:
    """Return the torch dtype of a safetensors dtype; torch has none for packed 4 and 6 bits."""
    import torch

    torch_type = getattr(torch, TABLES["torch"].get(dtype, ""), None)
    if not isinstance(torch_type, torch.dtype):
        raise CheckpointError(f"torch cannot hold a tensor of dtype {dtype}")
    return torch_type


def gguf_package() -> Any:
    """Import the `gguf` package, for quantisation and tensor names."""
    need_extras("arithmetic on GGUF files", "gguf")
    import gguf

    return gguf


# --- comparison ---


def same_bytes(
    first: TensorInfo, second: TensorInfo, chunk: int = 1 << 23, blocks: int | None = None
) -> bool:
    """True if two tensors have the same dtype, shape and bytes; reads `chunk` bytes at a time.

    With `blocks`, compares only as many chunks, evenly spread.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    translated = isinstance(first, Translated) or isinstance(second, Translated)
    size, length = (first.elements, chunk // 8) if translated else (first.nbytes, chunk)
    starts = range(0, size, length) if blocks is None else _sample_starts(size, blocks, length)

    def part(handle: Handle, info: TensorInfo, start: int) -> bytes | bytearray:
        if translated:
            return read_stored(handle, info, start, min(start + length, info.elements)).tobytes()
        # Bytearrays compare by memcmp; memoryviews would compare item by item.
        return _part(handle, info, start, length)

    with open_file(first.file) as a, open_file(second.file) as b:
        return all(part(a, first, start) == part(b, second, start) for start in starts)


def same_sample(first: TensorInfo, second: TensorInfo, blocks: int = GLANCED_BLOCKS) -> bool:
    """True if two tensors have the same dtype and shape, and agree in evenly spread blocks."""
    return same_bytes(first, second, GLANCED_BYTES, blocks)


def zero_samples(infos: Iterable[TensorInfo]) -> Iterator[TensorInfo]:
    """Find stored tensors whose evenly spread blocks contain only zero bytes."""
    for file, group in groupby(infos, key=lambda info: info.file):
        with open_file(file) as handle:
            for info in group:
                starts = _sample_starts(info.nbytes, GLANCED_BLOCKS, GLANCED_BYTES)
                if not any(any(_part(handle, info, start, GLANCED_BYTES)) for start in starts):
                    yield info


def _part(handle: Handle, info: TensorInfo, start: int, length: int) -> bytearray:
    """Read at most `length` bytes of a tensor."""
    stop = min(start + length, info.nbytes)
    return read_bytes(handle, info.offset + start, info.offset + stop, info.file)


def equal(first: TensorInfo, second: TensorInfo) -> bool:
    """True if two tensors have the same bytes; reads nothing over the network.

    Few tensors of experts agree in a sample, so hardly any but equal ones are read whole.
    """
    if first == second:
        return True
    if isinstance(first.file, RemoteFile) or isinstance(second.file, RemoteFile):
        return False
    try:
        stats = first.file.stat(), second.file.stat()
    except OSError:  # it has vanished, which the merge reports
        return False
    return _equal(first, second, *((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats))


def equal_anywhere(first: TensorInfo, second: TensorInfo) -> bool:
    """Return True if two tensors have the same bytes, on a disk or on the Hub."""
    return equal(first, second) or same_bytes(first, second)


@lru_cache(1 << 16)
def _equal(first: TensorInfo, second: TensorInfo, *versions: tuple[int, ...]) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    if versions[0] == versions[1] and first.offset == second.offset:
        return True
    return same_sample(first, second) and same_bytes(first, second)
