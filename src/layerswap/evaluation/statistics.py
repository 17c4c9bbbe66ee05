"""Statistics of scores: bootstrap intervals, paired tests, and tests over several conditions.

Percentile bootstrap over examples; McNemar, Wilcoxon and Holm for pairs; Friedman with post-hoc
tests for treatments over conditions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from layerswap.errors import RecipeError

LEVEL = 0.95
"""Default level of an interval."""
RESAMPLES = 2000
"""Default number of bootstrap samples."""
_CHUNK_CELLS = 4_000_000
"""Indices drawn at a time (32 MB), so that memory does not grow with the resamples."""


Values = npt.NDArray[np.generic]
"""Bool or numbers, `(n,)`, one per example."""


@dataclass(frozen=True)
class Interval:
    """A mean over `n` examples, with its bootstrap interval."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def in_words(self) -> str:
        """Describe a difference of fractions in points.

        Example: `Interval(0.02, -0.05, 0.09, 20).in_words()` is `no difference detected (n=20,
        ±7.0 points)`.
        """
        points = 100 * self.mean
        if self.low > 0 or self.high < 0:
            return f"{abs(points):.1f} points {'higher' if points > 0 else 'lower'}"
        reach = 100 * max(self.high - self.mean, self.mean - self.low)
        return f"no difference detected (n={self.n}, ±{reach:.1f} points)"


def mean_interval(
    correct: Values, *, level: float = LEVEL, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Compute the mean of one value per example, with a percentile bootstrap interval.

    If every example is right, or every one wrong, each resample repeats that. The interval is then
    the exact one (Clopper & Pearson, 1934).

    Args:
        correct: bool or numbers, `(n,)`, one per example.
        level: level of the interval, between 0 and 1.
        resamples: number of bootstrap samples.
        seed: seed of the draws; equal arguments give equal intervals.

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
    first, count = float(values[0]), len(values)
    if first in (0.0, 1.0) and (values == first).all():
        # Of n draws, none is otherwise with probability (1 - p)^n.
        reach = 1 - ((1 - level) / 2) ** (1 / count)
        return Interval(first, max(0.0, first - reach), min(1.0, first + reach), count)
    means = _resampled_means(values, resamples, np.random.default_rng(seed))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(values.mean()), float(low), float(high), count)


