"""Writes the shards of a plan to a safe target: spans copied by the kernel, blends in fixed chunks.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance, Log, PathLike
from layerswap.checkpoint import BLOCKS, Checkpoint, atomic_folder, refuse_target
from layerswap.checkpoint.commit import Journal, atomic_file, refuse_file
from layerswap.checkpoint.gguf import read_gguf
from layerswap.checkpoint.header import block_of, is_gguf, read_header
from layerswap.checkpoint.read import (
    Handle,
    is_finite,
    narrowed,
    numpy_dtype,
    open_file,
    read_into,
    read_tensor,
)
from layerswap.checkpoint.remote import CONNECTIONS, RemoteFile, RemoteHandle, WeightFile
from layerswap.compose.blend import Operation
from layerswap.errors import MergeError
from layerswap.merge.gguf import GGUFMergePlan, is_merged_gguf
from layerswap.merge.layout import OutputTensor, Shard, index_of
from layerswap.merge.lazy_tensors import (
    Gathered,
    Reader,
    Thresholds,
    leaves,
    model_thresholds,
)
from layerswap.merge.lora import AdapterMergePlan, write_adapter
from layerswap.merge.metadata import RECORD, record, write_documents
from layerswap.merge.plan import MergePlan, check_finite, check_unchanged, names_digest
from layerswap.merge.rounding import SAMPLED, Rounding, rounding_note

if TYPE_CHECKING:
    from layerswap.checkpoint.read import Floats, Stored


CHUNK_BYTES = 1 << 19
"""Bytes of output computed at a time by one worker: few enough to stay in the cache."""
PIECE_BYTES = 1 << 25
"""Bytes of output that one worker computes before it takes other work."""
FETCHED_BYTES = 1 << 22
"""The same where the inputs come over the network, from which many pieces are fetched at once."""
SPAN_BYTES = 1 << 24
"""Bytes copied between two reports of progress, after which the disk is set to work on them."""
SEGMENT_BYTES = 1 << 30
"""Bytes of a GGUF file after which a resumed merge need not write them again."""
LARGEST_FLOAT16 = 65504.0
NO_KERNEL_COPY = (
    errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP,
    errno.EPERM, errno.EACCES,  # sandboxes answer so to system calls they do not know
)  # fmt: skip
"""Errors of `copy_file_range` after which plain reading and writing may still work."""


@dataclass(frozen=True)
class _Copy:
    """Bytes of one source file that go unchanged to one place in the output file."""

    source: WeightFile
    source_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Compute:
    """Elements [start, stop) of one output tensor, computed and written at `offset`.

    A derived tensor is one piece, whatever its size: it is measured once, by one worker.
    """

    tensor: OutputTensor
    start: int
    stop: int
    offset: int


def write_shard(
    path: Path,
    shard: Shard,
    *,
    threads: int,
    progress: Advance,
    thresholds: Mapping[Operation, Thresholds] | None = None,
    allow_non_finite: bool = False,
    rounding: Rounding | None = None,
) -> None:
    """Write one output file, or the next part of one.

    Args:
        path: the file, which the part with its header creates.
        shard: its header and tensors.
        threads: workers that overlap reading, computing and writing.
        progress: told of every piece written.
        thresholds: of operations that rank a whole model's entries; see `measure_model`.
        allow_non_finite: let NaN and infinity through arithmetic.
        rounding: measures what of the deltas is lost to the dtype.

    Raises:
        MergeError: a blend gave NaN or infinity.
        CheckpointError: a source cannot be read or has shrunk.
        OSError: the output cannot be written.
    """
    # Copies first: the kernel does them while NumPy is still being imported.
    work: list[_Copy | Compute] = [*_copies(shard), *_computes(shard)]
    if any(isinstance(file, RemoteFile) for tensor, _ in shard.tensors for file in tensor.files):
        threads = max(threads, CONNECTIONS)  # they wait for the network
    with ExitStack() as stack:
        files = {file for tensor, _ in shard.tensors for file in tensor.files}
        handles = open_all(stack, files)
        fresh = os.O_CREAT | os.O_EXCL if shard.header else 0
        output = os.open(path, os.O_WRONLY | os.O_CLOEXEC | fresh, 0o666)
        stack.callback(os.close, output)
        _write(output, shard.header, 0)
        progress(len(shard.header))

        def run(piece: _Copy | Compute) -> None:
            if isinstance(piece, _Copy):
                copy_span(handles[piece.source], output, piece)
                _start_writing(output, piece.offset, piece.nbytes)
                progress(piece.nbytes)
                return
            with ExitStack() as held:
                hold_remote(held, piece, handles, path.parent)
                reader = Reader(handles, thresholds or {}, allow_non_finite=allow_non_finite)
                nbytes = 0
                for data, offset in computed(piece, reader, allow_non_finite, rounding):
                    _write(output, data, offset)
                    nbytes += len(data)
                    progress(len(data))
            _start_writing(output, piece.offset, nbytes)

        _run_all(run, work, threads)


def measure_model(tensors: Sequence[OutputTensor], threads: int = 1) -> dict[Operation, Thresholds]:
    """What operations must know of the whole model before a tensor of theirs can be computed."""
    terms = [term for tensor in tensors for term, _ in tensor.inputs]
    with ExitStack() as stack:
        derived = [tensor for tensor in tensors if not tensor.linear]
        handles = open_all(stack, {file for tensor in derived for file in tensor.files})
        return model_thresholds(terms, handles, threads)


def untrimmed_note(operation: Operation, thresholds: Thresholds) -> str | None:
    """What to say of deltas that a density leaves whole, since less of them changed; else None."""
    density = dict(operation.parameters).get("density")
    whole = [
        str(member)
        for (member, _), found in zip(operation.inputs, thresholds, strict=False)
        if found and min(found) == 0
    ]
    if density is None or not whole:
        return None
    return (
        f"{operation.method}: density {density:g} trims nothing of {', '.join(whole)}: it counts "
        "all entries of the model, and fewer of them changed"
    )


def compute_tensor(
    tensor: OutputTensor,
    thresholds: Mapping[Operation, Thresholds] | None = None,
    *,
    allow_non_finite: bool = False,
) -> Stored:
    """One output tensor in memory, as it is stored: what `write_shard` would write, bit for bit.

    Raises:
        MergeError: a blend gave NaN or infinity.
    """
    import numpy as np

    if tensor.verbatim:
        return read_tensor(next(leaves(tensor.inputs))).reshape(tensor.shape)
    values = np.empty(tensor.elements, numpy_dtype(tensor.dtype))
    buffer = values.view(np.uint8).data if len(values) else memoryview(b"")
    with ExitStack() as stack:
        handles = open_all(stack, tensor.files)
        reader = Reader(handles, thresholds or {}, allow_non_finite=allow_non_finite)
        whole = Compute(tensor, 0, tensor.elements, 0)
        for data, offset in computed(whole, reader, allow_non_finite):
            buffer[offset : offset + len(data)] = data
    return values.reshape(tensor.shape)


def _copies(shard: Shard) -> Iterator[_Copy]:
    """Neighbours in both files as one span, cut into pieces of `SPAN_BYTES`."""
    span: _Copy | None = None
    for tensor, offset in shard.tensors:
        if not tensor.verbatim or not tensor.nbytes:
            continue
        info = next(leaves(tensor.inputs))
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


def _computes(shard: Shard) -> Iterator[Compute]:
    for tensor, offset in shard.tensors:
        if tensor.verbatim or not tensor.elements:
            continue
        whole = Compute(tensor, 0, tensor.elements, offset)
        if not any(isinstance(file, RemoteFile) for file in tensor.files):
            yield from _chunks(whole, PIECE_BYTES) if tensor.linear else (whole,)
        else:  # gathered rows lie anywhere, so that their tensors are fetched once, and whole
            gathered = any(isinstance(term, Gathered) for term, _ in tensor.inputs)
            cut = tensor.linear and not gathered
            yield from _chunks(whole, FETCHED_BYTES) if cut else (whole,)


def hold_remote(
    stack: ExitStack, piece: Compute, handles: Mapping[WeightFile, Handle], folder: Path
) -> None:
    """Fetch what a piece is computed from and is read in place, until the stack is left.

    Methods read their inputs more than once; what is fetched waits in nameless files of `folder`.
    """
    share = piece.stop - piece.start
    for info in dict.fromkeys(leaves(piece.tensor.inputs)):
        handle = handles[info.file]
        if isinstance(handle, RemoteHandle):
            start, stop = info.offset, info.offset + info.nbytes
            if share < piece.tensor.elements:
                length, size = block_of(info.dtype)
                start, stop = (start + i // length * size for i in (piece.start, piece.stop))
            if start < stop:
                stack.enter_context(handle.holding(start, stop, folder))


def _chunks(piece: Compute, nbytes: int) -> Iterator[Compute]:
    """A piece cut into pieces of at most this many bytes of output."""
    length, size = block_of(piece.tensor.dtype)
    step = nbytes // max(size, 2 * length) * length  # of blocks, as many elements as of float16
    for start in range(piece.start, piece.stop, step):
        stop = min(start + step, piece.stop)
        offset = piece.offset + (start - piece.start) // length * size
        yield Compute(piece.tensor, start, stop, offset)


def computed(
    piece: Compute, reader: Reader, allow_non_finite: bool, rounding: Rounding | None = None
) -> Iterator[tuple[memoryview, int]]:
    """The bytes of a piece and where they go, chunk by chunk; `rounding` measures some of them."""
    import numpy as np

    dtype, base = piece.tensor.dtype, piece.tensor.base
    for chunk in _chunks(piece, CHUNK_BYTES):
        values = reader.total(piece.tensor.inputs, chunk.start, chunk.stop)
        if dtype in BLOCKS and not _fits_blocks(values):
            raise MergeError(_non_finite(chunk, reader))
        result = narrowed(values, dtype)
        if dtype not in BLOCKS and not allow_non_finite and not is_finite(result, dtype):
            raise MergeError(_non_finite(chunk, reader))
        number = chunk.start * block_of(dtype)[1] // CHUNK_BYTES
        if rounding is not None and base is not None and number % SAMPLED == 0:
            reference = reader.term(base, chunk.start, chunk.stop)
            rounding.add(values, result, reference, dtype)
        yield result.view(np.uint8).data, chunk.offset


def _fits_blocks(values: Floats) -> bool:
    """True if every value is finite, and none too large for the float16 scale of its block."""
    return not len(values) or bool(max(values.max(), -values.min()) <= LARGEST_FLOAT16)


def _non_finite(chunk: Compute, reader: Reader) -> str:
    tensor = chunk.tensor
    found = reader.blame(tensor.inputs, chunk.start, chunk.stop)
    option = "--blend-type" if tensor.dtype in BLOCKS else "--dtype"
    return found or f"tensor {tensor.name!r} overflows {tensor.dtype}; choose a wider {option}"


def open_all(stack: ExitStack, files: Iterable[WeightFile]) -> dict[WeightFile, Handle]:
    """Files, open for reading until the stack is left."""
    return {file: stack.enter_context(open_file(file)) for file in sorted(files, key=str)}


def copy_span(source: Handle, output: int, piece: _Copy) -> None:
    """Copy bytes between files inside the kernel, which shares their blocks where it can.

    Falls back to reading and writing where the filesystems cannot.

    Raises:
        CheckpointError: the source ended early.
        OSError: the output cannot be written.
    """
    if isinstance(source, RemoteHandle):
        start = piece.source_offset
        source.copy_to(output, start, start + piece.nbytes, piece.offset)
        return
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
            buffer = memoryview(bytearray(min(PIECE_BYTES, left)))
            read_into(source, start, buffer, piece.source)
            _write(output, buffer, offset)
            count = len(buffer)
        done += count


def _write(output: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(output, view, offset)
        view, offset = view[count:], offset + count


def _start_writing(output: int, offset: int, nbytes: int) -> None:
    """Let the kernel write these bytes to the disk now, not when all are waited for at the end.

    It drops from its cache what is on the disk already, and of bytes just written that is nothing.
    """
    with suppress(OSError):  # advice alone: some filesystems take none
        os.posix_fadvise(output, offset, nbytes, os.POSIX_FADV_DONTNEED)


def _run_all(
    run: Callable[[_Copy | Compute], None], work: Sequence[_Copy | Compute], threads: int
) -> None:
    pool = ThreadPoolExecutor(threads, thread_name_prefix="merge")
    try:
        for _ in pool.map(run, work):
            pass
    finally:
        pool.shutdown(cancel_futures=True)


def refuse_output(out: PathLike, *, overwrite: bool) -> Path:
    """The absolute path of a folder or a GGUF file that may be written.

    Raises:
        MergeError: it exists and may not be overwritten, or cannot be written.
    """
    if is_gguf(out):
        return refuse_file(out, is_ours=is_merged_gguf, overwrite=overwrite)
    return refuse_target(out, marker=RECORD, overwrite=overwrite)


def check_target(plan: MergePlan, out: PathLike, *, overwrite: bool) -> Path:
    """The absolute path that `write_plan` would write, checked without writing anything.

    Raises:
        LayerswapError: it exists, lies in a source, is of another format, does not fit on the
            disk or cannot be written, or a source changed since the plan was made.
    """
    target = refuse_output(out, overwrite=overwrite)
    if is_gguf(target) != isinstance(plan, GGUFMergePlan):
        raise MergeError(
            f"{target}: all experts are GGUF files, so the output is one; end its name with .gguf"
            if isinstance(plan, GGUFMergePlan)
            else f"{target}: a GGUF file is only written from GGUF files; name a folder"
        )
    check_apart(target, plan.opened)
    check_space(target.parent, plan.nbytes)
    check_unchanged(plan.stamps)
    return target


def check_apart(target: Path, sources: Mapping[str, Checkpoint]) -> None:
    """Refuse an output that is, holds or lies in a source, however either is reached.

    Raises:
        MergeError: naming the source.
    """
    real = target.expanduser().resolve()
    for name, checkpoint in sources.items():
        local = [file.resolve() for file in checkpoint.all_files if isinstance(file, Path)]
        if checkpoint.gguf is not None:  # a file has no folder of its own
            if any(real in (file, *file.parents) for file in local):
                raise MergeError(f"{target}: would write over the checkpoint of {name}")
            continue
        # A file may be a link out of its folder: replacing what it points to would lose it too.
        files = {file.parent for file in local}
        for folder in (checkpoint.folder.resolve(), *sorted(files)):
            if real == folder or folder in real.parents or real in folder.parents:
                raise MergeError(f"{target}: would write into the checkpoint of {name}")


def check_space(folder: Path, need: int) -> None:
    """Refuse an output of `need` bytes that does not fit on the disk of `folder`.

    Raises:
        MergeError: with both sizes.
    """
    free = shutil.disk_usage(folder).free
    if free < need:
        wanted, there = _size(need), _size(free)
        if wanted == there:
            wanted, there = f"{need:,} bytes", f"{free:,} bytes"
        raise MergeError(f"{folder}: needs {wanted}, only {there} are free")


def _size(count: int) -> str:
    for size, unit, digits in ((1e9, "GB", 2), (1e6, "MB", 1), (1e3, "kB", 1)):
        if count >= size:
            return f"{count / size:.{digits}f} {unit}"
    return f"{count} bytes"


def write_plan(
    plan: MergePlan,
    out: PathLike,
    *,
    overwrite: bool = False,
    threads: int | None = None,
    progress: Advance | None = None,
    allow_non_finite: bool = False,
    resume: bool = False,
    log: Log | None = None,
) -> Path:
    """Write the merged checkpoint, adapter or GGUF file; see `Plan.save`."""
    target = check_target(plan, out, overwrite=overwrite)
    if plan.needs_whole:
        plan = plan.downloaded()
    if not (allow_non_finite or isinstance(plan, AdapterMergePlan)):
        check_finite(plan.tensors)
    report = progress or (lambda count: None)
    if isinstance(plan, GGUFMergePlan):
        _write_gguf(
            plan,
            target,
            overwrite=overwrite,
            threads=threads or len(os.sched_getaffinity(0)),
            progress=report,
            allow_non_finite=allow_non_finite,
            resume=resume,
        )
        return target
    if isinstance(plan, AdapterMergePlan):  # small: no threads, and nothing to resume
        with atomic_folder(target, marker=RECORD, overwrite=overwrite) as folder:
            write_adapter(folder, plan, allow_non_finite=allow_non_finite)
            check_unchanged(plan.stamps)
        report(plan.nbytes)
        return target
    resume = resume and _tells_versions_apart(plan, log)
    shards, content = plan.shards, record(plan)
    workers = threads or len(os.sched_getaffinity(0))
    # One file is either finished or not: a journal would have nothing to say.
    key = _key(content, shards, allow_non_finite) if len(shards) > 1 else ""
    with (
        atomic_folder(
            target, marker=RECORD, overwrite=overwrite, resume=key if resume and key else None
        ) as folder,
        Journal(folder, key) as journal,
    ):
        left = [shard for shard in shards if shard.file not in journal.finished]
        if journal.finished:
            report(sum(shard.nbytes for shard in shards if shard not in left))
        thresholds = measure_model(plan.tensors, workers) if left else {}
        for operation, found in thresholds.items():
            if log is not None and (note := untrimmed_note(operation, found)) is not None:
                log(note)
        rounding = Rounding() if any(tensor.base for tensor in plan.tensors) else None
        for shard in left:
            write_shard(
                folder / shard.file,
                shard,
                threads=workers,
                progress=report,
                thresholds=thresholds,
                allow_non_finite=allow_non_finite,
                rounding=rounding,
            )
            if key:
                journal.enter(shard.file)
        names = [name for shard in shards for name in read_header(folder / shard.file)]
        check_written(target, names, content["tensors"]["output"])
        index = index_of(shards)
        if index:
            (folder / index[0]).write_text(json.dumps(index[1], indent=2) + "\n", "utf-8")
        lost = rounding.summary() if rounding is not None else None
        write_documents(folder, plan, content, lost)
        check_unchanged(plan.stamps)
    if log is not None and lost is not None and (note := rounding_note(lost)) is not None:
        log(note)
    return target


def _tells_versions_apart(plan: MergePlan, log: Log | None) -> bool:
    """Whether every server that is read from says which version of a file it sends."""
    for checkpoint in plan.sources.values():
        for file in checkpoint.files:
            if isinstance(file, RemoteFile) and not file.etag:
                if log is not None:
                    log(f"{file}: its server does not tell versions apart, so nothing is resumed")
                return False
    return True


def check_written(target: Path, names: Iterable[str], expected: Mapping[str, Any]) -> None:
    """Compare the names of the tensors, read back from the output's files, with the account.

    Raises:
        MergeError: the files do not hold the tensors that they should.
    """
    found = names_digest(names)
    if found != expected:
        raise MergeError(
            f"{target}: {found['count']} tensors were written where {expected['count']} were "
            "planned, or others; nothing was kept"
        )


def _write_gguf(
    plan: GGUFMergePlan,
    target: Path,
    *,
    overwrite: bool,
    threads: int,
    progress: Advance,
    allow_non_finite: bool,
    resume: bool,
) -> None:
    """Write one GGUF file, segment by segment; the journal has how far it is on the disk."""
    (shard,) = plan.shards
    segments = list(_segments(shard))
    key = _key(record(plan), [shard], allow_non_finite) if len(segments) > 1 else ""
    with (
        atomic_file(
            target,
            is_ours=is_merged_gguf,
            overwrite=overwrite,
            resume=key if resume and key else None,
        ) as path,
        Journal(path.parent, key) as journal,
    ):
        finished = journal.finished.get(path.name, 0)
        left = [segment for segment in segments if segment.nbytes > finished]
        if finished:
            os.truncate(path, finished)
            progress(finished)
        thresholds = measure_model(plan.tensors, threads) if left else {}
        for segment in left:
            write_shard(
                path,
                segment,
                threads=threads,
                progress=progress,
                thresholds=thresholds,
                allow_non_finite=allow_non_finite,
            )
            os.truncate(path, segment.nbytes)  # the padding behind the last tensor
            if key:
                journal.enter(path.name, segment.nbytes)
        check_written(target, read_gguf(path).tensors, plan.account["output"])
        check_unchanged(plan.stamps)


def _segments(shard: Shard) -> Iterator[Shard]:
    """A file in parts of at least `SEGMENT_BYTES`, each ending where the next one begins."""
    first, header = 0, shard.header
    for number, (_, offset) in enumerate(shard.tensors):
        if offset - shard.tensors[first][1] >= SEGMENT_BYTES:
            yield Shard(shard.file, header, shard.tensors[first:number], offset)
            first, header = number, b""
    yield Shard(shard.file, header, shard.tensors[first:], shard.nbytes)


def _key(content: Mapping[str, Any], shards: Sequence[Shard], allow_non_finite: bool) -> str:
    """A hash of all that decides the bytes of the output files."""
    digest = hashlib.sha256(json.dumps([content, allow_non_finite]).encode())
    for shard in shards:
        digest.update(shard.header)
    return digest.hexdigest()
