"""One result: models on test documents, the choice on development documents, and the road to take.

`eval`, `compare`, `sweep`, `study` and the quickstart have their results in this form, and all
pages, tables and JSON documents read it. Where something is chosen, every candidate is scored on
development documents, and these decide which model is selected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.classifier import LabelledTexts, Worth, worth
from layerswap.evaluation.statistics import (
    Balanced,
    Classified,
    Interval,
    classified_of,
    mean_interval,
    mean_over_groups,
    paired_difference,
    paired_over_groups,
    student_interval,
)
from layerswap.experiment.answers import Answer, Values
from layerswap.experiment.conditions import (
    ALSO_FINISHED,
    BASE,
    BASELINES,
    CHANCE,
    CHOSEN,
    COMMONEST,
    DEFAULT,
    FINISHED,
    FLATTERED,
    LANGUAGE_EXPERT,
    ON_LABELS,
    TASK_EXPERT,
    TRANSLATIONS,
    VECTORS,
    Condition,
)
from layerswap.report.tables import unit_of

NOT_SAVED = ("base", "joint", "simultaneous", FINISHED, ALSO_FINISHED, *BASELINES)
"""Methods left out of the choice on development documents: no merges of the experts."""
Model = Any
"""A `Condition`, or the name of a checkpoint."""
RANKED = 5
"""Fewest languages for an interval over languages, and fewest results for ranks."""
Road = Literal["too few documents", "no model", "labels", "encoder", "no merge", "translator",
               "merge", "finished"]  # fmt: skip
COSTS: tuple[tuple[Road, set[str]], ...] = (
    ("no model", {CHANCE.method, COMMONEST.method}),
    ("labels", {ON_LABELS.method}),
    ("encoder", {VECTORS}),
    ("no merge", {BASE.method}),
    ("no merge", {TASK_EXPERT.method, LANGUAGE_EXPERT.method}),
    ("translator", {*TRANSLATIONS}),
)
"""Kinds of road that cost less than a merge, cheapest first, with their methods."""
COARSE = 0.10
"""Widest reach of an interval, as a fraction, of a test with enough documents."""


class DocumentSplit(NamedTuple):
    """Positions of the development documents and of the test documents."""

    development: npt.NDArray[np.int64]
    test: npt.NDArray[np.int64]


def split_documents(
    count: int,
    development: float,
    *,
    seed: int = 0,
    limit: int | None = None,
    order: Sequence[int] | None = None,
) -> DocumentSplit:
    """Splits at least two documents at random, with at least one on each side.

    Equal arguments give an equal split, so tasks with parallel documents are split in parallel.
    `development` is a share in 0..1. `limit` counts both splits. Positions are in the order drawn,
    or in a given order of them.
    """
    drawn = np.random.default_rng(seed).permutation(count) if order is None else np.array(order)
    drawn = drawn[:limit]
    cut = min(len(drawn) - 1, max(1, round(development * len(drawn))))
    return DocumentSplit(drawn[:cut], drawn[cut:])


def choose(
    scores: Mapping[Condition, Values | float],
    *,
    of_equals: Literal["smallest", "first"] = "smallest",
) -> Condition:
    """Returns the candidate with the highest mean score on the development documents.

    Ties: `smallest` takes the candidate with the fewest layers in its zones, which departs least
    from the task expert, and `first` the first of the mapping.
    """

    def rank(condition: Condition) -> tuple[float, int]:
        zones = condition.zones if of_equals == "smallest" else None
        return -float(np.mean(scores[condition])), sum(vars(zones).values()) if zones else 0

    return min(scores, key=rank)


def best_of_all(scores: Mapping[Condition, Values]) -> Condition:
    """Returns the model with the highest mean score on development documents.

    All merges and experts of a study compete, not only swaps; `NOT_SAVED` do not. Ties go to
    the default swap, then to the chosen one. Test scores play no part. The regret of this rule
    and of others is in docs/evaluation.md.
    """
    competing = [model for model in scores if model.method not in NOT_SAVED and model != FLATTERED]
    ordered = sorted(competing, key=lambda model: (model != DEFAULT, model != CHOSEN))
    return choose({model: scores[model] for model in ordered}, of_equals="first")


@dataclass(frozen=True, kw_only=True, eq=False)
class Choice:
    """The choice on development documents: its candidates, their scores and the result.

    Attributes:
        candidates: by composition that was tried, its scores, the mean over pairs of experts.
        competed: by pair and reported model, its scores; the best is selected.
        reported: by pair and reported model, the model with its chosen zones or setting.
        count: the number of documents.
        published: true for a published development split, on which nothing is reported.
        labels: the right labels of the documents; empty for tasks without labels.
        weights: by model, the key of its weights, if recorded.
    """

    candidates: Mapping[Condition, Values] = field(default_factory=dict)
    competed: Mapping[str, Mapping[Condition, Values]] = field(default_factory=dict)
    reported: Mapping[str, Mapping[Condition, Condition]] = field(default_factory=dict)
    count: int = 0
    published: bool = False
    labels: frozenset[str] = frozenset()
    weights: Mapping[Condition, str] = field(default_factory=dict)

    def same(self, one: Model, other: Model) -> bool:
        """True if two reported models are one composition for every pair, as a chosen default."""

        def weights(by: Mapping[Condition, Condition], name: Model) -> Model:
            model = by.get(name, name)
            return self.weights.get(model) or model

        by_pair = self.reported.values()
        return one == other or (
            any(by_pair) and all(weights(by, one) == weights(by, other) for by in by_pair)
        )

    @property
    def chosen(self) -> dict[str, Condition]:
        """By pair, the best composition."""
        return {pair: by[CHOSEN].treatment for pair, by in self.reported.items() if CHOSEN in by}

    @cached_property
    def selected(self) -> Condition:
        """The model to report first and to save: finished on labels, else `unfinished`."""
        names = next(iter(self.reported.values()), {})
        return next((name for name in names if name.method == FINISHED), self.unfinished)

    @cached_property
    def unfinished(self) -> Condition:
        """The best model by `best_of_all` over pairs; the default swap if nothing competed."""
        by_pair = list(self.competed.values())
        if not by_pair:
            return DEFAULT
        common = [model for model in by_pair[0] if all(model in by for by in by_pair)]
        return best_of_all({m: np.mean([by[m] for by in by_pair], axis=0) for m in common})

    @property
    def saved(self) -> Condition:
        """The selected model of the best pair on development documents, otherwise of the first."""
        means = {pair: float(by[self.selected].mean()) for pair, by in self.competed.items()}
        pair = max(means, key=means.__getitem__) if means else next(iter(self.reported))
        return self.reported[pair][self.selected]

    def names_of(self, model: Condition) -> list[Condition]:
        """The names that report a model: of the grid, `CHOSEN`, `FLATTERED` or none."""
        if model.zones is None:
            return [model.treatment]
        picked = self.reported.get(model.pair, {})
        return [name for name in (CHOSEN, FLATTERED) if picked.get(name) == model]


class InEnglish(NamedTuple):
    """The mean score of the task experts in English, as with a perfect translator."""

    score: Interval
    parallel: bool  # true if the documents are those of the language, by their right answers


@dataclass(frozen=True)
class Verdict:
    """The recommended road of one result.

    Attributes:
        kind: the kind of the road.
        road: the cheapest model without another one clearly above it.
        lead: the selected model minus the road, paired over documents; None if they are the same.
    """

    kind: Road
    road: Condition
    lead: Interval | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Compared:
    """Models on the same documents of a benchmark in a language, on which nothing was chosen.

    Attributes:
        scores: one score per document, by model; the mean over pairs of experts.
        selected: the model that is reported first, and that the others are compared with.
        benchmark: its name; of an lm-eval task the task's.
        language: a BCP 47 tag, or the study's name of the language; empty if unknown.
        task: the name of the task or group.
        metric: the metric of the scores; empty for fractions.
        likeness: the metric of written answers, of which the scores are fractions.
        choice: the choice on development documents; empty where nothing was to be chosen.
        classified: answers to a classification, by model; empty for other tasks.
        labelled: the texts of a classification that a linear classifier is trained on and asked.
        counts: documents of each model, where only those that all models have are compared.
        wholes: the score of each model over the whole corpus, where lm-eval has one, such as BLEU.
        pairs: `scores` by pair, if there are pairs.
        test: positions of the documents, in the order of task and document.
        flattered: models that these documents chose.
        baselines: models that are baselines.
    """

    scores: Mapping[Model, Values]
    selected: Model = CHOSEN
    benchmark: str = ""
    language: str = ""
    task: str = ""
    metric: str = ""
    likeness: str = ""
    choice: Choice = Choice()
    classified: Mapping[Model, Classified] = field(default_factory=dict)
    labelled: LabelledTexts | None = None
    counts: Mapping[Model, int] = field(default_factory=dict)
    wholes: Mapping[Model, float | Interval] = field(default_factory=dict)
    pairs: Mapping[str, Mapping[Condition, Values]] = field(default_factory=dict)
    test: tuple[int, ...] = ()
    flattered: frozenset[Model] = frozenset({FLATTERED})
    baselines: frozenset[Model] = frozenset()

    @classmethod
    def of(cls, rows: Mapping[Model, Sequence[Answer]], /, **more: Any) -> Self:
        """Compare answers to the same documents under one measure, by model."""
        measured = {
            model: classified_of([(row.label, row.predicted) for row in answers])
            for model, answers in rows.items()
        }
        return cls(
            scores={model: np.array([row.score for row in by]) for model, by in rows.items()},
            classified={model: answers for model, answers in measured.items() if answers},
            baselines=frozenset(model for model, by in rows.items() if by[0].is_baseline),
            **{"metric": next(iter(rows.values()))[0].metric, **more},
        )  # fmt: skip

    @property
    def heading(self) -> str:
        """The benchmark and the language."""
        return ", ".join(filter(None, [self.benchmark, self.language]))

    @property
    def metric_in_words(self) -> str:
        """The metric; empty for fractions of right answers."""
        return (self.metric or self.likeness).replace("_", " ")

    @property
    def unit(self) -> str:
        """The unit of the scores in tables."""
        return unit_of(self.metric)

    @cached_property
    def intervals(self) -> dict[Model, Interval]:
        """Mean and 95% bootstrap interval of every model."""
        return {model: mean_interval(values) for model, values in self.scores.items()}

    @cached_property
    def differences(self) -> dict[Model, Interval]:
        """The selected model minus every other composition, paired over documents.

        Empty if the selected model is not among the models.
        """
        return {model: self._minus(self.selected, model) for model in self._others(self.selected)}

    def against(self, reference: Model) -> dict[Model, Interval]:
        """Subtract a reference from every other composition, paired over documents."""
        return {model: self._minus(model, reference) for model in self._others(reference)}

    def _others(self, reference: Model) -> list[Model]:
        if reference not in self.scores:
            return []
        return [m for m in self.scores if not self.choice.same(m, reference)]

    def _minus(self, model: Model, other: Model) -> Interval:
        """A model minus another, paired over documents; computed once."""
        if (model, other) not in self._apart:
            self._apart[model, other] = paired_difference(self.scores[model], self.scores[other])
        return self._apart[model, other]

    @cached_property
    def _apart(self) -> dict[tuple[Model, Model], Interval]:
        return {}

    @cached_property
    def by_sign(self) -> dict[int, list[Model]]:
        """Other models, best first: 1 clearly below the selected one, -1 above, 0 neither."""
        others = sorted(self.differences, key=lambda model: -self.intervals[model].mean)
        return {sign: [model for model in others
                       if model not in self.flattered and self.differences[model].sign == sign]
                for sign in (1, -1, 0)}  # fmt: skip

    @property
    def above(self) -> list[Model]:
        """Models that the documents show clearly above the selected one, best first."""
        return self.by_sign[-1]

    def balanced_against(self, reference: Model) -> dict[Model, Balanced]:
        """`against` of a classification's balanced measures; empty for other tasks."""
        first = self.classified.get(reference)
        return {} if first is None else {
            model: answers.minus(first) for model, answers in self.classified.items()
            if not self.choice.same(model, reference)
        }  # fmt: skip

    @property
    def leaders(self) -> list[Model]:
        """The models with the highest mean; none where documents are left out."""
        means = {model: interval.mean for model, interval in self.intervals.items()
                 if model not in self.flattered}  # fmt: skip
        left_out = any(len(self.scores[model]) < count for model, count in self.counts.items())
        return [] if left_out else [m for m in means if means[m] == max(means.values())]

    def worth_of(self, model: Model) -> dict[str, Worth]:
        """Return a model's worth in labels by measure; empty without a linear classifier."""
        if self.labelled is None or model not in self.classified:
            return {}
        answers, curve = self.classified[model], self.labelled.curve
        return {
            "accuracy": worth(answers, curve),
            "balanced accuracy": worth(answers, curve, balanced=True),
        }

    @cached_property
    def worth_in_labels(self) -> dict[str, Worth]:
        """`worth_of` the selected model; empty if a constant answer is as good."""
        return {} if self.verdict.kind == "no model" else self.worth_of(self.selected)

    @cached_property
    def extremes(self) -> dict[Model, tuple[float, float]]:
        """The mean score of the lowest and of the highest pair, by model."""
        means = {model: [float(by[model].mean()) for by in self.pairs.values() if model in by]
                 for model in self.scores}  # fmt: skip
        return {model: (min(of_pairs), max(of_pairs)) for model, of_pairs in means.items()}

    @property
    def saved_score(self) -> Interval:
        """The score of the model to save, on its own pair of experts."""
        saved = self.choice.saved
        return mean_interval(self.pairs[saved.pair or next(iter(self.pairs))][self.selected])

    @cached_property
    def verdict(self) -> Verdict:
        """The road to take; nothing is chosen among merges on the test documents.

        Roads are ordered by what they cost a user: a constant answer, a linear classifier on
        labels, sentence vectors of an encoder, the base, one expert, a translator, a merge, a model
        finished on labels. The selected model, and the one selected before models were finished,
        compete with the cheaper roads and the translator's: the cheapest is recommended that no
        other is clearly above. Clearly above means that the 95% interval of the paired difference
        lies above zero in accuracy, and not below zero in balanced accuracy.
        """
        selected = self.selected
        start = self.choice.unfinished if selected.method == FINISHED else selected
        roads = [
            model
            for model in self.intervals
            if model in (selected, start)
            or _road(model)[0] < _road(start)[0]
            or _road(model)[1] == "translator"
        ]
        roads.sort(key=lambda model: (_road(model)[0], -self.intervals[model].mean))
        best = [model for model in roads
                if not any(self._clearly_above(other, model) for other in roads)]  # fmt: skip
        road = best[0] if best else selected
        lead, kind = self.differences.get(road), _road(road)[1]
        if lead and kind == "no model" and not lead.sign and lead.reach > COARSE:
            kind = "too few documents"
        return Verdict(kind, road, lead)

    def _clearly_above(self, model: Condition, other: Condition) -> bool:
        if self.intervals[model].mean <= self.intervals[other].mean:
            return False  # as the difference would say, which costs a bootstrap
        if self._minus(model, other).sign < 1:
            return False
        known = [self.classified[one] for one in (model, other) if one in self.classified]
        return len(known) < 2 or known[0].minus(known[1]).balanced_accuracy.sign > -1

    def records(self) -> list[dict[str, Any]]:
        """Every condition with its fields, its interval, and the selected model minus it."""
        return [
            {"condition": str(model), **model.to_dict(), **asdict(interval),
             "selected_minus": plain(self.differences.get(model)), **self._balanced(model)}
            for model, interval in self.intervals.items()
        ]  # fmt: skip

    def _balanced(self, model: Model) -> dict[str, Any]:
        if model not in self.classified:
            return {}
        answers, first = self.classified[model], self.classified.get(self.selected)
        known = first is not None and not self.choice.same(model, self.selected)
        gap = first.minus(answers) if first and known else None
        return {**asdict(answers.balanced), "selected_minus_balanced": plain(gap)}