def paired_difference(
    a: Values,
    b: Values,
    *,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Compute the mean of `a - b` over the same examples; above 0, `a` is better.

    Pairing cancels the difficulty of each example, so the interval is narrower than two separate
    ones suggest. If right-or-wrong scores agree on every example, the interval is the exact one of
    as many examples without a difference, not one of width 0.

    Raises:
        RecipeError: as `mean_interval`, or `a` and `b` differ in length.
    """
    differences = _differences(a, b)
    interval = mean_interval(differences, level=level, resamples=resamples, seed=seed)
    if not differences.any():
        binary = bool(np.isin(_vector(a), (0, 1)).all())
        return Interval(
            0.0, -interval.high if binary else 0.0, interval.high if binary else 0.0, interval.n
        )
    return interval


def mean_over_groups(groups: Sequence[Values]) -> Interval:
    """Compute the mean of the means of several groups, such as one per language.

    The bootstrap draws from each group by itself. Exact cases are those of `mean_interval`.
    """
    if not groups:
        raise RecipeError("a mean over groups needs at least one")
    vectors = [_vector(one) for one in groups]
    values = np.concatenate(vectors)
    if len(vectors) == 1 or (values == values[0]).all():
        return mean_interval(values)
    rng = np.random.default_rng(0)
    drawn = np.mean([_resampled_means(one, RESAMPLES, rng) for one in vectors], axis=0)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    mean = float(np.mean([one.mean() for one in vectors]))
    return Interval(mean, float(low), float(high), len(values))


def paired_over_groups(a: Sequence[Values], b: Sequence[Values]) -> Interval:
    """Compute the mean over groups of `a - b`; see `paired_difference`."""
    differences = [_differences(first, second) for first, second in zip(a, b, strict=True)]
    if len(differences) == 1 or not np.concatenate(differences).any():
        return paired_difference(np.concatenate(a), np.concatenate(b))
    return mean_over_groups(differences)


def _differences(a: Values, b: Values) -> npt.NDArray[np.float64]:
    first, second = _vector(a), _vector(b)
    if len(first) != len(second):
        raise RecipeError(
            f"a paired difference needs the same examples on both sides, "
            f"not {len(first)} and {len(second)}"
        )
    return first - second


def _vector(values: Values) -> npt.NDArray[np.float64]:
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


@dataclass(frozen=True)
class Comparison:
    """Two models on the same examples; p-values are two-sided, of no difference."""

    difference: Interval  # mean of the first minus the second, paired
    p_bootstrap: float
    p_mcnemar: float | None  # exact; None if scores are not 0 or 1
    p_wilcoxon: float | None  # None if no score differs
    only_first: int | None  # examples that only the first has right; None if not 0 or 1
    only_second: int | None  # examples that only the second has right
    needed: int | None  # examples that show this difference; see `examples_needed`


def compare(first: Values, second: Values) -> Comparison:
    """Compare two models by their scores on the same examples, in the same order."""
    difference = paired_difference(first, second)
    a, b = (np.asarray(scores, dtype=np.float64) for scores in (first, second))
    binary = bool(np.isin(a, (0, 1)).all() and np.isin(b, (0, 1)).all())
    alone = int(((a == 1) & (b == 0)).sum()), int(((a == 0) & (b == 1)).sum())
    return Comparison(
        difference,
        paired_bootstrap_p(a, b),
        mcnemar_p(*alone) if binary else None,
        wilcoxon_p(a, b),
        alone[0] if binary else None,
        alone[1] if binary else None,
        examples_needed(a - b),
    )


def paired_bootstrap_p(
    first: Values, second: Values, *, resamples: int = RESAMPLES, seed: int = 0
) -> float:
    """Test a paired difference by the bootstrap (Efron & Tibshirani, 1993, 16.4), two-sided.

    The differences are shifted to a mean of 0 and resampled. The p-value is the share of means at
    least as far from 0 as the observed one, and never below 1 / (resamples + 1).
    """
    delta = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    rng = np.random.default_rng(seed)
    observed = abs(delta.mean())
    means = _resampled_means(delta - delta.mean(), resamples, rng)
    # A little slack, so that a mean that ties with the observed one counts.
    extreme = int((np.abs(means) >= observed - 1e-12).sum())
    return (extreme + 1) / (resamples + 1)


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Test by McNemar (1947), exact and two-sided, the examples that one model alone has right.

    Example: `mcnemar_p(10, 2)` is 0.0386.
    """
    from scipy.stats import binomtest

    if not only_first + only_second:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)


def wilcoxon_p(first: Values, second: Values) -> float | None:
    """Test by Wilcoxon's signed ranks, two-sided; None if no score differs."""
    from scipy.stats import wilcoxon

    delta = np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)
    if not np.any(delta):
        return None
    return float(wilcoxon(delta, zero_method="wilcox").pvalue)


def examples_needed(differences: Values, *, power: float = 0.8, level: float = LEVEL) -> int | None:
    """Estimate the number of examples that shows a paired difference like this one.

    For a two-sided z-test on paired differences with mean d and standard deviation s, it is
    n = ((z_level + z_power) s / d)^2. For right-or-wrong scores this is Connor's (1987) formula for
    McNemar's test, up to the variance under no difference.

    Args:
        differences: differences of the two models' scores, example by example.
        power: probability of seeing the difference.
        level: one minus the error of the test.

    Returns:
        The number; None if the means are equal, so that no number is enough.
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
    """Correct p-values for multiple tests (Holm, 1979); the order stays.

    Example: `holm([0.01, 0.04, 0.03])` is `[0.03, 0.06, 0.06]`.
    """
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


@dataclass(frozen=True)
class RankedPair:
    """Two treatments after Friedman's test."""

    first: str
    second: str
    difference: float  # mean score of the first minus the second
    p_nemenyi: float  # accounts for all pairs
    p_conover: float  # corrected by Holm
    p_wilcoxon: float  # over conditions, corrected by Holm
    effect: float  # matched-pairs rank-biserial correlation, -1..1 (Kerby, 2014)


