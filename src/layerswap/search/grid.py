"""Sweeps over a grid of compositions: the best is chosen on one split and reported on the other.

With successive halving, compositions that cannot be the best any more stop early. After every
round, which about doubles the examples, a composition leaves the race if a confidence bound on its
paired difference to the leader stays below zero. The bound is the empirical Bernstein inequality
(Maurer and Pontil, 2009, Theorem 4) for differences in [-1, 1], at a level divided by the rounds
and the pairs of compositions, so that with probability 1 - `error` no composition leaves whose true
mean is the highest. It holds for examples drawn at random, with or without replacement.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap._types import Advance, Log
from layerswap.compose import Recipe, Zones, default_zones, zone_grid
from layerswap.engine.trie import LayerCounts
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge import Plan, make_plan
from layerswap.search.conditions import (
    CHOSEN,
    DEFAULT,
    TASK_EXPERT,
    Condition,
    contenders,
    swapped,
)
from layerswap.search.evaluator import (
    DEVELOPMENT,
    DocumentScore,
    Evaluator,
    Measure,
    SweepResult,
    by_condition,
)
from layerswap.search.item_response import Screening, screen
from layerswap.search.protocol import choose, suggested
from layerswap.search.spec import ItemResponse, SweepSettings, SweepSpec
from layerswap.search.unlabelled import choose_without_labels

if TYPE_CHECKING:
    import numpy.typing as npt

    Score = Callable[[Sequence[int], int], npt.NDArray[np.float64]]
    """Scores in [0, 1] of some compositions on the first n examples, `(compositions, n)`."""


DIFFERENCE_RANGE = 2.0
"""Of a difference of two scores in [0, 1]."""


@dataclass(frozen=True)
class Race:
    """How a race went.

    Attributes:
        examples: per composition, how many examples it was scored on.
        means: per composition, its mean over them.
        rounds: examples of every round.
        error: the probability, at most, that the truly best composition left early.
    """

    examples: tuple[int, ...]
    means: tuple[float, ...]
    rounds: tuple[int, ...]
    error: float

    @property
    def survivors(self) -> list[int]:
        """Positions of the compositions that were scored on all examples."""
        return [i for i, n in enumerate(self.examples) if n == self.rounds[-1]]

    @property
    def saved(self) -> float:
        """Share of all scores that did not have to be computed."""
        return 1 - sum(self.examples) / (len(self.examples) * self.rounds[-1])

    def __str__(self) -> str:
        return (
            f"{len(self.survivors)} of {len(self.examples)} compositions were scored on all "
            f"{self.rounds[-1]} examples; the others left early, the best of all among them with "
            f"probability {self.error:g} at most ({self.saved:.0%} of the scores saved)"
        )


def race(
    score: Score, members: Sequence[int], examples: int, *, first: int = 50, error: float = 0.05
) -> Race:
    """Score compositions on more and more examples, dropping those that cannot win.

    Args:
        score: gives scores of compositions on the first n examples.
        members: the compositions.
        examples: how many there are.
        first: of the first round; every further round doubles them.
        error: see `Race`; in 0..1.

    Raises:
        EvaluationError: a setting out of range, or a score outside 0..1.
    """
    if not members or examples < 1 or first < 2 or not 0 < error < 1:
        raise EvaluationError(
            "a race needs compositions, examples, a first round of two and more, and an error "
            f"between 0 and 1, not {len(members)}, {examples}, {first}, {error}"
        )
    rounds = tuple(_rounds(first, examples))
    level = error / (max(1, len(rounds) - 1) * max(1, len(members) - 1))
    running = list(range(len(members)))
    seen, means = [0] * len(members), [0.0] * len(members)
    for count in rounds:
        found = np.asarray(score([members[i] for i in running], count), dtype=np.float64)
        if found.min() < 0 or found.max() > 1:
            raise EvaluationError("a race needs scores between 0 and 1")
        for row, i in zip(found, running, strict=True):
            seen[i], means[i] = count, float(row.mean())
        leader = found[int(found.mean(axis=1).argmax())]
        running = [
            i for row, i in zip(found, running, strict=True)
            if upper_bound(row - leader, level) >= 0
        ]  # fmt: skip
    return Race(tuple(seen), tuple(means), rounds, error)


def upper_bound(differences: npt.NDArray[np.float64], level: float) -> float:
    """What the true mean of differences in [-1, 1] exceeds with probability `level` at most.

    Args:
        differences: float64 `(n,)`, at least two.
        level: in 0..1.
    """
    n = len(differences)
    width = math.log(2 / level)
    deviation = math.sqrt(2 * float(differences.var(ddof=1)) * width / n)
    return float(differences.mean()) + deviation + 7 * DIFFERENCE_RANGE * width / (3 * (n - 1))


def _rounds(first: int, examples: int) -> Iterator[int]:
    count = first
    while count < examples:
        yield count
        count *= 2
    yield examples


INDISTINCT = 1e-6
"""A signal whose best value is less than this above the median tells compositions not apart."""


@dataclass(frozen=True, kw_only=True)
class GridResult(SweepResult):
    """What a sweep over given compositions found.

    Attributes:
        counts: layers run, here and one by one.
        race: how the race went, if there was one.
    """

    counts: LayerCounts
    race: Race | None = None

    @property
    def layers(self) -> int:
        """Layers of the model."""
        return self.best.composition.layers

    @property
    def default(self) -> Zones:
        """The paper's zones, scaled by depth."""
        return default_zones(self.layers)

    @cached_property
    def sensitivity(self) -> list[float | None]:
        """Per layer, what taking it from the language expert is worth on average over the grid.

        The mean score of the compositions that take the layer from the language expert, minus
        that of those that take it from the task expert; None where the grid has only one kind.
        """
        sides: list[dict[bool, list[float]]] = [{True: [], False: []} for _ in range(self.layers)]
        for condition, score in self.development.items():
            if condition.zones is None:
                continue
            zones, high = condition.zones, self.layers - condition.zones.top
            for layer, side in enumerate(sides):
                outer = layer < zones.bottom or layer >= high
                low = zones.bottom + zones.bottom_transition
                inner = low <= layer < high - zones.top_transition
                if outer or inner:
                    side[outer].append(score)
        return [
            float(np.mean(side[True]) - np.mean(side[False]))
            if side[True] and side[False]
            else None
            for side in sides
        ]


