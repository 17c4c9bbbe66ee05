"""Writing the shards: spans copied by the kernel, blends computed in fixed chunks.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.checkpoint import DTYPE_BITS, TensorInfo
from layerswap.checkpoint.read import open_file, read_into, read_tensor, torch_dtype
from layerswap.errors import MergeError
from layerswap.merge import kernels
from layerswap.merge.outputs import OutputTensor, Shard

if TYPE_CHECKING:
    import torch

CHUNK_BYTES = 1 << 24
"""Bytes of output computed at a time by one worker."""
SPAN_BYTES = 1 << 26
"""Bytes copied between two reports of progress."""
NO_KERNEL_COPY = (
    errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP,
    errno.EPERM, errno.EACCES,  # sandboxes answer so to system calls they do not know
)  # fmt: skip
"""Errors of `copy_file_range` after which plain reading and writing may still work."""

Progress = Callable[[int], None]
"""Called with the number of bytes just written."""


@dataclass(frozen=True)
class _Copy:
    """Bytes of one source file that go unchanged to one place in the output file."""

    source: Path
    source_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class _Compute:
    """Elements [start, stop) of one output tensor, computed and written at `offset`."""

    tensor: OutputTensor
    start: int
    stop: int
    offset: int


def write_shard(
    path: Path,
    shard: Shard,
    *,
    threads: int,
    progress: Progress,
    allow_non_finite: bool = False,
) -> None:
    """Write one output file.

    Args:
        path: the file to create.
        shard: its header and tensors.
        threads: workers that overlap reading, computing and writing.
        progress: told of every piece written.
        allow_non_finite: let NaN and infinity through arithmetic.

    Raises:
        MergeError: a blend gave NaN or infinity.
        CheckpointError: a source cannot be read or has shrunk.
        OSError: the output cannot be written.
    """
    work: list[_Copy | _Compute] = [*_copies(shard), *_computes(shard)]
    sources = {piece.source for piece in work if isinstance(piece, _Copy)} | {
        info.file for p in work if isinstance(p, _Compute) for info, _ in p.tensor.inputs
    }
    with ExitStack() as stack:
        handles = {source: stack.enter_context(open_file(source)) for source in sorted(sources)}
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, output)
        _write(output, shard.header, 0)
        progress(len(shard.header))

        def run(piece: _Copy | _Compute) -> None:
            if isinstance(piece, _Copy):
                copy_span(handles[piece.source], output, piece)
                progress(piece.nbytes)
            else:
                data = _compute_chunk(piece, handles, allow_non_finite)
                _write(output, data, piece.offset)
                progress(len(data))

        _run_all(run, work, threads)


def compute_tensor(tensor: OutputTensor, *, allow_non_finite: bool = False) -> torch.Tensor:
    """One output tensor in memory: what `write_shard` would write, bit for bit.

    Raises:
        MergeError: a blend gave NaN or infinity.
    """
    import torch

    if tensor.verbatim:
        return read_tensor(tensor.inputs[0][0]).reshape(tensor.shape)
    buffer = bytearray(tensor.nbytes)
    with ExitStack() as stack:
        handles = {
            file: stack.enter_context(open_file(file))
            for file in sorted({info.file for info, _ in tensor.inputs})
        }
        for piece in _chunks(tensor, 0):
            data = _compute_chunk(piece, handles, allow_non_finite)
            buffer[piece.offset : piece.offset + len(data)] = data
    dtype = torch_dtype(tensor.dtype)
    if not buffer:
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(buffer, dtype=dtype).reshape(tensor.shape)


def _copies(shard: Shard) -> Iterator[_Copy]:
    """Neighbours in both files as one span, cut into pieces of `SPAN_BYTES`."""
    span: _Copy | None = None
    for tensor, offset in shard.tensors:
        if not tensor.verbatim or not tensor.nbytes:
            continue
        info = tensor.inputs[0][0]
        if span and (info.file, info.offset, offset) == (
            span.source,
            span.source_offset + span.nbytes,
            span.offset + span.nbytes,
        ):
            span = _Copy(span.source, span.source_offset, span.offset, span.nbytes + tensor.nbytes)
            continue
        if span:
            yield from _pieces(span)
        span = _Copy(info.file, info.offset, offset, tensor.nbytes)
    if span:
        yield from _pieces(span)


def _pieces(span: _Copy) -> Iterator[_Copy]:
    for start in range(0, span.nbytes, SPAN_BYTES):
        length = min(SPAN_BYTES, span.nbytes - start)
        yield _Copy(span.source, span.source_offset + start, span.offset + start, length)


def _computes(shard: Shard) -> Iterator[_Compute]:
    for tensor, offset in shard.tensors:
        if not tensor.verbatim:
            yield from _chunks(tensor, offset)


def _chunks(tensor: OutputTensor, offset: int) -> Iterator[_Compute]:
    size = DTYPE_BITS[tensor.dtype] // 8
    step = CHUNK_BYTES // size
    for start in range(0, tensor.elements, step):
        stop = min(start + step, tensor.elements)
        yield _Compute(tensor, start, stop, offset + start * size)


def _compute_chunk(piece: _Compute, handles: dict[Path, int], allow_non_finite: bool) -> memoryview:
    import torch

    tensor = piece.tensor
    parts = [_read_part(info, piece, handles[info.file]) for info, _ in tensor.inputs]
    total = kernels.blend(parts, [weight for _, weight in tensor.inputs])
    result = total.to(torch_dtype(tensor.dtype))
    if not allow_non_finite and not kernels.is_finite(result):
        raise MergeError(_non_finite(tensor, parts))
    return memoryview(result.view(torch.uint8).numpy().data)


def _read_part(info: TensorInfo, piece: _Compute, handle: int) -> torch.Tensor:
    import torch

    size = DTYPE_BITS[info.dtype] // 8
    buffer = bytearray((piece.stop - piece.start) * size)
    read_into(handle, info.offset + piece.start * size, memoryview(buffer), info.file)
    return torch.frombuffer(buffer, dtype=torch_dtype(info.dtype))


def _non_finite(tensor: OutputTensor, parts: Sequence[torch.Tensor]) -> str:
    for (info, _), part in zip(tensor.inputs, parts, strict=True):
        if not kernels.is_finite(part):
            return f"{info.file}: tensor {info.name!r} holds NaN or infinity"
    return f"tensor {tensor.name!r} overflows {tensor.dtype}; choose a wider --dtype"


def copy_span(source: int, output: int, piece: _Copy) -> None:
    """Copy bytes between files inside the kernel, which shares their blocks where it can.

    Falls back to reading and writing where the filesystems cannot.

    Raises:
        CheckpointError: the source ended early.
        OSError: the output cannot be written.
    """
    done = 0
    while done < piece.nbytes:
        left = piece.nbytes - done
        start, offset = piece.source_offset + done, piece.offset + done
        try:
            count = os.copy_file_range(source, output, left, start, offset)
        except OSError as error:
            if error.errno not in NO_KERNEL_COPY:
                raise
            count = 0
        # Some filesystems answer 0 in the middle of a file; only reading tells its real end.
        if count == 0:
            buffer = memoryview(bytearray(min(CHUNK_BYTES, left)))
            read_into(source, start, buffer, piece.source)
            _write(output, buffer, offset)
            count = len(buffer)
        done += count


def _write(output: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(output, view, offset)
        view, offset = view[count:], offset + count


def _run_all(
    run: Callable[[_Copy | _Compute], None], work: Sequence[_Copy | _Compute], threads: int
) -> None:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="merge")
    try:
        with _single_threaded_torch():
            for _ in pool.map(run, work):
                pass
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _single_threaded_torch() -> Iterator[None]:
    """One torch thread per worker; the workers are the parallelism."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
