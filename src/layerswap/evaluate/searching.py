"""A search beyond the grid of zones: every layer, or every role of it, chooses its own source.

Optuna proposes (TPE) and remembers, in one SQLite file, so that a search goes on where it stopped.
Proposals come in batches that begin with the same layers: the compositions of a batch share that
work, so a batch costs little more than a few compositions. It starts from what is known already:
the paper's default, both experts alone, and the first of `suggest`'s ranking where the recipe names
the base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.compose import Recipe
from layerswap.evaluate.answers import AnswerStore, composition_key
from layerswap.evaluate.board import others_of
from layerswap.evaluate.judging import (
    DEVELOPMENT,
    Judge,
    Judged,
    Row,
    Say,
    Step,
    contenders,
    score_table,
)
from layerswap.evaluate.proposing import Search, Trial
from layerswap.evaluate.search_space import Choices, check_names, with_choices, with_choices_plan
from layerswap.evaluate.sweep_engine import Sweep
from layerswap.evaluate.sweep_spec import SweepSpec
from layerswap.evaluate.unlabelled import choose_without_labels
from layerswap.merge.documents import tokenizer_folder
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan


@dataclass(frozen=True)
class Found(Judged):
    """What a search found.

    Attributes:
        recipe: the recipe it started from.
        layers: number of layers.
        chosen_by: what the trials were compared by, in words.
        trials: in their order.
        best: of them.
        evaluated: layers that were run per batch of documents, over the whole search.
        alone: layers that one by one would have been.
    """

    recipe: Recipe
    layers: int
    chosen_by: str
    trials: Sequence[Trial]
    best: Trial
    evaluated: int
    alone: int

    def worth(self) -> dict[str, dict[str, float]]:
        """Per parameter and choice the mean score of the trials that made it."""
        found: dict[str, dict[str, list[float]]] = {}
        for trial in self.trials:
            for key, choice in trial.choices.items():
                found.setdefault(key, {}).setdefault(choice, []).append(trial.score)
        return {
            key: {choice: sum(scores) / len(scores) for choice, scores in sorted(by.items())}
            for key, by in found.items()
        }

    def best_recipe(self) -> dict[str, Any]:
        """The recipe of the best composition, ready for `layerswap merge`."""
        recipe = with_choices(self.recipe, self.best.choices)
        return recipe.model_dump(mode="json", exclude_defaults=True)


def run_search(
    spec: SweepSpec,
    recipe: Recipe,
    *,
    study: Path | None = None,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    say: Say = lambda line: None,
    progress: Step | None = None,
) -> Found:
    """Search compositions by the development split, and judge the best on the rest.

    Args:
        spec: with a search.
        recipe: a swap, whose experts can be taken.
        study: the file that Optuna keeps; in memory when None.
        store: keeps answers.
        allow_code: let tasks run code that a model wrote.
        say: told what the search costs.
        progress: called with the number of compositions just tried.

    Raises:
        LayerswapError: the experts or tasks cannot be had, or there is nothing of that name.
    """
    from transformers import AutoTokenizer

    assert spec.search is not None, "the file has a search; see evaluate.board for a grid"
    start = make_plan(recipe)
    check_names(spec.search, recipe)
    others = contenders(start)
    sweep = Sweep(list(others.values()), device=spec.device, dtype=spec.dtype)
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(start))
    judge = Judge(spec, sweep, tokenizer, store=store, allow_code=allow_code, say=say)
    scorer = _Scorer(judge, start, others_of([], others)["task expert"])
    trials = Search(spec.search, start, study).run(scorer, progress)
    best = max(trials, key=lambda trial: (trial.score, -trial.number))
    test, rows, measure = judge.tested(
        scorer.member(best.choices), others_of([], others), scorer.measure
    )
    say(
        f"{len(trials)} compositions tried: {scorer.evaluated} layers run per batch of documents "
        f"instead of {scorer.alone}"
    )
    return Found(
        measure, test, [*scorer.rows, *rows], recipe, start.composition.layers, scorer.chosen_by,
        trials, best, scorer.evaluated, scorer.alone,
    )  # fmt: skip


class _Scorer:
    """Scores batches of choices on the development split, keeping every row."""

    def __init__(self, judge: Judge, start: Plan, task_expert: int) -> None:
        self._judge, self._start, self._expert = judge, start, task_expert
        self._members: dict[str, int] = {}
        self.rows: list[Row] = []
        self.measure: tuple[str, str, str] | None = None
        self.chosen_by = ""
        self.evaluated = self.alone = 0

    def member(self, choices: Choices) -> int:
        """The position of a composition in the sweep; added if it is not there."""
        plan = with_choices_plan(self._start, choices)
        key = composition_key(plan)
        if key not in self._members:
            (self._members[key],) = self._judge.sweep.add([plan])
        return self._members[key]

    def __call__(self, batch: Mapping[int, Choices]) -> dict[int, float]:
        """The score of every trial of a batch, by its number."""
        members = {number: self.member(choices) for number, choices in batch.items()}
        distinct = list(dict.fromkeys(members.values()))
        counts = self._judge.sweep.counts(distinct)
        self.evaluated, self.alone = self.evaluated + counts.distinct, self.alone + counts.naive
        names = [next(str(n) for n, m in members.items() if m == member) for member in distinct]
        if self._judge.spec.without_labels is not None:
            values, signal = choose_without_labels(self._judge, distinct, names, self._expert)
            self.chosen_by = f"{signal} (no labels)"
        else:
            rows = self._judge.rows(DEVELOPMENT, distinct, names)
            self.measure = self._judge.measure(rows)
            self.chosen_by = " ".join(self.measure)
            self.rows += rows
            values = score_table(rows, DEVELOPMENT, names, self.measure).mean(axis=1)
        found = dict(zip(distinct, values.tolist(), strict=True))
        return {number: found[member] for number, member in members.items()}
