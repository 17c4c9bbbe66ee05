"""Scores of compositions on lm-eval tasks, document by document, on either side of the split."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from layerswap._types import Advance, Log
from layerswap.engine.vllm import open_engine
from layerswap.errors import EvaluationError
from layerswap.evaluation.harness import evaluate, load_tasks
from layerswap.evaluation.languages import (
    ANSWER,
    REASONING,
    identified_code,
    sample_shares,
)
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge import Plan
from layerswap.merge.loading import plan_tokenizer
from layerswap.search.conditions import Condition
from layerswap.search.item_response import Screening
from layerswap.search.protocol import TestResult, Values, split_documents
from layerswap.search.spec import SweepSettings

if TYPE_CHECKING:
    import pandas as pd

DEVELOPMENT, TEST = "development", "test"
Measure = tuple[str, str, str]
"""Task, metric and filter."""


@dataclass(frozen=True)
class DocumentScore:
    """The score of one composition on one document.

    Attributes:
        split: `development` or `test`.
        condition: the composition.
        task: the lm-eval task.
        metric: the metric.
        filter: lm-eval's name for how the answer was read.
        document: position in the task's documents.
        score: the metric of this document alone.
    """

    split: str
    condition: Condition
    task: str
    metric: str
    filter: str
    document: int
    score: float

    def to_dict(self) -> dict[str, Any]:
        """Its columns on disk; `composition` is the condition's name, its fields follow it."""
        plain = {name: value for name, value in vars(self).items() if name != "condition"}
        return {"composition": str(self.condition), **self.condition.to_dict(), **plain}


def by_condition(rows: Iterable[DocumentScore], measure: Measure) -> dict[Condition, Values]:
    """The scores of every composition under one measure, documents in order.

    Args:
        rows: of one split.
        measure: task, metric and filter.
    """
    found: dict[Condition, dict[int, float]] = {}
    for row in rows:
        if (row.task, row.metric, row.filter) == measure:
            found.setdefault(row.condition, {})[row.document] = row.score
    return {
        one: np.array([scores[document] for document in sorted(scores)])
        for one, scores in found.items()
    }


class Objectives(NamedTuple):
    """What a composition reached on the development documents.

    Attributes:
        score: what it was chosen by.
        language: the mean share of its answers' letters in the language that they should be in.
        front: True if no other composition is better in one of the two and as good in the other.
    """

    score: float
    language: float
    front: bool


def objectives(
    development: Mapping[Condition, float], rows: Iterable[DocumentScore]
) -> dict[Condition, Objectives]:
    """Both objectives of every composition that wrote enough text, and their Pareto front.

    Args:
        development: what each was chosen by.
        rows: scores of both splits; those of the development split count.
    """
    shares: dict[Condition, list[float]] = {}
    for row in rows:
        if row.metric == ANSWER and row.split == DEVELOPMENT:
            shares.setdefault(row.condition, []).append(row.score)
    both = {one: (development[one], float(np.mean(found))) for one, found in shares.items()
            if one in development}  # fmt: skip
    return {
        one: Objectives(
            *mine, not any(_dominates(other, mine) for other in both.values() if other != mine)
        )
        for one, mine in both.items()
    }


