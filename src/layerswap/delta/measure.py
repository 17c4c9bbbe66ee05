"""What fine-tuning did to one tensor, in one pass over it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, TensorInfo
from layerswap.delta.chunks import read_chunks
from layerswap.delta.rows import Axis, Rows
from layerswap.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 17
"""Elements read at a time, rounded to whole lines: few enough to stay in the cache."""
SAMPLED = 1 << 16
"""Elements of a tensor that its median is taken from, evenly spaced."""


@dataclass(frozen=True)
class Change:
    """How one tensor of an expert differs from the base's.

    Attributes:
        rows: float32 vector, the MAV of every row (paper 1, section 3.2).
        mean: mean of |delta| over all elements.
        median: median of |delta|, over at most 65,536 evenly spaced elements.
        largest: largest |delta|.
        norm: Frobenius norm of the delta.
        relative_norm: the same over the norm of the base's tensor.
        unchanged: share of elements that are exactly the base's.
        lost: Frobenius norm of the error of rounding the expert to bfloat16, over that of the
            delta. Measured where the expert is stored in more precision. A stored bfloat16 has
            been rounded already; then it is what to expect of errors spread evenly over one step
            of bfloat16: too much where deltas are smaller than a step.
        lost_is_measured: which of the two.
        lost_at_most: the largest share of the delta's total magnitude, the sum of |delta|, that
            rounding to bfloat16 can have removed from it: `H / (D + H)`, where H is the sum over
            all elements of half a step of bfloat16 at the expert's value, and D the sum of
            |delta|. No weight moves by more than half a step, so this holds whatever the delta
            was before. 0 where nothing changed, which may be a frozen tensor or one whose whole
            delta was lost, and where the expert is stored in more precision.
    """

    rows: Any
    mean: float
    median: float
    largest: float
    norm: float
    relative_norm: float
    unchanged: float
    lost: float
    lost_is_measured: bool
    lost_at_most: float = 0.0
    elements: int = 0


@dataclass(frozen=True)
class Sums:
    """What the conflict of two deltas is computed from; sums over elements, so they add up.

    Attributes:
        dot: sum of products.
        first: sum of squares of the first delta.
        second: sum of squares of the second delta.
        opposed: elements where the two have opposite signs.
        both: elements where neither is zero.
    """

    dot: float = 0.0
    first: float = 0.0
    second: float = 0.0
    opposed: int = 0
    both: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(*(a + b for a, b in zip(_values(self), _values(other), strict=True)))

    @property
    def cosine(self) -> float:
        """Cosine between the two deltas; 0 where one of them is zero."""
        size = math.sqrt(self.first * self.second)
        return self.dot / size if size else 0.0

    @property
    def disagreement(self) -> float:
        """Share of the elements that both changed in which the signs are opposite."""
        return self.opposed / self.both if self.both else 0.0


def _values(sums: Sums) -> tuple[Any, ...]:
    return sums.dot, sums.first, sums.second, sums.opposed, sums.both


def measure_tensor(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    name: str,
    *,
    axis: Axis = "input",
    transposed: bool = False,
) -> tuple[list[Change], dict[tuple[int, int], Sums]]:
    """Measure one tensor of several experts against the base, reading each once.

    Args:
        base: the base.
        experts: one or more experts.
        name: the tensor; of floating-point dtype, and of one shape in all.
        axis: what a row is: an input feature (the papers') or an output feature.
        transposed: whether matrices are stored [in, out].

    Returns:
        The change in each expert, and the sums for each pair of experts.

    Raises:
        CheckpointError: a shape differs, or a delta holds NaN or infinity.
    """
    import torch

    info = base.tensors[name]
    _check_shapes(info, experts, name)
    rows = Rows.of(info.shape, axis, transposed=transposed)
    tallies = [_Tally(info, rows) for _ in experts]
    pairs = {pair: Sums() for pair in combinations(range(len(experts)), 2)}
    memory = torch.empty(0)
    for start, (stored, *others) in read_chunks([base, *experts], name, rows.width, CHUNK_ELEMENTS):
        if len(memory) < len(stored):
            memory = torch.empty(len(stored))
        original = memory[: len(stored)].copy_(stored)
        squares = _square(original)
        for tally, part in zip(tallies, others, strict=True):
            tally.add(start, original, squares, part)
        for i, j in pairs:
            pairs[i, j] += tallies[i].against(tallies[j])
    for tally, expert in zip(tallies, experts, strict=True):
        if not tally.finite:
            files = f"{info.file} or {expert.tensors[name].file}"
            raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return [tally.change() for tally in tallies], pairs


class _Tally:
    """Adds up, chunk by chunk, what a `Change` says.

    Comparisons and counts are NumPy's: torch's take ten times as long on a processor.
    """

    def __init__(self, base: TensorInfo, rows: Rows) -> None:
        import torch

        self._elements, self._rows = base.elements, rows
        self._sums = torch.zeros(rows.count, dtype=torch.float64)
        self._sample: list[Any] = []
        self._step = max(1, base.elements // SAMPLED)
        self._squares = self._base_squares = self._lost_squares = self._half_steps = 0.0
        self._largest, self._unchanged, self._measured = 0.0, 0, False
        self._memory = torch.empty(3, 0)

    def add(self, start: int, original: torch.Tensor, squares: float, stored: torch.Tensor) -> None:
        """Add a chunk: the base's elements, the sum of their squares, and the expert's."""
        import numpy as np
        import torch

        count = len(original)
        if self._memory.shape[1] < count:
            self._memory = torch.empty(3, count)
        value, self.delta, size = self._memory[:, :count]
        value.copy_(stored)
        torch.sub(value, original, out=self.delta)
        torch.abs(self.delta, out=size)
        self.zero = np.equal(self.delta.numpy(), 0)
        self._rows.add(self._sums, start, size)
        self._largest = max(self._largest, float(size.amax()))
        self._unchanged += int(np.count_nonzero(self.zero))
        self._squares += _square(self.delta)
        self._base_squares += squares
        self._sample.append(size[(-start) % self._step :: self._step].numpy().copy())
        self._add_loss(original, value, stored)

    def _add_loss(self, original: torch.Tensor, value: torch.Tensor, stored: torch.Tensor) -> None:
        import torch

        if stored.dtype != torch.bfloat16:
            self._measured = True
            rounded = stored.bfloat16().float().sub_(original.bfloat16())
            self._lost_squares += _square(rounded.sub_(self.delta))
            return
        # The step of bfloat16 at a value is 2**-7 of the power of two below it.
        value.view(torch.int32).bitwise_and_(0x7F800000)
        self._lost_squares += _square(value) * 2.0**-14 / 12
        self._half_steps += float(value.sum()) * 2.0**-8

    def against(self, other: _Tally) -> Sums:
        """The conflict of two experts in the chunk that was added last."""
        import numpy as np

        both = np.logical_or(self.zero, other.zero)
        np.logical_not(both, out=both)
        negative = np.signbit(self.delta.numpy())
        opposed = np.not_equal(negative, np.signbit(other.delta.numpy()))
        np.logical_and(opposed, both, out=opposed)
        return Sums(
            _dot(self.delta, other.delta),
            _square(self.delta),
            _square(other.delta),
            int(np.count_nonzero(opposed)),
            int(np.count_nonzero(both)),
        )

    @property
    def finite(self) -> bool:
        """Whether no delta was NaN or infinity."""
        return math.isfinite(float(self._sums.sum()))

    def change(self) -> Change:
        """What was added up."""
        import numpy as np

        count = max(1, self._elements)
        total = float(self._sums.sum())
        sample = np.concatenate(self._sample) if self._sample else np.zeros(1)
        norm = math.sqrt(self._squares)
        return Change(
            rows=(self._sums / self._rows.length).numpy().astype(np.float32),
            mean=total / count,
            median=float(np.median(sample)),
            largest=self._largest,
            norm=norm,
            relative_norm=norm / math.sqrt(self._base_squares) if self._base_squares else 0.0,
            unchanged=self._unchanged / count,
            lost=math.sqrt(self._lost_squares) / norm if norm else 0.0,
            lost_is_measured=self._measured,
            lost_at_most=self._half_steps / (total + self._half_steps) if total else 0.0,
            elements=self._elements,
        )


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    import torch

    return float(torch.dot(first, second))


def _square(values: torch.Tensor) -> float:
    return _dot(values, values)


def _check_shapes(info: TensorInfo, experts: Sequence[Checkpoint], name: str) -> None:
    for expert in experts:
        shape = expert.tensors[name].shape
        if shape != info.shape:
            raise CheckpointError(
                f"{expert.identity}: {name!r} has shape {list(shape)}, "
                f"the base has {list(info.shape)}"
            )
