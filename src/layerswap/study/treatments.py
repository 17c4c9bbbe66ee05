"""Which models a language is judged with: the compositions of every pair, and the baselines."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Any

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.presets import Zones, zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan
from layerswap.study.running import Context

EXPERT, SELECTION = "expert", "selection.json"
DEFAULT = "swap, default"
GRID = "swap "
"""What the name of a composition of the grid begins with; its four counts follow."""
Recipe = dict[str, Any]


def models(context: Context) -> Iterator[tuple[str, Plan]]:
    """Every model by `<pair>: <treatment>`; what is the same for all pairs has no pair."""
    for name, recipe in recipes(context):
        yield name, make_plan(check_recipe({**recipe, "bake": True}, where=f"study, {name}"))


def recipes(context: Context) -> Iterator[tuple[str, Recipe]]:
    """The recipe of every model, by its name."""
    settings = context.step.settings
    base, language = settings["base"], settings["language"]
    tasks = selected(context, "select/task")
    languages = selected(context, f"select/{language}")
    if "base" in settings["baselines"]:
        yield "base", _alone(base)
    for name, folder in context.inputs.items():
        if name.startswith("train/"):
            yield name.removeprefix("train/").removesuffix(f"-{language}"), _alone(folder / EXPERT)
    yield from _partial(context)
    yield from _soups(context)
    for i, task in enumerate(tasks):
        for j, one in enumerate(languages):
            experts = {"task": str(task), "language": str(one)}
            for treatment, method in _treatments(settings):
                yield f"{i}-{j}: {treatment}", {"base": base, "experts": experts, **method}


def selected(context: Context, step: str) -> list[Path]:
    """The experts that a step has selected, the best first."""
    folder = context.inputs[step]
    names = json.loads((folder / SELECTION).read_text("utf-8"))
    return [folder.parent / name for name in names]


def zones_of(treatment: str) -> Zones | None:
    """The zones of a composition of the grid, from its name; None of any other treatment."""
    counts = treatment.removeprefix(GRID).split(",")
    return Zones(*map(int, counts)) if len(counts) == len(fields(Zones)) else None


def _alone(model: str | Path) -> Recipe:
    return {"experts": {"m": str(model)}, "soup": {"experts": ["m"]}}


def _treatments(settings: Mapping[str, Any]) -> Iterator[tuple[str, Recipe]]:
    both = ["task", "language"]
    yield DEFAULT, {"swap": {}}
    if settings["grid"]:
        for zones in zone_grid(open_checkpoint(settings["base"]).layers, **settings["grid"]):
            counts = ",".join(map(str, astuple(zones)))
            yield f"{GRID}{counts}", {"swap": asdict(zones)}
    for name in settings["partitions"]:
        yield f"partition {name}", {"partition": {"name": name}}
    known: dict[str, list[tuple[str, Recipe]]] = {
        "experts": [("task expert", {"soup": {"experts": ["task"]}}),
                    ("language expert", {"soup": {"experts": ["language"]}})],
        "soup": [("soup", {"soup": {"experts": both}})],
        "magnitude soup": [("magnitude soup", {"soup": {"experts": both},
                                               "weights": "magnitude"})],
        "ties": [("ties", {"merge": {"method": "ties", "experts": both}})],
    }  # fmt: skip
    for baseline in settings["baselines"]:
        yield from known.get(baseline, ())


def _partial(context: Context) -> Iterator[tuple[str, Recipe]]:
    """Experts that trained their part of a partition alone, each and swapped (paper 2, 3.3)."""
    settings = context.step.settings
    for name in settings["partitions"]:
        places = [f"partial/{kind}/{name}" for kind in ("task", settings["language"])]
        if places[0] not in context.inputs:
            return
        task, language = (str(context.inputs[place] / EXPERT) for place in places)
        yield f"task expert, partial {name}", _alone(task)
        yield f"language expert, partial {name}", _alone(language)
        experts = {"task": task, "language": language}
        yield f"swap of partial SFT, {name}", {"experts": experts, "partition": {"name": name}}


def _soups(context: Context) -> Iterator[tuple[str, Recipe]]:
    """Swaps of soups (paper 1, table 6)."""
    settings = context.step.settings
    own = f"select/{settings['language']}"
    every = [
        name for name in context.inputs if name.startswith("select/") and name != "select/task"
    ]
    wanted = {
        "soups": ("swap of soups", [own]),
        "multilingual soup": ("swap, multilingual soup", every),
    }
    tasks = {f"t{i}": str(one) for i, one in enumerate(selected(context, "select/task"))}
    for baseline, (treatment, steps) in wanted.items():
        if baseline in settings["baselines"]:
            paths = [path for step in steps for path in selected(context, step)]
            languages = {f"l{i}": str(path) for i, path in enumerate(paths)}
            soups = {"task": {"soup": list(tasks)}, "language": {"soup": list(languages)}}
            yield treatment, {"base": settings["base"], "swap": {},
                              "experts": {**tasks, **languages, **soups}}  # fmt: skip
