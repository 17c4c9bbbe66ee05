"""`SWEEP.yaml`: which compositions to try, on which tasks, and how to choose."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveInt, ValidationError, field_validator

from layerswap.compose.explain import explain
from layerswap.compose.recipe import Recipe, check_recipe, read_recipe
from layerswap.compose.schema import DTYPES, Strict
from layerswap.compose.yaml_file import KeyPath, parse_yaml
from layerswap.errors import RecipeError

RANGE = re.compile(r"(\d{1,3})-(\d{1,3})", re.ASCII)


def _read_sizes(value: object) -> object:
    """A number, a list of numbers, or a range such as `0-8`, as a list."""
    if type(value) is int:
        return [value]
    found = RANGE.fullmatch(value) if isinstance(value, str) else None
    if found:
        return list(range(int(found[1]), int(found[2]) + 1))
    return value


Sizes = Annotated[
    list[Annotated[int, Field(ge=0)]], BeforeValidator(_read_sizes), Field(min_length=1)
]


class Grid(Strict):
    """Zone sizes to try, every combination that fits; see `compose.presets.zone_grid`."""

    bottom: Sizes
    top: Sizes
    bottom_transition: Sizes = [0]
    top_transition: Sizes = [0]


class Choice(Strict):
    """What the best composition is chosen by; the first of what the tasks give by default."""

    task: str | None = None
    metric: str | None = None
    filter: str | None = None


class SweepSpec(Strict):
    """A whole sweep.

    Attributes:
        recipe: a swap, as a recipe file or inline.
        grid: the compositions to try.
        tasks: lm-eval tasks by name.
        include: folders with task YAMLs of one's own.
        choose_by: what the best composition is chosen by.
        development: share of each task's documents that compositions are chosen on; the others
            are for the report.
        limit: most documents of a task, both splits together.
        num_fewshot: examples in a prompt; the task's own number when not given.
        batch_size: rows that the model reads together.
        seed: of the split.
        device: where the models run.
        dtype: of the models; as stored when not given.
    """

    recipe: str | dict[str, Any]
    grid: Grid
    tasks: Annotated[list[str], Field(min_length=1)]
    include: list[str] = []
    choose_by: Choice = Choice()
    development: Annotated[float, Field(gt=0, lt=1)] = 0.5
    limit: PositiveInt | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    batch_size: PositiveInt = 16
    seed: int = 0
    device: str = "cpu"
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]

    @field_validator("tasks")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"task {twice!r} is there twice")
        return names


def read_sweep(path: Path) -> tuple[SweepSpec, Recipe]:
    """The sweep in a YAML file, and its recipe; paths in it are relative to the file.

    Raises:
        RecipeError: the file cannot be read, or what is wrong in it, each on a line with its key
            path; or the recipe is no swap.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError(f"{path}: cannot be read ({reason})") from None
    data, lines = parse_yaml(text, str(path))
    if not isinstance(data, dict):
        raise RecipeError(f"{path}: a sweep is a mapping with `recipe`, `grid` and `tasks`")
    try:
        spec = SweepSpec.model_validate(data)
    except ValidationError as error:
        raise RecipeError(explain(error, str(path), lines, _keys_at)) from None
    folder = path.parent
    recipe = (
        read_recipe(folder / spec.recipe)
        if isinstance(spec.recipe, str)
        else check_recipe(spec.recipe, where=f"{path}, recipe")
    )
    if recipe.swap is None:
        raise RecipeError(f"{path}: recipe: a grid of zones needs a swap")
    include = [str(folder / name) for name in spec.include]
    missing = next((name for name in include if not Path(name).is_dir()), None)
    if missing is not None:
        raise RecipeError(f"{path}: include: {missing}: no such folder")
    return spec.model_copy(update={"include": include}), recipe


def _keys_at(path: KeyPath) -> list[str]:
    models: dict[str, type[Strict]] = {"grid": Grid, "choose_by": Choice}
    model = models.get(str(path[0])) if path else SweepSpec
    return list(model.model_fields) if model else []