@dataclass(frozen=True)
class _Tried:
    """The candidates on the development split."""

    values: Mapping[Condition, float]
    chosen_by: str
    rows: Sequence[DocumentScore] = ()
    measure: Measure | None = None
    race: Race | None = None
    screening: Screening | None = None


def run_sweep(
    spec: SweepSpec, recipe: Recipe, *, log: Log = lambda line: None, **settings: Any
) -> GridResult:
    """Evaluate the grid of a file on the development split, and report the best on the rest.

    Args:
        spec: with a grid.
        recipe: a swap.
        log: called with what the sweep costs.
        settings: as `sweep_plans`.

    Raises:
        LayerswapError: the experts or tasks cannot be loaded, or a task has too few documents.
    """
    assert spec.grid is not None, "the file has a grid; see search.tpe for a search"
    start = make_plan(recipe)
    layers = start.composition.layers
    zones = list(zone_grid(layers, **spec.grid.sizes))
    if not zones:
        raise EvaluationError(f"no zones of the grid fit into {layers} layers")
    asked = math.prod(len(set(sizes)) for sizes in spec.grid.sizes.values())
    if asked > len(zones):
        log(f"{len(zones)} of the grid's {asked} zones fit into {layers} layers")
    candidates = {
        Condition("swap", zones=one, outside=outside): swapped(start, one, outside)
        for outside in spec.grid.outside or ("",)
        for one in zones
    }
    others = contenders(start, densities=spec.ties)
    return sweep_plans(spec, candidates, others, log=log, **settings)


