"""The schema of `SWEEP.yaml`: compositions to try, tasks to try them on, and how to choose."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from layerswap.compose.presets import Outside, Zones
from layerswap.compose.recipe import Recipe, check_recipe, read_recipe
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.ground.errors import RecipeError
from layerswap.ground.strict import Strict
from layerswap.ground.types import listed
from layerswap.ground.yaml_file import read_yaml

RANGE = re.compile(r"(\d{1,3})-(\d{1,3})", re.ASCII)


def _read_sizes(value: object) -> object:
    """Read a number, a list of numbers, or a range such as `0-8`, as a list."""
    if type(value) is int:
        return [value]
    match = RANGE.fullmatch(value) if isinstance(value, str) else None
    if match and int(match[1]) > int(match[2]):
        raise ValueError(f"the range {value} runs backwards; write {match[2]}-{match[1]}")
    return list(range(int(match[1]), int(match[2]) + 1)) if match else value


Sizes = Annotated[
    list[Annotated[int, Field(ge=0)]], BeforeValidator(_read_sizes), Field(min_length=1)
]
Outsides = Annotated[list[Outside], BeforeValidator(listed), Field(min_length=1)]


class Grid(Strict):
    """Zone sizes to try, every combination that fits; see `compose.presets.zone_grid`."""

    bottom: Sizes  # layers from the language expert at the input
    top: Sizes  # layers from the language expert at the output
    bottom_transition: Sizes = [0]  # blended layers above the bottom zone
    top_transition: Sizes = [0]  # blended layers below the top zone
    # Sources of the places outside the layers; the recipe's own when not given.
    outside: Outsides | None = None

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes by the names that `zone_grid` takes."""
        return {size.name: getattr(self, size.name) for size in fields(Zones)}


class ChooseBy(Strict):
    """The score that the best composition is chosen by; the tasks' first score by default."""

    task: str | None = None
    metric: str | None = None
    filter: str | None = None


class SweepSettings(EvaluationSettings):
    """How compositions are scored and one of them is chosen.

    `limit` is the largest number of documents of a task, both splits together.
    """

    choose_by: ChooseBy = ChooseBy()
    english: str | None = None  # the same task in English, which the task expert is asked
    ties: list[Annotated[float, Field(gt=0, le=1)]] = []  # densities to compare with; need the base
    # Share of each task's documents that compositions are chosen on; the others are for the report.
    development: Annotated[float, Field(gt=0, lt=1)] = 0.5
    seed: Annotated[int, Field(ge=0)] = 0  # of the split
    device: str = "cpu"

    @model_validator(mode="after")
    def _can_be_swept(self) -> Self:
        if not self.tasks:
            raise ValueError("tasks: write at least one")
        if self.engine != "sweep":
            raise ValueError("engine: a sweep has the engine `sweep`; leave it out")
        return self


class SweepSpec(SweepSettings):
    """A whole sweep."""

    recipe: str | dict[str, Any]  # a swap, as a recipe file or inline
    grid: Grid  # the compositions to try


def read_sweep(path: Path) -> tuple[SweepSpec, Recipe]:
    """The sweep in a YAML file, and its recipe; paths in it are relative to the file."""
    spec = read_yaml(path, SweepSpec, "a sweep is a mapping with `recipe`, `grid` and `tasks`")
    folder = path.parent
    recipe = (
        read_recipe(folder / spec.recipe)
        if isinstance(spec.recipe, str)
        else check_recipe(spec.recipe, where=f"{path}, recipe")
    )
    if recipe.swap is None:
        raise RecipeError(f"{path}: recipe: a sweep needs a recipe with `swap`")
    for name in spec.include:
        if not (folder / name).is_dir():
            raise RecipeError(f"{path}: include: {folder / name}: no such folder")
    located = [str(folder / name) for name in spec.include]
    return spec.model_copy(update={"include": located}), recipe
