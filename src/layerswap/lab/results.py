"""Results of a quickstart, in memory and as its steps write them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from layerswap.compose import Composition, default_zones
from layerswap.deltas.atlas import Atlas
from layerswap.errors import StudyError
from layerswap.lab.scoring import LabMeasure
from layerswap.search.conditions import Condition
from layerswap.search.protocol import TestResult, choose
from layerswap.study.journal import StepRecord
from layerswap.versions import __version__

Answers = Mapping[LabMeasure, Mapping[Condition, Any]]
"""By measure and condition, 1 or 0 (right or wrong) per test question."""


@dataclass(frozen=True)
class ShownProblem:
    """One test problem.

    Attributes:
        prompt: as the models read it.
        answer: the right one.
        written: by the condition's name, what the model wrote.
    """

    prompt: str
    answer: str
    written: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """Everything the quickstart measured.

    Attributes:
        language: the target language.
        source: the source language.
        questions: on the development split, that the composition was chosen by.
        grid: share of right answers on the development split, by composition.
        composition: the chosen one.
        answers: of every model on the test split.
        examples: the first test problems in the target language, with what each model wrote.
        change: what fine-tuning changed in both experts.
        entries: the steps that measured, with their keys and times.
    """

    language: str
    source: str
    questions: int
    grid: Mapping[Condition, float]
    composition: Composition
    answers: Answers
    examples: Sequence[ShownProblem]
    change: Atlas
    entries: Sequence[StepRecord]

    @property
    def seconds(self) -> float:
        """How long the steps took, wall clock."""
        return sum(entry.seconds for entry in self.entries)

    @cached_property
    def chosen(self) -> Condition:
        """The composition of the grid with the largest share."""
        return choose(self.grid)

    @property
    def default(self) -> Condition:
        """The paper's zones, scaled to the lab's depth."""
        return Condition("swap", zones=default_zones(self.composition.layers))

    @cached_property
    def tests(self) -> dict[LabMeasure, TestResult]:
        """Every measure on the test split."""
        return {
            measure: TestResult({one: np.array(row, dtype=np.float64) for one, row in rows.items()},
                                self.chosen)
            for measure, rows in self.answers.items()
        }  # fmt: skip

    @property
    def task(self) -> TestResult:
        """The task in the target language: what the composition is for."""
        return self.tests["task_target"]

    def results(self) -> dict[str, Any]:
        """The content of `results.json`: the models' scores, and how they came about."""
        return {
            "target_language": self.language,
            "source_language": self.source,
            "chosen": self.chosen.to_dict(),
            "chosen_on": {"split": "development", "questions": self.questions},
            "composition": self.composition.to_dict(),
            "grid": [{**one.to_dict(), "task_target": v} for one, v in self.grid.items()],
            **{measure: test.to_dict()["test"] for measure, test in self.tests.items()},
            "seconds": round(self.seconds, 1),
            "layerswap_version": __version__,
        }


def write_grid(path: Path, grid: Mapping[Condition, float]) -> None:
    """Write shares by composition."""
    rows = [{**one.to_dict(), "share": share} for one, share in grid.items()]
    path.write_text(json.dumps(rows) + "\n", "utf-8")


def read_grid(path: Path) -> dict[Condition, float]:
    """What `write_grid` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    return {Condition.from_dict(row): row["share"] for row in _read(path)}


def write_answers(path: Path, answers: Answers, shown: Sequence[ShownProblem]) -> None:
    """Write what each model answered right, and what it wrote."""
    right = {
        measure: [{**one.to_dict(), "right": np.asarray(row).astype(int).tolist()}
                  for one, row in rows.items()]
        for measure, rows in answers.items()
    }  # fmt: skip
    data = {"answers": right, "shown": [asdict(one) for one in shown]}
    path.write_text(json.dumps(data) + "\n", "utf-8")


def read_answers(path: Path) -> tuple[Answers, list[ShownProblem]]:
    """What `write_answers` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    data = _read(path)
    answers: Answers = {
        measure: {Condition.from_dict(row): row["right"] for row in rows}
        for measure, rows in data["answers"].items()
    }
    return answers, [ShownProblem(**one) for one in data["shown"]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(
            f"{path}: cannot be read ({type(error).__name__}); start again with --overwrite"
        ) from None
