"""Selecting the model to save on development documents, from the recorded scores.

    python -m research.selection        # the table of docs/evaluation.md
    python -m research.selection lab    # ask the lab's pairs anew, and record their regrets

A study saves the model that is best on development documents, of all merges and experts. How far is
it from the best on the test documents, and how far are other rules? Prints the table of
docs/evaluation.md: four data sets, each of three or ten languages, and every pair of the lab.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.statistics import paired_difference
from layerswap.experiment.answers import Values, read_answers
from layerswap.experiment.benchmarks import RESULTS, BenchmarkScores, condition_scores
from layerswap.experiment.compare import NOT_SAVED, best_of_all, choose
from layerswap.experiment.conditions import DEFAULT, SOUP, Condition, contenders, grid_plans
from layerswap.experiment.spec import Grid
from layerswap.lab import quickstart
from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import TEST_QUESTIONS
from layerswap.lab.scoring import sweep_correct
from research.lab.scoring import questions

HERE = Path(__file__).parent
LAB = HERE / "selection" / "lab.json"
"""The recorded regrets of the lab's pairs."""
STUDIES = {
    "headlines, ten languages": "ten-languages",
    "headlines, three pairs": "headline-seeds",
    "sentences, three pairs": "topic-seeds",
    "tweets": "sentiment-transfer",
}


def select(
    scores: Mapping[Condition, Values], chosen: Condition, default: Condition | None
) -> Condition:
    """Returns the composition to save and to report first: the chosen one, or the default swap.

    The chosen composition is selected if it is clearly better than the default swap on the
    development documents: the 95% interval of the paired difference lies above zero. Test scores
    play no part, so the test score of the selected composition is unbiased. Without a default swap,
    because the candidates are no swaps, the chosen composition is selected.
    """
    if default is None or default not in scores or chosen == default:
        return chosen
    return chosen if paired_difference(scores[chosen], scores[default]).low > 0 else default


RULES: Mapping[str, Callable[[Mapping[Condition, Values]], Condition]] = {
    "best of all models": best_of_all,
    "the same, if clearly above the default swap": lambda tried: select(
        tried, best_of_all(tried), DEFAULT
    ),
    "best swap, if clearly above the default swap": lambda tried: select(
        tried, choose({one: v for one, v in tried.items() if one.method == "swap"}), DEFAULT
    ),
    "always the default swap": lambda tried: DEFAULT,
    "always the average": lambda tried: SOUP,
}
"""Rules by name, from scores on development documents to a model."""


def cases(study: str) -> Iterator[BenchmarkScores]:
    """The scores of a study in each of its languages."""
    for folder in sorted((HERE / study).glob(f"*/{RESULTS}")):
        yield from condition_scores(read_answers(folder)).values()


def regrets(
    development: Mapping[Condition, Values], test: Mapping[Condition, Values]
) -> dict[str, float]:
    """The best share of right answers on test documents minus that of each rule's model."""
    scores = {one: float(values.mean()) for one, values in test.items()}
    return {name: max(scores.values()) - scores[rule(development)] for name, rule in RULES.items()}


def recorded_regrets(found: BenchmarkScores) -> dict[str, float]:
    """The regrets of every rule in one language of a study, on the published splits."""
    by: dict[Condition, list[np.ndarray]] = {}
    for one, values in found.scores.items():
        if one.method not in NOT_SAVED:
            by.setdefault(one.treatment, []).append(values)
    means = {one: np.mean(values, axis=0) for one, values in by.items()}
    first, test = found.split(0.5)  # the published splits
    return regrets(*({one: all_[part] for one, all_ in means.items()} for part in (first, test)))


def lab_regrets() -> Iterator[dict[str, float]]:
    """The regrets of every rule for each pair of the lab, on the quickstart's grid and problems."""
    lab = shipped()
    tokenizer = load_tokenizer(lab.base)
    for language in lab.languages:
        for pair in range(len(lab.language_experts[language])):
            start = quickstart.lab_plan(lab, language, pair)
            grid = Grid(bottom=[*quickstart.BOTTOMS], top=[*quickstart.TOPS])
            others = contenders(start, densities=quickstart.DENSITIES)
            plans = {**others, **grid_plans(grid, start, lambda line: None)}
            plans = {one: plan for one, plan in plans.items() if one.method not in NOT_SAVED}
            sweep = Sweep([*plans.values()], dtype="float32")
            splits = []
            for split, count in (
                ("development", quickstart.DEVELOPMENT_QUESTIONS),
                ("test", TEST_QUESTIONS),
            ):
                asked = questions("task_target", language, split, count)
                right = sweep_correct(sweep, tokenizer, asked).astype(float)
                splits.append(dict(zip(plans, right, strict=True)))
            yield regrets(*splits)


def by_study() -> dict[str, list[dict[str, float]]]:
    """The regrets of every rule in each language, by data set."""
    return {name: [*map(recorded_regrets, cases(study))] for name, study in STUDIES.items()}


def mean_regrets(found: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The mean regret of every rule in points, with one decimal."""
    return {rule: f"{100 * np.mean([row[rule] for row in found]):.1f}" for rule in RULES}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("ask", nargs="?", choices=["lab"])
    if parser.parse_args(arguments).ask:
        text = json.dumps([*lab_regrets()], indent=1)
        LAB.write_text(f"{text}\n", "utf-8", newline="\n")
    found = {**by_study(), "the lab": json.loads(LAB.read_text("utf-8"))}
    print(
        "| rule |", " | ".join(f"{name} ({len(rows)})" for name, rows in found.items()), "| all |"
    )
    print("|---|" + "--:|" * (len(found) + 1))
    columns = [*found.values(), [row for rows in found.values() for row in rows]]
    means = [mean_regrets(column) for column in columns]
    for rule in RULES:
        print(f"| {rule} |", " | ".join(by[rule] for by in means), "|")


if __name__ == "__main__":
    main()
