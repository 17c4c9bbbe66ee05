"""The quickstart: a sweep of the lab's two experts on shipped problems, a merged model, a page."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, get_args

from layerswap.checkpoint import atomic_folder
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.presets import Zones
from layerswap.compose.recipe import check_recipe
from layerswap.deltas.atlas import Atlas, measure_delta
from layerswap.engine.sweep import Sweep
from layerswap.experiment.answers import Answer, Measure
from layerswap.experiment.compare import Compared
from layerswap.experiment.conditions import (
    CHOSEN,
    JOINT,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
    contenders,
    grid_plans,
)
from layerswap.experiment.evaluator import TEST, Evaluator
from layerswap.experiment.sections import change_section
from layerswap.experiment.spec import Grid
from layerswap.experiment.sweep_page import (
    SweepResult,
    result_sections,
    sweep_opening,
    write_above,
)
from layerswap.experiment.sweeps import run_experiment
from layerswap.experiment.tables import models_table
from layerswap.ground.commit import write_json
from layerswap.ground.types import Advance, Bars, Log
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.questions import Question, Skill, questions
from layerswap.lab.scoring import sweep_correct, sweep_written
from layerswap.merge.api import make_plan
from layerswap.merge.metadata import command_lines, uses
from layerswap.merge.plan import Plan
from layerswap.report.page import Report, Section, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table
from layerswap.versions import __version__, versions

RESULTS, REPORT, MERGED = "results.json", "report.html", "merged"
BOTTOMS, TOPS = range(5), range(3)
"""The grid of zones, in layers."""
DENSITIES = (0.2, 0.5)
"""Of TIES: as published, and milder."""
DEVELOPMENT_QUESTIONS, TEST_QUESTIONS = 500, 1000
"""Most questions of each measure."""
SHOWN = 100
"""Test problems whose answers are in the report."""
LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
"""Libraries on which the scores depend."""
LabMeasure = Literal["task_target", "task_source", "comprehension_target", "comprehension_source"]
MEASURES: tuple[LabMeasure, ...] = get_args(LabMeasure)
"""The task and comprehension, each in the scarce (target) and in the source language."""
MEASURE = ("exact_match", "greedy")
"""Metric and filter of all answers."""


class LabQuestions(Evaluator):
    """The lab's questions as documents: the task in the target language decides, all measures test.

    Texts are written for the first test problems alone.
    """

    def __init__(self, lab: Lab, language: str, plans: Mapping[Condition, Plan]) -> None:
        self.lab, self.language, self.advance = lab, language, lambda count: None
        self.sweep = Sweep(list(plans.values()), dtype="float32")
        self.members = {condition: number for number, condition in enumerate(plans)}
        self._tokenizer = load_tokenizer(lab.base)

    def measure(self, rows: Sequence[Answer]) -> Measure:
        """Returns the measure that chooses."""
        return "task_target", *MEASURE

    def rows(
        self, split: Any, conditions: Sequence[Condition], *, first: int | None = None
    ) -> list[Answer]:
        """Scores compositions on the questions of a split, and writes texts on the test split."""
        members = [self.members[condition] for condition in conditions]
        rows: list[Answer] = []
        for measure in MEASURES if split == TEST else ("task_target",):
            asked = self._asked(split, measure)[:first]
            right = sweep_correct(
                self.sweep, self._tokenizer, asked, members=members, progress=self.advance
            )
            shown = asked[:SHOWN] if (split, measure) == (TEST, "task_target") else []
            texts = sweep_written(self.sweep, self._tokenizer, shown, members=members)
            for condition, scores, written in zip(conditions, right, texts, strict=True):
                rows += _answers(
                    condition, (split, measure), scores, zip(shown, written, strict=True)
                )
        return rows

    def recorded(self, condition: Condition) -> list[Answer]:
        """The test answers of a model that is not in the package, as recorded by its build."""
        record, rows = self.lab.record["models"][f"joint-{self.language}"], list[Answer]()
        for measure in MEASURES:
            asked = self._asked(TEST, measure)
            shown = asked[:SHOWN] if measure == "task_target" else []
            scores = [float(digit) for digit in record["test"][measure][: len(asked)]]
            texts = zip(shown, record["written"].split("\n"), strict=False)
            rows += _answers(condition, (TEST, measure), scores, texts)
        return rows

    def _asked(self, split: Any, measure: LabMeasure) -> Sequence[Question]:
        count = TEST_QUESTIONS if split == TEST else DEVELOPMENT_QUESTIONS
        asked = _skill_and_language(self.lab.source, self.language, measure)
        return questions(*asked, split)[:count]


def _skill_and_language(source: str, target: str, measure: LabMeasure) -> tuple[Skill, str]:
    skill: Skill = "problem" if measure.startswith("task") else "comprehension"
    return skill, target if measure.endswith("target") else source


def _answers(
    condition: Condition,
    asked: tuple[str, LabMeasure],
    scores: Sequence[float],
    shown: Iterable[tuple[Question, str]],
) -> list[Answer]:
    """The answers to the questions of a split and measure, with the texts of the first ones."""
    split, measure = asked
    texts = [
        {"question": question.prompt, "target": question.answer, "answer": text}
        for question, text in shown
    ]
    answer: Any = partial(Answer, str(condition), measure, split=split, condition=condition)
    return [
        answer(number, *MEASURE, float(score), main=True, **more)
        for number, (score, more) in enumerate(
            zip(scores, [*texts, *[{}] * (len(scores) - len(texts))], strict=True)
        )
    ]


@dataclass(frozen=True)
class Outcome:
    """All measurements of a quickstart."""

    board: SweepResult
    language: str  # the target
    source: str  # the source language
    change: Atlas  # of both experts from the base
    seconds: float  # of wall-clock time

    @property
    def zones(self) -> Zones | None:
        """Zones of the selected swap; None if the selected model is not a swap."""
        plan = self.board.best
        swap = plan.recipe.swap
        return None if swap is None else swap.zones(plan.composition.layers)

    @cached_property
    def tests(self) -> dict[LabMeasure, Compared]:
        """Every measure on the test split."""
        return {measure: self.board.tested((measure, *MEASURE)) for measure in MEASURES}

    def results(self) -> dict[str, Any]:
        """The content of `results.json`."""
        board = self.board
        return {
            "target_language": self.language,
            "source_language": self.source,
            "chosen": board.chosen.to_dict(),
            "selected": (
                Condition("swap", zones=self.zones) if self.zones else board.selected
            ).to_dict(),
            "above": [str(condition) for condition in board.above],
            "chosen_on": {"split": "development", "questions": DEVELOPMENT_QUESTIONS},
            "composition": board.best.composition.to_dict(),
            "grid": [
                {**condition.to_dict(), "task_target": v}
                for condition, v in board.development.items()
            ],
            **{measure: test.records() for measure, test in self.tests.items()},
            "seconds": round(self.seconds, 1),
            "layerswap_version": __version__,
            "made_with": versions(*LIBRARIES),
        }


def run(
    out: str | os.PathLike[str],
    *,
    language: str | None = None,
    overwrite: bool = False,
    log: Log,
    progress: Bars,
) -> tuple[Path, Outcome]:
    """Evaluate compositions of the lab's experts and baselines, merge one, test all, and report.

    The development split decides which model is merged. The test split is for the report.
    Writes `results.json`, `report.html` and `merged/` into `out`.
    """
    target = Path(out).expanduser().absolute()
    lab = shipped()
    language = lab.scarce(language)
    start = lab_plan(lab, language)
    with atomic_folder(target, marker=RESULTS, overwrite=overwrite) as folder:
        began = time.monotonic()
        total = DEVELOPMENT_QUESTIONS + len(MEASURES) * TEST_QUESTIONS
        with progress("trying compositions", total, "questions") as advance:
            board = _swept(lab, language, start, advance)
        log(f"The model selected on development problems in {language}:")
        for line in f"\n{board.best}\n".splitlines():
            log(line)
        board.best.save(folder / MERGED)
        experts = {
            "task expert": lab.task_experts[0],
            "language expert": lab.language_experts[language][0],
        }
        change = measure_delta(lab.base, experts)
        outcome = Outcome(board, language, lab.source, change, time.monotonic() - began)
        write_json(folder / RESULTS, outcome.results())
        write_above(board, folder)
        write_report(folder / REPORT, quickstart_report(outcome, target))
    return target, outcome


def _swept(lab: Lab, language: str, start: Plan, advance: Advance) -> SweepResult:
    """Sweep the grid. The joint model's answers were recorded when the lab was built."""
    grid = Grid(bottom=[*BOTTOMS], top=[*TOPS])
    candidates = grid_plans(grid, start, lambda line: None)
    others = contenders(start, densities=DENSITIES)
    documents = LabQuestions(lab, language, {**others, **candidates})
    documents.advance = advance
    return run_experiment(documents, candidates, others, recorded=documents.recorded(JOINT))


