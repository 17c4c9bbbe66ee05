"""Writes the bytes of output files: spans copied by the kernel, blends computed in fixed chunks.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from layerswap.checkpoint import BLOCKS, TensorInfo
from layerswap.checkpoint.header import Translated, as_stored, block_of
from layerswap.checkpoint.read import (
    FLOAT_DTYPES,
    FLOAT_NAMES,
    Handle,
    glance_is_finite,
    is_finite,
    narrowed,
    numpy_dtype,
    open_file,
    read_bytes,
    read_stored,
    read_tensor,
    widened,
)
from layerswap.checkpoint.remote import CONNECTIONS, RemoteFile, RemoteHandle, WeightFile
from layerswap.compose.blend import Operation
from layerswap.ground import system
from layerswap.ground.errors import LayerswapError, MergeError
from layerswap.merge.layout import BLOCK, OutputTensor, Shard, Span, names_digest, spans
from layerswap.merge.target import MergeOptions
from layerswap.merge.terms import (
    NON_FINITE,
    Gathered,
    Handles,
    ModelFacts,
    TermEvaluator,
    measure_model,
    stored_tensors,
)

if TYPE_CHECKING:
    from layerswap.checkpoint.read import Floats, Stored

CHUNK_BYTES = 1 << 19
"""Bytes of output computed at a time by one worker: few enough to stay in the cache."""
PIECE_BYTES = 1 << 25
"""Bytes of output that one worker computes before it takes other work."""
FETCHED_BYTES = 1 << 22
"""The same if the inputs come over the network, from which many pieces are fetched at once."""
SPAN_BYTES = 1 << 24
"""Bytes copied between two reports of progress, after which the disk is set to work on them."""
PROBED_BYTES = 1 << 14
"""Bytes of a verbatim tensor that are checked for NaN: a norm of 8,192 in bfloat16."""
LARGEST_FLOAT16 = 65504.0
SAMPLED = 16
"""One of this many chunks of a tensor is measured, always the first."""
NOTED = 0.1
"""Smallest error of the deltas, as a share of their norm, that a merge warns about."""
LOST_TO_DTYPE = "lost_to_dtype"
"""The key of `layerswap.json` for the measurement."""
SHARED_BYTES = "shared_bytes"
"""The key for the bytes of blocks that are the sources' own."""


Work = TypeVar("Work")


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of one output tensor, and the offset of their bytes.

    A tensor of a merge method is one piece of any size, so that one worker measures it once.
    """

    tensor: OutputTensor
    start: int
    stop: int
    offset: int


def check_finite(tensors: Iterable[OutputTensor]) -> None:
    """Refuse verbatim tensors with NaN or infinity among their first elements.

    Training that diverges leaves NaN nearly everywhere. Tensors on another machine are checked
    when they are here; those that are computed are checked whole.
    """
    sources = [tensor.copied for tensor in tensors if tensor.verbatim]
    local = [info for info in sources if not isinstance(info.file, RemoteFile)]
    _check_beginnings({info: info for info in local})


def _check_fetched(path: Path, shard: Shard) -> None:
    """Check the output's copies of remote tensors for NaN or infinity."""
    copied = ((t.copied, offset) for t, offset in shard.tensors if t.verbatim)
    _check_beginnings(
        {
            replace(info, file=path, offset=offset): info
            for info, offset in copied
            if isinstance(info.file, RemoteFile)
        }
    )