def plain(value: Any) -> dict[str, Any] | None:
    """A dataclass as data; None stays."""
    return None if value is None else asdict(value)


def _road(model: Condition) -> tuple[int, Road]:
    """The rank of a model's road by cost, and the kind of the road."""
    if model.method == FINISHED:
        return len(COSTS) + 1, "finished"
    cheap = ((i, kind) for i, (kind, methods) in enumerate(COSTS) if model.method in methods)
    return next(cheap, (len(COSTS), "merge"))


def over_languages(
    results: Sequence[Compared], model: Model, reference: Model | None = None
) -> Interval | None:
    """The mean of a model over languages, or its paired difference to another.

    From `RANKED` languages on, the interval is over languages, otherwise over documents. If all
    languages have the same documents, translations are resampled together; otherwise each language
    separately. None if a language lacks one of the models.
    """
    wanted = [model] if reference is None else [model, reference]
    if not all(name in by.scores for name in wanted for by in results):
        return None
    if len(results) >= RANKED:
        means = [np.array([by.scores[name].mean() for by in results]) for name in wanted]
        return student_interval(means[0] if reference is None else means[0] - means[1])
    tests = {by.test for by in results}

    def groups(name: Model) -> list[Values]:
        values = [by.scores[name] for by in results]
        return [np.mean(values, axis=0)] if len(tests) == 1 and () not in tests else values

    if reference is None:
        return mean_over_groups(groups(model))
    return paired_over_groups(groups(model), groups(reference))