def lab_plan(lab: Lab, language: str, pair: int = 0) -> Plan:
    """Plan the default swap of a pair of the lab's experts, with their base."""
    experts = {"task": str(lab.task_experts[pair]),
               "language": str(lab.language_experts[language][pair])}  # fmt: skip
    recipe = {"base": str(lab.base), "experts": experts, "swap": {}}
    return make_plan(check_recipe(recipe, where="lab"))


def quickstart_report(outcome: Outcome, folder: Path | None = None) -> Report:
    """Write a quickstart's report; only the joint model's numbers are from another run.

    `folder` is that of the quickstart, for its commands.
    """
    experts = {"task": f"{outcome.source} task expert",
               "language": f"{outcome.language} language expert"}  # fmt: skip
    libraries = ", ".join(f"{name} {number}" for name, number in versions(*LIBRARIES).items())
    board = outcome.board
    best, alone = (board.intervals[model].mean for model in (board.selected, TASK_EXPERT))
    name = "A swap" if outcome.zones else f"The {board.selected}"
    return Report(
        title=f"{name} answers {best:.1%} of {outcome.language} problems; the task expert "
        f"{alone:.1%}",
        lead=_lead(outcome, folder),
        figure=draw_stack(board.best.composition, experts),
        sections=[
            Section(
                "The models, four measures each",
                "Share of right answers, decoded greedily, with 95% bootstrap intervals.",
                table=measures_table(outcome),
            ),
            *result_sections(board),
            change_section(outcome.change, "What fine-tuning changed"),
            _limits(outcome),
            _models(outcome),
            Section(
                "Next",
                "Move the boundary and ask models on a page, check that a model loads and stops, "
                "and let speakers compare answers. Replace the words in capitals.",
                command_lines(uses((folder or Path()) / MERGED, [], gguf=False)),
            ),
        ],
        colophon=f"layerswap {__version__} with {libraries}: {outcome.seconds:.0f} seconds on this "
        "machine.",
    )


