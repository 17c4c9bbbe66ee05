"""Sweeps over candidates: all are scored on development documents, one is selected and tested.

With a screen there are two stages: all candidates are scored on a random part of the development
documents, and the best few on all of them. On the lab this rule was as good as item-response
screening and successive halving at the same price, and random draws with it as good as a TPE search
(docs/questions.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.compose import Recipe, Zones, default_zones
from layerswap.engine.trie import LayerCounts
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.results import Sample, samples_of
from layerswap.evaluation.statistics import Interval, paired_difference
from layerswap.ground.types import Advance, Log
from layerswap.merge import Plan, make_plan
from layerswap.search.candidates import Sources, draw_plan, draw_sources, grid_plans, zone_sources
from layerswap.search.conditions import CHOSEN, DEFAULT, Condition, contenders
from layerswap.search.evaluator import (
    DEVELOPMENT,
    TEST,
    DocumentScore,
    Evaluator,
    Measure,
    Objectives,
    by_condition,
    classified_by_condition,
    objectives,
)
from layerswap.search.protocol import TestResult, Values, choose, ranked, select
from layerswap.search.spec import Choice, SweepSettings, SweepSpec
from layerswap.search.unlabelled import signal_values

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Screening:
    """The two stages of a screened sweep, in numbers of compositions and documents."""

    candidates: int
    finalists: int  # scored on all development documents
    first: int  # documents of the first stage
    documents: int  # all development documents

    def __str__(self) -> str:
        return (
            f"{self.finalists} of {self.candidates} compositions were scored on all "
            f"{self.documents} development documents, the others on {self.first}"
        )


@dataclass(frozen=True, kw_only=True)
class SweepResult(TestResult):
    """The result of a sweep."""

    best: Plan  # the selected composition, ready to be saved or loaded
    # By candidate, its mean score on the development documents that it was scored on, or the value
    # of a signal.
    development: Mapping[Condition, float]
    # The chosen composition minus the default swap on the development documents, paired; None where
    # there is no default swap, or the default swap itself was chosen.
    lead: Interval | None = None
    # By candidate, the source of every layer of a swap, or of every place of a draw.
    sources: Mapping[Condition, Sources] = field(default_factory=dict)
    chosen_by: str  # name of the score or signal
    measure: Measure | None
    rows: Sequence[DocumentScore]  # every score of every document, of both splits
    counts: LayerCounts  # layers run, together and one by one
    lost_paths: Sequence[str] = ()  # what the model did not allow to share
    screening: Screening | None = None  # the two stages, with a screen
    answers: Sequence[Sample] = ()  # on the test split, of the chosen composition and the others

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return self.best.composition.layers

    @property
    def default(self) -> Zones:
        """The paper's zones, scaled by depth."""
        return default_zones(self.layers)

    @cached_property
    def objectives(self) -> dict[Condition, Objectives]:
        """Score and language of the answers; empty without an `answer_language`."""
        return objectives(self.development, self.rows)

    @cached_property
    def worth(self) -> dict[str, dict[str, float]]:
        """Mean score of the candidates, by place and source."""
        scores: dict[str, dict[str, list[float]]] = {}
        for one, sources in self.sources.items():
            for place, source in sources.items():
                scores.setdefault(place, {}).setdefault(source, []).append(self.development[one])
        return {
            place: {source: float(np.mean(found)) for source, found in sorted(by.items())}
            for place, by in scores.items()
        }

    @property
    def sensitivity(self) -> list[float | None]:
        """Per layer, the mean score with the language expert minus that with the task expert.

        None where the candidates take the layer from one of the two only.
        """
        by_layer = [self.worth.get(str(layer), {}) for layer in range(self.layers)]
        return [
            by["language"] - by["task"] if {"language", "task"} <= by.keys() else None
            for by in by_layer
        ]

    @cached_property
    def best_recipe(self) -> dict[str, Any]:
        """The recipe of `best`, ready for `layerswap merge`."""
        return self.best.recipe.model_dump(mode="json", exclude_defaults=True)

    def to_pandas(self) -> pd.DataFrame:
        """Every score of every document, a row each; see `DocumentScore`."""
        import pandas as pd

        return pd.DataFrame([row.to_dict() for row in self.rows])


def run_sweep(
    spec: SweepSpec, recipe: Recipe, *, log: Log = lambda line: None, **settings: Any
) -> SweepResult:
    """Evaluates the grid or the random draws of a file; settings are those of `sweep_plans`."""
    start = make_plan(recipe)
    layers = start.composition.layers
    others = contenders(start, densities=spec.ties)
    if spec.grid is not None:
        candidates = grid_plans(spec.grid, start, log)
        return sweep_plans(spec, candidates, others, log=log, **settings)
    assert spec.random is not None, "a sweep has a grid or random draws"
    draws = {
        Condition("draw", str(number)): sources
        for number, sources in enumerate(draw_sources(spec.random, layers), start=1)
    }
    candidates = {one: draw_plan(start, sources) for one, sources in draws.items()}
    return sweep_plans(spec, candidates, others, sources=draws, log=log, **settings)


