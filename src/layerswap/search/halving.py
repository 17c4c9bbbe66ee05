"""Successive halving over examples: compositions that cannot be the best any more stop early.

After every round, which about doubles the examples, a composition leaves the race if a confidence
bound on its paired difference to the leader stays below zero. The bound is the empirical Bernstein
inequality (Maurer and Pontil, 2009, Theorem 4) for differences in [-1, 1], at a level divided by
the rounds and the pairs of compositions, so that with probability 1 - `error` no composition leaves
whose true mean is the highest. It holds for examples drawn at random, with or without replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log, sqrt
from typing import TYPE_CHECKING

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Score = Callable[[Sequence[int], int], npt.NDArray[np.float64]]
    """Scores in [0, 1] of some compositions on the first n examples, `(compositions, n)`."""

RANGE = 2.0
"""Of a difference of two scores in [0, 1]."""


@dataclass(frozen=True)
class Race:
    """How a race went.

    Attributes:
        examples: per composition, how many examples it was scored on.
        means: per composition, its mean over them.
        rounds: examples of every round.
        error: the probability, at most, that the truly best composition left early.
    """

    examples: tuple[int, ...]
    means: tuple[float, ...]
    rounds: tuple[int, ...]
    error: float

    @property
    def survivors(self) -> list[int]:
        """Positions of the compositions that were scored on all examples."""
        return [i for i, n in enumerate(self.examples) if n == self.rounds[-1]]

    @property
    def saved(self) -> float:
        """Share of all scores that did not have to be computed."""
        return 1 - sum(self.examples) / (len(self.examples) * self.rounds[-1])

    def __str__(self) -> str:
        return (
            f"{len(self.survivors)} of {len(self.examples)} compositions were scored on all "
            f"{self.rounds[-1]} examples; the others left early, the best of all among them with "
            f"probability {self.error:g} at most ({self.saved:.0%} of the scores saved)"
        )


def race(
    score: Score, members: Sequence[int], examples: int, *, first: int = 50, error: float = 0.05
) -> Race:
    """Score compositions on more and more examples, dropping those that cannot win.

    Args:
        score: gives scores of compositions on the first n examples.
        members: the compositions.
        examples: how many there are.
        first: of the first round; every further round doubles them.
        error: see `Race`; in 0..1.

    Raises:
        EvaluationError: a setting out of range, or a score outside 0..1.
    """
    import numpy as np

    if not members or examples < 1 or first < 2 or not 0 < error < 1:
        raise EvaluationError(
            "a race needs compositions, examples, a first round of two and more, and an error "
            f"between 0 and 1, not {len(members)}, {examples}, {first}, {error}"
        )
    rounds = tuple(_rounds(first, examples))
    level = error / (max(1, len(rounds) - 1) * max(1, len(members) - 1))
    running = list(range(len(members)))
    seen, means = [0] * len(members), [0.0] * len(members)
    for count in rounds:
        found = np.asarray(score([members[i] for i in running], count), dtype=np.float64)
        if found.min() < 0 or found.max() > 1:
            raise EvaluationError("a race needs scores between 0 and 1")
        for row, i in zip(found, running, strict=True):
            seen[i], means[i] = count, float(row.mean())
        leader = found[int(found.mean(axis=1).argmax())]
        running = [
            i for row, i in zip(found, running, strict=True)
            if upper_bound(row - leader, level) >= 0
        ]  # fmt: skip
    return Race(tuple(seen), tuple(means), rounds, error)


def upper_bound(differences: npt.NDArray[np.float64], level: float) -> float:
    """What the true mean of differences in [-1, 1] exceeds with probability `level` at most.

    Args:
        differences: float64 `(n,)`, at least two.
        level: in 0..1.
    """
    n = len(differences)
    width = log(2 / level)
    deviation = sqrt(2 * float(differences.var(ddof=1)) * width / n)
    return float(differences.mean()) + deviation + 7 * RANGE * width / (3 * (n - 1))


def _rounds(first: int, examples: int) -> Iterator[int]:
    count = first
    while count < examples:
        yield count
        count *= 2
    yield examples
