"""Exact magnitude thresholds without sorting: a histogram in two levels over float bits.

The bits of a non-negative float32, read as an integer, order as the float does. Counting their
upper 16 bits finds the bucket that holds the wanted rank; counting the lower 16 bits within it
finds the value, exactly. Two passes, whatever the size; counts add up across chunks, tensors and
threads in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Chunks = Callable[[], "Iterable[Sequence[torch.Tensor]]"]
"""Starts a pass: gives chunk after chunk, each as one float32 vector per expert."""
_LEVEL = 1 << 16


def magnitude_thresholds(
    chunks: Chunks, experts: int, ranks: Callable[[int], Sequence[int]]
) -> tuple[tuple[float, ...], ...]:
    """Per expert, the magnitudes at the given ranks; exact.

    Rank k asks for the k-th largest |x|, counting from 1; rank 0 gives infinity.

    Args:
        chunks: called once per pass, two passes in all.
        experts: how many vectors a chunk holds.
        ranks: the ranks for a number of elements.

    Example: over `[3, -1, 2, 0]`, ranks 2 and 0 give 2.0 and infinity.
    """
    coarse = [_Counts() for _ in range(experts)]
    for parts in chunks():
        for counts, part in zip(coarse, parts, strict=True):
            counts.add(_bits(part) >> 16)
    found = [[counts.bucket(rank) for rank in ranks(counts.total)] for counts in coarse]
    fine = [[_Counts() for _ in buckets] for buckets in found]
    for parts in chunks():
        for part, buckets, counters in zip(parts, found, fine, strict=True):
            bits = _bits(part)
            for (high, _), counts in zip(buckets, counters, strict=True):
                counts.add((bits & (_LEVEL - 1))[(bits >> 16) == high])
    return tuple(
        tuple(
            _value(high, counts.bucket(rank)[0]) if rank else float("inf")
            for (high, rank), counts in zip(buckets, counters, strict=True)
        )
        for buckets, counters in zip(found, fine, strict=True)
    )


class _Counts:
    """How many elements have each 16-bit key."""

    def __init__(self) -> None:
        import torch

        self._counts = torch.zeros(_LEVEL, dtype=torch.int64)

    def add(self, keys: torch.Tensor) -> None:
        import torch

        self._counts += torch.bincount(keys, minlength=_LEVEL)

    @property
    def total(self) -> int:
        return int(self._counts.sum())

    def bucket(self, rank: int) -> tuple[int, int]:
        """The key of the rank-th largest element, and its rank among those with that key."""
        import torch

        if rank == 0:
            return -1, 0
        above = self._counts.flip(0).cumsum(0)
        position = int(torch.searchsorted(above, rank))
        before = int(above[position - 1]) if position else 0
        return _LEVEL - 1 - position, rank - before


def _bits(part: torch.Tensor) -> torch.Tensor:
    import torch

    return part.float().abs().view(torch.int32)


def _value(high: int, low: int) -> float:
    import torch

    return float(torch.tensor((high << 16) | low, dtype=torch.int32).view(torch.float32))
