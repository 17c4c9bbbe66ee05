"""Where two experts changed the same things: the numbers behind interference in merges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.delta.measure import Sums

if TYPE_CHECKING:
    from layerswap.delta.atlas import Atlas

TOP_ROWS = 0.1
"""The share of a matrix's rows, those with the largest MAV, that are compared."""


@dataclass(frozen=True)
class Conflict:
    """The conflict of two experts in one place, or in one tensor.

    Attributes:
        sums: what cosine and sign disagreement are computed from.
        top: rows of its matrices that count as most changed, for each expert.
        common: rows that are among the most changed of both.
    """

    sums: Sums
    top: int
    common: int

    @property
    def cosine(self) -> float:
        """Cosine between the two deltas; 0 where one of them is zero."""
        return self.sums.cosine

    @property
    def disagreement(self) -> float:
        """Share of the elements that both changed in which the signs are opposite."""
        return self.sums.disagreement

    @property
    def overlap(self) -> float | None:
        """Share of one expert's most changed rows that are also the other's; None without rows.

        Experts that have nothing to do with each other overlap by the share of rows compared.
        """
        return self.common / self.top if self.top else None

    @property
    def jaccard(self) -> float | None:
        """Most changed rows of both over those of either; None without rows."""
        return self.common / (2 * self.top - self.common) if self.top else None

    def __add__(self, other: Conflict) -> Conflict:
        return Conflict(self.sums + other.sums, self.top + other.top, self.common + other.common)


def tensor_conflict(
    atlas: Atlas, first: str, second: str, tensor: str, share: float = TOP_ROWS
) -> Conflict:
    """The conflict of two experts of an atlas in one tensor; a vector has no rows to compare."""
    rows = atlas.changes[first, tensor].rows, atlas.changes[second, tensor].rows
    sums = _sums(atlas, first, second)[tensor]
    if len(rows[0]) < 2:
        return Conflict(sums, 0, 0)
    return Conflict(sums, *common_rows(*rows, share))


def conflicts(
    atlas: Atlas, first: str, second: str, *, share: float = TOP_ROWS
) -> dict[Place, Conflict]:
    """The conflict of two experts at every place, over all tensors that lie there.

    Args:
        atlas: of both experts.
        first: an expert.
        second: another.
        share: how many rows of each matrix count as most changed.
    """
    found: dict[Place, Conflict] = {}
    for tensor in _sums(atlas, first, second):
        place, conflict = atlas.places[tensor], tensor_conflict(atlas, first, second, tensor, share)
        found[place] = found[place] + conflict if place in found else conflict
    return found


def common_rows(first: Any, second: Any, share: float) -> tuple[int, int]:
    """How many rows count as most changed, and how many of these two experts have in common.

    Args:
        first: MAV of every row.
        second: MAV of every row of the other expert.
        share: the share of rows to compare, at least one row; equal rows count from the first.
    """
    import numpy as np

    count = max(1, round(share * len(first)))
    one, two = (np.argsort(-rows, kind="stable")[:count] for rows in (first, second))
    return count, len(np.intersect1d(one, two, assume_unique=True))


def _sums(atlas: Atlas, first: str, second: str) -> Any:
    return atlas.sums.get((first, second)) or atlas.sums[second, first]
