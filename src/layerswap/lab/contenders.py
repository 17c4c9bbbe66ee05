"""The models that the quickstart compares, and what they answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.compose.recipe import check_recipe
from layerswap.lab.assets import Lab
from layerswap.lab.scoring import MEASURES, LabMeasure, correct, load, questions, written
from layerswap.merge import Plan, make_plan, soup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from transformers import PreTrainedModel

Answers = dict[LabMeasure, "npt.NDArray[np.bool_]"]
SHOWN = 100
"""Test problems whose answers are in the report."""


@dataclass(frozen=True)
class Shown:
    """One test problem.

    Attributes:
        prompt: as the models read it.
        answer: the right one.
        written: per model, what it wrote.
    """

    prompt: str
    answer: str
    written: Mapping[str, str]


def in_memory(plan: Plan) -> PreTrainedModel:
    """The merged model in float32: float16 as stored is slow on a CPU."""
    model: Any = plan.load()
    return model.float()  # type: ignore[no-any-return]


def contenders(lab: Lab, language: str, plan: Plan, merged: Path) -> dict[str, Path | Plan]:
    """The models of the table: what exists, what souping gives, and what swapping gives."""
    task, expert = lab.task_experts[0], lab.language_experts[language][0]
    ties = {
        "base": str(lab.base),
        "experts": {"task": str(task), "language": str(expert)},
        "merge": {"method": "ties", "experts": ["task", "language"]},
    }
    return {
        "base": lab.base,
        "task_expert": task,
        "language_expert": expert,
        "soup": soup({"task": task, "language": expert}),
        "ties": make_plan(check_recipe(ties, where="quickstart")),
        "swap_default": plan,
        "swap_best": merged,
    }


def answer_all(
    models: Mapping[str, Path | Plan],
    lab: Lab,
    language: str,
    n: int,
    advance: Callable[[int], None],
) -> tuple[dict[str, Answers], list[Shown]]:
    """What every model answers right, and what it writes to the first problems.

    Args:
        models: by name; a plan is merged in memory.
        lab: whose questions.
        language: the scarce one.
        n: questions of each measure.
        advance: called after each measure of each model.
    """
    _, tokenizer = load(lab.base)
    asked = {
        measure: questions(measure, language, "test", n, world=lab.world) for measure in MEASURES
    }
    first = asked["task_target"][:SHOWN]
    answers: dict[str, Answers] = {}
    texts: dict[str, list[str]] = {}
    for name, contender in models.items():
        loaded = in_memory(contender) if isinstance(contender, Plan) else load(contender)[0]
        answers[name] = {}
        for measure in MEASURES:
            answers[name][measure] = correct(loaded, tokenizer, asked[measure])
            advance(1)
        texts[name] = written(loaded, tokenizer, first)
    shown = [
        Shown(one.prompt, one.completion.strip(), {name: texts[name][i] for name in texts})
        for i, one in enumerate(first)
    ]
    return answers, shown