def sweep_plans(
    spec: SweepSettings,
    candidates: Mapping[Condition, Plan],
    others: Mapping[Condition, Plan],
    *,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> GridResult:
    """Evaluate candidates on the development split, and report the best beside its contenders.

    Args:
        spec: tasks and settings.
        candidates: the compositions to choose from.
        others: the contenders.
        store: keeps answers.
        allow_code: let tasks run code that a model wrote.
        log: called with what the sweep costs.
        progress: called with the number of compositions just scored.

    Raises:
        LayerswapError: the experts or tasks cannot be loaded, or a task has too few documents.
    """
    plans = {**others, **candidates}
    evaluator = Evaluator(
        spec, plans, store=store, allow_code=allow_code, log=log, progress=progress
    )
    counts = evaluator.sweep.counts([evaluator.members[one] for one in candidates])
    log(
        f"{len(candidates)} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )
    tried = _try(evaluator, list(candidates))
    early = tried.race or tried.screening
    running = [list(candidates)[i] for i in early.survivors] if early else ()
    chosen = choose(tried.values, among=running)
    if spec.without_labels is not None:
        chosen = chosen_by_signal(
            tried.values, default_zones(plans[chosen].composition.layers), log
        )
    if early:
        log(str(early))
    scores, rows, measure = evaluator.tested(
        chosen, others, reference=CHOSEN, measure=tried.measure
    )
    best = plans[DEFAULT if suggested(scores, CHOSEN) == DEFAULT else chosen]
    return GridResult(
        scores=scores, chosen=chosen, best=best, development=tried.values,
        chosen_by=tried.chosen_by, measure=measure, rows=[*tried.rows, *rows], counts=counts,
        race=tried.race, screening=tried.screening,
    )  # fmt: skip


def chosen_by_signal(values: Mapping[Condition, float], default: Zones, log: Log) -> Condition:
    """The composition that a label-free signal chooses; the default where it tells none apart.

    Args:
        values: of the signal, by composition.
        default: the paper's zones.
        log: called with the value of every composition and how far the best is ahead.
    """
    for one in sorted(values, key=lambda one: -values[one]):
        log(f"{one}: {values[one]:.4f}")
    best, median = max(values.values()), float(np.median(list(values.values())))
    if len(values) > 1 and best - median < INDISTINCT:
        defaults = {one: value for one, value in values.items() if one.zones == default}
        taken = choose(defaults or values)
        log(f"the signal cannot tell the compositions apart; {taken} is taken as the default")
        return taken
    log(f"the best is {best - median:.4f} above the median of {len(values)} compositions")
    return choose(values)


def _try(evaluator: Evaluator, candidates: Sequence[Condition]) -> _Tried:
    spec = evaluator.spec
    if spec.without_labels is not None:
        values, name = choose_without_labels(evaluator, candidates, TASK_EXPERT)
        return _Tried(dict(zip(candidates, values.tolist(), strict=True)), f"{name} (no labels)")
    if spec.halving is not None:
        return _raced(evaluator, candidates)
    if spec.item_response is not None:
        return _screened(evaluator, candidates, spec.item_response)
    rows = evaluator.rows(DEVELOPMENT, candidates)
    measure = evaluator.measure(rows)
    means = {one: float(v.mean()) for one, v in by_condition(rows, measure).items()}
    return _Tried(means, " ".join(measure), rows, measure)


def _raced(evaluator: Evaluator, candidates: Sequence[Condition]) -> _Tried:
    """Race the grid; the rows of every composition are those of the last round it ran in."""
    halving = evaluator.spec.halving
    assert halving is not None
    found: dict[Condition, list[DocumentScore]] = {}
    measures: list[Measure] = []

    def score(running: Sequence[int], count: int) -> Any:
        conditions = [candidates[i] for i in running]
        rows = evaluator.rows(DEVELOPMENT, conditions, count)
        measures.append(evaluator.measure(rows))
        for condition in conditions:
            found[condition] = [row for row in rows if row.condition == condition]
        return np.array(list(by_condition(rows, measures[0]).values()))

    ran = race(
        score, range(len(candidates)), evaluator.smallest(DEVELOPMENT), first=halving.first,
        error=halving.error,
    )  # fmt: skip
    rows = [row for condition in candidates for row in found[condition]]
    means = dict(zip(candidates, ran.means, strict=True))
    return _Tried(means, " ".join(measures[0]), rows, measures[0], ran)


def _screened(
    evaluator: Evaluator, candidates: Sequence[Condition], settings: ItemResponse
) -> _Tried:
    """Screen the grid; every composition has the rows of the documents that it was scored on."""
    found: dict[Condition, list[DocumentScore]] = {}
    measures: list[Measure] = []

    def score(asked: Sequence[int], places: Sequence[int]) -> Any:
        values, rows, measure = evaluator.on_places([candidates[i] for i in asked], places)
        measures.append(measure)
        for i in asked:
            found[candidates[i]] = [row for row in rows if row.condition == candidates[i]]
        return values

    went = screen(
        score, range(len(candidates)), evaluator.smallest(DEVELOPMENT),
        calibration=settings.calibration, anchors=settings.documents,
        finalists=settings.finalists, seed=evaluator.spec.seed,
    )  # fmt: skip
    rows = [row for one in candidates for row in found[one]]
    values = dict(zip(candidates, went.estimates, strict=True))
    return _Tried(values, " ".join(measures[0]), rows=rows, measure=measures[0], screening=went)
