"""What a search tries next: Optuna's proposals, in batches that begin alike, kept in a file."""

from __future__ import annotations

import hashlib
import json
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.compose import Zones, default_zones
from layerswap.evaluate.answers import composition_key
from layerswap.evaluate.judging import Step
from layerswap.evaluate.search_space import OUTSIDE, Choices, parameters
from layerswap.evaluate.sweep_spec import SearchSpec
from layerswap.merge.plan import Plan

if TYPE_CHECKING:
    import optuna

SUGGESTIONS = 5
"""How many of `suggest`'s ranking a search starts with."""


@dataclass(frozen=True)
class Trial:
    """A composition that was tried.

    Attributes:
        number: from 0.
        choices: what every layer (and role) takes.
        score: by which the search chooses.
    """

    number: int
    choices: Choices
    score: float


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
        self, score: Callable[[Mapping[int, Choices]], dict[int, float]], progress: Step | None
    ) -> list[Trial]:
        """Try as many compositions as the file asks for, those of earlier runs included.

        Args:
            score: gives the score of every trial of a batch.
            progress: called with the number of compositions just tried.
        """
        import optuna

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
        state = optuna.trial.TrialState.COMPLETE
        return [
            Trial(i, trial.params, float(trial.value))  # type: ignore[arg-type]
            for i, trial in enumerate(self._study.get_trials(states=(state,)))
        ]

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
    from layerswap.delta.atlas import measure_delta
    from layerswap.delta.proposal import suggest

    method, base = start.recipe.swap, start.recipe.base
    assert method is not None, "a sweep's recipe is a swap"
    sources = {name: start.recipe.experts[name].source for name in (method.task, method.language)}
    experts = {name: source for name, source in sources.items() if source is not None}
    if base is None or base.source is None or len(experts) < len(sources):
        return []
    atlas = measure_delta(base.source, experts)
    ranked = suggest(atlas, method.task, method.language).ranked[:SUGGESTIONS]
    return [Zones(z.bottom + z.bottom_transition, z.top + z.top_transition) for z, _ in ranked]
