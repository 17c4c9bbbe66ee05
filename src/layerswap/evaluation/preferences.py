"""Statistics of speakers' labels and votes: agreement, power, sign tests, Bradley-Terry."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.statistics import LEVEL, Interval, holm
from layerswap.ground.errors import DataError

DISAGREEING = 0.2
"""Share of test documents on which two models that are compared differ in being right."""
POWER_QUANTILE = 0.8416
"""Normal quantile of a power of 80%."""
DRAWS = 1000
"""Bootstrap samples of Bradley-Terry strengths."""
LOOKS = 3
"""Times that a stopping rule looks at the votes."""


def smallest_difference(labels: int, disagreeing: float = DISAGREEING) -> float:
    """Return the difference in accuracy that a paired 95% interval finds with 80% power.

    Two models disagree on a share of the documents. The variance of a paired difference d is then
    (disagreeing - d^2) / labels.
    """
    reach = (1.96 + POWER_QUANTILE) ** 2 / labels
    return math.sqrt(min(disagreeing, disagreeing * reach / (1 + reach)))


def agreement(first: Sequence[str], second: Sequence[str]) -> Interval:
    """Compute Cohen's kappa (1960) of two speakers on the same texts, with its 95% interval.

    Without variation in the labels there is no kappa: the mean is 1 and the interval is [-1, 1].
    """
    from statsmodels.stats.inter_rater import cohens_kappa

    labels = sorted({*first, *second})
    table = np.zeros((len(labels), len(labels)))
    for label, other_label in zip(first, second, strict=True):
        table[labels.index(label), labels.index(other_label)] += 1
    if len(labels) < 2:
        return Interval(1.0, -1.0, 1.0, len(first))
    estimate = cohens_kappa(table)
    low, high = (float(bound) for bound in (estimate.kappa_low, estimate.kappa_upp))
    return Interval(float(estimate.kappa), max(-1.0, low), min(1.0, high), len(first))


@dataclass(frozen=True)
class Vote:
    """A speaker's vote on two answers to a prompt."""

    speaker: str
    prompt: str
    left: str  # model whose answer was shown first
    right: str
    winner: str  # a model, `equal` or `bad` (both bad)

    @property
    def margin(self) -> float:
        """1 if the first answer won, -1 if the second did, else 0."""
        return (self.winner == self.left) - (self.winner == self.right)


@dataclass(frozen=True)
class Preference:
    """The votes on one pair of models."""

    first: str
    second: str
    wins: int  # prompts on which most votes are for the first
    losses: int
    ties: int
    both_bad: int  # votes
    p: float  # exact sign test over prompts, two-sided


def preference(votes: Sequence[Vote], first: str, second: str) -> Preference:
    """Test two models by the sign of each prompt's votes.

    Speakers who vote on one prompt are not independent, so a prompt counts once.
    """
    from scipy.stats import binomtest

    sums: dict[str, float] = {}
    pair = [v for v in votes if {v.left, v.right} == {first, second}]
    for vote in pair:
        toward = vote.margin if vote.left == first else -vote.margin
        sums[vote.prompt] = sums.get(vote.prompt, 0) + toward
    wins, losses = (sum(sign * value > 0 for value in sums.values()) for sign in (1, -1))
    p = float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    bad = sum(v.winner == "bad" for v in pair)
    return Preference(first, second, wins, losses, len(sums) - wins - losses, bad, p)


def looks(prompts: int) -> list[int]:
    """Return the numbers of judged prompts at which a stopping rule looks."""
    return sorted({math.ceil(prompts * (i + 1) / LOOKS) for i in range(LOOKS)})


def stops(votes: Sequence[Vote], first: str, second: str, prompts: int) -> bool:
    """True if the votes may stop: at a look, the sign test rejects at 5% over the looks.

    `votes` are in the order they were given, and the prompts of a look are the first ones judged.
    The error over all looks is at most 5% (Bonferroni), whatever the share of ties.
    """
    order = dict.fromkeys(vote.prompt for vote in votes)
    for look in looks(prompts):
        if len(order) < look:
            return False
        seen = {*[*order][:look]}
        result = preference([vote for vote in votes if vote.prompt in seen], first, second)
        if result.p <= (1 - LEVEL) / LOOKS:
            return True
    return True


