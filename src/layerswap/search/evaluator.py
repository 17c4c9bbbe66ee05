"""Scores of compositions on lm-eval tasks, document by document, on either side of the split."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from layerswap.evaluation.harness import (
    CALIBRATED,
    evaluate,
    labels_of,
    load_tasks,
    open_sweep,
    stratified_order,
)
from layerswap.evaluation.languages import ANSWER, REASONING, identified_code
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.results import document_scores
from layerswap.evaluation.statistics import Classified, classified_of
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Advance, Log
from layerswap.ground.yaml_file import nearest
from layerswap.merge import Plan
from layerswap.merge.folder import plan_tokenizer
from layerswap.search.conditions import Condition
from layerswap.search.protocol import Values, split_documents
from layerswap.search.spec import Choice, SweepSettings

if TYPE_CHECKING:
    from layerswap.engine.sweep import Sweep
    from layerswap.engine.vllm import VllmSweep

DEVELOPMENT, TEST = "development", "test"
Measure = tuple[str, str, str]
"""Task, metric and filter."""


@dataclass(frozen=True)
class DocumentScore:
    """The score of one composition on one document."""

    split: str  # development or test
    condition: Condition
    task: str
    metric: str
    filter: str  # lm-eval's name for how the answer was read
    document: int  # position in the task's documents
    score: float
    label: str = ""  # right label of a classification
    predicted: str = ""  # label that the composition answers

    def to_dict(self) -> dict[str, Any]:
        """Returns the columns on disk: the condition's name as `composition`, and all fields."""
        plain = {name: value for name, value in vars(self).items() if name != "condition"}
        return {"composition": str(self.condition), **self.condition.to_dict(), **plain}


def by_condition(rows: Iterable[DocumentScore], measure: Measure) -> dict[Condition, Values]:
    """Returns the scores of every composition under a measure, in the order of documents.

    All rows are of one split.
    """
    by_document: dict[Condition, dict[int, float]] = {}
    for row in rows:
        if (row.task, row.metric, row.filter) == measure:
            by_document.setdefault(row.condition, {})[row.document] = row.score
    return {
        condition: np.array([scores[document] for document in sorted(scores)])
        for condition, scores in by_document.items()
    }


def classified_by_condition(
    rows: Iterable[DocumentScore], measure: Measure
) -> dict[Condition, Classified]:
    """Returns the answers of every composition to a classification; empty for other tasks."""
    answers: dict[Condition, dict[int, tuple[str, str]]] = {}
    for row in rows:
        if (row.task, row.metric, row.filter) == measure:
            answers.setdefault(row.condition, {})[row.document] = row.label, row.predicted
    found = {
        one: classified_of([by_document[document] for document in sorted(by_document)])
        for one, by_document in answers.items()
    }
    return {one: answered for one, answered in found.items() if answered is not None}


class Objectives(NamedTuple):
    """The two objectives of a composition on the development documents."""

    score: float  # that compositions are chosen by
    language: float  # mean share of the answers' letters in the wanted language, in 0..1
    front: bool  # no other composition is better in one and as good in the other


def objectives(
    development: Mapping[Condition, float], rows: Iterable[DocumentScore]
) -> dict[Condition, Objectives]:
    """Returns both objectives of every composition that wrote enough text.

    `development` holds the score that each is chosen by. Only rows of that split count.
    """
    shares: dict[Condition, list[float]] = {}
    for row in rows:
        if row.metric == ANSWER and row.split == DEVELOPMENT:
            shares.setdefault(row.condition, []).append(row.score)
    both = {
        one: (development[one], float(np.mean(values)))
        for one, values in shares.items()
        if one in development
    }

    def beaten(mine: tuple[float, float]) -> bool:
        return any(
            other != mine and other[0] >= mine[0] and other[1] >= mine[1] for other in both.values()
        )

    return {one: Objectives(*mine, not beaten(mine)) for one, mine in both.items()}


