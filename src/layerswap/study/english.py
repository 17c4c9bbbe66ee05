"""The steps that evaluate the task experts on English documents: the benchmark's, or translations.

The score on parallel English documents is the score with a perfect translator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import check_askable
from layerswap.experiment.answers import ANSWERS_TABLE, write_answers
from layerswap.experiment.benchmarks import RESULTS
from layerswap.experiment.conditions import TASK_EXPERT, TRANSLATE_TEST, Condition
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Log
from layerswap.study.conditions import RecipeData
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.runner import Context

ENGLISH = "en"


class TaskExpertsStep(EvaluateStep):
    """Evaluates the task experts alone on a suite in one language; nothing is chosen."""

    version: ClassVar[int] = 1
    named: ClassVar[Condition] = TASK_EXPERT
    asked: ClassVar[str] = ""  # language of the benchmarks; that of the study when empty

    @property
    def suites(self) -> Iterator[tuple[list[str], list[str]]]:
        """The suite of the study, in one language."""
        yield [str(self.evaluate.suite)], [self.asked or self.language]

    @property
    def development(self) -> None:
        """None: nothing is chosen."""
        return None

    def recipes(self, inputs: Mapping[str, Path]) -> Iterator[tuple[Condition, RecipeData]]:
        """The task expert of every pair."""
        for name, recipe in super().recipes(inputs):
            if name.treatment == TASK_EXPERT:
                yield replace(self.named, pair=name.pair), recipe


class EnglishStep(TaskExpertsStep):
    """Evaluates the task experts on the benchmarks of the study, in English alone."""

    kind: ClassVar[str] = "english"
    asked: ClassVar[str] = ENGLISH

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Check nothing: without English documents the step writes no scores."""

    def run(self, context: Context) -> None:
        """Evaluate, if the benchmarks have English documents."""
        try:
            self._write_suite(str(self.evaluate.suite), [ENGLISH],
                              TaskFolder(context.folder / "tasks"), self._data(),
                              context.log)  # fmt: skip
        except EvaluationError as error:
            context.log(f"no score in English: {error}")
            (context.folder / RESULTS).mkdir(exist_ok=True)
            write_answers(context.folder / RESULTS / ANSWERS_TABLE, [])
            return
        super().run(context)


class TranslatedStep(TaskExpertsStep):
    """Evaluates the task experts on the test documents that a translator put into English."""

    kind: ClassVar[str] = "translated"
    named: ClassVar[Condition] = TRANSLATE_TEST
    translated: str  # file

    def check_data(self, name: str, *, fetch: bool, log: Log, seen: set[tuple[str, str]]) -> None:
        """Check the translations against the test documents."""
        super().check_data(name, fetch=fetch, log=log, seen=set())

    def _data(self, *, fetch: bool = True) -> DataFolder:
        return DataFolder.given(None, fetch=fetch, translated=self.translated)


def has_english(suite: str | None, languages: list[str]) -> bool:
    """True if a suite can be asked in English, and English is none of the study's languages."""
    if suite is None or ENGLISH in languages:
        return False
    try:
        check_askable(suite, ENGLISH)
    except EvaluationError:
        return False
    return True
