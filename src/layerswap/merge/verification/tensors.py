"""Comparing the weights of an output with what a merge of its sources gives, bit for bit.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

from layerswap._types import Advance
from layerswap.checkpoint import TensorInfo
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, Handle, is_finite, numpy_dtype, read_into
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose.blend import Operation
from layerswap.merge.layout import OutputTensor
from layerswap.merge.lazy_tensors import Reader, Thresholds, derived_tensors, leaves
from layerswap.merge.methods import METHODS
from layerswap.merge.writer import Compute, computed, hold_remote, open_all

PIECE_BYTES = 1 << 24
"""Bytes of output compared at a time by one worker."""
BLOCK_BYTES = 1 << 18
"""Length of the blocks of output that a sample is made of, in bytes."""

Item = TypeVar("Item")
TensorPair = tuple[OutputTensor, TensorInfo]
"""A tensor as the merge gives it, and as it lies in the output."""


@dataclass(frozen=True)
class _Same:
    """Bytes of a source that must stand at one place in the output."""

    tensor: str
    source: TensorInfo
    found: TensorInfo
    start: int
    nbytes: int


@dataclass(frozen=True)
class _Again:
    """Elements [start, stop) of a tensor, to be computed again."""

    piece: Compute
    found: TensorInfo
    nbytes: int


ComparisonWork = _Same | _Again


def verbatim_work(pairs: Sequence[TensorPair]) -> list[ComparisonWork]:
    """Every byte of the verbatim tensors, in pieces."""
    work: list[ComparisonWork] = []
    for tensor, found in pairs:
        if tensor.verbatim:
            source = next(leaves(tensor.inputs))
            for start in range(0, found.nbytes, PIECE_BYTES):
                length = min(PIECE_BYTES, found.nbytes - start)
                work.append(_Same(tensor.name, source, found, start, length))
    return work


def computed_work(
    pairs: Sequence[TensorPair], *, share: float, seed: int, known: Mapping[Operation, Thresholds]
) -> list[ComparisonWork]:
    """A sample of the computed tensors, in pieces.

    Of every tensor, at least `share` of its blocks of `BLOCK_BYTES` are drawn, and at least one.
    A tensor that its method must measure whole is drawn whole or not at all; of those at least
    `share`, and at least one. The draw depends on seed, tensor names and sizes alone.

    Args:
        pairs: the tensors of the output.
        share: of the blocks, and of the tensors that are measured whole, in (0, 1].
        seed: of the draw.
        known: thresholds that are measured already.
    """
    rest = [pair for pair in pairs if not pair[0].verbatim and pair[0].elements]
    whole = {pair[0].name: pair for pair in rest if _measured_whole(pair[0], known)}
    work: list[ComparisonWork] = []
    for name in _drawn(sorted(whole), share, f"{seed}"):
        tensor, found = whole[name]
        work.append(_again(tensor, found, 0, tensor.elements))
    for tensor, found in rest:
        if tensor.name not in whole:
            nbytes = PIECE_BYTES if share == 1 else BLOCK_BYTES
            length, size = block_of(tensor.dtype)
            step = max(1, nbytes // size) * length
            starts = range(0, tensor.elements, step)
            for start in _drawn(starts, share, f"{seed}/{tensor.name}"):
                stop = min(start + step, tensor.elements)
                work.append(_again(tensor, found, start, stop))
    return work


def differences(
    work: Sequence[ComparisonWork],
    *,
    known: Mapping[Operation, Thresholds],
    threads: int,
    progress: Advance,
) -> tuple[dict[str, int], set[str]]:
    """The tensors that differ, with the first byte of each that was found to.

    Also the verbatim tensors whose source holds NaN or infinity.

    Raises:
        CheckpointError: a file cannot be read.
    """
    found: dict[str, int] = {}
    non_finite: set[str] = set()
    lock = Lock()
    with ExitStack() as stack:
        handles = open_all(stack, {file for piece in work for file in _files(piece)})

        def run(piece: ComparisonWork) -> None:
            for name, position in _compare(piece, handles, known, non_finite):
                with lock:
                    found[name] = min(position, found.get(name, position))
            progress(piece.nbytes)

        with ThreadPoolExecutor(threads) as pool:
            try:
                deque(pool.map(run, work), maxlen=0)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return dict(sorted(found.items())), non_finite


def _compare(
    piece: ComparisonWork,
    handles: Mapping[WeightFile, Handle],
    known: Mapping[Operation, Thresholds],
    non_finite: set[str],
) -> Iterator[tuple[str, int]]:
    import numpy as np

    if isinstance(piece, _Same):
        expected = bytearray(piece.nbytes)
        source, offset = piece.source, piece.source.offset + piece.start
        read_into(handles[source.file], offset, memoryview(expected), source.file)
        if source.dtype in FLOAT_DTYPES:
            values = np.frombuffer(expected, numpy_dtype(source.dtype))
            if not is_finite(values, source.dtype):
                non_finite.add(piece.tensor)
        yield from _compare_bytes(piece.tensor, piece.found, piece.start, expected, handles)
        return
    reader = Reader(handles, known, allow_non_finite=True)
    with ExitStack() as held:
        hold_remote(held, piece.piece, handles, Path(tempfile.gettempdir()))
        for data, offset in computed(piece.piece, reader, allow_non_finite=True):
            yield from _compare_bytes(piece.piece.tensor.name, piece.found, offset, data, handles)


def _compare_bytes(
    name: str,
    found: TensorInfo,
    start: int,
    expected: bytearray | memoryview,
    handles: Mapping[WeightFile, Handle],
) -> Iterator[tuple[str, int]]:
    import numpy as np

    stored = bytearray(len(expected))
    read_into(handles[found.file], found.offset + start, memoryview(stored), found.file)
    # A bytearray compares by memcmp; two memoryviews would compare item by item.
    if stored != expected:
        wrong = np.frombuffer(stored, np.uint8) != np.frombuffer(expected, np.uint8)
        yield name, start + int(wrong.argmax())


def _again(tensor: OutputTensor, found: TensorInfo, start: int, stop: int) -> _Again:
    length, size = block_of(tensor.dtype)
    nbytes = (stop - start) // length * size
    return _Again(Compute(tensor, start, stop, start // length * size), found, nbytes)


def _files(piece: ComparisonWork) -> set[WeightFile]:
    if isinstance(piece, _Same):
        return {piece.source.file, piece.found.file}
    return piece.piece.tensor.files | {piece.found.file}


def _measured_whole(tensor: OutputTensor, known: Mapping[Operation, Thresholds]) -> bool:
    for term, _ in tensor.inputs:
        for derived in derived_tensors(term):
            operation = derived.operation
            method = METHODS[operation.method]
            ranks = method.ranks(dict(operation.parameters), derived.elements)
            if operation not in known and (method.gram or method.measure or ranks):
                return True
    return False


def _drawn(items: Sequence[Item], share: float, key: str) -> list[Item]:
    # Seeded by text, which Python hashes with SHA-512: no PYTHONHASHSEED.
    positions = random.Random(key).sample(range(len(items)), math.ceil(share * len(items)))
    return [items[position] for position in sorted(positions)]
