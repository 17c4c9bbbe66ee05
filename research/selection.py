"""Selecting among all merges and experts on development documents, from the recorded scores.

    python -m research.selection

A study selects the chosen swap if it is clearly better than the default swap on development
documents, else the default swap. Would other models as candidates be better on test documents?
Prints the rows of docs/questions.md, over three languages on three tasks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from layerswap.evaluation.statistics import student_interval
from layerswap.experiment.benchmarks import RESULTS, BenchmarkScores, read_condition_scores
from layerswap.experiment.compare import choose, select
from layerswap.experiment.conditions import DEFAULT, Condition
from research.markdown import points

HERE = Path(__file__).parent
STUDIES = ("headline-seeds", "topic-seeds", "sentiment-transfer")
LANGUAGES = ("ha", "sw", "yo")
RULES = ("best of all", "best of all if clearly better than the default swap", "a study's")


def cases() -> Iterator[BenchmarkScores]:
    """The scores of each task in each language."""
    for study in STUDIES:
        for code in LANGUAGES:
            yield from read_condition_scores(HERE / study / code / RESULTS).values()


def selected(found: BenchmarkScores) -> dict[str, float]:
    """The share of right answers on test documents of the model that each rule selects."""
    by: dict[Condition, list[np.ndarray]] = {}
    for one, values in found.scores.items():
        if one.method not in ("base", "joint"):
            by.setdefault(one.treatment, []).append(values)
    means = {one: np.mean(values, axis=0) for one, values in by.items()}
    first, test = found.split(0.5)  # the published splits
    tried = {one: values[first] for one, values in means.items()}
    swaps = {one: values for one, values in tried.items() if one.method == "swap"}
    picked = choose(tried), *(select(tried, choose(some), DEFAULT) for some in (tried, swaps))
    return {rule: float(means[one][test].mean()) for rule, one in zip(RULES, picked, strict=True)}


def gains() -> dict[str, list[float]]:
    """By rule, the gain in each case over the rule of a study."""
    found = [selected(one) for one in cases()]
    return {rule: [one[rule] - one[RULES[-1]] for one in found] for rule in RULES[:-1]}


def main() -> None:
    for rule, values in gains().items():
        print(f"{rule}: {points(student_interval(values))} points, n = {len(values)}")


if __name__ == "__main__":
    main()
