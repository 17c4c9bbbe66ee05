"""Statistics of speakers' labels and votes: agreement, and the share of preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from layerswap.evaluation.statistics import LEVEL, Interval
from layerswap.ground.errors import DataError


def agreement(first: Sequence[str], second: Sequence[str]) -> Interval:
    """Compute Cohen's kappa (1960) of two speakers on the same texts, with its 95% interval.

    Without variation in the labels there is no kappa: the mean is 1 and the interval is [-1, 1].
    """
    from sklearn.metrics import confusion_matrix
    from statsmodels.stats.inter_rater import cohens_kappa

    if len({*first, *second}) < 2:
        return Interval(1.0, -1.0, 1.0, len(first))
    estimate = cohens_kappa(confusion_matrix(first, second))
    low, high = (float(bound) for bound in (estimate.kappa_low, estimate.kappa_upp))
    return Interval(float(estimate.kappa), max(-1.0, low), min(1.0, high), len(first))


@dataclass(frozen=True)
class Vote:
    """A speaker's vote on two answers to a prompt."""

    speaker: str
    prompt: str
    models: tuple[str, str]
    winner: str  # a model, `equal` or `bad` (both bad)


@dataclass(frozen=True)
class Preference:
    """The votes on one pair of models."""

    first: str
    second: str
    wins: int  # prompts on which most votes are for the first
    losses: int
    ties: int
    both_bad: int  # votes
    share: Interval | None  # wins among decided prompts; None if no prompt is decided


def preference(votes: Sequence[Vote], first: str, second: str, level: float = LEVEL) -> Preference:
    """Compute the share of prompts that prefer a model, with its exact interval.

    Speakers who vote on one prompt are not independent, so a prompt counts once, by the majority
    of its votes. The interval is that of Clopper and Pearson (1934) over decided prompts.
    """
    from scipy.stats import binomtest

    pair = [vote for vote in votes if {*vote.models} == {first, second}]
    sums: dict[str, int] = {}
    for vote in pair:
        toward = (vote.winner == first) - (vote.winner == second)
        sums[vote.prompt] = sums.get(vote.prompt, 0) + toward
    wins, losses = (sum(sign * value > 0 for value in sums.values()) for sign in (1, -1))
    share = None
    if decided := wins + losses:
        low, high = binomtest(wins, decided).proportion_ci(level, method="exact")
        share = Interval(wins / decided, float(low), float(high), decided)
    bad = sum(vote.winner == "bad" for vote in pair)
    return Preference(first, second, wins, losses, len(sums) - decided, bad, share)


@dataclass(frozen=True)
class Judgement:
    """The result of a comparison by speakers. It is no accuracy."""

    title: str
    votes: int
    speakers: int
    pairs: list[Preference]


def judge(votes: Sequence[Vote], models: Sequence[str], title: str) -> Judgement:
    """Compare two or three models over all votes.

    The intervals of all pairs hold together at 95% (Bonferroni).

    Raises:
        DataError: there is no vote.
    """
    if not votes:
        raise DataError(f"{title}: no vote; every question was skipped or taken back")
    pairs = [*combinations(models, 2)]
    level = 1 - (1 - LEVEL) / len(pairs)
    return Judgement(title, len(votes), len({vote.speaker for vote in votes}),
                     [preference(votes, *pair, level) for pair in pairs])  # fmt: skip


def latest(lines: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Keep the last line of each speaker and item, and drop items that were taken back."""
    kept: dict[tuple[object, object], Mapping[str, object]] = {}
    for line in sorted(lines, key=lambda line: str(line["time"])):
        key = line["speaker"], line["item"]
        kept.pop(key, None)
        if line["answer"] is not None:
            kept[key] = line
    return list(kept.values())
