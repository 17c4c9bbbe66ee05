"""Reads tensors, whole or in part, with plain positioned reads; converts dtypes, and hashes files.

`os.pread` and not a memory map: a map of a file that shrinks, or on a network filesystem that
fails, kills the process with SIGBUS, which no program can catch.

NumPy has no bfloat16: its elements are held as their bits, in uint16, and so are those of 8 bits
in uint8. A quantised type of GGUF is held as the bytes of its blocks, in uint8. `widened` and
`narrowed` convert between what is stored and what is computed with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance
from layerswap.checkpoint.header import (
    BLOCKS,
    DTYPE_BITS,
    RowOrder,
    TensorInfo,
    Translated,
    block_of,
)
from layerswap.checkpoint.remote import RemoteFile, RemoteHandle, WeightFile
from layerswap.errors import CheckpointError
from layerswap.versions import need_extras

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
    Stored = npt.NDArray[Any]

Handle = int | RemoteHandle
"""A file that is open for positioned reads: a descriptor, or a file elsewhere."""
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
"""The dtypes of safetensors that arithmetic is defined for; all others are only ever copied."""
FLOAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
"""The dtypes that a recipe can ask for, as safetensors names them."""
QUANTISED = ("Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0", "MXFP4", "TQ2_0", "TQ1_0")
"""The quantised types that can be written, widest first; all of `BLOCKS` but `UNREAD` are read."""
UNREAD = ("Q8_1", "Q8_K")
"""The quantised types that are no types of weights: they are only ever copied."""
KEPT_BYTES = 1 << 24
"""Freed blocks up to this size are kept for the next; see `keep_freed_memory`."""
READ_DTYPES = (*FLOAT_DTYPES, *(dtype for dtype in BLOCKS if dtype not in UNREAD))
"""Everything that can be read as floats, quantised types of GGUF too."""
SAMPLE_BLOCKS, SAMPLE_BYTES = 64, 1 << 16
"""How many blocks of a file its fingerprint reads, and how long each is, in bytes."""
HASHERS = 8
"""Files whose fingerprints are made at a time: they wait for a disk that was not read yet."""
HASHED_BYTES = 1 << 24
"""Bytes that `sha256_of` reads at a time."""


@contextmanager
def open_file(path: WeightFile) -> Iterator[Handle]:
    """A file, open for positioned reads.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    if isinstance(path, RemoteFile):
        yield RemoteHandle(path)
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        yield handle
    finally:
        os.close(handle)


