"""The lab that ships with the package: trained models, ready to be recomposed."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder
from layerswap.lab.build import LAB_RECORD, read_record, settings_of
from layerswap.lab.world import World, make_world


@dataclass(frozen=True)
class Lab:
    """A built lab on disk.

    Attributes:
        base: the checkpoint folder of the base.
        task_experts: one folder per seed.
        language_experts: per scarce language, one folder per seed.
        joint_models: per scarce language, the folder of one model trained on the data of both
            first experts.
        record: how the lab was made, and the development scores of every model.
        languages: the scarce languages, nearest to the source language first.
    """

    base: Path
    task_experts: tuple[Path, ...]
    language_experts: dict[str, tuple[Path, ...]]
    joint_models: dict[str, Path]
    record: dict[str, Any]
    languages: tuple[str, ...]

    @property
    def world(self) -> World:
        """The world that the models were trained in."""
        return make_world(settings_of(self.record))


def shipped() -> Lab:
    """The lab inside the package.

    Raises:
        RecipeError: the package was installed without its data.
    """
    return open_lab(Path(str(files("layerswap.lab") / "assets")))


def copy_models(out: Path, *, overwrite: bool = False) -> list[str]:
    """Copy the shipped models into a folder, each to one of its own.

    Args:
        out: the folder to create.
        overwrite: replace a folder that this wrote.

    Returns:
        The names of the models.

    Raises:
        MergeError: the folder exists, or cannot be written.
    """
    lab = shipped()
    with atomic_folder(
        out.expanduser().absolute(), marker=LAB_RECORD, overwrite=overwrite
    ) as folder:
        shutil.copytree(lab.base.parent, folder, dirs_exist_ok=True)
    return list(lab.record["models"])


def open_lab(folder: Path) -> Lab:
    """The lab that `build` wrote to a folder.

    Raises:
        RecipeError: there is no lab in the folder.
    """
    record = read_record(folder)
    names = list(record["models"])
    languages = tuple(record["models"]["base"]["development"])
    return Lab(
        base=folder / "base",
        task_experts=tuple(folder / name for name in names if name.startswith("task-")),
        language_experts={
            language: tuple(folder / n for n in names if n.startswith(f"language-{language}-"))
            for language in languages
        },
        joint_models={name: folder / f"joint-{name}" for name in languages},
        record=record,
        languages=languages,
    )
