"""Measures the changes of tensors, row by row, and their magnitude."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.read import (
    READ_DTYPES,
    narrowed,
    reuse_chunk_memory,
    widened,
)
from layerswap.ground.errors import CheckpointError
from layerswap.methods.rows import Axis, Rows

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


CHUNK_ELEMENTS = 1 << 17
"""Elements read at a time, rounded to whole lines: few enough to stay in the cache."""
SAMPLED = 1 << 16
"""Elements of a tensor, evenly spaced, for the median."""


@dataclass(frozen=True)
class TensorChange:
    """The change of one tensor of an expert from the base's.

    Attributes:
        rows: float32 vector, the MAV of every row (paper 1, section 3.2).
        mean: mean of |delta| over all elements.
        median: median of |delta|, over at most 65,536 evenly spaced elements.
        largest: largest |delta|.
        norm: Frobenius norm of the delta.
        relative_norm: the same over the norm of the base's tensor.
        unchanged: share of elements that are exactly the base's.
        lost: Frobenius norm of the expert's rounding error in bfloat16, relative to the
            delta's. It is measured if the expert is stored in more precision. Otherwise it is the
            estimate for errors spread evenly over one step of bfloat16, which is too large for
            deltas smaller than a step.
        lost_is_measured: True if `lost` is measured.
        lost_at_most: upper bound of the share of the delta's total magnitude, the sum of |delta|,
            that rounding to bfloat16 removed: `H / (D + H)`. H is the sum of half a step of
            bfloat16 at the expert's values, D the sum of |delta|. No weight moves by more than
            half a step, so the bound holds for every delta. It is 0 if nothing changed, or if the
            expert is stored in more precision.
        elements: number of elements.
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


