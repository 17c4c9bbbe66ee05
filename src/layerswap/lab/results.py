"""Results of a quickstart, in memory and in the files of its steps."""

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
from layerswap.search.conditions import CHOSEN, DEFAULT, Condition
from layerswap.search.protocol import TestResult, Values, choose, select
from layerswap.study.journal import StepRecord
from layerswap.versions import __version__

Answers = Mapping[LabMeasure, Mapping[Condition, Any]]
"""By measure and condition, 1 or 0 (right or wrong) per test question."""
Grid = Mapping[Condition, Values]
"""By composition, 1 or 0 (right or wrong) per development question."""


@dataclass(frozen=True)
class ShownProblem:
    """One test problem.

    Attributes:
        prompt: of the problem.
        answer: the right one.
        written: the text of every model, by the condition's name.
    """

    prompt: str
    answer: str
    written: Mapping[str, str]


@dataclass(frozen=True)
class Outcome:
    """All measurements of a quickstart.

    Attributes:
        language: the target language.
        source: the source language.
        grid: the compositions on the development split.
        composition: the selected composition, which is merged.
        answers: of every model on the test split.
        examples: the first test problems in the target language.
        change: of both experts from the base.
        entries: records of the steps that measured.
    """

    language: str
    source: str
    grid: Grid
    composition: Composition
    answers: Answers
    examples: Sequence[ShownProblem]
    change: Atlas
    entries: Sequence[StepRecord]

    @property
    def seconds(self) -> float:
        """Wall-clock time of the steps, s."""
        return sum(entry.seconds or 0 for entry in self.entries)

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
        """The share of right answers on the development split, by composition."""
        return {one: float(np.mean(right)) for one, right in self.grid.items()}

    @cached_property
    def tests(self) -> dict[LabMeasure, TestResult]:
        """Every measure on the test split."""
        selected = DEFAULT if self.selected == self.default else CHOSEN
        return {
            measure: TestResult(
                {one: np.array(row, dtype=np.float64) for one, row in rows.items()},
                self.chosen,
                selected=selected,
            )
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
        }


def default_of_grid(layers: int) -> Condition:
    """The default swap as a composition of a grid."""
    return Condition("swap", zones=default_zones(layers))


def selected_of_grid(grid: Grid, layers: int) -> Condition:
    """The composition of a grid that is merged; see `search.protocol.select`."""
    return select(grid, choose(grid), default_of_grid(layers))


def write_grid(path: Path, grid: Grid) -> None:
    """Write the right and wrong answers of every composition."""
    rows = [{**one.to_dict(), "right": _digits(right)} for one, right in grid.items()]
    path.write_text(json.dumps(rows) + "\n", "utf-8")


def read_grid(path: Path) -> Grid:
    """Read what `write_grid` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    rows = _read(path)
    return {Condition.from_dict(row): np.array(row["right"], dtype=np.float64) for row in rows}


def write_answers(path: Path, answers: Answers, shown: Sequence[ShownProblem]) -> None:
    """Write the right and wrong answers of every model, and the texts of some."""
    right = {
        measure: [{**one.to_dict(), "right": _digits(row)} for one, row in rows.items()]
        for measure, rows in answers.items()
    }
    data = {"answers": right, "shown": [asdict(one) for one in shown]}
    path.write_text(json.dumps(data) + "\n", "utf-8")


def read_answers(path: Path) -> tuple[Answers, list[ShownProblem]]:
    """Read what `write_answers` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    data = _read(path)
    answers: Answers = {
        measure: {Condition.from_dict(row): row["right"] for row in rows}
        for measure, rows in data["answers"].items()
    }
    return answers, [ShownProblem(**one) for one in data["shown"]]


def _digits(right: Any) -> list[int]:
    digits: list[int] = np.asarray(right).astype(int).tolist()
    return digits


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(
            f"{path}: cannot be read ({type(error).__name__}); start again with --overwrite"
        ) from None
