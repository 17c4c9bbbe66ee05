"""Labs on disk: the one that ships with the package, and those that `research/lab` builds."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder
from layerswap.ground.errors import RecipeError
from layerswap.lab.questions import ASSETS, write_tasks

LAB_RECORD, TASKS = "record.json", "tasks"


@dataclass(frozen=True)
class Lab:
    """A lab on disk."""

    base: Path
    task_experts: tuple[Path, ...]  # one folder per seed
    language_experts: dict[str, tuple[Path, ...]]  # per scarce language, one folder per seed
    # Settings, seeds and versions of the build, and every model's development scores.
    record: dict[str, Any]
    source: str  # the language of the task expert's data
    languages: tuple[str, ...]  # the scarce languages, nearest to the source language first

    def scarce(self, language: str | None) -> str:
        """Check a scarce language; return the farthest from the source language when None."""
        if language is None:
            return self.languages[-1]
        if language not in self.languages:
            raise RecipeError(
                f"no target language {language!r} in the lab; it has {', '.join(self.languages)}"
            )
        return language


def shipped() -> Lab:
    """Open the lab inside the package."""
    return open_lab(ASSETS)


def open_lab(folder: Path) -> Lab:
    """Open a lab that `research/lab` built, or a copy of the shipped one."""
    record = read_record(folder)
    names = models_of(folder)
    languages = tuple(record["models"]["base"]["development"])
    spoken = record["settings"]["languages"]
    return Lab(
        base=folder / "base",
        task_experts=tuple(folder / name for name in names if name.startswith("task-")),
        language_experts={
            language: tuple(folder / n for n in names if n.startswith(f"language-{language}-"))
            for language in languages
        },
        record=record,
        source=next(one["name"] for one in spoken if one["coverage"] == "source"),
        languages=languages,
    )


def copy_models(out: Path, *, overwrite: bool = False) -> list[str]:
    """Copy the shipped models, each into a folder of its own in `out`; return their names.

    The test questions are lm-eval tasks in the folder `tasks` beside them.
    """
    names, target = models_of(ASSETS), out.expanduser().absolute()
    with atomic_folder(target, marker=LAB_RECORD, overwrite=overwrite) as folder:
        for name in names:
            shutil.copytree(ASSETS / name, folder / name)
        shutil.copy(ASSETS / LAB_RECORD, folder)
        write_tasks(folder / TASKS, at=target / TASKS)
    return names


def models_of(folder: Path) -> list[str]:
    """List the models of a lab; the package has the first expert of each kind alone."""
    return [name for name in read_record(folder)["models"] if (folder / name).is_dir()]


def read_record(folder: Path) -> dict[str, Any]:
    """Read the record of a lab."""
    record: dict[str, Any] = json.loads((folder / LAB_RECORD).read_text("utf-8"))
    return record
