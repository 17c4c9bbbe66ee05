"""Search beyond a grid: Optuna's TPE over what every layer (and role) takes."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance, Log
from layerswap.compose import Recipe, Zones, default_zones
from layerswap.compose.schema import Override
from layerswap.evaluation.response_cache import AnswerStore, composition_key
from layerswap.merge import Plan, make_plan
from layerswap.search.conditions import DEFAULT, TASK_EXPERT, Condition, contenders
from layerswap.search.evaluator import (
    DEVELOPMENT,
    DocumentScore,
    Evaluator,
    Measure,
    SweepResult,
    by_condition,
)
from layerswap.search.item_response import Estimator, Screening
from layerswap.search.protocol import Values, choose, suggested
from layerswap.search.spec import SearchSpec, SweepSpec
from layerswap.search.unlabelled import choose_without_labels

if TYPE_CHECKING:
    import optuna


OUTSIDE = "outside"
Choices = Mapping[str, str]
"""Per parameter what it takes, as text; a share of the language expert as a number in text."""


def parameters(spec: SearchSpec, layers: int) -> dict[str, list[str]]:
    """What is chosen, and from what: `outside`, and `3` or `3.attention` and `3.mlp`."""
    takes = [str(value) for value in spec.take]
    roles = [""] if spec.each == "layer" else [".attention", ".mlp"]
    return {
        OUTSIDE: list(spec.outside),
        **{f"{layer}{role}": takes for layer in range(layers) for role in roles},
    }


def with_choices(recipe: Recipe, choices: Choices) -> Recipe:
    """The recipe with an override for every choice; norms go with attention."""
    assert recipe.swap is not None, "a sweep's recipe is a swap"
    places = [*recipe.places, *_overrides(recipe, choices)]
    swap = recipe.swap.model_copy(update={"outside": choices[OUTSIDE]})
    return recipe.model_copy(update={"swap": swap, "places": places})


def with_choices_plan(start: Plan, choices: Choices) -> Plan:
    """The plan of `with_choices`, over checkpoints that are open already."""
    return start.with_recipe(with_choices(start.recipe, choices))


def _overrides(recipe: Recipe, choices: Choices) -> Iterator[Override]:
    method = recipe.swap
    assert method is not None, "a sweep's recipe is a swap"
    for key, choice in choices.items():
        if key == OUTSIDE:
            continue
        layer, _, role = key.partition(".")
        take: dict[str, float] = {choice: 1.0}
        if choice not in (*recipe.experts, "base"):
            share = float(choice)
            weights = {method.task: 1 - share, method.language: share}
            take = {name: weight for name, weight in weights.items() if weight}
        # Attention comes first and brings the layer's norms; the mlp then takes its own.
        roles = ["mlp"] if role == "mlp" else None
        yield Override(layers=layer, roles=roles, take=take)


SUGGESTIONS = 5
"""How many of `suggest`'s ranking a search starts with."""


@dataclass(frozen=True)
class Trial:
    """A composition that was tried.

    Attributes:
        number: from 0; those of a search that was killed are missing.
        choices: what every layer (and role) takes.
        score: by which the search chooses.
    """

    number: int
    choices: Choices
    score: float

    @property
    def condition(self) -> Condition:
        """The composition among others."""
        return trial_of(self.number)


def trial_of(number: int) -> Condition:
    """The composition of a trial."""
    return Condition("search", f"trial {number}")


