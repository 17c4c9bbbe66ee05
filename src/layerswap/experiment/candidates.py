"""The compositions that a sweep tries: a grid of zones, or random draws from the large space.

A draw gives each layer, or the attention and the mlp of each layer, a source of its own. It repeats
the source of the place before with probability `REPEAT`: experts change over runs of layers, and
independent draws are mostly poor. The sources of a draw are text by place: `{"outside": "blend",
"0.attention": "task", "0.mlp": "0.5", ...}`, where a number is the share of the language expert.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from random import Random

from layerswap.compose import Recipe, Zones, zone_grid
from layerswap.compose.schema import BASE, Override
from layerswap.experiment.conditions import Condition, swap_of, swapped
from layerswap.experiment.spec import Grid, RandomDraws
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Log
from layerswap.merge import Plan

OUTSIDE = "outside"
REPEAT = 0.75
"""Probability that a place repeats the source of the place before."""
Sources = Mapping[str, str]
"""By place (`outside`, `3`, `3.attention` or `3.mlp`) its source, as text."""


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


def zone_sources(zones: Zones, layers: int) -> dict[str, str]:
    """Returns the source of every layer of a swap: `task`, `language` or `blend`."""
    middle = range(zones.bottom + zones.bottom_transition,
                   layers - zones.top - zones.top_transition)  # fmt: skip
    outer = [*range(zones.bottom), *range(layers - zones.top, layers)]
    return {
        str(layer): "task" if layer in middle else "language" if layer in outer else "blend"
        for layer in range(layers)
    }


def draw_sources(spec: RandomDraws, layers: int) -> list[Sources]:
    """Draws distinct sources at random; lists a space of at most `draws` whole."""
    roles = [""] if spec.each == "layer" else [".attention", ".mlp"]
    takes = [str(value) for value in spec.take]
    space: dict[str, Sequence[str]] = {OUTSIDE: spec.outside}
    space |= {f"{layer}{role}": takes for layer in range(layers) for role in roles}
    if math.prod(map(len, space.values())) <= spec.draws:
        draws: Iterator[tuple[str, ...]] = product(*space.values())
    else:
        draws = _distinct(list(space.values()), Random(spec.seed))
    return [dict(zip(space, draw, strict=True)) for draw in islice(draws, spec.draws)]


def _distinct(options: Sequence[Sequence[str]], rng: Random) -> Iterator[tuple[str, ...]]:
    seen, repeat = set(), REPEAT
    outside, *places = options
    while True:
        draw = [rng.choice(outside), rng.choice(places[0])]
        for values in places[1:]:
            draw.append(draw[-1] if rng.random() < repeat else rng.choice(values))
        if tuple(draw) in seen:
            repeat *= 0.9  # Where most probable draws are known, others come sooner.
            continue
        repeat = REPEAT
        seen.add(tuple(draw))
        yield tuple(draw)


def draw_plan(start: Plan, sources: Sources) -> Plan:
    """Returns the plan of a draw, whose recipe has an override for every place."""
    swap = swap_of(start.recipe)
    places = [*start.recipe.places, *_overrides(start.recipe, sources)]
    swap = swap.model_copy(update={"outside": sources[OUTSIDE]})
    return start.with_recipe(start.recipe.model_copy(update={"swap": swap, "places": places}))


def _overrides(recipe: Recipe, sources: Sources) -> Iterator[Override]:
    swap = swap_of(recipe)
    for place, source in sources.items():
        if place == OUTSIDE:
            continue
        layer, _, role = place.partition(".")
        take = {source: 1.0}
        if source not in (*recipe.experts, BASE):
            share = float(source)
            weights = {swap.task: 1 - share, swap.language: share}
            take = {name: weight for name, weight in weights.items() if weight}
        # Attention comes first and brings the layer's norms; the mlp then takes its own.
        roles = ["mlp"] if role == "mlp" else None
        yield Override(layers=layer, roles=roles, take=take)
