"""Published worked examples, and properties that any sound test has."""

import numpy as np
import pytest

from layerswap.errors import RecipeError
from layerswap.evaluation.statistics import (
    compare,
    friedman,
    holm,
    paired_bootstrap_p,
    predictors,
    rank_biserial,
    wilcoxon_p,
)

# Demsar (2006), table 2: AUC of four versions of C4.5 on fourteen data sets. The paper reports
# Friedman's chi-square 9.28 (F 3.69), mean ranks 3.143, 2.000, 2.893 and 1.964, and Nemenyi's
# critical difference 1.25.
DEMSAR = {
    "C4.5": [0.763, 0.599, 0.954, 0.628, 0.882, 0.936, 0.661, 0.583, 0.775, 1.000, 0.940, 0.619,
             0.972, 0.957],
    "C4.5+m": [0.768, 0.591, 0.971, 0.661, 0.888, 0.931, 0.668, 0.583, 0.838, 1.000, 0.962, 0.666,
               0.981, 0.978],
    "C4.5+cf": [0.771, 0.590, 0.968, 0.654, 0.886, 0.916, 0.609, 0.563, 0.866, 1.000, 0.965, 0.614,
                0.9751, 0.946],
    "C4.5+m+cf": [0.798, 0.569, 0.967, 0.657, 0.898, 0.931, 0.685, 0.625, 0.875, 1.000, 0.962,
                  0.669, 0.975, 0.970],
}  # fmt: skip


def test_friedman_and_nemenyi_are_those_of_demsar():
    found = friedman(DEMSAR)
    ranks = dict(zip(found.treatments, found.mean_ranks, strict=True))
    assert ranks["C4.5"] == pytest.approx(3.143, abs=0.001)
    assert ranks["C4.5+m"] == pytest.approx(2.000, abs=0.001)
    assert ranks["C4.5+cf"] == pytest.approx(2.893, abs=0.001)
    assert ranks["C4.5+m+cf"] == pytest.approx(1.964, abs=0.001)
    assert found.critical_difference == pytest.approx(1.25, abs=0.01)
    # Demsar leaves ties uncorrected; the correction raises the statistic.
    uncorrected = 12 * 14 / 20 * (sum(rank**2 for rank in found.mean_ranks) - 25)
    assert uncorrected == pytest.approx(9.28, abs=0.005)
    assert uncorrected < found.statistic < 11
    assert found.p < 0.05
    assert found.treatments[0] == "C4.5+m+cf"
    assert 0 < found.kendall_w < 1


def test_wilcoxon_is_that_of_demsar():
    # The same paper, section 3.1.3: C4.5 against C4.5+m, sums of ranks 12 and 93, z = -2.54.
    p = wilcoxon_p(np.array(DEMSAR["C4.5"]), np.array(DEMSAR["C4.5+m"]))
    assert p == pytest.approx(0.0109, abs=0.004)
    delta = np.array(DEMSAR["C4.5+m"]) - np.array(DEMSAR["C4.5"])
    assert rank_biserial(delta) > 0.7


def test_holm_is_that_of_its_definition():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == []
    assert holm([0.6, 0.9]) == pytest.approx([1.0, 1.0])


def test_the_bootstrap_has_the_error_it_promises():
    rng = np.random.default_rng(3)
    wrong = sum(
        paired_bootstrap_p(a, b) < 0.05
        for _ in range(200)
        for a, b in [(rng.random(100) < 0.5, rng.random(100) < 0.5)]
    )
    assert 1 <= wrong <= 22
    assert paired_bootstrap_p(np.ones(50), np.ones(50)) == 1.0


def test_a_comparison_has_the_difference_and_its_p_value():
    first = np.array([1] * 60 + [0] * 40)
    second = np.array([1] * 45 + [0] * 55)
    found = compare(first, second)
    assert found.difference.mean == pytest.approx(0.15)
    assert found.p_bootstrap < 0.01
    with pytest.raises(RecipeError, match="same examples"):
        compare(first, second[:-1])


@pytest.mark.parametrize(
    "scores",
    [{"a": [1, 2], "b": [1, 2]}, {"a": [1], "b": [2], "c": [3]},
     {"a": [1, 2], "b": [1, 2], "c": [1, 2, 3]}, {"a": [1, 2], "b": [1, 2], "c": [1, np.nan]}],
)  # fmt: skip
def test_friedman_refuses_what_it_cannot_rank(scores):
    with pytest.raises(RecipeError, match="Friedman's test needs"):
        friedman(scores)


def test_equal_treatments_do_not_differ():
    found = friedman({name: [0.1, 0.2, 0.3] for name in "abc"})
    assert found.p == 1.0
    assert all(pair.p_nemenyi == 1.0 == pair.p_wilcoxon for pair in found.pairs)
    assert all(pair.effect == 0 for pair in found.pairs)


def test_the_signal_that_orders_the_merges_comes_first():
    merged = [0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.9]
    rng = np.random.default_rng(1)
    found = predictors(
        {"noise": rng.random(8), "reading": np.array(merged) * 2 + 1, "flat": np.ones(8)}, merged
    )
    assert found[0].signal == "reading"
    assert found[0].spearman.mean == pytest.approx(1.0)
    assert found[0].kendall.mean == pytest.approx(1.0)
    assert found[0].p_spearman < 0.01
    assert found[-1].spearman.mean == 0
    with pytest.raises(RecipeError, match="at least 4 merges"):
        predictors({"x": [1, 2, 3]}, [1, 2, 3])
