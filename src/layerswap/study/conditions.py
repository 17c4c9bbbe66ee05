"""Which models a language is judged with: the compositions of every pair, and the baselines."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.presets import Zones, zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.merge.planner import Plan, make_plan
from layerswap.study.runner import Context

EXPERT, SELECTION = "expert", "selection.json"
RESULTS, ELSEWHERE = "results", "elsewhere"
"""What was judged in the language's own documents, and in other languages."""
DEFAULT = "swap, default"
GRID = re.compile(r"swap (\d+),(\d+),(\d+),(\d+)")
"""The name of a composition of the grid: its four counts."""
REGIMES = {"": "", "lora-": ", LoRA"}
"""What the names of a regime's steps begin with, and what those of its treatments end with."""
RecipeData = dict[str, Any]


@dataclass(frozen=True)
class TrainedExpert:
    """The experts that the models of a language are made of.

    Attributes:
        kept: folders of the selected experts, the best first, by kind: `task`, or a language.
        others: the folder of what was trained beside them, by the name of its step.
        layers: of the base.
    """

    kept: Mapping[str, Sequence[str]]
    others: Mapping[str, str]
    layers: int


def models(context: Context) -> Iterator[tuple[str, Plan]]:
    """Every model by `<pair>: <treatment>`; what is the same for all pairs has no pair."""
    settings = context.step.settings
    trained = TrainedExpert(
        {
            step.partition("/")[2]: [str(path) for path in selected(context, step)]
            for step in context.inputs
            if step.startswith("select/")
        },
        {step: str(folder / EXPERT) for step, folder in context.inputs.items()},
        open_checkpoint(settings["base"]).layers,
    )
    for name, recipe in recipes(settings, trained):
        yield name, make_plan(check_recipe({**recipe, "bake": True}, where=f"study, {name}"))


def recipes(
    settings: Mapping[str, Any], trained: TrainedExpert
) -> Iterator[tuple[str, RecipeData]]:
    """The recipe of every model, by its name.

    Args:
        settings: of the step that judges a language.
        trained: the experts.
    """
    base = settings["base"]
    tasks, languages = trained.kept["task"], trained.kept[settings["language"]]
    if "base" in settings["baselines"]:
        yield "base", _alone(base, base)
    for regime, suffix in REGIMES.items():
        yield from _beside(settings, trained, regime, suffix)
    yield from _soups(settings, trained)
    for (i, task), (j, one) in product(enumerate(tasks), enumerate(languages)):
        if settings["pairs"] == "same" and i != j:
            continue
        experts = {"task": task, "language": one}
        for treatment, method in _treatments(settings, trained.layers):
            yield f"{i}-{j}: {treatment}", {"base": base, "experts": experts, **method}


def selected(context: Context, step: str) -> list[Path]:
    """The experts that a step has selected, the best first."""
    folder = context.inputs[step]
    names = json.loads((folder / SELECTION).read_text("utf-8"))
    return [folder.parent / name for name in names]


def grid_name(zones: Zones) -> str:
    """What a composition of the grid is called."""
    return f"swap {','.join(map(str, astuple(zones)))}"


def pair_of(model: str) -> str:
    """The pair in a model's name; empty where it is the same for all pairs."""
    return model.rpartition(": ")[0]


def treatment_of(model: str) -> str:
    """The treatment in a model's name."""
    return model.rpartition(": ")[2]


def zones_of(treatment: str) -> Zones | None:
    """The zones of a composition of the grid, from its name; None of any other treatment."""
    found = GRID.fullmatch(treatment)
    return Zones(*map(int, found.groups())) if found else None


def _alone(model: str, base: str) -> RecipeData:
    return {"base": base, "experts": {"m": model}, "soup": {"experts": ["m"]}}


def _partition(settings: Mapping[str, Any], name: str, **experts: str) -> RecipeData:
    return {"partition": {"name": name, "outside": settings["outside"], **experts}}


def _treatments(settings: Mapping[str, Any], layers: int) -> Iterator[tuple[str, RecipeData]]:
    both = ["task", "language"]
    yield DEFAULT, {"swap": {}}
    if settings["grid"]:
        for zones in zone_grid(layers, **settings["grid"]):
            yield grid_name(zones), {"swap": asdict(zones)}
    for name in settings["partitions"]:
        yield f"partition {name}", _partition(settings, name)
    known: dict[str, list[tuple[str, RecipeData]]] = {
        "experts": [("task expert", {"soup": {"experts": ["task"]}}),
                    ("language expert", {"soup": {"experts": ["language"]}})],
        "soup": [("soup", {"soup": {"experts": both}})],
        "magnitude soup": [("magnitude soup", {"soup": {"experts": both},
                                               "weights": "magnitude"})],
        "ties": [
            (f"ties, density {density}",
             {"merge": {"method": "ties", "experts": both, "density": density}})
            for density in settings["ties"]
        ],
        "reverted": [
            (f"{kind} expert, reverted {name}", _partition(settings, name, **{other: "base"}))
            for name in settings["partitions"]
            for kind, other in (("task", "language"), ("language", "task"))
        ],
    }  # fmt: skip
    for baseline in settings["baselines"]:
        yield from known.get(baseline, ())


def _beside(
    settings: Mapping[str, Any], trained: TrainedExpert, regime: str, suffix: str
) -> Iterator[tuple[str, RecipeData]]:
    """What was trained beside the pairs: on both data, with LoRA, on a part alone (paper 2)."""
    base, language, others = settings["base"], settings["language"], trained.others

    def both(step: str) -> dict[str, str]:
        return {kind: others[step.format(kind if kind == "task" else language)]
                for kind in ("task", "language")}  # fmt: skip

    for name in others:
        start = f"{regime}both/{language}/"
        if name.startswith(start):
            yield name.removeprefix(start) + suffix, _alone(others[name], base)
    if f"{regime}train/task" in others:
        experts = both(f"{regime}train/{{}}")
        for kind, path in experts.items():
            yield f"{kind} expert{suffix}", _alone(path, base)
        yield f"swap{suffix}", {"base": base, "experts": experts, "swap": {}}
        for name in settings["partitions"]:
            composed = {"base": base, "experts": experts, **_partition(settings, name)}
            yield f"partition {name}{suffix}", composed
    for name in settings["partitions"]:
        if f"{regime}partial/task/{name}" in others:
            experts = both(f"{regime}partial/{{}}/{name}")
            for kind, path in experts.items():
                yield f"{kind} expert, partial {name}{suffix}", _alone(path, base)
            composed = {"base": base, "experts": experts, **_partition(settings, name)}
            yield f"swap of partial SFT, {name}{suffix}", composed


def _soups(settings: Mapping[str, Any], trained: TrainedExpert) -> Iterator[tuple[str, RecipeData]]:
    """Swaps of soups (paper 1, table 6)."""
    every = [name for name in trained.kept if name != "task"]
    wanted = {
        "soups": ("swap of soups", [settings["language"]]),
        "multilingual soup": ("swap, multilingual soup", every),
    }
    tasks = {f"t{i}": one for i, one in enumerate(trained.kept["task"])}
    for baseline, (treatment, names) in wanted.items():
        if baseline in settings["baselines"]:
            paths = [path for name in names for path in trained.kept[name]]
            languages = {f"l{i}": path for i, path in enumerate(paths)}
            soups = {"task": {"soup": list(tasks)}, "language": {"soup": list(languages)}}
            yield treatment, {"base": settings["base"], "swap": {},
                              "experts": {**tasks, **languages, **soups}}  # fmt: skip