class Search:
    """Optuna's proposals over the choices of all layers, kept in a file.

    Args:
        spec: what there is to choose.
        start: the recipe's plan.
        study: the file; in memory when None.
    """

    def __init__(self, spec: SearchSpec, start: Plan, study: Path | None = None) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._spec, self._start = spec, start
        self._takes = [str(value) for value in spec.take]
        self.parameters = parameters(spec, start.composition.layers)
        space = [self.parameters, spec.seed, composition_key(start)]
        name = hashlib.sha256(json.dumps(space).encode()).hexdigest()
        self._study = optuna.create_study(
            storage=f"sqlite:///{study}" if study else None,
            study_name=name,
            direction="maximize",
            load_if_exists=True,
        )
        self._distributions: dict[str, Any] = {
            key: optuna.distributions.CategoricalDistribution(values)
            for key, values in self.parameters.items()
        }

    def run(
        self, score: Callable[[Mapping[int, Choices]], dict[int, float]], progress: Advance | None
    ) -> list[Trial]:
        """Try as many compositions as the file asks for, those of earlier runs included.

        Args:
            score: gives the score of every trial of a batch.
            progress: called with the number of compositions just tried.
        """
        self._forget_unfinished()
        if not self._finished():
            for choices in self._starts():
                self._study.enqueue_trial(dict(choices), skip_if_exists=True)
        while (left := self._spec.trials - len(self._finished())) > 0:
            batch = self._propose(min(left, self._spec.batch))
            scores = score({trial.number: trial.params for trial in batch})
            for trial in batch:
                self._study.tell(trial, scores[trial.number])
            if progress is not None:
                progress(len(batch))
        return self.trials

    @property
    def trials(self) -> list[Trial]:
        """What has been tried, in order."""
        return [Trial(t.number, t.params, float(t.value)) for t in self._finished()]

    def _propose(self, count: int) -> list[optuna.Trial]:
        """A batch: the first trial is free, the others begin with the layers that it begins with.

        As many layers as a draw says, at least a quarter and at most three.
        """
        import optuna

        number = len(self._study.get_trials(deepcopy=False))
        sampler = optuna.samplers.TPESampler(seed=self._spec.seed + number, constant_liar=True)
        self._study.sampler = sampler
        first = self._study.ask(self._distributions)
        layers = self._start.composition.layers
        draw = random.Random(f"{self._spec.seed}/{number}").uniform(0.25, 0.75)
        shared = {
            key: first.params[key]
            for key in self.parameters
            if key != OUTSIDE and int(key.split(".")[0]) < draw * layers
        }
        # What lies outside decides the embedding, with which a shared beginning begins.
        shared[OUTSIDE] = first.params[OUTSIDE]
        with warnings.catch_warnings():
            # Marked as experimental since Optuna 2.4, and unchanged since.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._study.sampler = optuna.samplers.PartialFixedSampler(shared, sampler)
        return [first, *(self._study.ask(self._distributions) for _ in range(count - 1))]

    def _finished(self) -> list[Any]:
        import optuna

        state = optuna.trial.TrialState.COMPLETE
        return self._study.get_trials(deepcopy=False, states=(state,))

    def _forget_unfinished(self) -> None:
        """Trials that were asked for when a search was killed count as failed."""
        import optuna

        for trial in self._study.get_trials(states=(optuna.trial.TrialState.RUNNING,)):
            self._study.tell(trial.number, state=optuna.trial.TrialState.FAIL)

    def _starts(self) -> Iterator[Choices]:
        layers = self._start.composition.layers
        method = self._start.recipe.swap
        assert method is not None, "a sweep's recipe is a swap"
        tried = [default_zones(layers), Zones(0, 0), Zones(layers, 0), *_suggested(self._start)]
        sides = (method.task, method.language)
        if not set(sides) <= set(self._takes):
            return
        for zones in tried:
            inside = range(zones.bottom, layers - zones.top)
            yield {
                key: self.parameters[OUTSIDE][0]
                if key == OUTSIDE
                else sides[int(key.split(".")[0]) not in inside]
                for key in self.parameters
            }


