"""Compares the weights of an output with what the writer would write, bit for bit.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

from layerswap._types import Advance
from layerswap.checkpoint import TensorInfo
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, is_finite, numpy_dtype, read_into
from layerswap.merge.layout import OutputTensor
from layerswap.merge.terms import Evaluator, Handles, ModelFacts, merged_tensors
from layerswap.merge.writer import Piece, chunks, hold_remote, open_all, piece_bytes

PIECE_BYTES = 1 << 24
"""Bytes of output compared at a time by one worker."""
BLOCK_BYTES = 1 << 18
"""Bytes of a block of output in a sample."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class Pair:
    """A tensor as the merge writes it, and as it is stored in the output."""

    expected: OutputTensor
    stored: TensorInfo


@dataclass(frozen=True)
class Comparison:
    """Elements of a pair to compare, as the writer computes them."""

    pair: Pair
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        length, size = block_of(self.pair.expected.dtype)
        return (self.piece.stop - self.piece.start) // length * size


def comparisons(
    pairs: Sequence[Pair],
    *,
    share: float,
    seed: int,
    facts: ModelFacts,
    sample_copies: bool = False,
) -> list[Comparison]:
    """Every verbatim tensor, and a sample of the computed tensors, in pieces.

    Of every computed tensor, at least `share` of its blocks of `BLOCK_BYTES` are drawn, and at
    least one. A tensor that its method must measure is drawn whole or not at all; of those at
    least `share`, and at least one. The draw depends on seed, tensor names and sizes alone.
    With `sample_copies`, verbatim tensors are drawn from as well.
    """
    stored = [pair for pair in pairs if pair.expected.elements]
    verbatim = [pair for pair in stored if pair.expected.verbatim and not sample_copies]
    computed = [pair for pair in stored if sample_copies or not pair.expected.verbatim]
    measured = {p.expected.name: p for p in computed if _is_measured(p.expected, facts)}
    work = [part for pair in verbatim for part in _parts(pair, PIECE_BYTES)]
    for name in _drawn(sorted(measured), share, f"{seed}"):
        work.append(Comparison(measured[name], _whole(measured[name])))
    for pair in computed:
        if pair.expected.name not in measured:
            parts = _parts(pair, PIECE_BYTES if share == 1 else BLOCK_BYTES)
            work += _drawn(parts, share, f"{seed}/{pair.expected.name}")
    return work


def differences(
    work: Sequence[Comparison], *, facts: ModelFacts, threads: int, progress: Advance
) -> tuple[dict[str, int], set[str]]:
    """The first wrong byte of each tensor that differs; verbatim tensors with NaN or infinity."""
    wrong: dict[str, int] = {}
    non_finite: set[str] = set()
    lock = Lock()
    files = {file for part in work for file in part.pair.expected.files}
    with ExitStack() as stack:
        handles = open_all(stack, files | {part.pair.stored.file for part in work})

        def run(part: Comparison) -> None:
            name = part.pair.expected.name
            position, finite = _compare(part, handles, facts)
            with lock:
                if position is not None:
                    wrong[name] = min(position, wrong.get(name, position))
                if not finite:
                    non_finite.add(name)
            progress(part.nbytes)

        with ThreadPoolExecutor(threads) as pool:
            try:
                deque(pool.map(run, work), maxlen=0)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
    return dict(sorted(wrong.items())), non_finite


def _compare(part: Comparison, handles: Handles, facts: ModelFacts) -> tuple[int | None, bool]:
    """The position of the first wrong byte, and True if all copied values are finite."""
    import numpy as np

    stored, expected = part.pair.stored, part.pair.expected
    evaluator = Evaluator(handles, facts, allow_non_finite=True)
    copies_floats = expected.verbatim and expected.dtype in FLOAT_DTYPES
    first, finite = None, True
    with ExitStack() as held:
        hold_remote(held, part.piece, handles, Path(tempfile.gettempdir()))
        for data, offset in piece_bytes(part.piece, evaluator):
            actual = bytearray(len(data))
            read_into(handles[stored.file], stored.offset + offset, memoryview(actual), stored.file)
            # A bytearray compares by memcmp; two memoryviews would compare item by item.
            if actual != data and first is None:
                unequal = np.frombuffer(actual, np.uint8) != np.frombuffer(data, np.uint8)
                first = offset + int(unequal.argmax())
            if copies_floats and finite:
                values = np.frombuffer(data, numpy_dtype(expected.dtype))
                finite = is_finite(values, expected.dtype)
    return first, finite


def _whole(pair: Pair) -> Piece:
    return Piece(pair.expected, 0, pair.expected.elements, 0)


def _parts(pair: Pair, nbytes: int) -> list[Comparison]:
    """All elements of a tensor, in parts of about `nbytes`."""
    return [Comparison(pair, piece) for piece in chunks(_whole(pair), nbytes)]


def _is_measured(tensor: OutputTensor, facts: ModelFacts) -> bool:
    merged = merged_tensors(tensor.inputs)
    return any(t.method.measure is not None and t.operation not in facts for t in merged)


def _drawn(items: Sequence[Item], share: float, key: str) -> list[Item]:
    # Seeded by text, which Python hashes with SHA-512: no PYTHONHASHSEED.
    positions = random.Random(key).sample(range(len(items)), math.ceil(share * len(items)))
    return [items[position] for position in sorted(positions)]
