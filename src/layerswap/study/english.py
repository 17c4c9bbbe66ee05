"""The step that evaluates the task experts in English: the score with a perfect translator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import check_askable
from layerswap.experiment.answers import ANSWERS_TABLE, write_answers
from layerswap.experiment.benchmarks import RESULTS
from layerswap.experiment.conditions import TASK_EXPERT, Condition
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Log
from layerswap.study.conditions import RecipeData
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.runner import Context

ENGLISH = "en"


class EnglishStep(EvaluateStep):
    """Evaluates the task experts on the benchmarks of the study, in English alone."""

    kind: ClassVar[str] = "english"
    version: ClassVar[int] = 1

    @property
    def suites(self) -> Iterator[tuple[list[str], list[str]]]:
        """The suite of the study, in English."""
        yield [str(self.evaluate.suite)], [ENGLISH]

    @property
    def development(self) -> None:
        """None: nothing is chosen in English."""
        return None

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Check nothing: without English documents the step writes no scores."""

    def recipes(self, inputs: Mapping[str, Path]) -> Iterator[tuple[Condition, RecipeData]]:
        """The task expert of every pair."""
        every = super().recipes(inputs)
        return ((name, recipe) for name, recipe in every if name.treatment == TASK_EXPERT)

    def run(self, context: Context) -> None:
        """Evaluate, if the benchmarks have English documents."""
        try:
            self._write_suite(str(self.evaluate.suite), [ENGLISH],
                              TaskFolder(context.folder / "tasks"), DataFolder.given(None),
                              context.log)  # fmt: skip
        except EvaluationError as error:
            context.log(f"no score in English: {error}")
            (context.folder / RESULTS).mkdir(exist_ok=True)
            write_answers(context.folder / RESULTS / ANSWERS_TABLE, [])
            return
        super().run(context)


def has_english(suite: str | None, languages: list[str]) -> bool:
    """True if a suite can be asked in English, and English is none of the study's languages."""
    if suite is None or ENGLISH in languages:
        return False
    try:
        check_askable(suite, ENGLISH)
    except EvaluationError:
        return False
    return True