class Evaluator:
    """Scores compositions of a sweep on its tasks."""

    def __init__(
        self,
        spec: SweepSettings,
        plans: Mapping[Condition, Plan],
        *,
        store: AnswerStore | None = None,
        log: Log = lambda line: None,
        progress: Advance | None = None,
        sweep: Sweep | VllmSweep | None = None,
    ) -> None:
        self.spec = spec
        if spec.answer_language is not None:
            identified_code(spec.answer_language)
        self.sweep = sweep or open_sweep(list(plans.values()), spec)
        self.members = {condition: i for i, condition in enumerate(plans)}
        self._plain = plan_tokenizer(next(iter(plans.values())))
        self.tokenizer = spec.with_chat_template(self._plain, log)
        self._settings: dict[str, Any] = {
            "include": [Path(name) for name in spec.include],
            "settings": spec,
            "store": store,
            "log": log,
            "progress": progress,
        }
        self._documents = _split(spec)
        self.tested: dict[Condition, Mapping[str, Any]] = {}  # lm-eval's results on the test split
        if spec.limit is not None:
            log(f"at most {spec.limit} documents of each task, drawn by label")

    def rows(
        self, split: str, conditions: Sequence[Condition], *, first: int | None = None,
        quiet: bool = False,
    ) -> list[DocumentScore]:  # fmt: skip
        """Scores compositions on a split, or on the `first` documents drawn of each task."""
        documents = self._documents[split]
        settings = {**self._settings, "log": lambda line: None} if quiet else self._settings
        scored = evaluate(
            self.sweep, self._plain, self.spec.tasks,
            samples={task: sorted(drawn[:first]) for task, drawn in documents.items()},
            members=[self.members[one] for one in conditions], **settings,
        )  # fmt: skip
        if split == TEST:
            self.tested |= dict(zip(conditions, scored, strict=True))
        rows = []
        for condition, result in zip(conditions, scored, strict=True):
            for task, samples in result["samples"].items():
                first_filter = samples[0]["filter"] if samples else ""
                rows += [
                    DocumentScore(split, condition, task, *numbers)
                    for numbers in document_scores(samples, self.spec.answer_language, first_filter)
                ]
        return rows

    def prompts(self, split: str, most: int) -> list[tuple[str, str | None]]:
        """Returns the first prompts of a split without examples, with answers that are texts."""
        tasks = load_tasks(self.spec.tasks, include=self._settings["include"])["tasks"]
        found: list[tuple[str, str | None]] = []
        for name, numbers in self._documents[split].items():
            documents = list(tasks[name].eval_docs)
            for number in sorted(numbers)[:most]:
                prompt = tasks[name].doc_to_text(documents[number])
                answer = tasks[name].doc_to_target(documents[number])
                found.append((str(prompt), answer if isinstance(answer, str) else None))
        return found[:most]

    def measure(self, rows: Sequence[DocumentScore]) -> Measure:
        """Returns the first measure of the tasks that fits `choose_by`."""
        fitting = list(dict.fromkeys(
            (row.task, row.metric, row.filter) for row in rows
            if row.metric not in (ANSWER, REASONING)  # not every document has one
        ))  # fmt: skip
        if not fitting:
            raise EvaluationError("choose_by: the tasks have no score of a single document")
        for i, key in enumerate(Choice.model_fields):
            wanted = getattr(self.spec.choose_by, key)
            known = list(dict.fromkeys(one[i] for one in fitting))
            if wanted is not None and wanted not in known:
                hint = nearest(wanted, known)
                if key == "filter":  # one is called none
                    hint = f"; its filters are {', '.join(map(repr, known))}"
                raise EvaluationError(f"choose_by: no {key} {wanted!r}{hint}")
            fitting = [one for one in fitting if wanted in (None, one[i])]
        return fitting[0]


def _split(spec: SweepSettings) -> dict[str, dict[str, list[int]]]:
    """Returns the positions of each task's documents by split, in the order drawn."""
    include = [Path(name) for name in spec.include]
    documents: dict[str, dict[str, list[int]]] = {DEVELOPMENT: {}, TEST: {}}
    if not spec.tasks:
        return documents
    loaded = load_tasks(spec.tasks, include=include)
    for name, task in loaded["tasks"].items():
        count = min(len(task.eval_docs), spec.limit_first or len(task.eval_docs))
        if min(count, spec.limit or count) < 2:
            raise EvaluationError(
                f"task {name}: a sweep needs two documents, one to choose on and one to test"
            )
        order = stratified_order(labels_of(task), spec.seed) if spec.limit else None
        parts = split_documents(
            count, spec.development, seed=spec.seed, limit=spec.limit, order=order
        )
        documents[DEVELOPMENT][name], documents[TEST][name] = (part.tolist() for part in parts)
        if spec.choose_by.metric == CALIBRATED and spec.choose_by.task in (None, name):
            uses = {"to choose on": len(parts[0]), "to test": len(parts[1])}
            uses |= {"in the screen": spec.screen.documents} if spec.screen else {}
            for use, held in uses.items():
                if held < 2:
                    raise EvaluationError(
                        f"choose_by: {CALIBRATED} needs two documents {use}; {name} has {held}"
                    )
    return documents
