"""Sweeps over candidates: all are scored on development documents, one is selected and tested.

With a screen there are two stages: all candidates are scored on a random part of the development
documents, and the best few on all of them. On the lab this rule was as good as item-response
screening and successive halving at the same price (docs/tables/tried.csv).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from layerswap.compose import Recipe, Zones, default_zones
from layerswap.engine.trie import LayerCounts
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.statistics import Interval, paired_difference
from layerswap.experiment.answers import Answer, Measure, classified_under, values_of
from layerswap.experiment.baselines import Baselines, answers_of_baselines, baselines_of
from layerswap.experiment.compare import (
    NOT_SAVED,
    TestResult,
    Values,
    best_of_all,
    choose,
    ranked,
)
from layerswap.experiment.conditions import (
    CHOSEN,
    DEFAULT,
    Condition,
    contenders,
    grid_plans,
)
from layerswap.experiment.evaluator import (
    DEVELOPMENT,
    TEST,
    Evaluator,
)
from layerswap.experiment.spec import Screen, SweepSettings, SweepSpec
from layerswap.ground.types import Advance, Log
from layerswap.merge import Plan, make_plan

if TYPE_CHECKING:
    import pandas as pd

    from layerswap.engine.sweep import Sweep


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

    best: Plan  # the selected model, ready to be saved or loaded
    # The plan of every model on the test documents, and the mean score on the development documents
    # of those that competed.
    models: Mapping[Condition, Plan] = field(default_factory=dict)
    competed: Mapping[Condition, float] = field(default_factory=dict)
    # By candidate, its mean score on the development documents that it was scored on.
    development: Mapping[Condition, float]
    # The chosen composition minus the default swap on the development documents, paired; None where
    # there is no default swap, or the default swap itself was chosen.
    lead: Interval | None = None
    measure: Measure
    rows: Sequence[Answer]  # every score of every document, of both splits
    counts: LayerCounts  # layers run, together and one by one
    screening: Screening | None = None  # the two stages, with a screen

    def tested(self, measure: Measure) -> TestResult:
        """The test documents under another measure."""
        rows = [row for row in self.rows if row.split == TEST]
        return TestResult(values_of(rows, measure), self.chosen, selected=self.selected)

    def with_answers(self, answers: Sequence[Answer]) -> SweepResult:
        """The result with the test answers of further models."""
        scores = {**self.scores, **values_of(answers, self.measure)}
        return replace(self, scores=scores, rows=[*self.rows, *answers])

    @property
    def chosen_by(self) -> str:
        """The score that chose, in words."""
        return " ".join(self.measure)

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return self.best.composition.layers

    @property
    def default(self) -> Zones:
        """The paper's zones, scaled by depth."""
        return default_zones(self.layers)

    def to_pandas(self) -> pd.DataFrame:
        """Every score of every document, a row each; see `Answer`."""
        import pandas as pd

        return pd.DataFrame([row.to_dict() for row in self.rows])


def run_sweep(
    spec: SweepSpec, recipe: Recipe, *, log: Log = lambda line: None, **settings: Any
) -> SweepResult:
    """Evaluates the grid of a file; settings are those of `sweep_plans`."""
    start = make_plan(recipe)
    others = contenders(start, densities=spec.ties)
    return sweep_plans(spec, grid_plans(spec.grid, start, log), others, log=log, **settings)


