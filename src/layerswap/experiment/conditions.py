"""Conditions: the models that an experiment compares, and the grid of swaps that a sweep tries."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import Any

from layerswap.compose.presets import Zones, default_zones, zone_grid
from layerswap.experiment.spec import Grid
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Log
from layerswap.merge.plan import Plan

NAMES = {
    "ties": "TIES", "joint": "joint training", "simultaneous": "simultaneous training",
    "also finished": "finished",
    "translate-test": "task expert, on the translated test",
    "translate-train": "task expert, trained on the translated task",
}  # fmt: skip
"""Names that people read, of the methods whose name in files is another."""


@dataclass(frozen=True)
class Condition:
    """One of the models that are compared.

    Tables print a condition as text. Files store its fields (`to_dict`), and nothing parses the
    text.

    Example:
        str(Condition("swap", zones=Zones(5, 2)))  # swap 5,2,0,0
        str(Condition("ties", "density 0.2"))      # TIES, density 0.2
        str(Condition("partition", "C", regime="LoRA", pair="0-1"))  # 0-1: partition C, LoRA
    """

    method: str  # swap, task expert, soup, ties, partition, joint, base ...
    variant: str = ""  # of a method: default, density 0.5, C, reverted C, chosen on development ...
    zones: Zones | None = None  # of a composition of a grid
    outside: str = ""  # source of the places outside the layers, where conditions differ by it
    regime: str = ""  # training of the experts, such as LoRA, where conditions differ by it
    pair: str = ""  # of experts; empty for models that all pairs share

    def __str__(self) -> str:
        zones = "" if self.zones is None else ",".join(map(str, astuple(self.zones)))
        # "partition C" is written without a comma.
        name = self.variant if self.method == "partition" else zones
        variant = "" if name == self.variant else self.variant
        outside = f"outside {self.outside}" if self.outside else ""
        method = NAMES.get(self.method, self.method)
        parts = [f"{method} {name}".rstrip(), variant, outside, self.regime]
        return f"{self.pair}: " * bool(self.pair) + ", ".join(part for part in parts if part)

    @property
    def treatment(self) -> Condition:
        """Returns the condition without its pair."""
        return replace(self, pair="")

    def to_dict(self) -> dict[str, str | int | None]:
        """Returns the fields as columns of a table; without zones, their four counts are None."""
        columns: dict[str, Any] = {**vars(self)}
        zones = columns.pop("zones")
        return columns | (vars(zones) if zones else {field.name: None for field in fields(Zones)})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Condition:
        """Reads a condition that `to_dict` stored; other keys are ignored."""
        zones = None
        if data.get("bottom") is not None:
            zones = Zones(**{field.name: data[field.name] for field in fields(Zones)})
        texts = {field.name: data[field.name] for field in fields(cls) if field.name in data}
        return cls(**{**texts, "zones": zones})


CHECKPOINT = Condition("")
"""A whole checkpoint, which is known by its name."""
BASE = Condition("base")
TASK_EXPERT, LANGUAGE_EXPERT = Condition("task expert"), Condition("language expert")
SOUP, MAGNITUDE_SOUP = Condition("soup"), Condition("magnitude soup")
JOINT = Condition("joint")
"""One model trained on the data of both experts."""
DEFAULT = Condition("swap", "default")
CHOSEN = Condition("swap", "chosen on development")
"""The composition with the best score on the development documents."""
FLATTERED = Condition("swap", "best (flattered)")
"""The swap with the best score on the test documents, which its own score flatters."""


def in_a_sentence(model: Any) -> str:
    """Write a model's name without commas, to follow "the", such as `default swap`."""
    finished = getattr(model, "method", "") in (FINISHED, ALSO_FINISHED)
    name = "model " * finished + str(model).replace(", ", " ")
    return {DEFAULT: "default swap", CHOSEN: "chosen swap"}.get(model, name)


COMMONEST, CHANCE = Condition("commonest label"), Condition("chance")
ON_LABELS = Condition("linear classifier", "on the development labels")
CROSS_VALIDATED = Condition("linear classifier", "cross-validated on the test labels")
VECTORS = "sentence vectors"
TRANSLATE_TEST, TRANSLATE_TRAIN = Condition("translate-test"), Condition("translate-train")
TRANSLATIONS = (TRANSLATE_TEST.method, TRANSLATE_TRAIN.method)
BASELINES = (COMMONEST.method, CHANCE.method, ON_LABELS.method, VECTORS, *TRANSLATIONS)
"""Methods of baselines that need no experts of a language: not chosen, and not saved."""


FINISHED, ALSO_FINISHED = "finished", "also finished"
"""Methods of models with a last training on labels in the language: from the start that
cross-validation over the labels chose, and from other starts."""


def finished(start: str, *, chosen: bool) -> Condition:
    """Returns the condition of a model finished on labels, by its start, such as `swap`."""
    return Condition(FINISHED if chosen else ALSO_FINISHED, f"from the {start}")