def measures_table(outcome: Outcome) -> Table:
    """All models on the test split, by measure."""

    def name(measure: LabMeasure) -> str:
        skill, spoken = _skill_and_language(outcome.source, outcome.language, measure)
        return f"{'problems' if skill == 'problem' else skill}, {spoken}"

    return models_table(
        {name(measure): test.intervals for measure, test in outcome.tests.items()},
        selected=outcome.board.selected,
        caption=f"% right of {outcome.board.intervals[CHOSEN].n:,} test questions each, with 95% "
        "bootstrap intervals; >: selected",
    )


def _lead(outcome: Outcome, folder: Path | None) -> str:
    scores = outcome.board.intervals
    experts = (
        f"The task expert has learned word problems in {outcome.source} only, the language expert "
        f"generic {outcome.language} only (both languages are invented). "
        f"The language expert alone answers {scores[LANGUAGE_EXPERT].mean:.1%}, their soup "
        f"{scores[SOUP].mean:.1%}. "
        f"{str(JOINT).capitalize()} (one model on both data sets, for as many steps as both "
        f"experts) answers {scores[JOINT].mean:.1%}, as recorded when the lab was built."
    )
    return "\n\n".join(sweep_opening(outcome.board, folder, experts))


def _models(outcome: Outcome) -> Section:
    zones, command = outcome.zones, "layerswap lab models --out lab"
    experts = ("--task-expert lab/task-1", f"--language-expert lab/language-{outcome.language}-1")
    if zones is not None:
        command += (
            f" && layerswap merge {' '.join(experts)} --bottom {zones.bottom} --top {zones.top} "
            "--outside blend --out merged"
        )
    text = (
        "The selected model is in merged, beside this page. This command writes the lab's models "
        f"into lab{', and composes them' if zones else ''}:"
    )
    return Section("Models", text, command)


def _limits(outcome: Outcome) -> Section:
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
