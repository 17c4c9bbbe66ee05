"""Opens what a page can be started on: a study, tasks of lm-eval, and suites."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerswap.compose import Recipe, read_recipe
from layerswap.compose.recipe import check_recipe
from layerswap.errors import StudyError
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import write_suite
from layerswap.play.documents import Tasks
from layerswap.search.spec import SweepSettings
from layerswap.study.journal import read_journal
from layerswap.study.report import BEST
from layerswap.study.step_functions import recipes_of
from layerswap.versions import need_extras


def open_tasks(names: Sequence[str], include: Sequence[Path], **settings: Any) -> Tasks:
    """Tasks of lm-eval, by name."""
    need_extras("lm-eval tasks", "eval")
    folders = [str(path.absolute()) for path in include]
    return Tasks(SweepSettings(tasks=[*names], include=folders, **settings))


def open_suite(suite: str, language: str, *, shots: int | None = None) -> Tasks:
    """A suite or a benchmark in a language, as tasks in a temporary folder."""
    need_extras("a suite", "eval")
    folder = TaskFolder(Path(mkdtemp(prefix="layerswap-play-")))
    written = write_suite(suite, [language], folder, data=DataFolder.given(None), shots=shots,
                          needed=True, skip=lambda line: None)  # fmt: skip
    return open_tasks([task.name for task in written], [folder.root])


def open_study(root: Path, language: str | None) -> tuple[Recipe, Tasks]:
    """The selected composition of a study in a language, and the study's tasks.

    Until the study has selected one, the first swap of its first pair of experts.
    """
    journal = read_journal(root)
    steps = {step.settings["language"]: step for step in journal.graph if step.kind == "evaluate"}
    chosen = next(iter(steps), "") if language is None else language
    if chosen not in steps:
        raise StudyError(f"{root}: has no {chosen!r}; its languages are {', '.join(steps)}")
    settings, best = steps[chosen].settings, root / BEST / f"{chosen}.yaml"
    if best.is_file():
        recipe = read_recipe(best)
    else:
        inputs = {name: journal.bring(name) for name in steps[chosen].needs}
        swaps = (data for _, data in recipes_of(settings, inputs) if "swap" in data)
        recipe = check_recipe(next(swaps), where=f"{root}")
    asked = settings["evaluate"]
    if asked["suite"]:
        return recipe, open_suite(asked["suite"], chosen, shots=asked["num_fewshot"])
    names = [name.format(language=chosen) for name in asked["tasks"]]
    shared = {name: asked[name] for name in ("num_fewshot", "limit", "apply_chat_template")
              if asked.get(name) is not None}  # fmt: skip
    return recipe, open_tasks(names, [Path(one) for one in asked["include"]], **shared)