def read_into(handle: Handle, offset: int, buffer: memoryview, path: WeightFile) -> None:
    """Fill `buffer` with the bytes of an open file from `offset` on.

    Raises:
        CheckpointError: the file ended before the buffer was full, or cannot be read.
    """
    if isinstance(handle, RemoteHandle):
        handle.read_into(offset, buffer)
        return
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(handle, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was being read")
        done += count


def fingerprint(path: WeightFile) -> str:
    """SHA-256 over a file's length and 64 blocks of 64 KiB spread evenly over it.

    The first block holds the header. It reads 4 MiB whatever the file's size, and distinguishes
    any two fine-tuned checkpoints; it is no proof against an edit of single bytes.

    Raises:
        CheckpointError: the file cannot be read.
    """
    digest = hashlib.sha256()
    with open_file(path) as handle:
        size = path.size if isinstance(path, RemoteFile) else path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        last = max(0, size - SAMPLE_BYTES)
        for start in sorted({last * i // (SAMPLE_BLOCKS - 1) for i in range(SAMPLE_BLOCKS)}):
            block = memoryview(bytearray(min(SAMPLE_BYTES, size - start)))
            read_into(handle, start, block, path)
            digest.update(block)
    return digest.hexdigest()


def fingerprints(files: Iterable[WeightFile]) -> dict[WeightFile, str]:
    """The fingerprint of every file; several are read and hashed at a time.

    Raises:
        CheckpointError: a file cannot be read.
    """
    listed = list(files)
    with ThreadPoolExecutor(HASHERS, thread_name_prefix="fingerprint") as pool:
        return dict(zip(listed, pool.map(fingerprint, listed), strict=True))


def sha256_of(path: Path, progress: Advance = lambda count: None) -> str:
    """SHA-256 of a whole file, in hexadecimal; `progress` gets the number of bytes just read.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(HASHED_BYTES))
    with open_file(path) as handle:
        size = path.stat().st_size
        for start in range(0, size, HASHED_BYTES):
            part = buffer[: min(HASHED_BYTES, size - start)]
            read_into(handle, start, part, path)
            digest.update(part)
            progress(len(part))
    return digest.hexdigest()


def read_stored(handle: Handle, info: TensorInfo, start: int, stop: int) -> Stored:
    """Elements [start, stop) of a tensor, counted in row-major order, as they are stored.

    Args:
        handle: `info.file`, open.
        info: the tensor; its dtype has whole bytes per element.
        start: first element; of a quantised type, the first of a block.
        stop: one past the last element; of a quantised type, where a block ends.

    Returns:
        A vector of `numpy_dtype(info.dtype)`, in fresh memory.

    Raises:
        CheckpointError: the file cannot be read, or the dtype packs several elements in a byte.
    """
    import numpy as np

    if isinstance(info, Translated):
        return narrowed(read_floats(handle, info, start, stop), info.dtype)
    length, nbytes = block_of(info.dtype)
    kind = numpy_dtype(info.dtype)
    values = np.empty((stop - start) // length * nbytes // kind.itemsize, kind)
    if len(values):
        position = info.offset + start // length * nbytes
        read_into(handle, position, values.view(np.uint8).data, info.file)
    return values


def read_floats(handle: Handle, info: TensorInfo, start: int, stop: int) -> Floats:
    """Elements [start, stop) of a floating-point tensor, to compute with; see `widened`."""
    if isinstance(info, Translated):
        return _translated(handle, info, start, stop)
    length, _ = block_of(info.dtype)
    first = start // length * length
    last = min(-(-stop // length) * length, info.elements)
    return widened(read_stored(handle, info, first, last), info.dtype)[start - first : stop - first]


def _translated(handle: Handle, info: Translated, start: int, stop: int) -> Floats:
    """Elements of a tensor of a GGUF file, in transformers' order."""
    import numpy as np

    if info.order is None or start == stop:
        values: Floats = read_floats(handle, info.stored, start, stop)
    else:
        width = info.elements // info.order.rows
        first, last = start // width, -(-stop // width)
        wanted = row_order(info.order)[first:last]
        places = np.argsort(wanted)
        wide = np.float64 if info.stored.dtype == "F64" else np.float32
        rows: Stored = np.empty((len(wanted), width), wide)
        # Neighbours in the file are read as one.
        for run in np.split(places, np.flatnonzero(np.diff(wanted[places]) != 1) + 1):
            begin, end = int(wanted[run[0]]), int(wanted[run[-1]]) + 1
            part = read_floats(handle, info.stored, begin * width, end * width)
            rows[run] = part.reshape(-1, width)
        values = rows.reshape(-1)[start - first * width : stop - first * width]
    return values + values.dtype.type(info.shift) if info.shift else values


@lru_cache(maxsize=8)
def row_order(order: RowOrder) -> npt.NDArray[np.int64]:
    """The row of the file that each row of transformers' tensor is."""
    import numpy as np

    rows, heads = np.arange(order.rows), order.heads
    if order.kind == "rotary":  # [head, half, pair] from [head, pair, half]
        return rows.reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    if order.kind == "heads":  # [head, part, ...] from [part, head, ...]
        return rows.reshape(3, heads, -1).swapaxes(0, 1).reshape(-1)
    each = heads // order.groups
    size = order.rows // (heads + 2 * order.groups)
    queries, keys, values = np.split(rows, [heads * size, (heads + order.groups) * size])
    parts = [part.reshape(order.groups, -1, size) for part in (queries, keys, values)]
    assert parts[0].shape[1] == each
    return np.concatenate(parts, axis=1).reshape(-1)


def read_tensor(info: TensorInfo) -> Stored:
    """One whole tensor as it is stored, with its shape, in fresh memory.

    Raises:
        CheckpointError: the file cannot be read, or the dtype packs several elements in a byte.
    """
    with open_file(info.file) as handle:
        return read_stored(handle, info, 0, info.elements).reshape(info.shape)


def read_matrix(info: TensorInfo) -> npt.NDArray[np.float64]:
    """One whole floating-point tensor in float64."""
    import numpy as np

    return widened(read_tensor(info), info.dtype).astype(np.float64, copy=False)


def widened(stored: Stored, dtype: str) -> Floats:
    """Stored elements of a dtype of `FLOAT_DTYPES` in float32, or float64 where they are that.

    Those of a quantised type are dequantised. Fresh memory, unless they are stored so.
    """
    import numpy as np

    if dtype in BLOCKS:
        if not len(stored):  # which the package refuses
            return np.empty(0, np.float32)
        package = gguf_package()
        kind = package.GGMLQuantizationType[dtype]
        values: Floats = package.quants.dequantize(stored, kind)
        return values
    if dtype != "BF16":
        return stored if dtype in ("F32", "F64") else stored.astype(np.float32)
    bits = np.left_shift(stored, 16, dtype=np.uint32)  # the upper half of a float32
    return bits.view(np.float32)


def narrowed(values: Floats, dtype: str) -> Stored:
    """Floats as they are stored in a dtype, rounded to the nearest, ties to even.

    What is too large becomes infinite. A float64 goes through float32 on its way to 16 bits. A
    quantised type of `QUANTISED` gets whole blocks, which hold finite numbers.
    """
    import numpy as np

    if dtype in BLOCKS:
        package = gguf_package()
        kind = package.GGMLQuantizationType[dtype]
        blocks: Stored = package.quants.quantize(values.astype(np.float32, copy=False), kind)
        return blocks
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
        short[np.isnan(single)] = 0x7FC0  # adding to the bits of a NaN may give a number
    return short


def keep_freed_memory() -> None:
    """Let the allocator keep what chunks free, for the next ones.

    glibc keeps blocks no larger than the largest it has seen freed. By default it gives memory of a
    chunk's size back to the system, and most of the time goes into clearing the same pages again.
    """
    import numpy as np

    np.empty(KEPT_BYTES, np.uint8)


def is_finite(stored: Stored, dtype: str = "F32") -> bool:
    """True if no element, as it is stored in a floating-point dtype, is NaN or infinite."""
    import numpy as np

    if stored.size == 0:
        return True
    if dtype == "BF16":
        return int(np.bitwise_and(stored, 0x7FFF).max()) < 0x7F80
    # A NaN is the least and the largest of all, so that two numbers say it.
    return bool(np.isfinite(stored.min()) and np.isfinite(stored.max()))


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The NumPy dtype that holds the elements of a dtype, or their bits, or bytes of blocks.

    Raises:
        CheckpointError: it packs several elements in a byte.
    """
    import numpy as np

    if dtype in BLOCKS:
        return np.dtype("u1")
    bits = DTYPE_BITS[dtype]
    if bits < 8:
        raise CheckpointError(f"elements of {dtype} cannot be taken one by one")
    kinds = {"F": "f", "I": "i", "U": "u", "C": "c"}
    kind = "u" if dtype == "BF16" or bits == 8 else kinds[dtype[0]]
    return np.dtype("bool" if dtype == "BOOL" else f"<{'i' if dtype == 'I8' else kind}{bits // 8}")


def as_torch(stored: Stored, dtype: str) -> torch.Tensor:
    """A torch tensor over stored elements, which shares their memory.

    Raises:
        CheckpointError: torch has no such dtype.
    """
    import torch

    return torch.from_numpy(stored).view(torch_dtype(dtype))


def torch_dtype(dtype: str) -> torch.dtype:
    """The torch dtype of a safetensors dtype.

    Raises:
        CheckpointError: torch has none that holds one element per item (packed 4 and 6 bit).
    """
    import torch

    names = {
        "BOOL": "bool",
        "F8_E5M2": "float8_e5m2",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E8M0": "float8_e8m0fnu",
        "F8_E4M3FNUZ": "float8_e4m3fnuz",
        "F8_E5M2FNUZ": "float8_e5m2fnuz",
        "C64": "complex64",
        "BF16": "bfloat16",
    }
    kinds = {"F": "float", "I": "int", "U": "uint"}
    name = names.get(dtype) or f"{kinds[dtype[0]]}{DTYPE_BITS[dtype]}"
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"torch cannot hold a tensor of dtype {dtype}")
    return found


def gguf_package() -> Any:
    """The `gguf` package, which quantises, dequantises, and knows the names of tensors.

    Raises:
        LayerswapError: it is not installed.
    """
    need_extras("arithmetic on GGUF files", "gguf")
    import gguf

    return gguf


def same_bytes(first: TensorInfo, second: TensorInfo, chunk: int = 1 << 23) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes.

    Reads at most `chunk` bytes of each at a time.
    """
    if isinstance(first, Translated) or isinstance(second, Translated):
        chunk //= 8  # elements
        return _same_elements(first, second, range(0, first.elements, chunk), chunk)
    return _same_blocks(first, second, range(0, first.nbytes, chunk), chunk)


def same_sample(first: TensorInfo, second: TensorInfo, blocks: int, nbytes: int) -> bool:
    """True if two stored tensors have the same dtype and shape, and agree in some blocks of bytes.

    The blocks are spread evenly, from the beginning to the end.
    """
    by_element = isinstance(first, Translated) or isinstance(second, Translated)
    size, length = (first.elements, nbytes // 8) if by_element else (first.nbytes, nbytes)
    last = max(0, size - length)
    starts = sorted({last * i // max(1, blocks - 1) for i in range(blocks)})
    return (_same_elements if by_element else _same_blocks)(first, second, starts, length)


def _same_blocks(first: TensorInfo, second: TensorInfo, starts: Iterable[int], nbytes: int) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open_file(first.file) as a, open_file(second.file) as b:
        for start in starts:
            length = min(nbytes, first.nbytes - start)
            # Bytearrays compare by memcmp; memoryviews would compare item by item.
            buffers = bytearray(length), bytearray(length)
            read_into(a, first.offset + start, memoryview(buffers[0]), first.file)
            read_into(b, second.offset + start, memoryview(buffers[1]), second.file)
            if buffers[0] != buffers[1]:
                return False
    return True


def _same_elements(
    first: TensorInfo, second: TensorInfo, starts: Iterable[int], count: int
) -> bool:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open_file(first.file) as a, open_file(second.file) as b:
        for start in starts:
            stop = min(start + count, first.elements)
            parts = read_stored(a, first, start, stop), read_stored(b, second, start, stop)
            if parts[0].tobytes() != parts[1].tobytes():
                return False
    return True
