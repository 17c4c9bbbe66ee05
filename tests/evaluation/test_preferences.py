"""Simulated speakers: intervals cover, errors stay below their level, an injected bias is found."""

from __future__ import annotations

import numpy as np
import pytest

from layerswap.evaluation.preferences import (
    Vote,
    agreement,
    latest,
    looks,
    position_bias,
    preference,
    smallest_difference,
    stops,
    strengths,
)
from layerswap.evaluation.statistics import paired_difference


def votes(rng, prompts, chance, *, bias=0.0, ties=0.2, speakers=("ada",), models=("a", "b")):
    """Votes of speakers who prefer the first model with a chance, and the left side with a bias."""
    made = []
    for prompt in range(prompts):
        for speaker in speakers:
            left, right = rng.permutation(models)
            first = chance + (bias if left == models[0] else -bias)
            winner = models[0] if rng.random() < first else models[1]
            winner = "equal" if rng.random() < ties else winner
            made.append(Vote(speaker, str(prompt), str(left), str(right), winner))
    return made


def test_what_a_number_of_labels_shows_is_what_the_paired_test_finds():
    assert round(100 * smallest_difference(100)) == 12
    rng, found = np.random.default_rng(0), 0
    apart = smallest_difference(150)
    for _ in range(300):
        draw = rng.choice(3, 150, p=[(0.2 + apart) / 2, (0.2 - apart) / 2, 0.8])
        found += paired_difference((draw == 0).astype(float), (draw == 1).astype(float)).sign == 1
    assert 0.73 <= found / 300 <= 0.88


def test_kappa_is_that_of_the_book():
    """Cohen's table of 1960 in its usual form: 45, 15, 25, 15 of 100."""
    first = ["y"] * 60 + ["n"] * 40
    second = ["y"] * 45 + ["n"] * 15 + ["y"] * 25 + ["n"] * 15
    found = agreement(first, second)
    assert found.mean == pytest.approx(0.1304, abs=1e-4)
    assert found.low < 0.1304 < found.high
    assert (agreement(["y"] * 5, ["y"] * 5).low, agreement(["y"] * 5, ["y"] * 5).high) == (-1, 1)


def test_a_prompt_counts_once_and_both_bad_is_even():
    made = [Vote(one, "p", "a", "b", "a") for one in ("ada", "obi")]
    made += [Vote("ada", "q", "b", "a", "bad"), Vote("ada", "r", "b", "a", "b")]
    found = preference(made, "a", "b")
    assert (found.wins, found.losses, found.ties, found.both_bad, found.p) == (1, 1, 1, 1, 1.0)
    assert preference(made, "b", "a").losses == 1


def test_the_stopping_rule_errs_at_most_at_its_level():
    """10,000 studies without a difference, by the exact test's own rejection regions."""
    from scipy.stats import binom

    rng, prompts = np.random.default_rng(0), 60
    critical = {n: max((k for k in range(n // 2 + 1)
                        if 2 * binom.cdf(k, n, 0.5) <= 0.05 / 3), default=-1)
                for n in range(prompts + 1)}  # fmt: skip
    signs = rng.choice([-1, 0, 1], (10_000, prompts), p=[0.4, 0.2, 0.4])
    wrong = np.zeros(10_000, bool)
    for look in looks(prompts):
        wins, losses = ((signs[:, :look] == sign).sum(1) for sign in (1, -1))
        wrong |= np.minimum(wins, losses) <= np.array([critical[n] for n in wins + losses])
    assert 0.01 < wrong.mean() <= 0.05
    for row in signs[:40]:  # and the function is that rule
        made = [Vote("ada", str(i), "a", "b", {1: "a", -1: "b", 0: "equal"}[int(sign)])
                for i, sign in enumerate(row)]  # fmt: skip
        first = looks(prompts)[0]
        wins, losses = ((row[:first] == sign).sum() for sign in (1, -1))
        early = min(wins, losses) <= critical[wins + losses]
        assert stops(made[:first], "a", "b", prompts) == early
        assert stops(made, "a", "b", prompts)
        assert not stops(made[: first - 1], "a", "b", prompts)


@pytest.mark.slow
def test_an_injected_bias_of_the_sides_is_found_and_none_is_not():
    rng = np.random.default_rng(3)
    biased = position_bias(votes(rng, 150, 0.5, bias=0.2))
    assert biased.low > 0.5
    fair = [position_bias(votes(rng, 100, 0.6)) for _ in range(200)]
    assert np.mean([one.low <= 0.5 <= one.high for one in fair]) >= 0.93
    assert position_bias([Vote("ada", "p", "a", "b", "equal")]) is None


@pytest.mark.slow
def test_intervals_of_strengths_cover(monkeypatch):
    from layerswap.evaluation import preferences

    monkeypatch.setattr(preferences, "DRAWS", 200)
    rng, inside, truth = np.random.default_rng(4), 0, 0.8 * 0.65 + 0.1
    true = np.sqrt(truth / (1 - truth)) / (1 + np.sqrt(truth / (1 - truth)))
    for _ in range(100):
        found = strengths(votes(rng, 60, 0.65))["a"]
        inside += found.low <= true <= found.high
    assert inside >= 88


def test_three_models_are_ranked():
    rng, made = np.random.default_rng(5), []
    for pair, chance in ((("swap", "task"), 0.8), (("swap", "soup"), 0.7), (("soup", "task"), 0.6)):
        made += votes(rng, 60, chance, models=pair, ties=0.1, speakers=("ada", "obi"))
    found = strengths(made)
    assert found["swap"].mean > found["soup"].mean > found["task"].mean
    assert found["swap"].low > found["task"].high


def test_the_last_answer_counts_and_a_taken_back_one_does_not():
    def line(item, answer, time):
        return {"speaker": "ada", "item": item, "answer": answer, "time": time}

    given = [line("x", "a", "1"), line("x", "b", "2"), line("y", "a", "3"), line("y", None, "4")]
    assert latest(given) == [given[1]]
