"""A sweep from its file to its board: compositions chosen on one split, judged on another."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.compose import Blend, Composition, Recipe, Zones, default_zones, zone_grid
from layerswap.errors import EvaluationError
from layerswap.evaluate.answers import AnswerStore
from layerswap.evaluate.harness import evaluate, load_tasks
from layerswap.evaluate.statistics import Interval, mean_interval, paired_difference
from layerswap.evaluate.sweep_engine import Sweep
from layerswap.evaluate.sweep_spec import SweepSpec
from layerswap.evaluate.trie import LayerCounts
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

DEFAULT, BEST = "default", "best"
Step = Callable[[int], None]


@dataclass(frozen=True)
class Row:
    """The score of one composition on one document.

    Attributes:
        split: `development` or `test`.
        composition: its zones as text, or a contender's name.
        task: the lm-eval task.
        metric: the metric.
        filter: lm-eval's name for how the answer was read.
        document: position in the task's documents.
        score: the metric of this document alone.
    """

    split: str
    composition: str
    task: str
    metric: str
    filter: str
    document: int
    score: float


@dataclass(frozen=True)
class Board:
    """What a sweep found.

    Attributes:
        recipe: the recipe of the swap.
        layers: number of layers.
        measure: task, metric and filter that the best was chosen by.
        grid: mean score on the development split, by zones.
        best: the zones with the highest; of equals, those that depart least from the task expert.
        default: the paper's zones, scaled by depth.
        test: per contender (`best` among them) the scores on the test split, by document.
        rows: every score of every document.
        counts: layers run, here and one by one.
    """

    recipe: Recipe
    layers: int
    measure: tuple[str, str, str]
    grid: Mapping[Zones, float]
    best: Zones
    default: Zones
    test: Mapping[str, Sequence[float]]
    rows: Sequence[Row]
    counts: LayerCounts

    def intervals(self) -> dict[str, Interval]:
        """Mean and 95% bootstrap interval of every contender on the test split."""
        import numpy as np

        return {name: mean_interval(np.array(scores)) for name, scores in self.test.items()}

    def differences(self) -> dict[str, Interval]:
        """Paired difference of the best composition to every other contender, on the test split."""
        import numpy as np

        best = np.array(self.test[BEST])
        return {
            name: paired_difference(best, np.array(scores))
            for name, scores in self.test.items()
            if name != BEST
        }

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


def run_sweep(
    spec: SweepSpec,
    recipe: Recipe,
    *,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    say: Callable[[str], None] = lambda line: None,
    progress: Step | None = None,
) -> Board:
    """Judge a grid on the development split, and the best of it beside its contenders on the rest.

    Raises:
        LayerswapError: the experts or tasks cannot be had, or a task has too few documents.
    """
    from transformers import AutoTokenizer

    start = make_plan(recipe)
    layers = start.composition.layers
    zones = list(zone_grid(layers, **spec.grid.model_dump()))
    if not zones:
        raise EvaluationError(f"no zones of the grid fit into {layers} layers")
    others = _contenders(start)
    sweep = Sweep(
        [_swapped(start, one) for one in zones] + list(others.values()),
        device=spec.device,
        dtype=spec.dtype,
    )
    grid_members = range(len(zones))
    counts = sweep.counts(grid_members)
    say(_cost(len(zones), counts))
    tokenizer = AutoTokenizer.from_pretrained(start.tokenizer_owner.folder)
    development, test = _split(spec)
    settings = _settings(spec, store, allow_code, progress)
    tried = evaluate(
        sweep, tokenizer, spec.tasks, members=grid_members, samples=development, **settings
    )
    rows = [
        row
        for one, found in zip(zones, tried, strict=True)
        for row in _rows(found, "development", str(one))
    ]
    measure = _measure(spec, rows)
    grid = {one: _mean(rows, str(one), measure) for one in zones}
    best = max(grid, key=lambda one: (grid[one], -sum(vars(one).values())))
    members = [zones.index(best), *range(len(zones), len(sweep))]
    judged = evaluate(sweep, tokenizer, spec.tasks, members=members, samples=test, **settings)
    names = [BEST, *others]
    rows += [
        row for name, found in zip(names, judged, strict=True) for row in _rows(found, "test", name)
    ]
    scores = {name: _scores(rows, "test", name, measure) for name in names}
    return Board(recipe, layers, measure, grid, best, default_zones(layers), scores, rows, counts)


def _cost(compositions: int, counts: LayerCounts) -> str:
    return (
        f"{compositions} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )


def _settings(
    spec: SweepSpec, store: AnswerStore | None, allow_code: bool, progress: Step | None
) -> dict[str, Any]:
    return {
        "include": [Path(name) for name in spec.include],
        "num_fewshot": spec.num_fewshot,
        "batch_size": spec.batch_size,
        "store": store,
        "allow_code": allow_code,
        "progress": progress,
    }


def _contenders(start: Plan) -> dict[str, Plan]:
    """What the best is compared with: the default, the soup, both experts, and the base."""
    method = start.recipe.swap
    assert method is not None, "a sweep's recipe is a swap"
    layers = start.composition.layers
    soup = Blend.of({method.task: 1.0, method.language: 1.0})
    blends = {"soup": soup, "task expert": Blend.of(method.task),
              "language expert": Blend.of(method.language)}  # fmt: skip
    if start.base is not None:
        blends["base"] = Blend.of("base")
    flat = {name: start.recipe.flat(name) for name in start.recipe.experts}
    found = {DEFAULT: _swapped(start, default_zones(layers))}
    for name, blend in blends.items():
        whole = Composition.build(layers, lambda place, blend=blend: blend).rename(flat)  # type: ignore[misc]
        found[name] = start.with_composition(whole)
    return found


def _swapped(start: Plan, zones: Zones) -> Plan:
    (plan,) = start.grid(**{name: [size] for name, size in vars(zones).items()})
    return plan


def _split(spec: SweepSpec) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Positions of the documents of each task for choosing, and for judging."""
    include = [Path(name) for name in spec.include]
    loaded = load_tasks(spec.tasks, include=include, num_fewshot=spec.num_fewshot)
    development, test = {}, {}
    for name, task in loaded["tasks"].items():
        count = len(task.eval_docs)
        order = list(range(count))
        # Seeded by text, which Python hashes with SHA-512: no PYTHONHASHSEED.
        random.Random(f"{spec.seed}/{name}").shuffle(order)
        order = order[: spec.limit]
        cut = round(spec.development * len(order))
        if not 0 < cut < len(order):
            raise EvaluationError(f"task {name} has {len(order)} documents: too few to split")
        development[name], test[name] = sorted(order[:cut]), sorted(order[cut:])
    return development, test


