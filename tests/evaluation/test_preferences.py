"""Agreement of speakers, and shares of preferences with exact intervals."""

import pytest

from layerswap.evaluation.preferences import Vote, agreement, judge, latest, preference

PAIR = ("a", "b")


def test_kappa_is_that_of_the_book():
    """Cohen's table of 1960 in its usual form: 45, 15, 25, 15 of 100."""
    first = ["y"] * 60 + ["n"] * 40
    second = ["y"] * 45 + ["n"] * 15 + ["y"] * 25 + ["n"] * 15
    found = agreement(first, second)
    assert found.mean == pytest.approx(0.1304, abs=1e-4)
    assert found.low < 0.1304 < found.high
    assert (agreement(["y"] * 5, ["y"] * 5).low, agreement(["y"] * 5, ["y"] * 5).high) == (-1, 1)


def test_a_prompt_counts_once_and_both_bad_is_even():
    made = [Vote(one, "p", PAIR, "a") for one in ("ada", "obi")]
    made += [Vote("ada", "q", PAIR, "bad"), Vote("ada", "r", ("b", "a"), "b")]
    found = preference(made, "a", "b")
    assert (found.wins, found.losses, found.ties, found.both_bad) == (1, 1, 1, 1)
    assert (found.share.mean, found.share.n) == (0.5, 2)
    assert preference(made, "b", "a").losses == 1
    assert preference(made[2:3], "a", "b").share is None


def test_the_interval_of_a_share_is_that_of_clopper_and_pearson():
    """By its definition: at each end, the tail of the binomial distribution is 2.5%."""
    from scipy.stats import binom

    votes = [Vote("ada", str(i), PAIR, "a" if i < 14 else "b") for i in range(20)]
    share = preference(votes, "a", "b").share
    assert share.mean == 0.7
    assert binom.sf(13, 20, share.low) == pytest.approx(0.025)
    assert binom.cdf(14, 20, share.high) == pytest.approx(0.025)
    (pair,) = judge(votes, PAIR, "t").pairs
    assert pair.share == share
    of_three = judge(votes, ["a", "b", "c"], "t").pairs[0].share
    assert binom.sf(13, 20, of_three.low) == pytest.approx(0.025 / 3)


def test_the_last_answer_counts_and_a_taken_back_one_does_not():
    def line(item, answer, time):
        return {"speaker": "ada", "item": item, "answer": answer, "time": time}

    given = [line("x", "a", "1"), line("x", "b", "2"), line("y", "a", "3"), line("y", None, "4")]
    assert latest(given) == [given[1]]
