"""Races over examples: the stated error bound by simulation, and what is saved."""

from __future__ import annotations

import numpy as np
import pytest

from layerswap.errors import EvaluationError
from layerswap.search.grid import race, upper_bound


def lookup(scores):
    return lambda members, n: scores[members][:, :n]


def test_poor_compositions_leave_early_and_the_best_stays():
    rng = np.random.default_rng(0)
    chances = np.array([0.1] * 30 + [0.8, 0.75])
    scores = (rng.random((32, 2000)) < chances[:, None]).astype(float)
    found = race(lookup(scores), range(32), 2000, first=100)
    assert set(found.survivors) == {30, 31}
    assert found.rounds == (100, 200, 400, 800, 1600, 2000)
    assert found.saved > 0.8
    assert found.means[30] == scores[30].mean()
    assert found.examples[0] in found.rounds[:2]
    assert "2 of 32 compositions" in str(found)


def test_the_best_leaves_less_often_than_stated():
    """At an error of a half, close compositions and many short rounds, in 400 races."""
    rng = np.random.default_rng(1)
    lost = 0
    for _ in range(400):
        ease = rng.random(400) * 0.3
        chances = np.clip(np.array([0.5, *[0.48] * 9])[:, None] + ease, 0, 1)
        scores = (rng.random((10, 400)) < chances).astype(float)
        found = race(lookup(scores), range(10), 400, first=4, error=0.5)
        lost += 0 not in found.survivors
    assert lost <= 0.5 * 400


def test_a_bound_without_the_correction_would_not_hold():
    """The simulation can fail: a bound of the standard error alone loses the best too often."""
    rng = np.random.default_rng(2)
    lost = 0
    for _ in range(200):
        scores = (rng.random((10, 64)) < 0.5).astype(float)
        leader = scores[scores.mean(1).argmax()]
        gap = (scores[0] - leader).mean() + (scores[0] - leader).std(ddof=1) / 8
        lost += gap < 0
    assert lost > 0.1 * 200


def test_the_bound_covers_the_true_mean():
    rng = np.random.default_rng(3)
    draws = rng.choice([-1.0, 0.0, 1.0], p=[0.25, 0.6, 0.15], size=(2000, 60))
    misses = np.mean([upper_bound(row, 0.1) < -0.1 for row in draws])
    assert misses <= 0.1


def test_one_round_where_there_are_few_examples():
    scores = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    found = race(lookup(scores), range(2), 3, first=50)
    assert found.rounds == (3,)
    assert found.survivors == [0, 1]
    assert found.saved == 0


@pytest.mark.parametrize("settings", [{"first": 1}, {"error": 0.0}, {"error": 1.0}])
def test_settings_out_of_range(settings):
    with pytest.raises(EvaluationError, match="a race needs"):
        race(lookup(np.ones((1, 5))), [0], 5, **settings)


def test_scores_out_of_range():
    with pytest.raises(EvaluationError, match="between 0 and 1"):
        race(lookup(np.full((2, 5), 1.5)), [0, 1], 5, first=2)
