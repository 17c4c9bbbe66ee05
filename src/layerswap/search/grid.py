"""A sweep of a grid, from its file to its board: chosen on one split, judged on another."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap._types import Advance, Log
from layerswap.compose import Recipe, Zones, default_zones, zone_grid
from layerswap.engine.sweep import Sweep
from layerswap.engine.trie import LayerCounts
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge.load import plan_tokenizer
from layerswap.merge.planner import make_plan
from layerswap.search.evaluator import (
    DEVELOPMENT,
    Evaluator,
    Measure,
    Row,
    SweepTested,
    contenders,
    score_table,
    swapped,
)
from layerswap.search.halving import Race, race
from layerswap.search.spec import SweepSpec
from layerswap.search.unlabelled import choose_without_labels


@dataclass(frozen=True)
class GridResult(SweepTested):
    """What a sweep over a grid of zones found.

    Attributes:
        recipe: the recipe of the swap.
        layers: number of layers.
        chosen_by: what the compositions of the grid were compared by, in words.
        grid: by zones, the mean score on the development split (of one that left a race early, on
            the documents that it was scored on), or the value of a signal that needs no labels.
        best: the zones with the highest; of equals, those that depart least from the task expert.
        default: the paper's zones, scaled by depth.
        counts: layers run, here and one by one.
        race: how the race went, if there was one.
    """

    recipe: Recipe
    layers: int
    chosen_by: str
    grid: Mapping[Zones, float]
    best: Zones
    default: Zones
    counts: LayerCounts
    race: Race | None = None

    def sensitivity(self) -> list[float | None]:
        """Per layer, what taking it from the language expert is worth on average over the grid.

        The mean score of the compositions that take the layer from the language expert, minus
        that of those that take it from the task expert; None where the grid has only one kind.
        """
        found: list[float | None] = []
        for layer in range(self.layers):
            sides: dict[bool, list[float]] = {True: [], False: []}
            for zones, score in self.grid.items():
                low, high = zones.bottom, self.layers - zones.top
                if low <= layer < low + zones.bottom_transition or (
                    high - zones.top_transition <= layer < high
                ):
                    continue
                sides[layer < low or layer >= high].append(score)
            means = [sum(side) / len(side) if side else None for side in sides.values()]
            both = means[0] is not None and means[1] is not None
            found.append(means[0] - means[1] if both else None)  # type: ignore[operator]
        return found

    def best_recipe(self) -> dict[str, Any]:
        """The recipe of the best composition, ready for `layerswap merge`."""
        data = self.recipe.model_dump(mode="json", exclude_defaults=True)
        return {**data, "swap": {**data.get("swap", {}), **vars(self.best)}}


@dataclass(frozen=True)
class _Tried:
    """The grid on the development split."""

    values: Sequence[float]
    rows: list[Row]
    measure: Measure | None
    chosen_by: str
    race: Race | None = None


def run_sweep(
    spec: SweepSpec,
    recipe: Recipe,
    *,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> GridResult:
    """Judge a grid on the development split, and the best of it beside its contenders on the rest.

    Raises:
        LayerswapError: the experts or tasks cannot be had, or a task has too few documents.
    """
    assert spec.grid is not None, "the file has a grid; see evaluate.searching for a search"
    start = make_plan(recipe)
    layers = start.composition.layers
    zones = list(zone_grid(layers, **spec.grid.model_dump()))
    if not zones:
        raise EvaluationError(f"no zones of the grid fit into {layers} layers")
    asked = math.prod(len(set(sizes)) for sizes in spec.grid.model_dump().values())
    if asked > len(zones):
        log(f"{len(zones)} of the grid's {asked} zones fit into {layers} layers")
    others = contenders(start)
    plans = [swapped(start, one) for one in zones] + list(others.values())
    sweep = Sweep(plans, device=spec.device, dtype=spec.dtype)
    members = range(len(zones))
    counts = sweep.counts(members)
    log(_cost(len(zones), counts))
    tokenizer = plan_tokenizer(start)
    judge = Evaluator(
        spec, sweep, tokenizer, store=store, allow_code=allow_code, log=log, progress=progress
    )
    tried = _try(judge, members, [str(one) for one in zones], sweep, others_of(zones, others))
    grid = dict(zip(zones, tried.values, strict=True))
    running = [zones[i] for i in tried.race.survivors] if tried.race else zones
    best = max(running, key=lambda one: (grid[one], -sum(vars(one).values())))
    if tried.race:
        log(str(tried.race))
    test, rows, measure = judge.tested(zones.index(best), others_of(zones, others), tried.measure)
    return GridResult(
        measure, test, [*tried.rows, *rows], recipe, layers, tried.chosen_by, grid, best,
        default_zones(layers), counts, tried.race,
    )  # fmt: skip


def others_of(before: Sequence[object], others: Mapping[str, object]) -> dict[str, int]:
    """Positions of the contenders in a sweep that holds them after `before`."""
    return {name: len(before) + i for i, name in enumerate(others)}


def _try(
    judge: Evaluator,
    members: Sequence[int],
    names: Sequence[str],
    sweep: Sweep,
    others: Mapping[str, int],
) -> _Tried:
    spec = judge.spec
    if spec.without_labels is not None:
        values, name = choose_without_labels(judge, members, names, others["task expert"])
        return _Tried(values.tolist(), [], None, f"{name} (no labels)")
    if spec.halving is None:
        rows = judge.rows(DEVELOPMENT, members, names)
        measure = judge.measure(rows)
        means = score_table(rows, DEVELOPMENT, names, measure).mean(axis=1)
        return _Tried(means.tolist(), rows, measure, " ".join(measure))
    return _raced(judge, members, names)


def _raced(judge: Evaluator, members: Sequence[int], names: Sequence[str]) -> _Tried:
    """Race the grid; the rows of every composition are those of the last round it ran in."""
    halving = judge.spec.halving
    assert halving is not None
    found: dict[str, list[Row]] = {}
    measures: list[Measure] = []

    def score(running: Sequence[int], count: int) -> Any:
        labels = [names[member] for member in running]
        rows = judge.rows(DEVELOPMENT, running, labels, count)
        measures.append(judge.measure(rows))
        for label in labels:
            found[label] = [row for row in rows if row.composition == label]
        return score_table(rows, DEVELOPMENT, labels, measures[0])

    ran = race(
        score, members, judge.smallest(DEVELOPMENT), first=halving.first, error=halving.error
    )
    rows = [row for name in names for row in found[name]]
    return _Tried(list(ran.means), rows, measures[0], " ".join(measures[0]), ran)


def _cost(compositions: int, counts: LayerCounts) -> str:
    return (
        f"{compositions} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )
