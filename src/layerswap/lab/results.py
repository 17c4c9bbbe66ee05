"""What a quickstart has measured, in memory and as its steps write it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerswap.compose import Composition, Zones
from layerswap.deltas.atlas import Atlas
from layerswap.errors import StudyError
from layerswap.evaluation.statistics import Interval, mean_interval, paired_difference
from layerswap.lab.contenders import Answers, Shown
from layerswap.lab.scoring import LabMeasure
from layerswap.study.journal import StepRecord
from layerswap.versions import __version__


@dataclass(frozen=True)
class Outcome:
    """Everything the quickstart measured.

    Attributes:
        language: the target language.
        source: the source language.
        questions: on the development split, that the composition was chosen by.
        grid: share of right answers on the development split, by zones.
        best: the zones with the largest share.
        default: the paper's zones, scaled to the lab's depth.
        composition: of the best zones.
        answers: per model and measure, right or wrong per test question.
        examples: the first test problems in the target language, with what each model wrote.
        change: what fine-tuning changed in both experts.
        entries: the steps that measured, with their keys and times.
    """

    language: str
    source: str
    questions: int
    grid: Mapping[Zones, float]
    best: Zones
    default: Zones
    composition: Composition
    answers: Mapping[str, Answers]
    examples: Sequence[Shown]
    change: Atlas
    entries: Sequence[StepRecord]

    @property
    def seconds(self) -> float:
        """How long the steps took, wall clock."""
        return sum(entry.seconds for entry in self.entries)

    def intervals(self) -> dict[str, dict[LabMeasure, Interval]]:
        """Mean and 95% bootstrap interval per model and measure."""
        return {
            model: {measure: mean_interval(right) for measure, right in answers.items()}
            for model, answers in self.answers.items()
        }

    def differences(self) -> dict[str, Interval]:
        """Paired difference of the best swap to every other model, on the target-language task."""
        best = self.answers["swap_best"]["task_target"]
        return {
            model: paired_difference(best, answers["task_target"])
            for model, answers in self.answers.items()
            if model != "swap_best"
        }

    def results(self) -> dict[str, Any]:
        """The content of `results.json`: the models' scores, and how they came about."""
        return {
            **{
                model: {measure: asdict(interval) for measure, interval in measures.items()}
                for model, measures in self.intervals().items()
            },
            "composition": {
                **asdict(self.best),
                "resolved": self.composition.to_dict(),
                "chosen_on": {"split": "development", "questions": self.questions},
            },
            "differences_of_swap_best": {
                model: asdict(interval) for model, interval in self.differences().items()
            },
            "grid": [{**asdict(zones), "task_target": share} for zones, share in self.grid.items()],
            "target_language": self.language,
            "source_language": self.source,
            "seconds": round(self.seconds, 1),
            "layerswap_version": __version__,
        }


def best_of(grid: Mapping[Zones, float]) -> Zones:
    """The zones with the largest share; of equals, those that depart least from the task expert."""
    return max(grid, key=lambda zones: (grid[zones], -zones.bottom - zones.top))


def write_grid(path: Path, grid: Mapping[Zones, float]) -> None:
    """Write shares by zones."""
    rows = [{"zones": asdict(zones), "share": share} for zones, share in grid.items()]
    path.write_text(json.dumps(rows) + "\n", "utf-8")


def read_grid(path: Path) -> dict[Zones, float]:
    """What `write_grid` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    return {Zones(**row["zones"]): row["share"] for row in _read(path)}


def write_answers(path: Path, answers: Mapping[str, Answers], shown: Sequence[Shown]) -> None:
    """Write what each model answered right, and what it wrote."""
    right = {
        model: {measure: row.astype(int).tolist() for measure, row in rows.items()}
        for model, rows in answers.items()
    }
    told = {"right": right, "shown": [asdict(one) for one in shown]}
    path.write_text(json.dumps(told) + "\n", "utf-8")


def read_answers(path: Path) -> tuple[dict[str, Answers], list[Shown]]:
    """What `write_answers` wrote.

    Raises:
        StudyError: the file cannot be read.
    """
    told = _read(path)
    answers: dict[str, Answers] = {
        model: {measure: np.array(row, dtype=bool) for measure, row in rows.items()}
        for model, rows in told["right"].items()
    }
    return answers, [Shown(**one) for one in told["shown"]]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StudyError(
            f"{path}: cannot be read ({type(error).__name__}); begin anew with --overwrite"
        ) from None