def _suggested(start: Plan) -> Iterable[Zones]:
    """The first of `suggest`'s ranking; nothing without a base to measure against."""
    from layerswap.deltas.atlas import measure_delta
    from layerswap.deltas.suggestion import suggest

    method, base = start.recipe.swap, start.recipe.base
    assert method is not None, "a sweep's recipe is a swap"
    sources = {name: start.recipe.experts[name].source for name in (method.task, method.language)}
    experts = {name: source for name, source in sources.items() if source is not None}
    if base is None or base.source is None or len(experts) < len(sources):
        return []
    atlas = measure_delta(base.source, experts)
    ranked = suggest(atlas, method.task, method.language).ranked[:SUGGESTIONS]
    return [Zones(z.bottom + z.bottom_transition, z.top + z.top_transition) for z, _ in ranked]


FOUND = Condition("search", "chosen on development")
"""The composition that a search chose."""


@dataclass(frozen=True, kw_only=True)
class SearchResult(SweepResult):
    """What a search found.

    Attributes:
        trials: in their order.
        evaluated: layers that were run per batch of documents, over the whole search.
        naive: layers that one by one would have been.
    """

    trials: Sequence[Trial]
    evaluated: int
    naive: int

    @property
    def best_trial(self) -> Trial:
        """The trial that was chosen."""
        return next(trial for trial in self.trials if trial.condition == self.chosen)

    @cached_property
    def worth(self) -> dict[str, dict[str, float]]:
        """Per parameter and choice the mean score of the trials that made it."""
        found: dict[str, dict[str, list[float]]] = {}
        for trial in self.trials:
            for key, choice in trial.choices.items():
                found.setdefault(key, {}).setdefault(choice, []).append(trial.score)
        return {
            key: {choice: sum(scores) / len(scores) for choice, scores in sorted(by.items())}
            for key, by in found.items()
        }


def run_search(
    spec: SweepSpec,
    recipe: Recipe,
    *,
    study: Path | None = None,
    store: AnswerStore | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    progress: Advance | None = None,
) -> SearchResult:
    """Search compositions by the development split, and report the best on the rest.

    Args:
        spec: with a search.
        recipe: a swap, from whose experts the search selects.
        study: the file that Optuna keeps; in memory when None.
        store: keeps answers.
        allow_code: let tasks run code that a model wrote.
        log: called with what the search costs.
        progress: called with the number of compositions just tried.

    Raises:
        LayerswapError: the experts or tasks cannot be loaded.
    """
    assert spec.search is not None, "the file has a search; see search.grid for a grid"
    start = make_plan(recipe)
    others = contenders(start, densities=spec.ties)
    evaluator = Evaluator(spec, others, store=store, allow_code=allow_code, log=log)
    scorer = _Scorer(evaluator, start)
    search = Search(spec.search, start, study)
    if scorer.estimator is not None and (earlier := search.trials):
        # Their answers are kept: the model is fitted to the same compositions again.
        scorer({trial.number: trial.choices for trial in earlier})
    trials, whole, screening = scorer.finish(search.run(scorer, progress))
    if screening is not None:
        log(str(screening))
    development = {trial.condition: trial.score for trial in trials}
    chosen = choose(development, among=whole)
    best = next(trial for trial in trials if trial.condition == chosen)
    evaluator.members[chosen] = scorer.member(best.choices)
    scores, rows, measure = evaluator.tested(
        chosen, others, reference=FOUND, measure=scorer.measure
    )
    log(
        f"{len(trials)} compositions tried: {scorer.evaluated} layers run per batch of documents "
        f"instead of {scorer.naive}"
    )
    beaten = suggested(scores, FOUND) == DEFAULT
    plan = others[DEFAULT] if beaten else with_choices_plan(start, best.choices)
    return SearchResult(
        scores=scores, chosen=chosen, reference=FOUND, best=plan,
        development=development, chosen_by=scorer.chosen_by, measure=measure,
        rows=[*scorer.rows, *rows], trials=trials, evaluated=scorer.evaluated, naive=scorer.naive,
        screening=screening,
    )  # fmt: skip


