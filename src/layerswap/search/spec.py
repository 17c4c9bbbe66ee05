"""The schema of `SWEEP.yaml`: compositions to try, tasks to try them on, and how to choose."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveInt,
    field_validator,
    model_validator,
)

from layerswap._types import EngineName
from layerswap.compose.presets import Outside, Zones
from layerswap.compose.recipe import Recipe, check_recipe, read_recipe
from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import read_yaml
from layerswap.errors import RecipeError
from layerswap.evaluation.settings import EvaluationSettings

ZONE_SIZES = tuple(field.name for field in fields(Zones))
RANGE = re.compile(r"(\d{1,3})-(\d{1,3})", re.ASCII)


def _read_sizes(value: object) -> object:
    """A number, a list of numbers, or a range such as `0-8`, as a list."""
    if type(value) is int:
        return [value]
    found = RANGE.fullmatch(value) if isinstance(value, str) else None
    if found:
        return list(range(int(found[1]), int(found[2]) + 1))
    return value


def _read_one(value: object) -> object:
    """One name as a list of one."""
    return [value] if isinstance(value, str) else value


Sizes = Annotated[
    list[Annotated[int, Field(ge=0)]], BeforeValidator(_read_sizes), Field(min_length=1)
]


class Grid(Strict):
    """Zone sizes to try, every combination that fits; see `compose.presets.zone_grid`.

    Attributes:
        bottom: layers from the language expert at the input.
        top: layers from the language expert at the output.
        bottom_transition: blended layers above the bottom zone.
        top_transition: blended layers below the top zone.
        outside: what the places outside the layers may take; the recipe's own when not given.
    """

    bottom: Sizes
    top: Sizes
    bottom_transition: Sizes = [0]
    top_transition: Sizes = [0]
    outside: Annotated[list[Outside], BeforeValidator(_read_one), Field(min_length=1)] | None = None

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The sizes by the names that `zone_grid` takes."""
        return {name: getattr(self, name) for name in ZONE_SIZES}


class Choice(Strict):
    """What the best composition is chosen by; the first of what the tasks give by default."""

    task: str | None = None
    metric: str | None = None
    filter: str | None = None


class Halving(Strict):
    """Dropping compositions that cannot win any more; see `search.grid`.

    Attributes:
        first: documents of the first round; every further round doubles them.
        error: the probability, at most, that the truly best composition is dropped.
    """

    first: Annotated[int, Field(ge=2)] = 50
    error: Annotated[float, Field(gt=0, lt=1)] = 0.05


class ItemResponse(Strict):
    """Estimating most compositions from a few documents; see `search.item_response`.

    Attributes:
        calibration: compositions that are scored on all documents first.
        documents: those that the others are scored on.
        finalists: compositions with the highest estimates, which are scored on all documents.
    """

    calibration: Annotated[int, Field(ge=2)] = 6
    documents: PositiveInt = 40
    finalists: PositiveInt = 3


SIGNALS = ("agreement", "consensus", "confidence", "self_consistency", "fluency", "closeness",
           "tasks")  # fmt: skip
Signal = Literal["agreement", "consensus", "confidence", "self_consistency", "fluency",
                 "closeness", "tasks"]  # fmt: skip


class WithoutLabels(Strict):
    """Choosing where nothing in the target language is labelled; see `search.unlabelled`.

    Attributes:
        by: a signal, or several whose ranks are averaged. By default the one that did best on the
            lab among those that the files below allow.
        prompts: a file of target-language prompts, as the task asks them.
        parallel: a file with the same prompts in the source language, line by line.
        text: a file of plain target-language text.
        answer: a regular expression; its last match in what was written is the answer. All that
            was written, without blanks around it, when not given.
        max_new_tokens: most tokens of an answer.
        stop: strings that end an answer.
    """

    by: Annotated[list[Signal], BeforeValidator(_read_one), Field(min_length=1)] | None = None
    prompts: str | None = None
    parallel: str | None = None
    text: str | None = None
    answer: str | None = None
    max_new_tokens: PositiveInt = 64
    stop: list[str] = []

    @field_validator("answer")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        try:
            re.compile(pattern or "")
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from None
        return pattern

    @model_validator(mode="after")
    def _has_files(self) -> WithoutLabels:
        if self.by is None and not (self.prompts or self.text):
            raise ValueError("give prompts (with their parallel) or text to choose by")
        for signal in self.by or ():
            lacking = next((file for file in NEEDS[signal] if getattr(self, file) is None), None)
            if lacking is not None:
                raise ValueError(f"{signal} needs `{lacking}`")
        return self


NEEDS: dict[str, tuple[str, ...]] = {
    "agreement": ("prompts", "parallel"),
    "consensus": ("prompts",),
    "confidence": ("prompts",),
    "self_consistency": ("prompts",),
    "fluency": ("text",),
    "closeness": ("prompts", "parallel"),
    "tasks": (),
}
"""The files that a signal reads."""