@dataclass(frozen=True)
class Friedman:
    """Friedman's test over conditions x treatments, with its post-hoc tests."""

    treatments: tuple[str, ...]  # in the order of their mean rank, the best first
    mean_ranks: tuple[float, ...]  # rank 1 is best; ties share their ranks
    statistic: float  # chi-square, corrected for ties
    p: float
    kendall_w: float  # effect size in 0..1, the agreement of the conditions
    critical_difference: float  # smallest significant difference of mean ranks (Nemenyi, .05)
    pairs: tuple[RankedPair, ...]
    conditions: int  # number of conditions


def friedman(scores: Mapping[str, Sequence[float]]) -> Friedman:
    """Test differences between treatments over the same conditions; larger scores are better.

    Args:
        scores: per treatment one score per condition, in the same order of conditions.

    Raises:
        RecipeError: fewer than three treatments or two conditions, different lengths, or a
            missing score.

    Example: `friedman({"soup": [...], "swap": [...], "joint": [...]})`, with the score of every
    language and model.
    """
    import scikit_posthocs
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    names, table = list(scores), _table(scores)
    conditions, count = table.shape
    ranks = rankdata(-table, axis=1).mean(axis=0)
    if (table == table[:, :1]).all():
        statistic, p = 0.0, 1.0
    else:
        test = friedmanchisquare(*table.T)
        statistic, p = float(test.statistic), float(test.pvalue)
    with np.errstate(invalid="ignore"):  # if nothing differs; _p makes 1 of that
        nemenyi = scikit_posthocs.posthoc_nemenyi_friedman(table).to_numpy()
        conover = scikit_posthocs.posthoc_conover_friedman(table).to_numpy()
    both = list(combinations(range(count), 2))
    p_conover = holm([_p(conover[i, j]) for i, j in both])
    p_wilcoxon = holm([_p(wilcoxon_p(table[:, i], table[:, j])) for i, j in both])
    pairs = tuple(
        RankedPair(
            names[i], names[j], float((table[:, i] - table[:, j]).mean()), _p(nemenyi[i, j]),
            p_conover[k], p_wilcoxon[k], rank_biserial(table[:, i] - table[:, j]),
        )
        for k, (i, j) in enumerate(both)
    )  # fmt: skip
    quantile = float(studentized_range.ppf(0.95, count, np.inf)) / np.sqrt(2)
    order = sorted(range(count), key=lambda i: (ranks[i], i))
    return Friedman(
        tuple(names[i] for i in order),
        tuple(float(ranks[i]) for i in order),
        statistic,
        p,
        statistic / (conditions * (count - 1)),
        float(quantile * np.sqrt(count * (count + 1) / (6 * conditions))),
        pairs,
        conditions,
    )


def rank_biserial(differences: npt.NDArray[np.float64]) -> float:
    """Compute the matched-pairs rank-biserial correlation, the effect size of Wilcoxon's test.

    The share of the rank sum with a positive difference, minus the share with a negative one
    (Kerby, 2014); 0 if nothing differs.
    """
    from scipy.stats import rankdata

    moved = differences[differences != 0]
    if not len(moved):
        return 0.0
    ranks = rankdata(np.abs(moved))
    return float((ranks[moved > 0].sum() - ranks[moved < 0].sum()) / ranks.sum())


def _table(scores: Mapping[str, Sequence[float]]) -> npt.NDArray[np.float64]:
    lengths = {len(values) for values in scores.values()}
    if len(scores) < 3 or len(lengths) != 1 or lengths.pop() < 2:
        raise RecipeError(
            "Friedman's test needs at least three treatments and two conditions, and a score of "
            "every treatment under every condition"
        )
    table = np.array([np.asarray(values, dtype=np.float64) for values in scores.values()]).T
    if not np.isfinite(table).all():
        raise RecipeError("Friedman's test needs numbers; a score is missing")
    return table


def _p(value: float | None) -> float:
    """Return a p-value; 1 if a test has none because nothing differs."""
    return 1.0 if value is None or not np.isfinite(value) else float(value)