class _Scorer:
    """Scores batches of choices on the development split, keeping every row."""

    def __init__(self, evaluator: Evaluator, start: Plan) -> None:
        self._evaluator, self._start = evaluator, start
        self._members: dict[str, int] = {}
        self._rows: dict[Condition, list[DocumentScore]] = {}
        self._named: dict[int, Condition] = {}
        self.measure: Measure | None = None
        self.chosen_by = ""
        self.evaluated = self.naive = 0
        self.estimator: Estimator | None = None
        spec = evaluator.spec
        if (wanted := spec.item_response) is not None:
            self.estimator = Estimator(
                self._on_places, evaluator.smallest(DEVELOPMENT), seed=spec.seed,
                calibration=wanted.calibration, anchors=wanted.documents,
            )  # fmt: skip

    @property
    def rows(self) -> list[DocumentScore]:
        """Every score of every document that it asked for."""
        return [row for rows in self._rows.values() for row in rows]

    def finish(
        self, trials: Sequence[Trial]
    ) -> tuple[list[Trial], list[Condition], Screening | None]:
        """The trials, those that may be chosen, and how they were estimated, if they were.

        The best of those that were estimated are scored on all documents.
        """
        wanted = self._evaluator.spec.item_response
        if self.estimator is None or wanted is None:
            return list(trials), [], None
        of = {self.member(trial.choices): trial for trial in reversed(trials)}
        members = list(reversed(of))
        went = self.estimator.finish(members, wanted.finalists)
        means = dict(zip(members, went.estimates, strict=True))
        whole = [of[members[i]].condition for i in went.survivors]
        scored = [replace(one, score=means[self.member(one.choices)]) for one in trials]
        return scored, whole, went

    def _on_places(self, members: Sequence[int], places: Sequence[int]) -> Values:
        conditions = [self._named[member] for member in members]
        values, rows, self.measure = self._evaluator.on_places(conditions, places)
        self._keep(rows)
        return values

    def _keep(self, rows: Iterable[DocumentScore]) -> None:
        """Put rows in the place of what there is of their compositions."""
        found: dict[Condition, list[DocumentScore]] = {}
        for row in rows:
            found.setdefault(row.condition, []).append(row)
        self._rows |= found

    def member(self, choices: Choices) -> int:
        """The position of a composition in the sweep; added if it is not there."""
        plan = with_choices_plan(self._start, choices)
        key = composition_key(plan)
        if key not in self._members:
            (self._members[key],) = self._evaluator.sweep.add([plan])
        return self._members[key]

    def __call__(self, batch: Mapping[int, Choices]) -> dict[int, float]:
        """The score of every trial of a batch, by its number."""
        members = {trial_of(number): self.member(choices) for number, choices in batch.items()}
        self._evaluator.members |= members
        # Trials that are the same composition are scored once, as the first of them.
        first = {member: one for one, member in reversed(members.items())}
        counts = self._evaluator.sweep.counts(list(first))
        self.evaluated, self.naive = self.evaluated + counts.distinct, self.naive + counts.naive
        distinct = [one for one in members if first[members[one]] == one]
        if self._evaluator.spec.without_labels is not None:
            values, signal = choose_without_labels(self._evaluator, distinct, TASK_EXPERT)
            self.chosen_by = f"{signal} (no labels)"
            found = dict(zip(distinct, values.tolist(), strict=True))
        elif self.estimator is not None:
            self._named = {members[one]: one for one in distinct} | self._named
            means = self.estimator([members[one] for one in distinct])
            self.chosen_by = " ".join(self.measure or ())
            found = dict(zip(distinct, means, strict=True))
        else:
            rows = self._evaluator.rows(DEVELOPMENT, distinct)
            self.measure = self._evaluator.measure(rows)
            self.chosen_by = " ".join(self.measure)
            self._keep(rows)
            found = {one: float(v.mean()) for one, v in by_condition(rows, self.measure).items()}
        return {number: found[first[members[trial_of(number)]]] for number in batch}