def ties(density: float) -> Condition:
    """Returns the condition of TIES that keeps this share of every delta."""
    return Condition("ties", f"density {density}")


TUNED = ("weighted soup", "task arithmetic", "ties")
"""Methods with a setting that can be chosen on development documents."""


def methods(
    baselines: Collection[str] = ("experts", "soup"),
    *,
    task: str = "task",
    language: str = "language",
    densities: Sequence[float] = (),
    shares: Sequence[float] = (),
    scales: Sequence[float] = (),
    partitions: Sequence[str] = (),
    outside: str | None = None,
) -> Iterator[tuple[Condition, dict[str, Any]]]:
    """Yields the default swap, every partition and the baselines, as parts of a recipe.

    Baselines are `experts`, `soup`, `weighted soup`, `magnitude soup`, `task arithmetic`, `ties`
    and `reverted` (experts reverted outside a partition); others are ignored. Each of `densities`
    (of TIES), `shares` (of the task expert in weighted soups), `scales` (of both deltas in task
    arithmetic) and `partitions` is a condition. `task` and `language` are names in the recipe.
    """
    roles = {"task": task, "language": language}

    def part(name: str, **experts: str) -> dict[str, Any]:
        return {"partition": {"name": name, "outside": outside, **roles, **experts}}

    yield DEFAULT, {"swap": dict(roles)}
    for name in partitions:
        yield Condition("partition", name), part(name)
    experts = list(roles.values())
    known: dict[str, list[tuple[Condition, dict[str, Any]]]] = {
        "experts": [(TASK_EXPERT, {"soup": {"experts": [task]}}),
                    (LANGUAGE_EXPERT, {"soup": {"experts": [language]}})],
        "soup": [(SOUP, {"soup": {"experts": experts}})],
        "magnitude soup": [(MAGNITUDE_SOUP, {"soup": {"experts": experts},
                                             "weights": "magnitude"})],
        "weighted soup": [
            (Condition("weighted soup", f"task {share}"),
             {"soup": {"experts": experts}, "weights": {task: share, language: 1 - share}})
            for share in shares
        ],
        "task arithmetic": [
            (Condition("task arithmetic", f"scale {scale}"),
             {"merge": {"method": "task_arithmetic", "experts": dict.fromkeys(experts, scale)}})
            for scale in scales
        ],
        "ties": [
            (ties(density), {"merge": {"method": "ties", "experts": experts, "density": density}})
            for density in densities
        ],
        "reverted": [
            (Condition(f"{kind} expert", f"reverted {name}"), part(name, **{opposite: "base"}))
            for name in partitions
            for kind, opposite in (("task", "language"), ("language", "task"))
        ],
    }  # fmt: skip
    for baseline in baselines:
        yield from known.get(baseline, ())


def contenders(start: Plan, *, densities: Sequence[float] = ()) -> dict[Condition, Plan]:
    """Returns the plans to compare a swap with: experts, averages and the default swap.

    All use the swap's own checkpoints. The base and TIES are added where the recipe names the base.
    """
    method, baselines = start.recipe.swap, ["experts", "soup"]
    assert method is not None, "contenders are those of a swap"
    parts: dict[Condition, dict[str, Any]] = {}
    if start.base is not None:
        baselines.append("ties")
        parts[BASE] = {"soup": {"experts": ["base"]}}
    parts |= methods(baselines, task=method.task, language=method.language, densities=densities)
    parts.pop(DEFAULT)
    recipes = {
        condition: start.recipe.changed(
            {"places": [], **part}, where=str(condition), without=("swap", "weights")
        )
        for condition, part in parts.items()
    }
    plans = {condition: start.with_recipe(recipe) for condition, recipe in recipes.items()}
    return {**plans, DEFAULT: swapped(start, default_zones(start.composition.layers))}


def swapped(start: Plan, zones: Zones, outside: str = "") -> Plan:
    """Returns the swap with other zones, and another outside if given."""
    changes = {**vars(zones), **({"outside": outside} if outside else {})}
    assert start.recipe.swap is not None, "other zones are those of a swap"
    swap = start.recipe.swap.model_copy(update=changes)
    return start.with_recipe(start.recipe.model_copy(update={"swap": swap}))


# --- the compositions that a sweep tries ---


def grid_plans(grid: Grid, start: Plan, log: Log) -> dict[Condition, Plan]:
    """Returns the plans of every composition of a grid that fits."""
    layers = start.composition.layers
    zones = list(zone_grid(layers, **grid.sizes))
    if not zones:
        raise EvaluationError(f"no zones of the grid fit into {layers} layers")
    listed = math.prod(len(set(sizes)) for sizes in grid.sizes.values())
    if listed > len(zones):
        log(f"{len(zones)} of the grid's {listed} zones fit into {layers} layers")
    return {
        Condition("swap", zones=sizes, outside=outside): swapped(start, sizes, outside)
        for outside in grid.outside or ("",)
        for sizes in zones
    }
