"""What the quickstart found, told as a report. Every number in it was measured in that run."""

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
from layerswap.report.panels import ShownAnswer, examples_panel
from layerswap.study.report import provenance
from layerswap.versions import __version__

if TYPE_CHECKING:
    from layerswap.lab.results import Outcome

NAMES = {
    "base": "base",
    "task_expert": "task expert",
    "language_expert": "language expert",
    "soup": "soup of both",
    "ties": "TIES",
    "swap_default": "swap, paper's default",
    "swap_best": "swap, best of the grid",
}
"""What the report calls each model."""


def write_story(path: Path, outcome: Outcome) -> Path:
    """Write the report of a quickstart to `path`."""
    return write_report(path, tell(outcome))


def tell(outcome: Outcome) -> Report:
    """The report of a quickstart: the stack, the table, the grid, and what they do not show."""
    experts = {"task": f"{outcome.source} task expert",
               "language": f"{outcome.language} language expert"}  # fmt: skip
    return Report(
        title=f"Word problems in {outcome.language}, without one to learn from",
        lead=_lead(outcome),
        figure=draw_stack(outcome.composition, experts),
        sections=[
            _table(outcome),
            _task(outcome),
            _grid(outcome),
            _change(outcome),
            _examples(outcome),
            _conditions(outcome),
            provenance(
                outcome.entries,
                "The grid is of the step grid, the composition of merge, the tables and answers of "
                "judge, the maps of change.",
            ),
        ],
        colophon=f"layerswap {__version__}, {outcome.seconds:.0f} seconds on this machine.",
    )


def _lead(outcome: Outcome) -> str:
    scores = {model: row["task_target"] for model, row in outcome.intervals().items()}
    best = scores["swap_best"]
    return (
        f"The task expert has learned word problems in {outcome.source} only, the language expert "
        f"generic {outcome.language} only. Recomposed layer by layer ({outcome.best}) they answer "
        f"{best.mean:.1%} of {best.n} unseen {outcome.language} problems; the task expert alone "
        f"answers {scores['task_expert'].mean:.1%}, the language expert "
        f"{scores['language_expert'].mean:.1%}, their soup {scores['soup'].mean:.1%}.\n\n"
        + _verdict(outcome)
    )


def _verdict(outcome: Outcome) -> str:
    """Which differences to the best swap are clear of zero, in words."""
    groups: dict[str, list[str]] = {"better than": [], "not clearly different from": [],
                                    "worse than": []}  # fmt: skip
    for model, difference in outcome.differences().items():
        groups[_relation(difference)].append(NAMES[model])
    parts = [f"{relation} {_listed(models)}" for relation, models in groups.items() if models]
    return f"On these problems the best swap is {', and '.join(parts)} (95% paired intervals)."


def _relation(difference: Interval) -> str:
    if difference.low > 0:
        return "better than"
    return "worse than" if difference.high < 0 else "not clearly different from"


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _table(outcome: Outcome) -> Section:
    measures = {
        "task_target": f"problems, {outcome.language}",
        "task_source": f"problems, {outcome.source}",
        "comprehension_target": f"reading, {outcome.language}",
        "comprehension_source": f"reading, {outcome.source}",
    }
    intervals = outcome.intervals()
    rows: list[list[str | Interval]] = [
        [NAMES[model], *row.values()] for model, row in intervals.items()
    ]
    return Section(
        "Seven models, four measures",
        "Share of right answers, decoded greedily, with 95% bootstrap intervals.",
        table=Table(
            ("model", *measures.values()),
            rows,
            caption=f"Test split, {intervals['base']['task_target'].n} questions each.",
            highlight=list(intervals).index("swap_best"),
        ),
    )


def _task(outcome: Outcome) -> Section:
    rows = [(NAMES[model], row["task_target"]) for model, row in outcome.intervals().items()]
    differences = [(NAMES[model], value) for model, value in outcome.differences().items()]
    return Section(
        f"The task in {outcome.language}",
        figure=draw_intervals(rows, measure="right answers", highlight=NAMES["swap_best"]),
        table=Table(
            ("best swap minus", "difference"),
            differences,
            caption="Paired differences over the same problems: clear of zero means significant.",
        ),
    )


def _grid(outcome: Outcome) -> Section:
    values = {(zones.bottom, zones.top): share for zones, share in outcome.grid.items()}
    default = outcome.default
    return Section(
        "Every composition of the grid",
        "How many layers come from the language expert at the bottom and at the top, against the "
        "share of development problems answered. The best of them was chosen here and then judged "
        "on other problems.",
        figure=draw_heat_map(
            values,
            row_label="bottom layers",
            column_label="top layers",
            best=(outcome.best.bottom, outcome.best.top),
            default=(default.bottom, default.top),
        ),
        note="The best of many always looks a little better on the problems it was chosen on than "
        "it is; the table above is not touched by that.",
    )


def _change(outcome: Outcome) -> Section:
    return Section(
        "What fine-tuning changed",
        "The share of rows of each matrix whose mean absolute change is above the threshold, for "
        "both experts (paper 1, figure 2).",
        panel=map_panel(outcome.change, outcome.change.threshold()),
    )


def _examples(outcome: Outcome) -> Section:
    models = ["swap_best", *(name for name in NAMES if name != "swap_best")]
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
        panel=examples_panel([NAMES[name] for name in models], examples),
    )


def _conditions(outcome: Outcome) -> Section:
    return Section(
        "What this shows, and what it does not",
        f"These are real transformers models, trained from scratch, but tiny ones, in a small "
        f"made-up world. No {outcome.language} problem of the tested kind was in any training "
        "data. One pair of experts is compared here; other seeds give other numbers, and a world "
        "of this size says little about how much a large model gains.\n\n"
        "Each expert has trained its own part of the layers alone (partition C of Bandarkar and "
        "Peng, 2025, what is outside of them with the language). Experts of this world that are "
        "trained in full do not swap to a gain: docs/lab.md has the table and the reason.",
    )
