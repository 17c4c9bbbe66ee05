"""Finds exact magnitude thresholds without sorting.

The bits of a non-negative float32, read as an integer, have the order of the floats. One pass
counts the values by their upper 16 bits, which gives the bucket of a rank. A second pass counts the
values of that bucket by their lower 15 bits. Memory does not grow with the tensor, and counts of
chunks, tensors and threads can be added in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from layerswap.checkpoint.read import Floats

LOWER = 15
"""Number of lower bits."""
Stream = Callable[[], Iterable["Sequence[Floats]"]]
"""A pass over the chunks of a tensor, each with one vector per expert."""


def magnitude_thresholds(
    streams: Sequence[Stream], experts: int, ranks: Sequence[int], threads: int = 1
) -> tuple[tuple[float, ...], ...]:
    """Per expert, the exact magnitudes at the given ranks.

    Rank k gives the k-th largest |x|, counting from 1; rank 0 gives infinity.

    Example: over `[3, -1, 2, 0]`, ranks 2 and 0 give 2.0 and infinity.
    """
    import numpy as np

    def count(of: Callable[[int, Any], Any]) -> list[Any]:
        """Sum the counts of all chunks, by expert."""

        def counts(stream: Stream) -> list[Any]:
            totals: list[Any] = [0] * experts
            for parts in stream():
                for expert, part in enumerate(parts):
                    totals[expert] = totals[expert] + of(expert, _bits(part))
            return totals

        with ThreadPoolExecutor(threads, thread_name_prefix="rank") as pool:
            return [sum(column) for column in zip(*pool.map(counts, streams), strict=True)]

    def by_upper(expert: int, bits: Any) -> Any:
        return np.bincount(bits >> LOWER, minlength=1 << 16)

    def by_lower(expert: int, bits: Any) -> Any:
        upper = bits >> LOWER
        inside = (bits[upper == bucket] & ((1 << LOWER) - 1) for bucket, _ in buckets[expert])
        return np.stack([np.bincount(lower, minlength=1 << LOWER) for lower in inside])

    buckets = [[_find(counts, rank) for rank in ranks] for counts in count(by_upper)]

    def value(rank: int, bucket: tuple[int, int], counts: Any) -> float:
        bits = (bucket[0] << LOWER) + _find(counts, bucket[1])[0]
        return float(np.int32(bits).view(np.float32)) if rank else float("inf")

    return tuple(
        tuple(map(value, ranks, found, counts))
        for found, counts in zip(buckets, count(by_lower), strict=True)
    )


def _find(counts: Any, rank: int) -> tuple[int, int]:
    """Return the bucket of the value at a rank from the top, and its rank in the bucket."""
    from_top = counts[::-1].cumsum()
    place = int(from_top.searchsorted(rank))
    bucket = len(counts) - 1 - place
    return bucket, rank - int(from_top[place] - counts[bucket])


def _bits(part: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    import numpy as np

    return np.abs(part.astype(np.float32, copy=False)).view(np.int32)