def sweep_plans(
    spec: SweepSettings,
    candidates: Mapping[Condition, Plan],
    others: Mapping[Condition, Plan],
    *,
    sources: Mapping[Condition, Sources] | None = None,
    store: AnswerStore | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> SweepResult:
    """Scores candidates on the development split, selects one, and tests it on the test split.

    The default swap is one of the `others` unless the candidates are no swaps. `sources` are those
    of every draw; those of swaps follow from their zones.
    """
    plans = {**others, **candidates}
    evaluator = Evaluator(spec, plans, store=store, log=log, progress=progress)
    numbers = [evaluator.members[one] for one in candidates]
    counts = evaluator.sweep.counts(numbers)
    log(
        f"{len(candidates)} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )
    default = _default(candidates, others)
    scored = _scored(evaluator, list(candidates), default)
    chosen = choose({one: v for one, v in scored.finals.items() if one in candidates})
    lead = None
    if default is not None and default != chosen:
        lead = paired_difference(scored.finals[chosen], scored.finals[default])
    selected = select(scored.finals, chosen, default)
    if scored.screening is not None:
        log(str(scored.screening))
    scores, rows, measure = _tested(evaluator, chosen, others, scored.measure)
    classified = classified_by_condition(rows, measure) if measure else {}
    answers: list[Sample] = []
    if measure is not None:
        task, _, name = measure
        for one, result in evaluator.tested.items():
            model = str(CHOSEN if one == chosen else one)
            answers += samples_of(model, task, result["samples"][task], name)
    layers = next(iter(candidates.values())).composition.layers
    zones = {one: one.zones for one in candidates if one.zones is not None}
    return SweepResult(
        scores=scores, chosen=chosen, selected=DEFAULT if selected == default else CHOSEN,
        best=plans[selected], development=scored.means, lead=lead,
        sources=sources or {one: zone_sources(z, layers) for one, z in zones.items()},
        chosen_by=scored.chosen_by, measure=measure, rows=[*scored.rows, *rows],
        counts=evaluator.sweep.counts(numbers), lost_paths=evaluator.sweep.lost_paths,
        screening=scored.screening, answers=answers, classified=classified,
    )  # fmt: skip


def _default(
    candidates: Mapping[Condition, Plan], others: Mapping[Condition, Plan]
) -> Condition | None:
    """Returns the candidate that is the default swap, else `DEFAULT`, or None without one."""
    if DEFAULT not in others:
        return None
    wanted = others[DEFAULT].composition
    return next((one for one, plan in candidates.items() if plan.composition == wanted), DEFAULT)


@dataclass(frozen=True)
class _Scored:
    """The candidates on the development split."""

    means: Mapping[Condition, float]
    # Per document or prompt, of the compositions that were scored on all of them: the finalists, or
    # all candidates, and the default swap.
    finals: Mapping[Condition, Values]
    chosen_by: str  # name of the score or signal
    rows: Sequence[DocumentScore] = ()
    measure: Measure | None = None  # None for a signal
    screening: Screening | None = None


def _scored(
    evaluator: Evaluator, candidates: Sequence[Condition], default: Condition | None
) -> _Scored:
    """Scores the candidates; with a screen all on a part of the documents, the best few on all.

    The default swap is scored on all documents, as the choice is compared with it.
    """
    spec, finalists = evaluator.spec, candidates
    first: list[DocumentScore] = []
    early: dict[Condition, Values] = {}
    if spec.tasks and spec.choose_by != Choice():
        # A wrong name is refused before all are asked; calibration needs two documents.
        evaluator.measure(evaluator.rows(DEVELOPMENT, candidates[:1], first=2, quiet=True))
    if spec.screen is not None:
        first = evaluator.rows(DEVELOPMENT, candidates, first=spec.screen.documents)
        early = by_condition(first, evaluator.measure(first))
        finalists = ranked(early)[: spec.screen.finalists]
    finalists = list(dict.fromkeys([*finalists, *([default] if default else [])]))
    if spec.without_labels is not None:
        values = signal_values(evaluator, finalists)
        means = {one: float(values[one].mean()) for one in candidates}
        return _Scored(means, values, f"{spec.without_labels.signal} (no labels)")
    rows = evaluator.rows(DEVELOPMENT, finalists)
    measure = evaluator.measure(rows)
    finals = by_condition(rows, measure)
    means = {one: float({**early, **finals}[one].mean()) for one in candidates}
    screening = None
    if early:
        size, whole = (len(next(iter(by.values()))) for by in (early, finals))
        screening = Screening(len(candidates), len(finals), size, whole)
        rows += [row for row in first if row.condition not in finals]
    return _Scored(means, finals, " ".join(measure), rows, measure, screening)


def _tested(
    evaluator: Evaluator,
    chosen: Condition,
    others: Mapping[Condition, Plan],
    measure: Measure | None,
) -> tuple[dict[Condition, Values], list[DocumentScore], Measure | None]:
    """Scores the chosen composition, as `CHOSEN`, and its contenders on the test split."""
    if not evaluator.spec.tasks:
        return {}, [], None
    rows = [
        replace(row, condition=CHOSEN) if row.condition == chosen else row
        for row in evaluator.rows(TEST, [chosen, *others])
    ]
    measure = measure or evaluator.measure(rows)
    return by_condition(rows, measure), rows, measure
