"""What fine-tuning did to one tensor, in one pass over it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Checkpoint, TensorInfo
from layerswap.checkpoint.read import open_file, read_elements
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
        lost: how much of the delta rounding to bfloat16 takes away, as a share of its Frobenius
            norm: measured where both are stored in more precision. Else the size of the rounding
            that a stored bfloat16 has been through, an error spread evenly over one step: too
            much where deltas are smaller than a step.
        lost_is_measured: which of the two.
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
    info = base.tensors[name]
    _check_shapes(info, experts, name)
    rows = Rows.of(info.shape, axis, transposed=transposed)
    tallies = [_Tally(info, expert.tensors[name], rows) for expert in experts]
    pairs = {(i, j): Sums() for j in range(len(experts)) for i in range(j)}
    for start, parts in _chunks([base, *experts], name, rows.width):
        original = parts[0].float()
        deltas = [part.float() - original for part in parts[1:]]
        for tally, delta, stored in zip(tallies, deltas, parts[1:], strict=True):
            tally.add(start, original, delta, stored)
        for (i, j), sums in pairs.items():
            pairs[i, j] = sums + _sums(deltas[i], deltas[j])
    for tally, expert in zip(tallies, experts, strict=True):
        if not math.isfinite(tally.total):
            files = f"{info.file} or {expert.tensors[name].file}"
            raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return [tally.change() for tally in tallies], pairs


class _Tally:
    """Adds up, chunk by chunk, what a `Change` says."""

    def __init__(self, base: TensorInfo, stored: TensorInfo, rows: Rows) -> None:
        import torch

        self._elements, self._rows = base.elements, rows
        self._sums = torch.zeros(rows.count, dtype=torch.float64)
        self._measured = not {base.dtype, stored.dtype} & {"BF16"}
        self._sample: list[Any] = []
        self._step = max(1, base.elements // SAMPLED)
        self.total = self._squares = self._base_squares = self._lost_squares = 0.0
        self._largest, self._unchanged = 0.0, 0

    def add(
        self, start: int, original: torch.Tensor, delta: torch.Tensor, stored: torch.Tensor
    ) -> None:
        import torch

        size = delta.abs()
        self._rows.add(self._sums, start, size)
        self.total += float(size.sum(dtype=torch.float64))
        self._largest = max(self._largest, float(size.max()))
        self._unchanged += delta.numel() - int(torch.count_nonzero(delta))
        self._squares += _square(delta)
        self._base_squares += _square(original)
        self._lost_squares += self._lost(original, delta, stored)
        self._sample.append(size[(-start) % self._step :: self._step].numpy().copy())

    def change(self) -> Change:
        import numpy as np

        count = max(1, self._elements)
        rows = (self._sums / self._rows.length).numpy()
        sample = np.concatenate(self._sample) if self._sample else np.zeros(1)
        norm = math.sqrt(self._squares)
        return Change(
            rows=rows.astype(np.float32),
            mean=self.total / count,
            median=float(np.median(sample)),
            largest=self._largest,
            norm=norm,
            relative_norm=norm / math.sqrt(self._base_squares) if self._base_squares else 0.0,
            unchanged=self._unchanged / count,
            lost=math.sqrt(self._lost_squares) / norm if norm else 0.0,
            lost_is_measured=self._measured,
        )

    def _lost(self, original: torch.Tensor, delta: torch.Tensor, stored: torch.Tensor) -> float:
        import torch

        if self._measured:
            rounded = stored.bfloat16().float() - original.bfloat16().float()
            return _square(rounded.sub_(delta))
        # The step of bfloat16 at a value is 2**-7 of the power of two below it.
        power = (stored.float().view(torch.int32) & 0x7F800000).view(torch.float32)
        return _square(power) * 2.0**-14 / 12


def _square(values: torch.Tensor) -> float:
    import torch

    return float(torch.dot(values, values))


def _sums(first: torch.Tensor, second: torch.Tensor) -> Sums:
    import torch

    # Deltas of 1e-20 and less would underflow as products; none such is above float32's noise.
    signs = first.sign().mul_(second.sign())
    return Sums(
        float(torch.dot(first, second)),
        _square(first),
        _square(second),
        int(torch.count_nonzero(signs < 0)),
        int(torch.count_nonzero(signs)),
    )


def _check_shapes(info: TensorInfo, experts: Sequence[Checkpoint], name: str) -> None:
    for expert in experts:
        shape = expert.tensors[name].shape
        if shape != info.shape:
            raise CheckpointError(
                f"{expert.identity}: {name!r} has shape {list(shape)}, "
                f"the base has {list(info.shape)}"
            )


def _chunks(
    checkpoints: Sequence[Checkpoint], name: str, width: int
) -> Iterator[tuple[int, list[torch.Tensor]]]:
    """Whole lines of one tensor of several checkpoints at a time, and where they start."""
    infos = [checkpoint.tensors[name] for checkpoint in checkpoints]
    lows = [checkpoint.low_rank.get(name) for checkpoint in checkpoints]
    factors = [low.factors() if low else None for low in lows]
    step = max(1, CHUNK_ELEMENTS // width) * width
    with ExitStack() as stack:
        handles = [stack.enter_context(open_file(info.file)) for info in infos]
        for start in range(0, infos[0].elements, step):
            stop = min(start + step, infos[0].elements)
            parts = []
            for info, handle, low, pair in zip(infos, handles, lows, factors, strict=True):
                part = read_elements(handle, info, start, stop)
                if low is not None and pair is not None:
                    part = part.float().add_(low.elements(pair, start, stop))
                parts.append(part)
            yield start, parts
