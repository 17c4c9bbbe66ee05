"""Statistics of scores: bootstrap intervals, paired tests, ranks over conditions, and signals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from layerswap.ground.errors import RecipeError
from layerswap.ground.yaml_file import nearest
from layerswap.reading.files import rows_of

LEVEL = 0.95
"""Level of an interval."""
RESAMPLES = 2000
"""Number of bootstrap samples."""
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

    @property
    def sign(self) -> int:
        """1 or -1 if the interval lies above or below zero, else 0."""
        return (self.low > 0) - (self.high < 0)

    @property
    def bounds(self) -> dict[str, float]:
        """The ends of the interval and the number of examples, by name."""
        return {"low": self.low, "high": self.high, "n": self.n}

    @property
    def reach(self) -> float:
        """The distance from the mean to the farther end."""
        return max(self.high - self.mean, self.mean - self.low)

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def in_words(self) -> str:
        """Describe a difference of fractions in points.

        Example: `Interval(0.02, -0.05, 0.09, 20).in_words()` is `no difference detected (n=20,
        ±7.0 points)`.
        """
        points = 100 * self.mean
        if self.sign:
            return f"{abs(points):.1f} points {'higher' if points > 0 else 'lower'}"
        return f"no difference detected (n={self.n}, ±{100 * self.reach:.1f} points)"


def mean_interval(correct: Values) -> Interval:
    """Compute the mean of one value per example, with its 95% percentile bootstrap interval.

    If every example is right, or every one wrong, each resample repeats that. The interval is then
    the exact one (Clopper & Pearson, 1934).

    Args:
        correct: bool or numbers, `(n,)`, one per example; equal ones give equal intervals.

    Raises:
        RecipeError: `correct` is not a vector of at least one finite number.
    """
    values = _vector(correct)
    first, count = float(values[0]), len(values)
    if first in (0.0, 1.0) and (values == first).all():
        # P(no other value in n draws) = (1 - p)^n
        reach = 1 - ((1 - LEVEL) / 2) ** (1 / count)
        return Interval(first, max(0.0, first - reach), min(1.0, first + reach), count)
    means = _resampled_means(values, np.random.default_rng(0))
    return Interval(float(values.mean()), *_percentiles(means), count)


def paired_difference(a: Values, b: Values) -> Interval:
    """Compute the mean of `a - b` over the same examples; above 0, `a` is better.

    Pairing cancels the difficulty of each example, so the interval is narrower than two separate
    ones suggest. If right-or-wrong scores agree on every example, returns the exact interval for
    zero differences in n examples instead of an empty one.

    Raises:
        RecipeError: as `mean_interval`, or `a` and `b` differ in length.
    """
    differences = _differences(a, b)
    interval = mean_interval(differences)
    if not differences.any():
        reach = interval.high if np.isin(_vector(a), (0, 1)).all() else 0.0
        return Interval(0.0, -reach, reach, interval.n)
    return interval


def mean_over_groups(groups: Sequence[Values]) -> Interval:
    """Compute the mean of the means of several groups, such as one per language.

    The bootstrap draws from each group by itself. Exact cases: see `mean_interval`.
    """
    if not groups:
        raise RecipeError("a mean over groups needs at least one")
    vectors = [_vector(group) for group in groups]
    values = np.concatenate(vectors)
    if len(vectors) == 1 or (values == values[0]).all():
        return mean_interval(values)
    rng = np.random.default_rng(0)
    drawn = np.mean([_resampled_means(vector, rng) for vector in vectors], axis=0)
    mean = float(np.mean([vector.mean() for vector in vectors]))
    return Interval(mean, *_percentiles(drawn), len(values))


def paired_over_groups(a: Sequence[Values], b: Sequence[Values]) -> Interval:
    """Compute the mean over groups of `a - b`; see `paired_difference`."""
    differences = [_differences(first, second) for first, second in zip(a, b, strict=True)]
    if len(differences) == 1 or not np.concatenate(differences).any():
        return paired_difference(np.concatenate(a), np.concatenate(b))
    return mean_over_groups(differences)


def ratio_interval(parts: Values, wholes: Values) -> Interval:
    """Compute `sum(parts) / sum(wholes)` over examples, with its 95% bootstrap interval.

    Examples are drawn with both their numbers, such as the tokens and the words of a line.

    Raises:
        RecipeError: as `mean_interval`, the two differ in length, or the wholes add up to nothing.
    """
    first, second = _vector(parts), _vector(wholes)
    if len(first) != len(second) or second.sum() <= 0:
        raise RecipeError("a ratio needs two numbers per example, and wholes above zero")
    counts = resampled_counts(len(first)).astype(np.float64)
    ratios = (counts @ first) / np.maximum(counts @ second, np.finfo(float).tiny)
    return Interval(float(first.sum() / second.sum()), *_percentiles(ratios[1:]), len(first))


def student_interval(means: Values) -> Interval:
    """Compute the mean of means, such as one per language, with Student's 95% interval.

    The interval covers other languages like these. A bootstrap over documents covers other
    documents of the same languages. Equal means give an interval of width 0.

    Raises:
        RecipeError: `means` is not a vector of at least two finite numbers.
    """
    from scipy.stats import sem, t

    values = _vector(means)
    if len(values) < 2:
        raise RecipeError("an interval over languages needs at least two")
    mean = float(values.mean())
    reach = float(t.ppf((1 + LEVEL) / 2, len(values) - 1) * sem(values))
    return Interval(mean, mean - reach, mean + reach, len(values))


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


def _percentiles(drawn: npt.NDArray[np.float64] | list[float]) -> tuple[float, float]:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _resampled_means(
    values: npt.NDArray[np.float64], rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    n = len(values)
    rows = max(1, _CHUNK_CELLS // n)
    means = [
        values[rng.integers(n, size=(min(rows, RESAMPLES - start), n))].mean(axis=1)
        for start in range(0, RESAMPLES, rows)
    ]
    return np.concatenate(means)


@dataclass(frozen=True)
class Balanced:
    """Measures of a classification in which every label has the same weight."""

    balanced_accuracy: Interval  # mean recall over the labels that occur
    macro_f1: Interval  # mean F1 over the labels that occur or are answered


@dataclass(frozen=True, eq=False)
class Classified:
    """Answers to the same documents, of one model or of several whose measures are averaged.

    Attributes:
        labels: the right labels, `(documents,)`.
        predicted: the answers, `(models, documents)`.
    """

    labels: npt.NDArray[np.str_]
    predicted: npt.NDArray[np.str_]

    @cached_property
    def balanced(self) -> Balanced:
        """The measures, with bootstrap intervals over documents."""
        return self._intervals(self.resampled, mean_interval(self.right))

    def minus(self, other: Classified) -> Balanced:
        """Return the paired differences to other answers to the same documents."""
        return self._intervals(
            self.resampled - other.resampled, paired_difference(self.right, other.right)
        )

    @property
    def right(self) -> Values:
        """Share of models that answer correctly, by document, `(documents,)`."""
        right: Values = (self.predicted == self.labels).mean(axis=0)
        return right

    def _intervals(self, drawn: npt.NDArray[np.float64], exact: Interval) -> Balanced:
        """Compute intervals from resamples. Where all resamples are equal, use `exact`."""
        return Balanced(*(
            exact if (row == exact.mean).all()
            else Interval(float(row[0]), *_percentiles(row[1:]), len(self.labels))
            for row in drawn
        ))  # fmt: skip

    @cached_property
    def resampled(self) -> npt.NDArray[np.float64]:
        """Both measures of the documents, then of every resample: `(2, 1 + RESAMPLES)`."""
        counts = resampled_counts(len(self.labels))
        names = np.unique([self.labels, *self.predicted])[:, None]
        support = counts @ (self.labels == names).T.astype(np.float32)
        drawn = []
        for predicted in self.predicted:
            answered = counts @ (predicted == names).T.astype(np.float32)
            hits = (predicted == names) & (self.labels == names)
            right = counts @ hits.T.astype(np.float32)
            drawn.append([
                _mean_ratio(right, support), _mean_ratio(2 * right, support + answered)
            ])  # fmt: skip
        means: npt.NDArray[np.float64] = np.mean(drawn, axis=0)
        return means


def classified_of(answers: Sequence[tuple[str, str]]) -> Classified | None:
    """Collect the right label and the answer of every document; None if one has no label."""
    labels, predicted = zip(*answers, strict=True)
    return Classified(np.array(labels), np.array([predicted])) if all(labels) else None


def _mean_ratio(
    above: npt.NDArray[np.float32], below: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """Average ratios over the columns whose denominator is not 0."""
    ratios = np.divide(above, below, out=np.zeros(below.shape), where=below > 0)
    mean: npt.NDArray[np.float64] = ratios.sum(axis=1) / (below > 0).sum(axis=1)
    return mean


@lru_cache(maxsize=1)
def resampled_counts(n: int) -> npt.NDArray[np.float32]:
    """Count how often each document occurs: once, then in every resample."""
    rng = np.random.default_rng(0)
    drawn = [np.bincount(rng.integers(n, size=n), minlength=n) for _ in range(RESAMPLES)]
    return np.array([np.ones(n), *drawn], dtype=np.float32)


def paired_bootstrap_p(first: Values, second: Values) -> float:
    """Test a paired difference by the bootstrap (Efron & Tibshirani, 1993, 16.4), two-sided.

    The differences are shifted to a mean of 0 and resampled. The p-value is the share of means at
    least as far from 0 as the observed one, and never below 1 / (RESAMPLES + 1).
    """
    delta = _differences(first, second)
    observed = abs(delta.mean())
    means = _resampled_means(delta - delta.mean(), np.random.default_rng(0))
    # A little slack, so that a mean that ties with the observed one counts.
    extreme = int((np.abs(means) >= observed - 1e-12).sum())
    return (extreme + 1) / (RESAMPLES + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """Correct p-values for multiple tests (Holm, 1979); the order stays.

    Example: `holm([0.01, 0.04, 0.03])` is `[0.03, 0.06, 0.06]`.
    """
    from statsmodels.stats.multitest import multipletests

    if not p_values:
        return []
    return [float(p) for p in multipletests(list(p_values), method="holm")[1]]


@dataclass(frozen=True)
class Friedman:
    """Friedman's test over conditions x treatments, with Nemenyi's critical difference."""

    treatments: tuple[str, ...]  # in the order of their mean rank, the best first
    mean_ranks: tuple[float, ...]  # rank 1 is best; ties share their ranks
    statistic: float  # chi-square, corrected for ties
    p: float
    kendall_w: float  # effect size in 0..1, the agreement of the conditions
    critical_difference: float  # smallest significant difference of mean ranks (Nemenyi, .05)
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
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    names, lengths = list(scores), {len(values) for values in scores.values()}
    if len(names) < 3 or len(lengths) != 1 or lengths.pop() < 2:
        raise RecipeError(
            "Friedman's test needs at least three treatments and two conditions, and a score of "
            "every treatment under every condition"
        )
    table = np.array([*scores.values()], dtype=np.float64).T
    if not np.isfinite(table).all():
        raise RecipeError("Friedman's test needs numbers; a score is missing")
    conditions, count = table.shape
    ranks = rankdata(-table, axis=1).mean(axis=0)
    if (table == table[:, :1]).all():
        statistic, p = 0.0, 1.0
    else:
        test = friedmanchisquare(*table.T)
        statistic, p = float(test.statistic), float(test.pvalue)
    quantile = float(studentized_range.ppf(0.95, count, np.inf)) / np.sqrt(2)
    order = sorted(range(count), key=lambda i: (ranks[i], i))
    return Friedman(
        tuple(names[i] for i in order),
        tuple(float(ranks[i]) for i in order),
        statistic,
        p,
        statistic / (conditions * (count - 1)),
        float(quantile * np.sqrt(count * (count + 1) / (6 * conditions))),
        conditions,
    )


# --- signals of the quality of merges (paper 2, section 5) ---

FEWEST = 4
"""Smallest number of merges for a rank correlation."""


@dataclass(frozen=True)
class Predictor:
    """One signal."""

    signal: str
    spearman: Interval  # with its bootstrap interval over merges
    p_spearman: float  # two-sided, by permutation; exact for few merges


def read_merges(path: Path, merged: str) -> tuple[dict[str, list[float]], list[float]]:
    """Read signals and quality of merges from a CSV or JSON Lines table with one row per merge.

    The column `merged` has the scores of the merges; every other numeric column is a signal.
    """
    rows = list(rows_of(path))
    numeric: dict[str, list[float]] = {}
    for name in rows[0] if rows else ():
        with suppress(ValueError, TypeError):  # a column of texts
            cells = (row[name] for row in rows)
            numeric[name] = [np.nan if cell in (None, "") else float(cell) for cell in cells]
    if merged not in numeric:
        raise RecipeError(f"{path}: no numeric column {merged!r}{nearest(merged, list(numeric))}")
    gaps = sorted(name for name, values in numeric.items() if not np.isfinite(values).all())
    if gaps:
        raise RecipeError(f"{path}: {', '.join(gaps)}: a number is missing")
    quality = numeric.pop(merged)
    if not numeric:
        raise RecipeError(f"{path}: no other numeric column, so no signal")
    return numeric, quality


def predictors(signals: Mapping[str, Sequence[float]], merged: Sequence[float]) -> list[Predictor]:
    """Correlate each signal with the quality of merges; the strongest comes first.

    A signal has one number per merge, such as the English score of its task expert.
    """
    from scipy.stats import permutation_test

    quality = np.asarray(merged, dtype=np.float64)
    ranked = []
    for name, values in signals.items():
        signal = np.asarray(values, dtype=np.float64)
        if signal.shape != quality.shape or len(quality) < FEWEST:
            raise RecipeError(
                f"{name}: a signal needs one number per merge, and at least {FEWEST} merges; "
                f"{len(signal)} numbers for {len(quality)} merges"
            )
        permuted = permutation_test(
            [signal], lambda shuffled, axis: _spearman(shuffled, quality), vectorized=True,
            permutation_type="pairings", n_resamples=RESAMPLES, rng=np.random.default_rng(0),
        )  # fmt: skip
        spearman = _interval(signal, quality)
        ranked.append(Predictor(name, spearman, float(permuted.pvalue)))
    return sorted(ranked, key=lambda predictor: -abs(predictor.spearman.mean))


Rows = npt.NDArray[np.float64]


def _interval(signal: Values, quality: Values) -> Interval:
    count = len(quality)
    drawn = np.random.default_rng(0).integers(count, size=(RESAMPLES, count))
    resampled = _spearman(signal[drawn], quality[drawn])
    return Interval(float(_spearman(signal, quality)), *_percentiles(resampled), count)


def _spearman(a: Values, b: Values) -> Rows:
    """Spearman's correlations along the last axis, all rows at once; 0 if a side is constant."""
    from scipy.stats import rankdata

    first, second = (rankdata(side, axis=-1) for side in (a, b))
    first, second = (side - side.mean(-1, keepdims=True) for side in (first, second))
    norm = np.sqrt((first**2).sum(-1) * (second**2).sum(-1))
    correlations: Rows = np.zeros_like(norm)
    np.divide((first * second).sum(-1), norm, out=correlations, where=norm > 0)
    return correlations
