"""The results of a quickstart and their report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from layerswap.compose import Composition, default_zones
from layerswap.deltas.atlas import Atlas
from layerswap.evaluation.statistics import Interval
from layerswap.lab.scoring import LabMeasure, measure_names
from layerswap.report import Report, Section, Table, draw_heat_map, draw_intervals, draw_stack
from layerswap.report.delta_map import map_panel
from layerswap.report.page import Answers, ShownAnswer
from layerswap.report.stack import NOTHING_ON_TOP
from layerswap.report.tables import contrasts, difference_words
from layerswap.search.conditions import (
    CHOSEN,
    DEFAULT,
    JOINT,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
)
from layerswap.search.protocol import TestResult, Values, choose, select
from layerswap.versions import __version__, versions

Right = dict[LabMeasure, dict[Condition, Values]]
"""By measure and condition, 1 or 0 (right or wrong) per test question."""
Grid = dict[Condition, Values]
"""By composition, 1 or 0 (right or wrong) per development question."""
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Libraries on which the scores depend."""


@dataclass(frozen=True)
class ShownProblem:
    """One test problem."""

    prompt: str
    answer: str
    written: Mapping[str, str]  # every model's text, by the condition's name


@dataclass(frozen=True)
class Outcome:
    """All measurements of a quickstart."""

    language: str  # the target
    source: str  # the source language
    grid: Grid  # on the development split
    composition: Composition  # selected, and merged
    answers: Right  # of every model on the test split
    examples: Sequence[ShownProblem]  # the first test problems in the target language
    change: Atlas  # of both experts from the base
    seconds: float  # of wall-clock time

    @cached_property
    def chosen(self) -> Condition:
        """The composition of the grid with the largest share of right answers."""
        return choose(self.grid)

    @property
    def default(self) -> Condition:
        """The default swap among the compositions of the grid."""
        return default_of_grid(self.composition.layers)

    @cached_property
    def selected(self) -> Condition:
        """The composition of the grid that is merged: the chosen one or the default swap."""
        return selected_of_grid(self.grid, self.composition.layers)

    @property
    def shares(self) -> dict[Condition, float]:
        """The share of right answers on the development split by composition."""
        return {one: float(np.mean(right)) for one, right in self.grid.items()}

    @cached_property
    def tests(self) -> dict[LabMeasure, TestResult]:
        """Every measure on the test split."""
        selected = DEFAULT if self.selected == self.default else CHOSEN
        return {
            measure: TestResult(rows, self.chosen, selected=selected)
            for measure, rows in self.answers.items()
        }

    @property
    def task(self) -> TestResult:
        """The task in the target language."""
        return self.tests["task_target"]

    def results(self) -> dict[str, Any]:
        """The content of `results.json`."""
        return {
            "target_language": self.language,
            "source_language": self.source,
            "chosen": self.chosen.to_dict(),
            "selected": self.selected.to_dict(),
            "chosen_on": {"split": "development", "questions": len(self.grid[self.chosen])},
            "composition": self.composition.to_dict(),
            "grid": [{**one.to_dict(), "task_target": v} for one, v in self.shares.items()],
            **{measure: test.to_dict()["test"] for measure, test in self.tests.items()},
            "seconds": round(self.seconds, 1),
            "layerswap_version": __version__,
            "made_with": versions(*LIBRARIES),
        }


def default_of_grid(layers: int) -> Condition:
    """Return the default swap as a composition of a grid."""
    return Condition("swap", zones=default_zones(layers))


def selected_of_grid(grid: Grid, layers: int) -> Condition:
    """Return the composition of a grid that is merged; see `search.protocol.select`."""
    return select(grid, choose(grid), default_of_grid(layers))


def quickstart_report(outcome: Outcome) -> Report:
    """Write a quickstart's report; only the joint model's numbers are from another run."""
    experts = {"task": f"{outcome.source} task expert",
               "language": f"{outcome.language} language expert"}  # fmt: skip
    libraries = ", ".join(f"{name} {number}" for name, number in versions(*LIBRARIES).items())
    return Report(
        title=_title(outcome),
        lead=_lead(outcome),
        figure=draw_stack(outcome.composition, experts),
        sections=[
            _table(outcome),
            _task(outcome),
            _grid(outcome),
            _change(outcome),
            _examples(outcome),
            _conditions(outcome),
            _models(outcome),
        ],
        colophon=f"layerswap {__version__} with {libraries}: {outcome.seconds:.0f} seconds on this "
        "machine.",
    )


def _title(outcome: Outcome) -> str:
    scores = outcome.task.intervals
    best, alone = scores[outcome.task.selected].mean, scores[TASK_EXPERT].mean
    return f"A swap answers {best:.1%} of {outcome.language} problems; the task expert {alone:.1%}"


def _lead(outcome: Outcome) -> str:
    scores = outcome.task.intervals
    best, zones = scores[outcome.task.selected], outcome.selected.zones
    return (
        f"The task expert has learned word problems in {outcome.source} only, the language expert "
        f"generic {outcome.language} only (both languages are invented). Their swap ({zones}) "
        f"answers {best.mean:.1%} of {best.n:,} unseen {outcome.language} problems. "
        f"The task expert alone answers {scores[TASK_EXPERT].mean:.1%}, the language expert "
        f"{scores[LANGUAGE_EXPERT].mean:.1%}, their soup {scores[SOUP].mean:.1%}. "
        f"{str(JOINT).capitalize()} (one model on both data sets, for as many steps as both "
        f"experts) answers {scores[JOINT].mean:.1%}, as recorded when the lab was built."
        f"\n\n{_differences(outcome)}"
    )


