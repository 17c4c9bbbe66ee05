"""Conflicts: two experts that changed the same rows, or moved the same weights apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.checkpoint import Place
from layerswap.deltas.measure import Sums

TOP_ROWS = 0.1
"""Share of a matrix's rows, those with the largest MAV, that are compared."""


@dataclass(frozen=True)
class Conflict:
    """The conflict of two experts in one place, or in one tensor.

    Attributes:
        sums: over elements, for cosine and sign disagreement.
        top: rows of its matrices that count as most changed, for each expert.
        common: rows that are among the most changed of both.
    """

    sums: Sums
    top: int
    common: int

    @property
    def cosine(self) -> float:
        """Cosine between the two deltas; 0 if one of them is zero."""
        return self.sums.cosine

    @property
    def disagreement(self) -> float:
        """Share of the elements that both changed in which the signs are opposite."""
        return self.sums.disagreement

    @property
    def overlap(self) -> float | None:
        """Share of one expert's most changed rows that are also the other's; None without rows.

        Unrelated experts overlap by the share of rows compared.
        """
        return self.common / self.top if self.top else None

    @property
    def jaccard(self) -> float | None:
        """Most changed rows of both over those of either; None without rows."""
        return self.common / (2 * self.top - self.common) if self.top else None

    def __add__(self, other: Conflict) -> Conflict:
        return Conflict(self.sums + other.sums, self.top + other.top, self.common + other.common)


def tensor_conflict(sums: Sums, rows: Sequence[Any], share: float) -> Conflict:
    """The conflict in one tensor; a vector has no rows to compare.

    Args:
        sums: of both deltas.
        rows: MAV of every row, of each of the two experts.
        share: share of the rows that counts as most changed.
    """
    first, second = rows
    return Conflict(sums, *(common_rows(first, second, share) if len(first) > 1 else (0, 0)))


def by_place(
    conflicts: Mapping[str, Conflict], places: Mapping[str, Place]
) -> dict[Place, Conflict]:
    """The conflicts of tensors, added up at every place."""
    found: dict[Place, Conflict] = {}
    for tensor, conflict in conflicts.items():
        place = places[tensor]
        found[place] = found[place] + conflict if place in found else conflict
    return found


def common_rows(first: Any, second: Any, share: float) -> tuple[int, int]:
    """The number of rows that count as most changed, and how many of them are common.

    Args:
        first: MAV of every row.
        second: MAV of every row of the other expert.
        share: share of the rows to compare, at least one row; equal rows count from the first.
    """
    import numpy as np

    count = max(1, round(share * len(first)))
    one, two = (np.argsort(-rows, kind="stable")[:count] for rows in (first, second))
    return count, len(np.intersect1d(one, two, assume_unique=True))
