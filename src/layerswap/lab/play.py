"""The lab on the page of `layerswap play`: its experts and its problems."""

from __future__ import annotations

from layerswap.lab.assets import shipped
from layerswap.lab.quickstart import lab_plan
from layerswap.lab.scoring import NEW_TOKENS, questions
from layerswap.lab.tasks import LabSplit
from layerswap.merge import Plan
from layerswap.play.documents import Answered, Prompt

PROBLEMS = 200
"""Problems of each split."""
LENGTH = NEW_TOKENS
"""Longest answer, in tokens."""


def open_lab_pair(language: str | None = None) -> tuple[Plan, Answered]:
    """The default swap of the lab's first experts, and problems in the target language."""
    lab = shipped()
    target = lab.scarce(language)

    def problems(split: LabSplit) -> list[Prompt]:
        asked = questions("task_target", target, split, PROBLEMS, world=lab.world)
        return [Prompt(one.prompt, one.completion) for one in asked]

    splits = {"development": problems("development"), "test": problems("test")}
    return lab_plan(lab, target), Answered(f"problems in {target}", splits)  # type: ignore[arg-type]