def _rows(found: Mapping[str, Any], split: str, composition: str) -> Iterator[Row]:
    for task, samples in found["samples"].items():
        for sample in samples:
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, bool | int | float):
                    yield Row(
                        split, composition, task, metric, sample["filter"],
                        int(sample["doc_id"]), float(value),
                    )  # fmt: skip


def _measure(spec: SweepSpec, rows: Sequence[Row]) -> tuple[str, str, str]:
    known = list(dict.fromkeys((row.task, row.metric, row.filter) for row in rows))
    wanted = spec.choose_by
    for task, metric, name in known:
        if (wanted.task in (None, task) and wanted.metric in (None, metric)
                and wanted.filter in (None, name)):  # fmt: skip
            return task, metric, name
    shown = "; ".join(" ".join(one) for one in known) or "nothing with a number per document"
    raise EvaluationError(f"choose_by fits none of what the tasks give: {shown}")


def _scores(
    rows: Sequence[Row], split: str, composition: str, measure: tuple[str, str, str]
) -> list[float]:
    found = {
        row.document: row.score
        for row in rows
        if (row.split, row.composition) == (split, composition)
        and (row.task, row.metric, row.filter) == measure
    }
    return [found[document] for document in sorted(found)]


def _mean(rows: Sequence[Row], composition: str, measure: tuple[str, str, str]) -> float:
    scores = _scores(rows, "development", composition, measure)
    return sum(scores) / len(scores)