def _check_beginnings(tensors: Mapping[TensorInfo, TensorInfo]) -> None:
    """Check tensors where they lie; messages name their sources."""
    with ExitStack() as stack:
        handles = open_all(stack, {info.file for info in tensors})
        for info, source in tensors.items():
            if info.dtype not in FLOAT_DTYPES:
                continue
            stop = info.offset + min(info.nbytes, PROBED_BYTES)
            start = read_bytes(handles[info.file], info.offset, stop, info.file)
            if not glance_is_finite(start, info.dtype) and not is_finite(
                read_stored(handles[info.file], info, 0, len(start) // block_of(info.dtype)[1]),
                info.dtype,
            ):
                raise MergeError(f"{source.file}: tensor {source.name!r} {NON_FINITE}")


def measure_tensors(tensors: Sequence[OutputTensor], threads: int = 1) -> dict[Operation, Any]:
    """Measure the whole model for the merge methods that need it before computing any tensor."""
    terms = tuple(term for tensor in tensors for term in tensor.inputs)
    with ExitStack() as stack:
        merged = [tensor for tensor in tensors if not tensor.linear]
        handles = open_all(stack, {file for tensor in merged for file in tensor.files})
        return measure_model(terms, handles, threads)


def check_written(target: Path, names: Iterable[str], expected: Mapping[str, Any]) -> None:
    """Compare the tensor names in the output's files with the plan's account."""
    written = names_digest(names)
    if written != expected:
        raise MergeError(
            f"{target}: the output has {written['count']} tensors and the plan "
            f"{expected['count']}, or their names differ; nothing was kept"
        )


def write_shard(
    path: Path,
    shard: Shard,
    facts: ModelFacts,
    options: MergeOptions,
    rounding: Rounding | None = None,
    *,
    share: bool = False,
) -> int:
    """Write one output file; return the bytes of shared blocks.

    With `share`, whole blocks that have the same position in source and output are not copied if
    the filesystem can share them.
    """
    files = {file for tensor, _ in shard.tensors for file in tensor.files}
    threads = options.workers
    if any(isinstance(file, RemoteFile) for file in files):
        threads = max(threads, CONNECTIONS)  # they wait for the network
    with ExitStack() as stack:
        handles = open_all(stack, files)
        output = system.open_to_write(path)
        stack.callback(os.close, output)
        system.write_at(output, shard.header, 0)
        options.progress(len(shard.header))
        copied = left = spans(shard)
        if share:
            left = [end for s in copied for end in share_blocks(handles[s.source], output, s)]
        shared = sum(span.nbytes for span in copied) - sum(span.nbytes for span in left)
        if shared:
            options.progress(shared)
        # Copies first: the kernel does them while NumPy is still being imported.
        work: list[Span | Piece] = [
            span.part(start, min(start + SPAN_BYTES, span.nbytes))
            for span in left
            for start in range(0, span.nbytes, SPAN_BYTES)
        ]
        work += _computes(shard)

        def run(piece: Span | Piece) -> None:
            if isinstance(piece, Span):
                copy_span(handles[piece.source], output, piece)
                system.start_writing(output, piece.offset, piece.nbytes)
                options.progress(piece.nbytes)
                return
            with ExitStack() as held:
                hold_remote(held, piece, handles, path.parent)
                evaluator = TermEvaluator(handles, facts)
                nbytes = 0
                for data, offset in piece_bytes(piece, evaluator, rounding):
                    system.write_at(output, data, offset)
                    nbytes += len(data)
                    options.progress(len(data))
            system.start_writing(output, piece.offset, nbytes)

        run_all(run, work, threads)
    _check_fetched(path, shard)
    return shared


def compute_tensor(tensor: OutputTensor, facts: ModelFacts | None = None) -> Stored:
    """Compute one output tensor in memory, bit-identical to `write_shard`."""
    import numpy as np

    if tensor.verbatim:
        return read_tensor(next(stored_tensors(tensor.inputs))).reshape(tensor.shape)
    values = np.empty(tensor.elements, numpy_dtype(tensor.dtype))
    buffer = values.view(np.uint8).data if len(values) else memoryview(b"")
    with ExitStack() as stack:
        handles = open_all(stack, tensor.files)
        evaluator = TermEvaluator(handles, facts or {})
        for data, offset in piece_bytes(Piece(tensor, 0, tensor.elements, 0), evaluator):
            buffer[offset : offset + len(data)] = data
    return values.reshape(tensor.shape)


def _computes(shard: Shard) -> Iterator[Piece]:
    for tensor, offset in shard.tensors:
        if tensor.verbatim or not tensor.elements:
            continue
        whole = Piece(tensor, 0, tensor.elements, offset)
        if not any(isinstance(file, RemoteFile) for file in tensor.files):
            yield from chunks(whole, PIECE_BYTES) if tensor.linear else (whole,)
        else:  # rows in another order lie anywhere: their tensors are fetched once, and whole
            gathered = any(isinstance(term, Gathered) for term, _ in tensor.inputs)
            reordered = any(isinstance(i, Translated) for i in stored_tensors(tensor.inputs))
            cut = tensor.linear and not gathered and not reordered
            yield from chunks(whole, FETCHED_BYTES) if cut else (whole,)


def hold_remote(stack: ExitStack, piece: Piece, handles: Handles, folder: Path) -> None:
    """Fetch a piece's remote inputs, and keep them until the stack closes.

    Methods read their inputs more than once; fetched bytes wait in nameless files of `folder`.
    """
    share = piece.stop - piece.start
    for info in dict.fromkeys(map(as_stored, stored_tensors(piece.tensor.inputs))):
        handle = handles[info.file]
        if isinstance(handle, RemoteHandle):
            start, stop = info.offset, info.offset + info.nbytes
            if share < piece.tensor.elements:
                length, size = block_of(info.dtype)
                start, stop = (start + i // length * size for i in (piece.start, piece.stop))
            if start < stop:
                stack.enter_context(handle.holding(start, stop, folder))


def chunks(piece: Piece, nbytes: int) -> Iterator[Piece]:
    """Cut a piece into pieces of at most this many bytes of output."""
    length, size = block_of(piece.tensor.dtype)
    step = nbytes // max(size, 2 * length) * length  # whole blocks; the element count of float16
    for start in range(piece.start, piece.stop, step):
        stop = min(start + step, piece.stop)
        offset = piece.offset + (start - piece.start) // length * size
        yield Piece(piece.tensor, start, stop, offset)


def piece_bytes(
    piece: Piece, evaluator: TermEvaluator, rounding: Rounding | None = None
) -> Iterator[tuple[bytearray | memoryview, int]]:
    """Yield a piece's bytes with their offsets, chunk by chunk; `rounding` samples them."""
    if piece.tensor.verbatim:
        yield from _stored_bytes(piece, evaluator)
        return
    import numpy as np

    dtype, base = piece.tensor.dtype, piece.tensor.base
    evaluator.prepare(piece.tensor.inputs)
    for chunk in chunks(piece, CHUNK_BYTES):
        values = evaluator.sum(piece.tensor.inputs, chunk.start, chunk.stop)
        if dtype in BLOCKS and not _fits_blocks(values):
            raise MergeError(_non_finite(chunk, evaluator))
        result = narrowed(values, dtype)
        if dtype not in BLOCKS and not is_finite(result, dtype):
            raise MergeError(_non_finite(chunk, evaluator))
        number = chunk.start * block_of(dtype)[1] // CHUNK_BYTES
        if rounding is not None and base is not None and number % SAMPLED == 0:
            reference = evaluator.term(base, chunk.start, chunk.stop)
            rounding.add(values, result, reference, dtype)
        yield result.view(np.uint8).data, chunk.offset


def _stored_bytes(piece: Piece, evaluator: TermEvaluator) -> Iterator[tuple[bytearray, int]]:
    source = next(stored_tensors(piece.tensor.inputs))
    length, size = block_of(source.dtype)
    for chunk in chunks(piece, CHUNK_BYTES):
        start, stop = (source.offset + i // length * size for i in (chunk.start, chunk.stop))
        handle = evaluator.handles[source.file]
        yield read_bytes(handle, start, stop, source.file), chunk.offset


def _fits_blocks(values: Floats) -> bool:
    """True if every value is finite, and none too large for the float16 scale of its block."""
    return not len(values) or bool(max(values.max(), -values.min()) <= LARGEST_FLOAT16)


def _non_finite(chunk: Piece, evaluator: TermEvaluator) -> str:
    tensor = chunk.tensor
    culprit = evaluator.blame(tensor.inputs, chunk.start, chunk.stop)
    option = "--blend-type" if tensor.dtype in BLOCKS else "--dtype"
    return culprit or f"tensor {tensor.name!r} overflows {tensor.dtype}; choose a wider {option}"


def open_all(stack: ExitStack, files: Iterable[WeightFile]) -> dict[WeightFile, Handle]:
    """Open files for reading until the stack closes."""
    listed = sorted(files, key=str)
    system.allow_open_files(len(listed))
    return {file: stack.enter_context(open_file(file)) for file in listed}


def shareable_bytes(blocks: Iterable[Span], folder: Path) -> int:
    """Bytes of whole blocks that new files in a folder can share with their sources.

    Shares one block of each filesystem with a nameless file: names of filesystems do not reveal it,
    since it depends on their settings and versions.
    """
    shares: dict[int, bool] = {}
    total = 0
    for span in blocks:
        with suppress(OSError, LayerswapError), open_file(span.source) as handle:
            if isinstance(handle, RemoteHandle):
                continue
            device = os.fstat(handle).st_dev
            if device not in shares:
                shares[device] = False
                with tempfile.TemporaryFile(dir=folder) as file:
                    shares[device] = system.share_range(handle, file.fileno(), BLOCK, 0, 0)
            total += span.nbytes if shares[device] else 0
    return total


def share_blocks(source: Handle, output: int, span: Span) -> list[Span]:
    """Share the whole blocks of a span with its source; return the spans that are left to copy."""
    blocks = span.blocks
    if blocks is None or isinstance(source, RemoteHandle):
        return [span]
    at = blocks.source_offset, blocks.offset
    if not system.share_range(source, output, blocks.nbytes, *at):
        return [span]
    start = blocks.offset - span.offset
    ends = span.part(0, start), span.part(start + blocks.nbytes, span.nbytes)
    return [end for end in ends if end.nbytes]


def copy_span(source: Handle, output: int, piece: Span) -> None:
    """Copy bytes inside the kernel, or by reading and writing if the filesystems cannot."""
    if isinstance(source, RemoteHandle):
        start = piece.source_offset
        source.copy_to(output, start, start + piece.nbytes, piece.offset)
        return
    done = 0
    while done < piece.nbytes:
        left = piece.nbytes - done
        start, offset = piece.source_offset + done, piece.offset + done
        count = system.copy_range(source, output, left, start, offset)
        # Some filesystems answer 0 in the middle of a file; only reading finds its real end.
        if count == 0:
            buffer = read_bytes(source, start, start + min(PIECE_BYTES, left), piece.source)
            system.write_at(output, buffer, offset)
            count = len(buffer)
        done += count


def run_all(run: Callable[[Work], None], work: Sequence[Work], threads: int) -> None:
    """Run pieces of work in threads; begin no more after a failure."""
    pool = ThreadPoolExecutor(threads, thread_name_prefix="merge")
    try:
        for _ in pool.map(run, work):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


class Rounding:
    """The loss of deltas by rounding, over the tensors that are computed from a base.

    Deltas of fine-tuning are near the step of bfloat16 at the size of usual weights, so half of
    the training can round back to the base unnoticed. Measures a sample of the chunks of each
    tensor. Threads may add chunks in any order.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[int, int, float, float]] = []
        self._dtype = ""

    def add(self, values: Floats, rounded: Stored, base: Floats, dtype: str) -> None:
        """Measure one chunk."""
        import numpy as np

        self._dtype = dtype
        delta = np.subtract(values, base)
        before = narrowed(base, dtype)
        # The delta that is left between two models of the output's dtype.
        error = np.subtract(widened(rounded, dtype), widened(before, dtype))
        error -= delta
        changed = int(np.count_nonzero(delta))
        lost = int(np.count_nonzero((delta != 0) & (rounded == before)))
        norm, wrong = (
            float(np.square(difference, dtype=np.float64).sum()) for difference in (delta, error)
        )
        self._chunks.append((changed, lost, norm, wrong))

    def summary(self) -> dict[str, Any] | None:
        """The entry of `layerswap.json`; None if no delta was measured.

        `share` is the share of changed elements that equal the base again. `error` is the norm of
        the deltas' rounding error over the norm of the deltas.
        """
        changed, lost = (sum(chunk[i] for chunk in self._chunks) for i in (0, 1))
        norm, error = (math.fsum(chunk[i] for chunk in self._chunks) for i in (2, 3))
        if not changed or not math.isfinite(norm + error) or not norm:
            return None
        return {
            "dtype": next(n for n, short in FLOAT_NAMES.items() if short == self._dtype),
            "share": round(lost / changed, 4),
            "error": round(math.sqrt(error / norm), 4),
            "elements_measured": changed,
        }


def rounding_note(measured: Mapping[str, Any] | None) -> str | None:
    """A warning if rounding lost much of the deltas; else None."""
    if not measured or measured["error"] < NOTED:
        return None
    return (
        f"{measured['dtype']} loses {measured['share']:.0%} of the changed elements (rounding "
        f"error {measured['error']:.2f} of the deltas' norm); write float32 (--dtype float32)"
    )
