"""Intervals for scores, by the percentile bootstrap over examples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layerswap.errors import RecipeError

_CHUNK_CELLS = 4_000_000
"""Indices drawn at a time (32 MB), so that memory does not grow with the resamples."""


@dataclass(frozen=True)
class Interval:
    """A mean over `n` examples, and the interval that resampling the examples gives it."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(
    correct: npt.NDArray[np.generic], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval:
    """The mean of one value per example, with a percentile bootstrap interval.

    Args:
        correct: bool or numbers, `(n,)`, one per example.
        level: of the interval, between 0 and 1.
        resamples: how many times the examples are drawn anew, with replacement.
        seed: of the draws; equal arguments give equal intervals.

    Raises:
        RecipeError: `correct` is not a vector of at least one finite number, or a setting is
            out of range.
    """
    values = _vector(correct)
    if not 0.0 < level < 1.0 or resamples < 1:
        raise RecipeError(
            f"an interval needs a level between 0 and 1 and at least one resample, "
            f"not level={level}, resamples={resamples}"
        )
    means = _resampled_means(values, resamples, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high), len(values))


def paired_difference(
    a: npt.NDArray[np.generic],
    b: npt.NDArray[np.generic],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """The mean of `a - b` over the same examples: an interval above 0 says that `a` is better.

    Pairing cancels what makes an example hard for both, so the interval is narrower than two
    separate ones suggest.

    Raises:
        RecipeError: as `mean_interval`, or `a` and `b` differ in length.
    """
    first, second = _vector(a), _vector(b)
    if len(first) != len(second):
        raise RecipeError(
            f"a paired difference needs the same examples on both sides, "
            f"not {len(first)} and {len(second)}"
        )
    return mean_interval(first - second, level=level, resamples=resamples, seed=seed)


def _vector(values: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1 or len(vector) == 0 or not np.isfinite(vector).all():
        raise RecipeError(
            f"a score needs one finite number per example, not an array of shape {vector.shape}"
        )
    return vector


def _resampled_means(
    values: npt.NDArray[np.float64], resamples: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    n = len(values)
    rows = max(1, _CHUNK_CELLS // n)
    means = [
        values[rng.integers(n, size=(min(rows, resamples - start), n))].mean(axis=1)
        for start in range(0, resamples, rows)
    ]
    return np.concatenate(means)