def position_bias(votes: Sequence[Vote]) -> Interval | None:
    """Compute the share of decided votes for the answer shown first, with its exact interval."""
    from scipy.stats import binomtest

    decided = [vote.margin > 0 for vote in votes if vote.margin]
    if not decided:
        return None
    test = binomtest(sum(decided), len(decided))
    low, high = test.proportion_ci(LEVEL, method="exact")
    return Interval(sum(decided) / len(decided), float(low), float(high), len(decided))


def strengths(votes: Sequence[Vote], seed: int = 0) -> dict[str, Interval]:
    """Fit Bradley and Terry's model (1952): the probability to win against an average model.

    Equal answers count as half a win each. Intervals resample prompts and speakers together, so
    that they cover other prompts, and with several speakers other speakers.
    """
    models = sorted({model for vote in votes for model in (vote.left, vote.right)})
    prompts, speakers = (sorted({getattr(vote, name) for vote in votes})
                         for name in ("prompt", "speaker"))  # fmt: skip
    indices = np.array([(prompts.index(vote.prompt), speakers.index(vote.speaker),
                         models.index(vote.left), models.index(vote.right))
                        for vote in votes])  # fmt: skip
    left = np.array([(1 + vote.margin) / 2 for vote in votes])
    rng = np.random.default_rng(seed)
    whole = _fit(indices, left, np.ones(len(votes)), len(models))
    drawn = []
    for _ in range(DRAWS):
        by_prompt = np.bincount(rng.integers(len(prompts), size=len(prompts)),
                                minlength=len(prompts))  # fmt: skip
        by_speaker = np.bincount(rng.integers(len(speakers), size=len(speakers)),
                                 minlength=len(speakers))  # fmt: skip
        weights = by_prompt[indices[:, 0]] * by_speaker[indices[:, 1]]
        if weights.any():
            drawn.append(_fit(indices, left, weights.astype(float), len(models)))
    ends = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return {model: Interval(float(whole[i]), float(ends[0, i]), float(ends[1, i]), len(prompts))
            for i, model in enumerate(models)}  # fmt: skip


def _fit(
    indices: npt.NDArray[np.int64],
    left: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64],
    models: int,
) -> npt.NDArray[np.float64]:
    """Fit by minorisation-maximisation (Hunter, 2004), with half a tie of every pair added."""
    wins = np.full((models, models), 0.25) * (1 - np.eye(models))
    np.add.at(wins, (indices[:, 2], indices[:, 3]), weights * left)
    np.add.at(wins, (indices[:, 3], indices[:, 2]), weights * (1 - left))
    games, strength = wins + wins.T, np.ones(models)
    for _ in range(100):
        new = wins.sum(1) / (games / (strength[:, None] + strength[None, :])).sum(1)
        new /= np.exp(np.log(new).mean())
        if np.abs(new - strength).max() < 1e-6:
            break
        strength = new
    return strength / (1 + strength)


@dataclass(frozen=True)
class Judgement:
    """The result of a comparison by speakers. It is no accuracy."""

    title: str
    votes: int
    speakers: int
    pairs: list[Preference]
    corrected: list[float]  # p of each pair by Holm
    strengths: dict[str, Interval]  # probability to win against an average model
    position: Interval | None  # share of decided votes for the answer that was shown first
    stop: bool  # what the stopping rule says


def judge(votes: Sequence[Vote], models: Sequence[str], prompts: int, title: str) -> Judgement:
    """Compare models by all votes, which are in the order they were given.

    Args:
        votes: of all speakers.
        models: two or three; the stopping rule is about the first two.
        prompts: number of prompts that are asked.
        title: name of the comparison.

    Raises:
        DataError: there is no vote.
    """
    if not votes:
        raise DataError(f"{title}: no vote; every question was skipped or taken back")
    pairs = [preference(votes, *pair) for pair in combinations(models, 2)]
    return Judgement(
        title, len(votes), len({vote.speaker for vote in votes}), pairs,
        holm([pair.p for pair in pairs]), strengths(votes), position_bias(votes),
        stops(votes, models[0], models[1], prompts),
    )  # fmt: skip


def latest(lines: Sequence[Mapping[str, object]]) -> list[Mapping[str, object]]:
    """Keep the last line of each speaker and item, and drop items that were taken back."""
    kept: dict[tuple[object, object], Mapping[str, object]] = {}
    for line in sorted(lines, key=lambda line: str(line["time"])):
        key = line["speaker"], line["item"]
        kept.pop(key, None)
        if line["answer"] is not None:
            kept[key] = line
    return list(kept.values())