def measure_tensor(
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    name: str,
    *,
    axis: Axis = "input",
    transposed: bool = False,
) -> list[TensorChange]:
    """Measure one tensor of several experts against the base, reading each once.

    `transposed`: matrices are stored [in, out]. Returns the change in each expert.
    """
    import numpy as np

    info = base.tensors[name]
    _check_shapes(name, [base, *experts])
    rows = Rows.of(info.shape, axis, transposed=transposed)
    tallies = [_Tally(name, expert, rows) for expert in experts]
    step = max(1, CHUNK_ELEMENTS // rows.width) * rows.width  # whole lines
    reuse_chunk_memory()
    with ExitStack() as stack:
        readers = [stack.enter_context(one.reader(name)) for one in (base, *experts)]
        for start in range(0, info.elements, step):
            stored, *others = (read(start, min(start + step, info.elements)) for read in readers)
            original = stored.astype(np.float32, copy=False)
            squares = _square(original)
            for tally, part in zip(tallies, others, strict=True):
                tally.add(start, original, squares, part)
    for tally, expert in zip(tallies, experts, strict=True):
        if not math.isfinite(float(tally.sums.sum())):
            files = f"{info.file} or {expert.tensors[name].file}"
            raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return [tally.change() for tally in tallies]


class _Tally:
    """Accumulates a `TensorChange` chunk by chunk."""

    def __init__(self, name: str, expert: Checkpoint, rows: Rows) -> None:
        import numpy as np

        stored = expert.tensors[name]
        self._elements, self._rows = stored.elements, rows
        # An adapter adds to its base in float32: nothing has been rounded to 16 bits.
        self._measured = stored.dtype != "BF16" or name in expert.low_rank
        self.sums = np.zeros(rows.count)
        self._sample: list[Any] = []
        self._step = max(1, stored.elements // SAMPLED)
        self._squares = self._base_squares = self._lost_squares = self._half_steps = 0.0
        self._largest, self._unchanged = 0.0, 0

    def add(self, start: int, original: Array, squares: float, stored: Array) -> None:
        """Add a chunk: the base's elements, the sum of their squares, and the expert's."""
        import numpy as np

        value = stored.astype(np.float32, copy=False)
        delta = value - original
        size = np.abs(delta)
        self._rows.add(self.sums, start, size)
        self._largest = max(self._largest, float(size.max()))
        self._unchanged += delta.size - int(np.count_nonzero(delta))
        self._squares += _square(delta)
        self._base_squares += squares
        self._sample.append(size[(-start) % self._step :: self._step].copy())
        self._add_loss(original, value, delta)

    def _add_loss(self, original: Array, value: Array, delta: Array) -> None:
        import numpy as np

        if self._measured:
            rounded = widened(narrowed(value, "BF16"), "BF16")
            rounded -= widened(narrowed(original, "BF16"), "BF16")
            rounded -= delta
            self._lost_squares += _square(rounded)
            return
        # The step of bfloat16 at a value is 2**-7 of the power of two below it.
        power = np.bitwise_and(value.view(np.int32), 0x7F800000).view(np.float32)
        self._lost_squares += _square(power) * 2.0**-14 / 12
        self._half_steps += float(power.sum(dtype=np.float64)) * 2.0**-8

    def change(self) -> TensorChange:
        """The change over all chunks."""
        import numpy as np

        count = max(1, self._elements)
        total = float(self.sums.sum())
        sample = np.concatenate(self._sample) if self._sample else np.zeros(1)
        norm = math.sqrt(self._squares)
        return TensorChange(
            rows=(self.sums / self._rows.length).astype(np.float32),
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


def _square(values: Array) -> float:
    # Not a dot product, whose result depends on the threads of the linear algebra library.
    return float((values * values).sum())


def _check_shapes(name: str, checkpoints: Sequence[Checkpoint]) -> None:
    """Refuse a tensor with another shape than in the first checkpoint, the base."""
    first, *shapes = (checkpoint.tensors[name].shape for checkpoint in checkpoints)
    for expert, shape in zip(checkpoints[1:], shapes, strict=True):
        if shape != first:
            raise CheckpointError(
                f"{expert.identity}: {name!r} has shape {list(shape)}, the base has {list(first)}"
            )


# --- magnitude-adjusted weights of experts: 1 / mean MAV (paper 1, section 5.1) ---

SUMMED = 1 << 22
"""Elements read at a time for a magnitude."""
Soup = Sequence[tuple[Checkpoint, float]]
"""An expert: one checkpoint of weight 1, or a soup of several."""


def magnitude_weight(base: Checkpoint, parts: Soup, skip: frozenset[str] = frozenset()) -> float:
    """The weight of an expert in a magnitude-adjusted blend.

    The mean is over all rows of all deltas of the expert, each row counting once. A row is an
    input feature: for a `[out, in]` weight the MAV is the mean of |delta| over `out`, a vector of
    length `in`. Conv1D layouts are transposed, a stack of matrices is taken matrix by matrix, and
    a vector is one row. `skip` names tensors to leave out (a stored copy of tied embeddings).
    """
    total, rows = 0.0, 0
    for name, info in base.tensors.items():
        stored = name not in skip and all(name in expert.tensors for expert, _ in parts)
        if info.dtype not in READ_DTYPES or not stored:
            continue
        count = Rows.of(info.shape, transposed=base.transposes(name)).count
        total += mean_absolute_delta(base, parts, name) * count
        rows += count
    if total == 0:
        raise CheckpointError(f"{parts[0][0].identity}: no tensor differs from {base.identity}")
    return rows / total


def mean_absolute_delta(base: Checkpoint, parts: Soup, name: str) -> float:
    """Mean of |blend - base| over all elements of one tensor, in float32, summed in float64."""
    import numpy as np

    info = base.tensors[name]
    _check_shapes(name, [base, *(expert for expert, _ in parts)])
    total = 0.0
    for start in range(0, info.elements, SUMMED):
        stop = min(start + SUMMED, info.elements)
        delta = -base.elements(name, start, stop).astype(np.float32)
        for expert, weight in parts:
            values = expert.elements(name, start, stop).astype(np.float32, copy=False)
            delta += values if weight == 1 else values * weight
        with np.errstate(all="ignore"):
            total += float(np.abs(delta, out=delta).sum(dtype=np.float64))
    if not math.isfinite(total):
        stored = [expert.tensors[name] for expert, _ in parts]
        files = " or ".join(str(tensor.file) for tensor in (info, *stored))
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return total / max(1, info.elements)
