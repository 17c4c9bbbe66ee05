"""Compares stored weights with the writer's output, bit for bit.

Memory does not grow with the model: each worker holds one chunk of every input.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TypeVar

from layerswap.checkpoint import TensorInfo
from layerswap.checkpoint.header import block_of
from layerswap.checkpoint.read import FLOAT_DTYPES, is_finite, numpy_dtype, read_into
from layerswap.ground.errors import RecipeError
from layerswap.ground.types import Advance
from layerswap.merge.compatibility import some_tensors
from layerswap.merge.layout import OutputTensor
from layerswap.merge.terms import Handles, ModelFacts, TermEvaluator, merged_tensors
from layerswap.merge.writer import (
    Piece,
    chunks,
    hold_remote,
    open_all,
    piece_bytes,
    run_all,
)

PIECE_BYTES = 1 << 24
"""Bytes of output compared at a time by one worker."""
BLOCK_BYTES = 1 << 18
"""Bytes of a block of output in a sample."""

Item = TypeVar("Item")


@dataclass(frozen=True)
class TensorPair:
    """An output tensor as planned, and as stored."""

    expected: OutputTensor
    stored: TensorInfo


@dataclass(frozen=True)
class Comparison:
    """A range of elements of two tensors to compare."""

    pair: TensorPair
    piece: Piece

    @property
    def nbytes(self) -> int:
        """Bytes to compare."""
        length, size = block_of(self.pair.expected.dtype)
        return (self.piece.stop - self.piece.start) // length * size


def check_share(share: float) -> None:
    """Refuse a share of the blocks of a tensor outside (0, 1]."""
    if not 0 < share <= 1:
        raise RecipeError(f"share is {share:g}; write a number above 0 and at most 1")


def match(
    expected: Iterable[OutputTensor], stored: Mapping[str, TensorInfo]
) -> tuple[list[TensorPair], list[str]]:
    """Pair tensors of equal dtype and shape; describe each kind of mismatch in a line."""
    named = {tensor.name: tensor for tensor in expected}
    pairs: list[TensorPair] = []
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, tensor in named.items():
        if (info := stored.get(name)) is None:
            continue
        if (tensor.dtype, tensor.shape) == (info.dtype, info.shape):
            pairs.append(TensorPair(tensor, info))
        else:
            formats = f"{info.dtype} {list(info.shape)}", f"{tensor.dtype} {list(tensor.shape)}"
            kinds.setdefault(formats, []).append(name)
    lines = []
    if extra := stored.keys() - named.keys():
        lines.append(f"holds {some_tensors(extra)}, which the merge does not write there")
    if missing := named.keys() - stored.keys():
        lines.append(f"lacks {some_tensors(missing)}, which the merge writes there")
    for (there, planned), names in kinds.items():
        lines.append(f"{some_tensors(names)}: {there}; the merge writes {planned}")
    return pairs, lines


def comparisons(
    pairs: Sequence[TensorPair],
    *,
    share: float,
    seed: int,
    facts: ModelFacts,
) -> list[Comparison]:
    """Every verbatim tensor, and a sample of the computed tensors, in pieces.

    Of every computed tensor, at least `share` of its blocks of `BLOCK_BYTES` are drawn, and at
    least one. A tensor that its method must measure is drawn whole or not at all; of those at
    least `share`, and at least one. The draw depends on seed, tensor names and sizes alone.
    """
    work: list[Comparison] = []
    measured: list[Comparison] = []
    for pair in sorted(pairs, key=lambda pair: pair.expected.name):
        tensor = pair.expected
        whole = Piece(tensor, 0, tensor.elements, 0)
        merged = merged_tensors(tensor.inputs)
        if any(t.method.measure is not None and t.operation not in facts for t in merged):
            measured.append(Comparison(pair, whole))
            continue
        sampled_share = 1 if tensor.verbatim else share
        pieces = [*chunks(whole, PIECE_BYTES if sampled_share == 1 else BLOCK_BYTES)]
        drawn = _drawn(pieces, sampled_share, f"{seed}/{tensor.name}")
        work += [Comparison(pair, piece) for piece in drawn]
    return work + _drawn(measured, share, f"{seed}")


def differences(
    work: Sequence[Comparison], *, facts: ModelFacts, threads: int, progress: Advance
) -> tuple[dict[str, int], set[str]]:
    """Find each tensor's first wrong byte, and verbatim tensors with NaN or infinity."""
    wrong: dict[str, int] = {}
    non_finite: set[str] = set()
    lock = Lock()
    files = {file for comparison in work for file in comparison.pair.expected.files}
    with ExitStack() as stack:
        handles = open_all(stack, files | {comparison.pair.stored.file for comparison in work})

        def run(comparison: Comparison) -> None:
            name = comparison.pair.expected.name
            position, finite = _compare(comparison, handles, facts)
            with lock:
                if position is not None:
                    wrong[name] = min(position, wrong.get(name, position))
                if not finite:
                    non_finite.add(name)
            progress(comparison.nbytes)

        run_all(run, work, threads)
    return dict(sorted(wrong.items())), non_finite


def _compare(
    comparison: Comparison, handles: Handles, facts: ModelFacts
) -> tuple[int | None, bool]:
    """The position of the first wrong byte, and True if all copied values are finite."""
    import numpy as np

    stored, expected = comparison.pair.stored, comparison.pair.expected
    evaluator = TermEvaluator(handles, facts)
    copies_floats = expected.verbatim and expected.dtype in FLOAT_DTYPES
    first, finite = None, True
    with ExitStack() as held:
        hold_remote(held, comparison.piece, handles, Path(tempfile.gettempdir()))
        for data, offset in piece_bytes(comparison.piece, evaluator):
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


def _drawn(items: Sequence[Item], share: float, key: str) -> list[Item]:
    # Seeded by text, which Python hashes with SHA-512: no PYTHONHASHSEED.
    positions = random.Random(key).sample(range(len(items)), math.ceil(share * len(items)))
    return [items[position] for position in sorted(positions)]