def sweep_plans(
    spec: SweepSettings,
    candidates: Mapping[Condition, Plan],
    others: Mapping[Condition, Plan],
    *,
    store: AnswerStore | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> SweepResult:
    """Scores models on the development split, selects one, and tests all on the test split.

    The default swap is one of the `others` unless the candidates are no swaps.
    """
    documents = Evaluator(spec, {**others, **candidates}, store=store, log=log, progress=progress)
    documents.check_choice(next(iter(candidates)))
    return run_experiment(documents, candidates, others, screen=spec.screen, log=log)


class Scorer(Protocol):
    """Documents on which the compositions of a sweep are scored."""

    @property
    def sweep(self) -> Sweep:
        """The models in memory."""

    @property
    def members(self) -> Mapping[Condition, int]:
        """The number of each condition in the sweep."""

    def rows(
        self, split: str, conditions: Sequence[Condition], *, first: int | None = None
    ) -> list[Answer]:
        """Scores compositions on a split, or on the `first` documents of each task."""

    def measure(self, rows: Sequence[Answer]) -> Measure:
        """Returns the measure that chooses."""


def run_experiment(
    documents: Scorer,
    candidates: Mapping[Condition, Plan],
    others: Mapping[Condition, Plan],
    *,
    screen: Screen | None = None,
    log: Log = lambda line: None,
) -> SweepResult:
    """Scores models on the development split, selects one, and tests all on the test split.

    See `sweep_plans` and `best_of_all`; `screen` has the two stages.
    """
    plans = {**others, **candidates}
    numbers = [documents.members[candidate] for candidate in candidates]
    counts = documents.sweep.counts(numbers)
    log(
        f"{len(candidates)} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )
    default = _default(candidates, others)
    rivals = [rival for rival in others if rival.method not in NOT_SAVED and rival != DEFAULT]
    scored = _scored(documents, list(candidates), default, rivals, screen)
    chosen = choose({model: v for model, v in scored.finals.items() if model in candidates})
    lead = None
    if default is not None and default != chosen:
        lead = paired_difference(scored.finals[chosen], scored.finals[default])
    named = {CHOSEN: chosen, **({DEFAULT: default} if default else {}), **{o: o for o in rivals}}
    selected = best_of_all({name: scored.finals[model] for name, model in named.items()})
    models = {**others, CHOSEN: plans[chosen]}
    if scored.screening is not None:
        log(str(scored.screening))
    measure = scored.measure
    rows = [
        replace(row, condition=CHOSEN, model=str(CHOSEN)) if row.condition == chosen else row
        for row in documents.rows(TEST, [chosen, *others])
    ]
    free, of_free = _baselines([*scored.rows, *rows], measure, chosen)
    rows += of_free
    classified = classified_under(rows, measure)
    return SweepResult(
        scores=values_of(rows, measure), chosen=chosen, labelled=free.labelled,
        selected=selected, best=models[selected], models=models,
        competed={name: float(scored.finals[model].mean()) for name, model in named.items()},
        development=scored.means, lead=lead,
        measure=measure, rows=[*scored.rows, *rows],
        counts=documents.sweep.counts(numbers),
        screening=scored.screening, classified=classified,
    )  # fmt: skip


def _baselines(
    rows: Sequence[Answer], measure: Measure, chosen: Condition
) -> tuple[Baselines, list[Answer]]:
    """The baselines of the documents that the chosen composition answered, and their answers."""
    own = sorted((row for row in rows if row.measure == measure), key=lambda row: row.document)
    tested = [row for row in own if row.split == TEST and row.condition == CHOSEN]
    taught = [row for row in own if row.split == DEVELOPMENT and row.condition == chosen]
    found = baselines_of(taught, tested)
    return found, list(answers_of_baselines(tested, found))


def _default(
    candidates: Mapping[Condition, Plan], others: Mapping[Condition, Plan]
) -> Condition | None:
    """Returns the candidate that is the default swap, else `DEFAULT`, or None without one."""
    if DEFAULT not in others:
        return None
    wanted = others[DEFAULT].composition
    return next((name for name, plan in candidates.items() if plan.composition == wanted), DEFAULT)


@dataclass(frozen=True)
class _Scored:
    """The candidates on the development split."""

    means: Mapping[Condition, float]
    # Per document or prompt, of the models that were scored on all of them: the finalists, or all
    # candidates, the default swap and its rivals.
    finals: Mapping[Condition, Values]
    measure: Measure
    rows: Sequence[Answer]
    screening: Screening | None = None


def _scored(
    documents: Scorer,
    candidates: Sequence[Condition],
    default: Condition | None,
    rivals: Sequence[Condition],
    screen: Screen | None,
) -> _Scored:
    """Scores the candidates; with a screen all on a part of the documents, the best few on all.

    The default swap and its rivals are scored on all documents, as the choice competes with them.
    """
    finalists = candidates
    first: list[Answer] = []
    early: dict[Condition, Values] = {}
    if screen is not None:
        first = documents.rows(DEVELOPMENT, candidates, first=screen.documents)
        early = values_of(first, documents.measure(first))
        finalists = ranked(early)[: screen.finalists]
    finalists = list(dict.fromkeys([*finalists, *([default] if default else [])]))
    rows = documents.rows(DEVELOPMENT, [*finalists, *rivals])
    measure = documents.measure(rows)
    finals = values_of(rows, measure)
    means = {candidate: float({**early, **finals}[candidate].mean()) for candidate in candidates}
    screening = None
    if early:
        size, whole = (len(next(iter(by.values()))) for by in (early, finals))
        screening = Screening(len(candidates), len(finalists), size, whole)
        rows += [row for row in first if row.condition not in finals]
    return _Scored(means, finals, measure, rows, screening)