def _dominates(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return all(a >= b for a, b in zip(one, other, strict=True))


@dataclass(frozen=True, kw_only=True)
class SweepResult(TestResult):
    """What a sweep or a search found.

    Attributes:
        best: the chosen composition, ready to be saved or loaded; the default swap where that
            scores higher on the test documents.
        development: of every candidate, what it was chosen by: its mean score on the development
            documents (in a race, on those that it was scored on), or the value of a signal.
        chosen_by: what that is, in words.
        measure: task, metric and filter that `scores` are of; None without a task.
        rows: every score of every document, of both splits.
        screening: how most were estimated from a few documents, if they were.
    """

    best: Plan
    development: Mapping[Condition, float]
    chosen_by: str
    measure: Measure | None
    rows: Sequence[DocumentScore]
    screening: Screening | None = None

    @cached_property
    def objectives(self) -> dict[Condition, Objectives]:
        """Score and language of the answers; empty without a language that they should be in."""
        return objectives(self.development, self.rows)

    @cached_property
    def best_recipe(self) -> dict[str, Any]:
        """The recipe of `best`, ready for `layerswap merge`."""
        return self.best.recipe.model_dump(mode="json", exclude_defaults=True)

    def to_pandas(self) -> pd.DataFrame:
        """Every score of every document, a row each; see `DocumentScore`."""
        import pandas as pd

        return pd.DataFrame([row.to_dict() for row in self.rows])


class Evaluator:
    """Scores compositions of a sweep on its tasks.

    Args:
        spec: the tasks, and how they are asked.
        plans: the compositions by condition; more may be added later.
        store: keeps answers.
        allow_code: let tasks run code that a model wrote.
        log: called with what will be in memory, before it is.
        progress: called with the number of compositions just scored.

    Raises:
        EvaluationError: the tasks cannot be loaded, or have too few documents.
    """

    def __init__(
        self,
        spec: SweepSettings,
        plans: Mapping[Condition, Plan],
        *,
        store: AnswerStore | None = None,
        allow_code: bool = False,
        log: Log = lambda line: None,
        progress: Advance | None = None,
    ) -> None:
        self.spec = spec
        if spec.answer_language is not None:
            identified_code(spec.answer_language)
        self.sweep = open_engine(
            list(plans.values()), engine=spec.engine, device=spec.device, dtype=spec.dtype,
            engine_args=spec.engine_args,
        )  # fmt: skip
        self.members = {condition: i for i, condition in enumerate(plans)}
        self._plain = plan_tokenizer(next(iter(plans.values())))
        self.tokenizer = spec.options.tokenizer(self._plain, log)
        self._settings: dict[str, Any] = {
            "include": [Path(name) for name in spec.include],
            "num_fewshot": spec.num_fewshot,
            "options": spec.options,
            "batch_size": None if spec.batch_size == "auto" else spec.batch_size,
            "store": store,
            "allow_code": allow_code,
            "log": log,
            "progress": progress,
        }
        self._documents = _split(spec)
        if spec.limit is not None:
            drawn = "drawn at random" if spec.limit_order == "random" else "the first ones"
            log(f"at most {spec.limit} documents of each task, {drawn}")

    def add(self, condition: Condition, plan: Plan) -> int:
        """Add a composition; returns its position in the sweep."""
        (self.members[condition],) = self.sweep.add([plan])
        return self.members[condition]

    def rows(
        self,
        split: str,
        conditions: Sequence[Condition],
        first: int | None = None,
        *,
        places: Sequence[int] | None = None,
    ) -> list[DocumentScore]:
        """Every score of compositions on a split.

        Args:
            split: `development` or `test`.
            conditions: the compositions.
            first: documents of each task to score, in the order drawn; all when None.
            places: places of the documents in that order, instead.
        """
        samples = {
            task: sorted(docs[:first] if places is None else [docs[i] for i in places])
            for task, docs in self._documents[split].items()
        }
        scored = evaluate(
            self.sweep, self._plain, self.spec.tasks, samples=samples,
            members=[self.members[one] for one in conditions], **self._settings,
        )  # fmt: skip
        return [
            row
            for condition, found in zip(conditions, scored, strict=True)
            for row in _rows(found, split, condition, self.spec.answer_language)
        ]

    def on_places(
        self, conditions: Sequence[Condition], places: Sequence[int]
    ) -> tuple[Values, list[DocumentScore], Measure]:
        """Scores of compositions on some development documents.

        Args:
            conditions: the compositions.
            places: of the documents, in the order drawn.

        Returns:
            `(compositions, places)` by the measure that the sweep chooses by, all rows, and the
            measure.
        """
        rows = self.rows(DEVELOPMENT, conditions, places=places)
        measure = self.measure(rows)
        order = [self._documents[DEVELOPMENT][measure[0]][place] for place in places]
        column = {document: i for i, document in enumerate(sorted(order))}
        values = np.array(list(by_condition(rows, measure).values()))
        return values[:, [column[document] for document in order]], rows, measure

    def smallest(self, split: str) -> int:
        """How many documents of a split the task with the fewest has."""
        return min(len(docs) for docs in self._documents[split].values())

    def measure(self, rows: Sequence[DocumentScore]) -> Measure:
        """The measure that the sweep chooses by, among those that the tasks give.

        Raises:
            EvaluationError: nothing fits.
        """
        known = list(dict.fromkeys((row.task, row.metric, row.filter) for row in rows))
        wanted = self.spec.choose_by
        for task, metric, name in known:
            if metric in (ANSWER, REASONING):  # not every document has one
                continue
            if (wanted.task in (None, task) and wanted.metric in (None, metric)
                    and wanted.filter in (None, name)):  # fmt: skip
                return task, metric, name
        shown = "; ".join(" ".join(one) for one in known) or "nothing with a number per document"
        raise EvaluationError(f"choose_by fits none of what the tasks give: {shown}")

    def tested(
        self,
        chosen: Condition,
        others: Iterable[Condition],
        *,
        reference: Condition,
        measure: Measure | None,
    ) -> tuple[dict[Condition, Values], list[DocumentScore], Measure | None]:
        """The chosen composition and its contenders on the test split.

        Args:
            chosen: the composition.
            others: its contenders.
            reference: the condition that the chosen one is reported as.
            measure: what they are compared by; chosen by the settings when None.

        Returns:
            Scores by condition, all rows, and the measure.
        """
        if not self.spec.tasks:
            return {}, [], None
        self.members[reference] = self.members[chosen]
        rows = self.rows(TEST, [reference, *others])
        measure = measure or self.measure(rows)
        return by_condition(rows, measure), rows, measure


def _split(spec: SweepSettings) -> dict[str, dict[str, list[int]]]:
    """Per split and task the positions of its documents, in the order drawn."""
    include = [Path(name) for name in spec.include]
    found: dict[str, dict[str, list[int]]] = {DEVELOPMENT: {}, TEST: {}}
    if not spec.tasks:
        return found
    loaded = load_tasks(spec.tasks, include=include, num_fewshot=spec.num_fewshot)
    for name, task in loaded["tasks"].items():
        count = len(task.eval_docs)
        if min(count, spec.limit or count) < 2:
            raise EvaluationError(f"task {name}: two documents at least, to choose on and to test")
        parts = split_documents(
            count, spec.development, seed=spec.seed, limit=spec.limit,
            first=spec.limit_order == "first",
        )  # fmt: skip
        found[DEVELOPMENT][name], found[TEST][name] = (part.tolist() for part in parts)
    return found


def _rows(
    found: Mapping[str, Any], split: str, condition: Condition, language: str | None
) -> Iterator[DocumentScore]:
    for task, samples in found["samples"].items():
        for sample in samples:
            if language is not None and sample["filter"] == samples[0]["filter"]:
                for name, share in sample_shares(sample, language).items():
                    yield DocumentScore(
                        split, condition, task, name, sample["filter"], int(sample["doc_id"]), share
                    )
            for metric in sample["metrics"]:
                value = sample[metric]
                if isinstance(value, bool | int | float):
                    yield DocumentScore(
                        split, condition, task, metric, sample["filter"],
                        int(sample["doc_id"]), float(value),
                    )  # fmt: skip
