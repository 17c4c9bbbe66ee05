"""Reading tensors, whole or in part, with plain positioned reads.

`os.pread` and not a memory map: a map of a file that shrinks, or on a network filesystem that
fails, kills the process with SIGBUS, which no program can catch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from layerswap.checkpoint.header import DTYPE_BITS, TensorInfo
from layerswap.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    import torch

FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")
"""The dtypes that arithmetic is defined for; all others are only ever copied."""


@contextmanager
def open_file(path: Path) -> Iterator[int]:
    """A read-only file descriptor for positioned reads.

    Raises:
        CheckpointError: the file cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        yield handle
    finally:
        os.close(handle)


def read_into(handle: int, offset: int, buffer: memoryview, path: Path) -> None:
    """Fill `buffer` with the bytes of an open file from `offset` on.

    Raises:
        CheckpointError: the file ended before the buffer was full, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(handle, [buffer[done:]], offset + done)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
        if count == 0:
            raise CheckpointError(f"{path}: ended while it was being read")
        done += count


def read_elements(handle: int, info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Elements [start, stop) of a tensor, counted in row-major order.

    Args:
        handle: `info.file`, open.
        info: the tensor; its dtype has whole bytes per element.
        start: first element.
        stop: one past the last element.

    Returns:
        A vector in the stored dtype, in fresh memory.

    Raises:
        CheckpointError: the file cannot be read, or torch has no such dtype.
    """
    import torch

    dtype = torch_dtype(info.dtype)
    size = DTYPE_BITS[info.dtype] // 8
    buffer = bytearray((stop - start) * size)
    read_into(handle, info.offset + start * size, memoryview(buffer), info.file)
    return torch.frombuffer(buffer, dtype=dtype) if buffer else torch.empty(0, dtype=dtype)


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """One whole tensor, as stored: its own dtype and shape, in fresh memory.

    Raises:
        CheckpointError: the file cannot be read, or torch has no such dtype.
    """
    with open_file(info.file) as handle:
        return read_elements(handle, info, 0, info.elements).reshape(info.shape)


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


def same_bytes(first: TensorInfo, second: TensorInfo, chunk: int = 1 << 23) -> bool:
    """Whether two stored tensors have the same dtype, shape and bytes.

    Reads at most `chunk` bytes of each at a time.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    with open_file(first.file) as a, open_file(second.file) as b:
        for start in range(0, first.nbytes, chunk):
            length = min(chunk, first.nbytes - start)
            # Bytearrays compare by memcmp; memoryviews would compare item by item.
            buffers = bytearray(length), bytearray(length)
            read_into(a, first.offset + start, memoryview(buffers[0]), first.file)
            read_into(b, second.offset + start, memoryview(buffers[1]), second.file)
            if buffers[0] != buffers[1]:
                return False
    return True


def is_finite(tensor: torch.Tensor) -> bool:
    """True if no element is NaN or infinite."""
    import torch

    if tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) and torch.isfinite(high))
