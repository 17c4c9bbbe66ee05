"""Treatments compared over many conditions by their ranks (paper 2, section 5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from layerswap.errors import RecipeError
from layerswap.evaluate.significance import holm, wilcoxon_p


@dataclass(frozen=True)
class Pair:
    """Two treatments, after the Friedman test.

    Attributes:
        first: the one.
        second: the other.
        difference: mean score of the first minus the second.
        p_nemenyi: Nemenyi's test, which accounts for all pairs.
        p_conover: Conover's test, corrected by Holm.
        p_wilcoxon: Wilcoxon's signed-rank test over the conditions, corrected by Holm.
        effect: matched-pairs rank-biserial correlation, in -1..1 (Kerby, 2014).
    """

    first: str
    second: str
    difference: float
    p_nemenyi: float
    p_conover: float
    p_wilcoxon: float
    effect: float


@dataclass(frozen=True)
class Friedman:
    """Friedman's test over conditions x treatments, with its post-hoc tests.

    Attributes:
        treatments: in the order of their mean rank, the best first.
        mean_ranks: rank 1 is best; ties share their ranks.
        statistic: chi-square of Friedman, corrected for ties.
        p: of no difference between treatments.
        kendall_w: effect size in 0..1: how far the conditions agree on the order.
        critical_difference: mean ranks further apart than this differ (Nemenyi, level 0.05).
        pairs: every pair of treatments.
        conditions: how many conditions.
    """

    treatments: tuple[str, ...]
    mean_ranks: tuple[float, ...]
    statistic: float
    p: float
    kendall_w: float
    critical_difference: float
    pairs: tuple[Pair, ...]
    conditions: int


def friedman(scores: Mapping[str, Sequence[float]], *, larger_is_better: bool = True) -> Friedman:
    """Whether treatments differ over the same conditions, and which.

    Args:
        scores: per treatment one score per condition, in the same order of conditions.
        larger_is_better: whether a larger score gets a better rank.

    Raises:
        RecipeError: fewer than three treatments or two conditions, different lengths, or a score
            that is no number.

    Example: `friedman({"soup": [...], "swap": [...], "joint": [...]})`, with the score of every
    language and model.
    """
    import scikit_posthocs
    from scipy.stats import friedmanchisquare, rankdata, studentized_range

    names, table = list(scores), _table(scores)
    conditions, count = table.shape
    signed = -table if larger_is_better else table
    ranks = rankdata(signed, axis=1).mean(axis=0)
    if (table == table[:, :1]).all():
        statistic, p = 0.0, 1.0
    else:
        found = friedmanchisquare(*table.T)
        statistic, p = float(found.statistic), float(found.pvalue)
    with np.errstate(invalid="ignore"):  # where nothing differs; _p makes 1 of that
        nemenyi = scikit_posthocs.posthoc_nemenyi_friedman(table).to_numpy()
        conover = scikit_posthocs.posthoc_conover_friedman(table).to_numpy()
    both = list(combinations(range(count), 2))
    p_conover = holm([_p(conover[i, j]) for i, j in both])
    p_wilcoxon = holm([_p(wilcoxon_p(table[:, i], table[:, j])) for i, j in both])
    pairs = tuple(
        Pair(
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
    """Matched-pairs rank-biserial correlation: the effect size of Wilcoxon's signed-rank test.

    The share of the rank sum that speaks for a positive difference, minus the share that speaks
    against it (Kerby, 2014); 0 where nothing differs.
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
    """A p-value; 1 where a test cannot tell because nothing differs."""
    return 1.0 if value is None or not np.isfinite(value) else float(value)
