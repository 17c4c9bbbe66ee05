"""The report of the quickstart: every number in it was measured in that run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.evaluation.statistics import Interval
from layerswap.report import (
    Report,
    Section,
    Table,
    draw_heat_map,
    draw_intervals,
    draw_stack,
    write_report,
)
from layerswap.report.delta_map import map_panel
from layerswap.report.page import Answers, ShownAnswer
from layerswap.report.tables import contrasts
from layerswap.search.conditions import CHOSEN, JOINT, LANGUAGE_EXPERT, SOUP, TASK_EXPERT, Condition
from layerswap.study.report import provenance
from layerswap.versions import __version__

if TYPE_CHECKING:
    from layerswap.lab.results import Outcome
    from layerswap.lab.scoring import LabMeasure

NAMES = {
    "soup": "soup of both",
    "ties, density 0.2": "TIES, 20% kept (as published)",
    "ties, density 0.5": "TIES, 50% kept",
    "joint": "one model, both data sets",
    "swap, default": "swap, paper's default",
    "swap, chosen on development": "swap, best of the grid",
}
"""Names of conditions in the report, where they differ from the condition's own."""


def name_of(condition: Condition | str) -> str:
    """The name of a condition in the report."""
    return NAMES.get(str(condition), str(condition))


def write_quickstart_report(path: Path, outcome: Outcome) -> Path:
    """Write the report of a quickstart to `path`."""
    return write_report(path, tell(outcome))


def tell(outcome: Outcome) -> Report:
    """The report of a quickstart: the stack, the table, the grid, and what they do not show."""
    experts = {"task": f"{outcome.source} task expert",
               "language": f"{outcome.language} language expert"}  # fmt: skip
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
            provenance(
                outcome.entries,
                "The grid is of the step grid, the composition of merge, the tables and answers of "
                "test, the maps of change.",
            ),
        ],
        colophon=f"layerswap {__version__}, {outcome.seconds:.0f} seconds on this machine.",
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
        f"generic {outcome.language} only (both languages are invented). Recomposed layer by layer "
        f"({zones}) they answer {best.mean:.1%} of {best.n:,} unseen {outcome.language} problems; "
        f"the task expert alone answers {scores[TASK_EXPERT].mean:.1%}, the language expert "
        f"{scores[LANGUAGE_EXPERT].mean:.1%}, their soup {scores[SOUP].mean:.1%}. One "
        f"model trained on both data sets, for as many steps as both experts, answers "
        f"{scores[JOINT].mean:.1%}.\n\n{_verdict(outcome)}"
    )


def _verdict(outcome: Outcome) -> str:
    """What the differences to the swap that leads show."""
    task = outcome.task
    apart = {name_of(one): found for one, found in task.against(task.selected).items()}
    return f"Against it, with 95% paired intervals: {contrasts(apart)}."


def _table(outcome: Outcome) -> Section:
    measures: dict[LabMeasure, str] = {
        "task_target": f"problems, {outcome.language}",
        "task_source": f"problems, {outcome.source}",
        "comprehension_target": f"reading, {outcome.language}",
        "comprehension_source": f"reading, {outcome.source}",
    }
    tests = [outcome.tests[measure] for measure in measures]
    models = list(outcome.task.scores)
    rows: list[list[str | Interval]] = [
        [name_of(model), *(test.intervals[model] for test in tests)] for model in models
    ]
    return Section(
        "The models, four measures each",
        "Share of right answers, decoded greedily, with 95% bootstrap intervals.",
        table=Table(
            ("model", *measures.values()),
            rows,
            caption=f"Test split, {outcome.task.intervals[CHOSEN].n:,} questions each.",
            highlight=models.index(outcome.task.selected),
        ),
    )


def _task(outcome: Outcome) -> Section:
    rows = [(name_of(model), interval) for model, interval in outcome.task.intervals.items()]
    differences = [(name_of(one), value) for one, value in outcome.task.differences.items()]
    return Section(
        f"The task in {outcome.language}",
        figure=draw_intervals(
            rows, measure="right answers", highlight=name_of(outcome.task.selected)
        ),
        table=Table(
            (f"{name_of(outcome.task.selected)}, minus", "difference"),
            differences,
            caption="Paired differences over the same problems: clear of zero means significant.",
        ),
    )


def _grid(outcome: Outcome) -> Section:
    values = {cell(one): share for one, share in outcome.shares.items()}
    return Section(
        "Every composition of the grid",
        "How many layers come from the language expert at the bottom and at the top, against the "
        f"share of development problems answered. The best is {outcome.chosen.zones}. It is merged "
        "if it is clearly better than the paper's default here, and then tested on other problems. "
        f"Merged: {outcome.selected.zones}.",
        figure=draw_heat_map(
            values,
            row_label="bottom layers",
            column_label="top layers",
            best=cell(outcome.chosen),
            default=cell(outcome.default),
        ),
        note="The best of many always looks a little better on the problems it was chosen on than "
        "it is; the table above is not touched by that.",
    )


def cell(condition: Condition) -> tuple[int, int]:
    """The place of a composition on the heat map of its grid: layers at the bottom and the top."""
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
        f"The first {len(examples)} test problems in {outcome.language}: where is one model right "
        "and another wrong?",
        answers=Answers([name_of(name) for name in models], examples),
    )


def _models(outcome: Outcome) -> Section:
    """The checkpoints, and the command that composes them."""
    zones = outcome.selected.zones
    assert zones is not None, "the grid is of zones"
    experts = ("--task-expert lab/task-1", f"--language-expert lab/language-{outcome.language}-1")
    return Section(
        "Models",
        "The composed model is in merged, beside this page. These commands write the lab's models "
        f"into lab and compose them: layerswap lab models --out lab; layerswap merge "
        f"{' '.join(experts)} --bottom {zones.bottom} --top {zones.top} --outside blend --out "
        "merged",
        table=Table(
            ["name", "checkpoint"],
            [["base", "lab/base"], ["task expert", "lab/task-1"],
             ["language expert", f"lab/language-{outcome.language}-1"],
             ["one model, both data sets", f"lab/joint-{outcome.language}"]],
        ),
    )  # fmt: skip


def _conditions(outcome: Outcome) -> Section:
    return Section(
        "What this shows, and what it does not",
        "These are real transformers models, trained from scratch, but tiny ones, in a small "
        f"made-up world: {outcome.source} and {outcome.language} are invented languages. No "
        f"{outcome.language} problem of the tested kind was in any training data. One pair of "
        "experts is compared here; other seeds give other numbers, and a world of this size says "
        "little about how much a large model gains.\n\n"
        "Each expert has trained its own part of the layers alone (partition C of Bandarkar and "
        "Peng, 2025, what is outside of them with the language). Experts of this world that are "
        "trained in full do not swap to a gain: docs/lab.md has the table and the reason.",
    )
