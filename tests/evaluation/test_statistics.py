"""Intervals: where they must lie, how often they cover, and what they refuse."""

import numpy as np
import pytest

from layerswap.errors import RecipeError
from layerswap.evaluation.statistics import (
    Interval,
    mean_interval,
    mean_over_groups,
    paired_difference,
)

RNG = np.random.default_rng(0)


def test_the_interval_of_a_share_is_close_to_the_normal_one():
    right = np.arange(1000) < 300
    interval = mean_interval(right, seed=1)
    half = 1.96 * (0.3 * 0.7 / 1000) ** 0.5
    assert interval.mean == pytest.approx(0.3)
    assert interval.low == pytest.approx(0.3 - half, abs=0.005)
    assert interval.high == pytest.approx(0.3 + half, abs=0.005)
    assert interval.n == 1000
    assert str(interval).startswith("0.300 [0.2")


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    hits = 0
    for _ in range(300):
        interval = mean_interval(RNG.random(100) < 0.4, level=0.9, resamples=300, seed=0)
        hits += interval.low <= 0.4 <= interval.high
    assert 0.83 < hits / 300 < 0.96


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


def test_a_paired_difference_is_narrower_than_two_intervals():
    a = RNG.random(400) < 0.5
    b = a.copy()
    b[:10] = ~b[:10]
    paired, single = paired_difference(a, b), mean_interval(a)
    assert paired.high - paired.low < (single.high - single.low) / 2
    assert paired.mean == pytest.approx(a.mean() - b.mean())


def test_the_sign_shows_the_better_model():
    better, worse = np.ones(50, dtype=bool), np.arange(50) % 2 == 0
    assert paired_difference(better, worse).low > 0
    assert paired_difference(worse, better).high < 0


def test_equal_seeds_give_equal_intervals_whatever_the_chunks(monkeypatch):
    right = RNG.random(300) < 0.5
    whole = mean_interval(right, seed=5)
    assert whole == mean_interval(right, seed=5)
    assert whole != mean_interval(right, seed=6)
    monkeypatch.setattr("layerswap.evaluation.statistics._CHUNK_CELLS", 1000)
    chunked = mean_interval(right, seed=5)
    assert chunked.low == pytest.approx(whole.low, abs=0.02)


@pytest.mark.parametrize("values", [np.array([]), np.ones((2, 2)), np.array([1.0, np.nan])])
def test_invalid_scores_are_refused(values):
    with pytest.raises(RecipeError, match="one finite number per example"):
        mean_interval(values)


def test_settings_out_of_range_are_refused():
    with pytest.raises(RecipeError, match="level between 0 and 1"):
        mean_interval(np.ones(3), level=95)
    with pytest.raises(RecipeError, match="same examples on both sides"):
        paired_difference(np.ones(3), np.ones(4))
