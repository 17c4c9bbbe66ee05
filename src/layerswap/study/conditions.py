"""Conditions of a study: the compositions of every pair of experts, and their baselines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

from pydantic import field_serializer

from layerswap.compose.presets import zone_grid
from layerswap.experiment.conditions import (
    BASE,
    LANGUAGE_EXPERT,
    TASK_EXPERT,
    Condition,
    methods,
)
from layerswap.experiment.spec import Grid
from layerswap.ground.strict import Strict
from layerswap.study.spec import Contenders

REGIMES = {"": "", "LoRA": "lora-"}
"""Regimes of training, and prefixes of the names of their steps."""
RecipeData = dict[str, Any]


class Variant(Strict):
    """Further trainings of the experts: with LoRA, or of their part of a partition alone."""

    regime: str
    partition: str
    task: str  # names of steps
    language: str | None = None


class LanguageModels(Contenders):
    """Settings of the models of one language."""

    language: str
    base: str
    grid: Grid | None = None
    both: list[dict[str, Any]] = []  # models trained on all data: condition and `step`
    variants: list[Variant] = []

    @field_serializer("grid")
    def _grid_as_given(self, grid: Grid | None) -> dict[str, Any] | None:
        return None if grid is None else grid.model_dump(exclude_none=True)


def recipes(
    settings: LanguageModels,
    kept: Mapping[str, Sequence[str]],
    trained: Mapping[str, str],
    layers: int,
) -> Iterator[tuple[Condition, RecipeData]]:
    """Return a language's recipes by condition; conditions that all pairs share have no pair.

    Args:
        settings: of the language.
        kept: the selected experts, the best first, by kind of expert.
        trained: the folder of each further training, by the name of its step.
        layers: of the base.
    """
    base, one_to_one = settings.base, settings.pairs == "same"
    if "base" in settings.baselines:
        yield BASE, alone(base, base)
    for regime in REGIMES:
        yield from _trained(settings, kept, trained, regime)
    yield from _soups(settings, kept)
    treatments = list(_treatments(settings, layers))
    tasks, languages = kept["task"], kept[settings.language]
    for (i, task), (j, language) in product(enumerate(tasks), enumerate(languages)):
        if i == j or not one_to_one:
            experts = {"task": task, "language": language}
            for condition, method in treatments:
                yield replace(condition, pair=f"{i}-{j}"), {
                    "base": base, "experts": experts, **method,
                }  # fmt: skip


def alone(model: str, base: str) -> RecipeData:
    """The recipe of one model over a base."""
    return {"base": base, "experts": {"m": model}, "soup": {"experts": ["m"]}}


def _treatments(settings: LanguageModels, layers: int) -> Iterator[tuple[Condition, RecipeData]]:
    """The conditions of every pair."""
    of_pairs = list(methods(
        settings.baselines, densities=settings.ties, shares=settings.soup_shares,
        scales=settings.scales, partitions=settings.partitions, outside=settings.outside,
    ))  # fmt: skip
    yield of_pairs[0]
    if settings.grid:
        outsides: list[str] = [*settings.grid.outside] if settings.grid.outside else [""]
        for zones, outside in product(zone_grid(layers, **settings.grid.sizes), outsides):
            condition = Condition("swap", zones=zones, outside=outside)
            yield condition, {"swap": asdict(zones) | ({"outside": outside} if outside else {})}
    yield from of_pairs[1:]


def _trained(
    settings: LanguageModels,
    kept: Mapping[str, Sequence[str]],
    trained: Mapping[str, str],
    regime: str,
) -> Iterator[tuple[Condition, RecipeData]]:
    """Models trained beside the pairs: on both data sets, with LoRA, or in part (paper 2)."""
    base, whole = settings.base, kept[settings.language][0]
    for joint in settings.both:
        if joint["regime"] == regime:
            yield Condition.from_dict(joint), alone(trained[joint["step"]], base)
    for variant in settings.variants:
        if variant.regime != regime:
            continue
        name, task = variant.partition, trained[variant.task]
        language = trained[variant.language] if variant.language else None
        part = f"partial {name}" if name else ""
        yield replace(TASK_EXPERT, variant=part, regime=regime), alone(task, base)
        if language:
            yield replace(LANGUAGE_EXPERT, variant=part, regime=regime), alone(language, base)
        partners = {"swap of partial SFT" if name else "partition": language} if language else {}
        if language and not name:
            whole = language
            experts = {"task": task, "language": language}
            yield Condition("swap", regime=regime), {"base": base, "experts": experts, "swap": {}}
        elif "partial task" in settings.baselines:
            partners["swap of partial task expert"] = whole
        for partition_name in [name] if name else settings.partitions:
            zones = {"partition": {"name": partition_name, "outside": settings.outside}}
            for method, partner in partners.items():
                experts = {"task": task, "language": partner}
                yield Condition(method, partition_name, regime=regime), {
                    "base": base, "experts": experts, **zones,
                }  # fmt: skip


def _soups(
    settings: LanguageModels, kept: Mapping[str, Sequence[str]]
) -> Iterator[tuple[Condition, RecipeData]]:
    """Swaps of soups (paper 1, table 6)."""
    every = [kind for kind in kept if kind != "task"]
    wanted = {
        "soups": (Condition("swap of soups"), [settings.language]),
        "multilingual soup": (Condition("swap", "multilingual soup"), every),
    }
    tasks = {f"t{i}": path for i, path in enumerate(kept["task"])}
    for baseline, (condition, kinds) in wanted.items():
        if baseline in settings.baselines:
            paths = [path for kind in kinds for path in kept[kind]]
            languages = {f"l{i}": path for i, path in enumerate(paths)}
            soups = {"task": {"soup": list(tasks)}, "language": {"soup": list(languages)}}
            yield condition, {"base": settings.base, "swap": {},
                              "experts": {**tasks, **languages, **soups}}  # fmt: skip
