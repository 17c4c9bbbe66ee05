"""Intervals and tests: published worked examples, and properties that any sound one has."""

import numpy as np
import pytest

from layerswap.evaluation.statistics import (
    Interval,
    friedman,
    holm,
    mean_interval,
    mean_over_groups,
    paired_bootstrap_p,
    paired_difference,
    predictors,
    student_interval,
)
from layerswap.ground.errors import RecipeError

RNG = np.random.default_rng(0)


def test_the_interval_of_a_share_is_close_to_the_normal_one():
    right = np.arange(1000) < 300
    interval = mean_interval(right)
    half = 1.96 * (0.3 * 0.7 / 1000) ** 0.5
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(0.3 - half, abs=0.005)
    assert interval.high == pytest.approx(0.3 + half, abs=0.005)
    assert interval.n == 1000
    assert str(interval).startswith("0.300 [0.2")


@pytest.mark.parametrize("count", [1, 12, 100])
def test_scores_of_only_zero_or_one_have_exact_intervals(count):
    """Where all are right or all wrong, the interval is that of Clopper and Pearson."""
    from scipy.stats import binomtest

    for right in (0, count):
        found = mean_interval(np.arange(count) < right)
        exact = binomtest(right, count).proportion_ci(0.95, "exact")
        assert (found.low, found.high) == pytest.approx((exact.low, exact.high))
        assert found.mean == right / count


def test_equal_answers_are_not_proof_of_equality():
    same = np.arange(20) < 8
    found = paired_difference(same, same)
    assert found.mean == 0
    assert found.high == -found.low == pytest.approx(1 - 0.025 ** (1 / 20))
    assert paired_difference(np.full(5, 0.3), np.full(5, 0.3)) == Interval(0.0, 0.0, 0.0, 5)
    assert found.in_words() == "no difference detected (n=20, ±16.8 points)"
    assert Interval(0.12, 0.05, 0.2, 40).in_words() == "12.0 points higher"
    assert Interval(-0.12, -0.2, -0.05, 40).in_words() == "12.0 points lower"


def test_a_mean_over_groups_weighs_every_group_the_same():
    rng = np.random.default_rng(0)
    few, many = rng.random(50) < 0.2, rng.random(400) < 0.8
    found = mean_over_groups([few, many])
    assert found.mean == pytest.approx((few.mean() + many.mean()) / 2)
    assert found.n == 450
    # The standard error of the mean of two independent means.
    error = np.sqrt(few.var() / 50 + many.var() / 400) / 2
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.1)
    assert mean_over_groups([many]) == mean_interval(many)
    with pytest.raises(RecipeError, match="at least one"):
        mean_over_groups([])


def test_an_interval_over_languages_is_students():
    found = student_interval(np.array([1.0, 2.0, 3.0]))
    reach = 4.302653 / 3**0.5  # Student's t of two degrees of freedom; the deviation is 1
    assert (found.mean, found.n) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach))
    with pytest.raises(RecipeError, match="at least two"):
        student_interval(np.array([1.0]))


@pytest.mark.parametrize("values", [np.array([]), np.ones((2, 2)), np.array([1.0, np.nan])])
def test_invalid_scores_are_refused(values):
    with pytest.raises(RecipeError, match="one finite number per example"):
        mean_interval(values)


# --- tests ---

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
    assert paired_difference(first, second).mean == pytest.approx(0.15)
    assert paired_bootstrap_p(first, second) < 0.01
    for compare in (paired_difference, paired_bootstrap_p):
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


def test_the_signal_that_orders_the_merges_comes_first():
    merged = [0.1, 0.2, 0.25, 0.3, 0.5, 0.6, 0.7, 0.9]
    rng = np.random.default_rng(1)
    found = predictors(
        {"noise": rng.random(8), "reading": np.array(merged) * 2 + 1, "flat": np.ones(8)}, merged
    )
    assert found[0].signal == "reading"
    assert found[0].spearman.mean == pytest.approx(1.0)
    assert found[0].p_spearman < 0.01
    assert found[-1].spearman.mean == 0
    with pytest.raises(RecipeError, match="at least 4 merges"):
        predictors({"x": [1, 2, 3]}, [1, 2, 3])
