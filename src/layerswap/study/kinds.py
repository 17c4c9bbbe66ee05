"""The kinds of step of a study, by the name that a planned step has."""

from __future__ import annotations

from collections.abc import Mapping

from layerswap.study.english import EnglishStep, TranslatedStep
from layerswap.study.evaluating import ChangeStep, EvaluateStep, TablesStep
from layerswap.study.finishing import FinishedStep, FinishStep
from layerswap.study.kind import Kind
from layerswap.study.mixes import DataStep
from layerswap.study.runner import Context, StepFunction
from layerswap.study.steps import Step
from layerswap.study.trainings import SelectStep, TrainStep
from layerswap.study.vectors import VectorsStep

KINDS: Mapping[str, type[Kind]] = {
    step.kind: step
    for step in (
        DataStep,
        TrainStep,
        SelectStep,
        ChangeStep,
        EvaluateStep,
        EnglishStep,
        TranslatedStep,
        VectorsStep,
        FinishStep,
        FinishedStep,
        TablesStep,
    )
}


def kind_of(step: Step) -> Kind:
    """The settings of a step, which check and run it.

    Raises:
        StudyError: the step is of another version of layerswap, or damaged.
    """
    return KINDS[step.kind].of(step)


def run_study_step(context: Context) -> None:
    """Run a step of any kind."""
    kind_of(context.step).run(context)


def step_functions() -> Mapping[str, StepFunction]:
    """The function of each kind of step."""
    return dict.fromkeys(KINDS, run_study_step)
