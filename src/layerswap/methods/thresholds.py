"""Finds exact magnitude thresholds without sorting.

The bits of a non-negative float32, read as an integer, have the order of the floats. A sample
gives a bracket around the wanted rank. One pass counts the values above the bracket and makes a
histogram of those inside. If a bucket is wider than one value, or the bracket missed the rank, the
next pass searches a narrower bracket. One pass is usually enough. Memory does not grow with the
tensor, and counts of chunks, tensors and threads can be added in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from layerswap.checkpoint.read import Floats

BUCKETS = 1 << 22
"""Most buckets of a histogram."""
HELD = 1 << 20
"""Elements in a bracket that are collected before they are counted."""
SAMPLE = 1 << 18
"""Elements of the sample."""
MARGIN = 0.005
"""Distance from the wanted rank to each end of the bracket, as a share of the elements."""
_END = 1 << 31


@dataclass(frozen=True)
class Stream:
    """A tensor to search: one float32 vector per expert, by passes of chunks, or elements."""

    elements: int
    chunks: Callable[[], Iterable[Sequence[Floats]]]
    part: Callable[[int, int], Sequence[Floats]]


def magnitude_thresholds(
    streams: Sequence[Stream], experts: int, ranks: Sequence[int], threads: int = 1
) -> tuple[tuple[float, ...], ...]:
    """Per expert, the exact magnitudes at the given ranks.

    Rank k gives the k-th largest |x|, counting from 1; rank 0 gives infinity.

    Example: over `[3, -1, 2, 0]`, ranks 2 and 0 give 2.0 and infinity.
    """
    total = sum(stream.elements for stream in streams)
    samples = _samples(streams, experts, total)
    searches = [[_Search(rank, total, sample) for rank in ranks] for sample in samples]
    while any(not search.done for row in searches for search in row):

        def count(stream: Stream) -> None:
            for parts in stream.chunks():
                for row, part in zip(searches, parts, strict=True):
                    bits = _bits(part)
                    for search in row:
                        search.count(bits)

        with ThreadPoolExecutor(threads, thread_name_prefix="rank") as pool:
            for _ in pool.map(count, streams):
                pass
        for row in searches:
            for search in row:
                search.narrow()
    return tuple(tuple(search.value for search in row) for row in searches)


class _Search:
    """The search for one rank of one expert, in the bracket [low, high) of bits."""

    def __init__(self, rank: int, elements: int, sample: Any) -> None:
        self._rank = rank
        # Reading a small tensor again is faster than summing millions of buckets.
        self._buckets = min(BUCKETS, 64 * max(1, elements))
        self._low, self._high = _bracket(sample, rank / max(1, elements))
        self.done = rank == 0
        self._lock = Lock()
        self._held: list[Any] = []
        self._reset()

    @property
    def value(self) -> float:
        """The magnitude at the rank."""
        import numpy as np

        if self._rank == 0:
            return float("inf")
        return float(np.array([self._low], dtype=np.int32).view(np.float32)[0])

    def count(self, bits: Any) -> None:
        """Count the elements of a chunk above and in the bracket."""
        import numpy as np

        if self.done:
            return
        width = self._high - self._low
        above = int(np.count_nonzero(bits >= self._high))
        # The outer values are counted separately: deltas of 16-bit weights have few distinct
        # values, one of which often fills an end of the bracket, and counting one is far cheaper.
        ends = [0] if width == 1 else [0, width - 1]
        at_ends = [int(np.count_nonzero(bits == self._low + end)) for end in ends]
        # As an unsigned number, a value below the bracket exceeds its width too.
        offset = bits - np.int32(self._low + 1)
        inside = (offset[offset.view(np.uint32) < max(0, width - 2)] + 1) >> self._shift
        with self._lock:
            self._above += above
            for end, count in zip(ends, at_ends, strict=True):
                self._counts[end >> self._shift] += count
            self._held.append(inside)
            self._held_count += len(inside)
            if self._held_count >= HELD:
                self._flush()

    def narrow(self) -> None:
        """After a pass, narrow to the bucket of the rank, or move the bracket if it missed."""
        if self.done:
            return
        self._flush()
        inside = self._counts.sum()
        if self._rank <= self._above:
            self._low, self._high = self._high, _END
        elif self._rank > self._above + inside:
            self._low, self._high = 0, self._low
        else:
            from_top = self._counts[::-1].cumsum()
            bucket = len(from_top) - 1 - int(from_top.searchsorted(self._rank - self._above))
            self.done = self._shift == 0
            self._low += bucket << self._shift
            self._high = min(self._high, self._low + (1 << self._shift))
        self._reset()

    def _flush(self) -> None:
        import numpy as np

        if self._held:
            keys = np.concatenate(self._held)
            self._counts += np.bincount(keys, minlength=len(self._counts))
        self._held.clear()
        self._held_count = 0

    def _reset(self) -> None:
        import numpy as np

        width = self._high - self._low
        self._shift = max(0, (width - 1).bit_length() - (self._buckets - 1).bit_length())
        buckets = 0 if self.done else ((width - 1) >> self._shift) + 1
        self._counts = np.zeros(buckets, dtype=np.int64)
        self._above, self._held_count = 0, 0
        self._held.clear()


def _bracket(sample: Any, share: float) -> tuple[int, int]:
    """The bracket [low, high) of bits around a share of a sorted sample."""
    count = len(sample)
    if count == 0:
        return 0, _END
    below = (1 - share) * count
    first, last = int(below - MARGIN * count), int(below + MARGIN * count) + 1
    low = int(sample[min(first, count - 1)]) if first >= 0 else 0
    high = int(sample[last]) + 1 if last < count else _END
    return low, high


def _samples(streams: Sequence[Stream], experts: int, total: int) -> list[Any]:
    """Per expert, the sorted bits of blocks spread evenly over all streams."""
    import numpy as np

    sampled: list[list[Any]] = [[] for _ in range(experts)]
    block = 4096
    for stream in streams:
        blocks = max(1, round(SAMPLE // block * stream.elements / max(1, total)))
        last = max(0, stream.elements - block)
        for start in sorted({last * i // max(1, blocks - 1) for i in range(blocks)}):
            parts = stream.part(start, min(start + block, stream.elements))
            for bits, part in zip(sampled, parts, strict=True):
                bits.append(_bits(part))
    return [np.sort(np.concatenate(bits)) if bits else np.zeros(0, np.int32) for bits in sampled]


def _bits(part: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    import numpy as np

    return np.abs(part.astype(np.float32, copy=False)).view(np.int32)
