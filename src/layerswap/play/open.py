"""Opens the sources of a page: a study, a suite, and files of prompts."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from layerswap.compose import Recipe
from layerswap.evaluation.examples import read_examples
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder
from layerswap.evaluation.suites.suites import write_suite
from layerswap.experiment.documents import Prompt, Tasks
from layerswap.study.report import selected_recipe
from layerswap.versions import need_extras


def open_suite(suite: str, language: str, **settings: Any) -> Tasks:
    """A suite or a benchmark in a language, as tasks in a temporary folder."""
    need_extras("a suite", "eval")
    folder = TaskFolder(Path(mkdtemp(prefix="layerswap-play-")))
    written = write_suite(suite, [language], folder, data=DataFolder.given(None),
                          shots=settings.get("num_fewshot"), needed=True,
                          skip=lambda line: None)  # fmt: skip
    return Tasks([task.name for task in written], [folder.root], **settings)


def open_study(root: Path, language: str | None) -> tuple[Recipe, Tasks]:
    """The selected composition of a study in a language, and the study's tasks."""
    recipe, chosen, asked = selected_recipe(root, language)
    shared = {
        name: given for name in ("num_fewshot", "limit", "apply_chat_template")
        if (given := getattr(asked, name)) is not None
    }  # fmt: skip
    if asked.suite:
        return recipe, open_suite(asked.suite, chosen, **shared)
    names = [name.format(language=chosen) for name in asked.tasks]
    return recipe, Tasks(names, [Path(folder) for folder in asked.include], **shared)


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file: JSON Lines of `prompt` and `answer` or of `text`, or plain lines."""
    return [(example.prompt, example.text) if example.prompt else (example.text, None)
            for example in read_examples(path)]  # fmt: skip
