"""Whether two models differ on the same examples, and how many examples it takes to see it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layerswap.errors import RecipeError
from layerswap.evaluate.statistics import Interval, paired_difference

Scores = npt.NDArray[np.generic]


@dataclass(frozen=True)
class Comparison:
    """Two models on the same examples.

    Attributes:
        difference: mean of the first minus the second, with its paired bootstrap interval.
        p_bootstrap: two-sided, of no difference, from the paired bootstrap.
        p_mcnemar: two-sided and exact, of right-or-wrong scores; None for others.
        p_wilcoxon: two-sided, of the signed-rank test; None where no score differs.
        only_first: examples that the first alone has right; None for scores that are not 0 or 1.
        only_second: the same for the second.
        needed: examples needed to see this difference; see `examples_needed`.
    """

    difference: Interval
    p_bootstrap: float
    p_mcnemar: float | None
    p_wilcoxon: float | None
    only_first: int | None
    only_second: int | None
    needed: int | None


def compare(
    first: Scores, second: Scores, *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Comparison:
    """Compare two models by their scores on the same examples.

    Args:
        first: one finite number per example, `(n,)`.
        second: the same examples in the same order.
        level: of the interval.
        resamples: of the bootstrap.
        seed: of the bootstrap.

    Raises:
        RecipeError: different lengths, nothing to compare, or a score that is no number.
    """
    difference = paired_difference(first, second, level=level, resamples=resamples, seed=seed)
    a, b = (np.asarray(scores, dtype=np.float64) for scores in (first, second))
    binary = bool(np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all())
    alone = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return Comparison(
        difference,
        paired_bootstrap_p(a, b, resamples=resamples, seed=seed),
        mcnemar_p(*alone) if binary else None,
        wilcoxon_p(a, b),
        alone[0] if binary else None,
        alone[1] if binary else None,
        examples_needed(a - b),
    )


def paired_bootstrap_p(
    first: Scores, second: Scores, *, resamples: int = 2000, seed: int = 0
) -> float:
    """Two-sided p of no difference by the paired bootstrap (Efron and Tibshirani, 1993, 16.4).

    The differences are shifted to a mean of 0, which is what no difference means, and resampled;
    p is how often a mean as far from 0 as the one measured comes out, never below
    1 / (resamples + 1).
    """
    delta = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    rng = np.random.default_rng(seed)
    centred, seen = delta - delta.mean(), abs(delta.mean())
    means = np.array(
        [centred[rng.integers(len(delta), size=len(delta))].mean() for _ in range(resamples)]
    )
    # A little slack, so that a mean that ties with the one measured counts as reaching it.
    extreme = int((np.abs(means) >= seen - 1e-12).sum())
    return (extreme + 1) / (resamples + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Two-sided exact p of McNemar's test (McNemar, 1947), from the examples that one alone has.

    Example: `mcnemar_p(10, 2)` is 0.0386.
    """
    from scipy.stats import binomtest

    if not only_first + only_second:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)


def wilcoxon_p(first: Scores, second: Scores) -> float | None:
    """Two-sided p of Wilcoxon's signed-rank test; None where no score differs."""
    from scipy.stats import wilcoxon

    delta = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not np.any(delta):
        return None
    return float(wilcoxon(delta, zero_method="wilcox").pvalue)


def examples_needed(differences: Scores, *, power: float = 0.8, level: float = 0.95) -> int | None:
    """How many examples it takes to see a paired difference like this one.

    For a two-sided z-test on paired differences: n = ((z_level + z_power) s / d)^2, with their mean
    d and standard deviation s; for right-or-wrong scores this is Connor's (1987) formula for
    McNemar's test up to the variance under no difference.

    Args:
        differences: of the two models' scores, example by example.
        power: probability of seeing the difference.
        level: one minus the error of the test.

    Returns:
        The number, or None where the means are equal, so that no number is enough.
    """
    from scipy.stats import norm

    delta = np.asarray(differences, dtype=np.float64)
    if len(delta) < 2 or not 0 < power < 1 or not 0 < level < 1:
        raise RecipeError("power needs at least two examples, and power and level between 0 and 1")
    mean, deviation = float(delta.mean()), float(delta.std(ddof=1))
    if mean == 0:
        return None
    z = float(norm.ppf(1 - (1 - level) / 2) + norm.ppf(power))
    return max(2, math.ceil((z * deviation / mean) ** 2))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for being several (Holm, 1979), in the given order.

    Example: `holm([0.01, 0.04, 0.03])` is `[0.03, 0.06, 0.06]`.
    """
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]