class SearchSpec(Strict):
    """A search beyond the grid of zones; see `search.tpe`.

    Attributes:
        each: whether every layer chooses, or attention and mlp of every layer apart.
        take: what there is to choose from: names of the recipe's experts, or numbers, the share of
            the language expert in a blend of the two.
        outside: what the places outside the layers may take.
        trials: compositions to try.
        batch: compositions that are proposed and evaluated together.
        seed: of the proposals.
    """

    each: Literal["layer", "layer_and_role"] = "layer"
    take: Annotated[list[str | float | int], Field(min_length=2)] = ["task", "language"]
    outside: Annotated[list[Outside], BeforeValidator(_read_one), Field(min_length=1)] = ["blend"]
    trials: PositiveInt = 100
    batch: PositiveInt = 16
    seed: int = 0

    @field_validator("take")
    @classmethod
    def _shares(cls, values: list[str | float | int]) -> list[str | float | int]:
        for value in values:
            if not isinstance(value, str) and not 0 <= value <= 1:
                raise ValueError(f"{value} is no share of the language expert in 0..1")
        if len(set(map(str, values))) < len(values):
            raise ValueError("something is there twice")
        return values


class SweepSettings(EvaluationSettings):
    """How compositions are scored and one of them is chosen.

    Attributes:
        tasks: lm-eval tasks by name.
        include: folders with further task YAMLs.
        choose_by: what the best composition is chosen by.
        without_labels: choose by signals that need no labels; the tasks are only reported.
        halving: let compositions of a grid that cannot win any more stop early.
        item_response: estimate most compositions from a few informative documents.
        ties: densities of TIES to compare with, which needs the recipe's base.
        development: share of each task's documents that compositions are chosen on; the others
            are for the report.
        limit: most documents of a task, both splits together.
        limit_order: documents within the limit: drawn at `random`, or the `first` ones, which
            lm-eval's own limit takes.
        answer_language: the language that answers should be in; its share of the letters that a
            composition writes is reported beside the score, with the compositions that no other
            beats in both.
        seed: of the split.
    """

    tasks: list[str] = []
    include: list[str] = []
    choose_by: Choice = Choice()
    without_labels: WithoutLabels | None = None
    halving: Halving | None = None
    item_response: ItemResponse | None = None
    ties: list[Annotated[float, Field(gt=0, le=1)]] = []
    development: Annotated[float, Field(gt=0, lt=1)] = 0.5
    limit_order: Literal["random", "first"] = "random"
    answer_language: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    device: str = "cpu"
    engine: EngineName = "sweep"

    @model_validator(mode="after")
    def _has_tasks(self) -> SweepSettings:
        signals = self.without_labels
        if not self.tasks and (signals is None or "tasks" in (signals.by or ())):
            raise ValueError("tasks: name at least one")
        if self.engine == "vllm" and signals:
            raise ValueError("without_labels reads logits and states: it needs the engine sweep")
        if (self.halving or self.item_response) and signals:
            name = "halving" if self.halving else "item_response"
            raise ValueError(f"{name} is for what is chosen by tasks")
        if self.halving and self.item_response:
            raise ValueError("give halving or item_response, not both")
        return self

    @field_validator("tasks")
    @classmethod
    def _once(cls, names: list[str]) -> list[str]:
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"task {twice!r} is there twice")
        return names


class SweepSpec(SweepSettings):
    """A whole sweep.

    Attributes:
        recipe: a swap, as a recipe file or inline.
        grid: the compositions to try.
        search: instead of a grid, a search.
    """

    recipe: str | dict[str, Any]
    grid: Grid | None = None
    search: SearchSpec | None = None

    @model_validator(mode="after")
    def _grid_or_search(self) -> SweepSpec:
        if (self.grid is None) == (self.search is None):
            raise ValueError("give either a grid or a search")
        if self.halving and self.search:
            raise ValueError("halving is for a grid; a search takes item_response")
        return self


def read_sweep(path: Path) -> tuple[SweepSpec, Recipe]:
    """The sweep in a YAML file, and its recipe; paths in it are relative to the file.

    Raises:
        RecipeError: the file cannot be read, or what is wrong in it, each on a line with its key
            path; or the recipe is no swap, or lacks an expert that a search takes.
    """
    spec = read_yaml(path, SweepSpec, "a sweep is a mapping with `recipe`, `grid` and `tasks`")
    folder = path.parent
    recipe = (
        read_recipe(folder / spec.recipe)
        if isinstance(spec.recipe, str)
        else check_recipe(spec.recipe, where=f"{path}, recipe")
    )
    if recipe.swap is None:
        raise RecipeError(f"{path}: recipe: a grid of zones needs a swap")
    known = [*recipe.experts, *(["base"] if recipe.base else [])]
    take = spec.search.take if spec.search else []
    unknown = next((one for one in take if isinstance(one, str) and one not in known), None)
    if unknown is not None:
        raise RecipeError(
            f"{path}: search.take: no expert {unknown!r} in the recipe; it has {', '.join(known)}"
        )
    include = [str(folder / name) for name in spec.include]
    missing = next((name for name in include if not Path(name).is_dir()), None)
    if missing is not None:
        raise RecipeError(f"{path}: include: {missing}: no such folder")
    found = {"include": include, "without_labels": _with_paths(spec.without_labels, path)}
    return spec.model_copy(update=found), recipe


def _with_paths(signals: WithoutLabels | None, path: Path) -> WithoutLabels | None:
    """The same with its files relative to the sweep's file.

    Raises:
        RecipeError: a file is not there.
    """
    if signals is None:
        return None
    files = {}
    for key in ("prompts", "parallel", "text"):
        name = getattr(signals, key)
        if name is not None:
            files[key] = str(path.parent / name)
            if not Path(files[key]).is_file():
                raise RecipeError(f"{path}: without_labels.{key}: {files[key]}: no such file")
    return signals.model_copy(update=files)