def _differences(outcome: Outcome) -> str:
    """Write the paired differences of all models to the selected swap in words."""
    task = outcome.task
    apart = {str(model): gap for model, gap in task.against(task.selected).items()}
    return f"Against the swap, with 95% paired intervals: {contrasts(apart)}."


def _table(outcome: Outcome) -> Section:
    measures = measure_names(outcome.language)
    tests = [outcome.tests[measure] for measure in measures]
    models = list(outcome.task.scores)
    rows: list[list[str | Interval]] = [
        [str(model), *(test.intervals[model] for test in tests)] for model in models
    ]
    return Section(
        "The models, four measures each",
        "Share of right answers, decoded greedily, with 95% bootstrap intervals.",
        table=Table(
            ("model", *measures.values()),
            rows,
            caption=f"Test split, {outcome.task.intervals[CHOSEN].n:,} questions each.",
            highlight=models.index(outcome.task.selected),
            bold={
                (models.index(max(models, key=lambda one: test.intervals[one].mean)), number)
                for number, test in enumerate(tests, start=1)
            },
        ),
    )


def _task(outcome: Outcome) -> Section:
    rows = [(str(model), interval) for model, interval in outcome.task.intervals.items()]
    differences = [
        (str(one), difference_words(value)) for one, value in outcome.task.differences.items()
    ]
    return Section(
        f"The task in {outcome.language}",
        figure=draw_intervals(rows, measure="right answers", highlight=str(outcome.task.selected)),
        table=Table(
            (f"{outcome.task.selected}, minus", "difference"),
            differences,
            caption="Paired differences over the same problems; *: the interval excludes zero.",
        ),
    )


def _grid(outcome: Outcome) -> Section:
    values = {cell(one): share for one, share in outcome.shares.items()}
    return Section(
        "Every composition of the grid",
        "The share of development problems answered, by the layers from the language expert at the "
        f"bottom and at the top. The best composition is {outcome.chosen.zones}. It is merged if "
        f"it is clearly better than the paper's default here. Merged: {outcome.selected.zones}."
        + ("" if cell(outcome.chosen)[1] else f" {NOTHING_ON_TOP}"),
        figure=draw_heat_map(
            values,
            row_label="bottom layers",
            column_label="top layers",
            best=cell(outcome.chosen),
            default=cell(outcome.default),
        ),
        note="The best of many compositions looks better on the problems that chose it than it is. "
        "The tables above have other problems.",
    )


def cell(condition: Condition) -> tuple[int, int]:
    """Return a composition's cell on the heat map: layers at the bottom and at the top."""
    assert condition.zones is not None, "the grid is of zones"
    return condition.zones.bottom, condition.zones.top


def _change(outcome: Outcome) -> Section:
    return Section(
        "What fine-tuning changed",
        "The share of rows of each matrix that are among the 15% that each expert changed most, by "
        "mean absolute change (paper 1, figure 2). The slider sets that share.",
        maps=map_panel(outcome.change),
    )


def _examples(outcome: Outcome) -> Section:
    selected = str(outcome.task.selected)
    models = sorted(map(str, outcome.task.scores), key=lambda name: name != selected)
    examples = [
        ShownAnswer(
            f"problem in {outcome.language}", i, shown.prompt, shown.answer,
            tuple(shown.written[name] for name in models),
            tuple(shown.written[name] == shown.answer for name in models),
        )
        for i, shown in enumerate(outcome.examples)
    ]  # fmt: skip
    return Section(
        "Answers one by one",
        f"The first {len(examples)} test problems in {outcome.language}, with the answers of every "
        "model.",
        answers=Answers(models, examples),
    )


def _models(outcome: Outcome) -> Section:
    zones = outcome.selected.zones
    assert zones is not None, "the grid is of zones"
    experts = ("--task-expert lab/task-1", f"--language-expert lab/language-{outcome.language}-1")
    return Section(
        "Models",
        "The composed model is in merged, beside this page. These commands write the lab's models "
        "into lab, and compose them:",
        f"layerswap lab models --out lab && layerswap merge {' '.join(experts)} --bottom "
        f"{zones.bottom} --top {zones.top} --outside blend --out merged",
        table=Table(
            ["name", "checkpoint"],
            [["base", "lab/base"], ["task expert", "lab/task-1"],
             ["language expert", f"lab/language-{outcome.language}-1"]],
        ),
    )  # fmt: skip


def _conditions(outcome: Outcome) -> Section:
    return Section(
        "Limits",
        "These are real transformers models, trained from scratch, but tiny. "
        f"{outcome.source} and {outcome.language} are invented languages. No {outcome.language} "
        "problem of this kind was in any training data. The report compares one pair of experts. "
        "Other seeds give other numbers, and a world of this size says little about the gain of a "
        "large model.\n\n"
        "Each expert trained its own part of the layers alone (partition C of Bandarkar and Peng, "
        "2025, with the places outside the layers for the language). Experts of this world that "
        "are trained in full gain nothing from a swap: docs/lab.md has the table and the reason.",
    )
