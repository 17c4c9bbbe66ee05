"""Scores of compositions on lm-eval tasks, document by document, on either side of the split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import (
    evaluate,
    labels_of,
    load_tasks,
    stratified_order,
)
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.experiment.answers import Answer, Measure, answers_to
from layerswap.experiment.compare import split_documents
from layerswap.experiment.conditions import TASK_EXPERT, Condition
from layerswap.experiment.spec import ChooseBy, SweepSettings
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Advance, Log, listed
from layerswap.ground.yaml_file import nearest
from layerswap.merge.folder import plan_tokenizer
from layerswap.merge.plan import Plan

DEVELOPMENT: Final = "development"
TEST: Final = "test"


class Evaluator:
    """Scores compositions of a sweep on its tasks; the lab asks its own questions.

    Attributes:
        sweep: the models in memory.
        members: the number of each in the sweep.
    """

    sweep: Sweep
    members: Mapping[Condition, int]
    _english: Mapping[str, Sequence[int]] = MappingProxyType({})

    def __init__(
        self,
        spec: SweepSettings,
        plans: Mapping[Condition, Plan],
        *,
        store: AnswerStore | None = None,
        log: Log = lambda line: None,
        progress: Advance | None = None,
    ) -> None:
        self.spec = spec
        self.sweep = Sweep(list(plans.values()), device=spec.device, dtype=spec.dtype)
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
        if spec.english and TASK_EXPERT not in plans:
            raise EvaluationError("english: needs a task expert to ask; give a swap")
        self._documents = _split(spec, spec.tasks)
        self._english = _split(spec, listed(spec.english or ()))[TEST]
        if spec.limit is not None:
            log(f"at most {spec.limit} documents of each task, drawn by label")
        if spec.choose_by != ChooseBy():  # a wrong one is refused before all are asked
            self.measure(self.rows(DEVELOPMENT, [next(iter(plans))], first=1))

    def rows(
        self, split: str, conditions: Sequence[Condition], *, first: int | None = None
    ) -> list[Answer]:
        """Scores compositions on a split, or silently on the `first` documents of each task."""
        drawn = {task: order[:first] for task, order in self._documents[split].items()}
        settings = {**self._settings, "log": lambda line: None} if first else self._settings
        return self._scored(self.spec.tasks, split, drawn, conditions, **settings)

    def in_english(self) -> list[Answer]:
        """Scores the task expert on the English test documents; empty without an English task."""
        if not self._english:
            return []
        tasks = [*self._english]
        return self._scored(tasks, TEST, self._english, [TASK_EXPERT], **self._settings)

    def _scored(
        self,
        tasks: Sequence[str],
        split: str,
        documents: Mapping[str, Sequence[int]],
        conditions: Sequence[Condition],
        **settings: Any,
    ) -> list[Answer]:
        scored = evaluate(
            self.sweep, self._plain, tasks,
            samples={task: sorted(drawn) for task, drawn in documents.items()},
            members=[self.members[composition] for composition in conditions], **settings,
        )  # fmt: skip
        rows: list[Answer] = []
        for condition, result in zip(conditions, scored, strict=True):
            for task, samples in result["samples"].items():
                firsts = ((next(iter(one["metrics"]), ""), one["filter"]) for one in samples)
                rows += answers_to(
                    samples, None, next(firsts, ("", "")), task=task,
                    benchmark=task, split=split, condition=condition, model=str(condition),
                )  # fmt: skip
        return rows

    def measure(self, rows: Sequence[Answer]) -> Measure:
        """Returns the first measure of the tasks that fits `choose_by`."""
        fitting = list(dict.fromkeys((row.task, row.metric, row.filter) for row in rows))
        if not fitting:
            raise EvaluationError("choose_by: the tasks have no score of a single document")
        for i, key in enumerate(ChooseBy.model_fields):
            wanted = getattr(self.spec.choose_by, key)
            known = list(dict.fromkeys(measure[i] for measure in fitting))
            if wanted is not None and wanted not in known:
                hint = nearest(wanted, known)
                if key == "filter":  # one is called none
                    hint = f"; its filters are {', '.join(map(repr, known))}"
                raise EvaluationError(f"choose_by: no {key} {wanted!r}{hint}")
            fitting = [measure for measure in fitting if wanted in (None, measure[i])]
        return fitting[0]


def _split(spec: SweepSettings, tasks: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Returns the positions of each task's documents by split, in the order drawn."""
    include = [Path(name) for name in spec.include]
    documents: dict[str, dict[str, list[int]]] = {DEVELOPMENT: {}, TEST: {}}
    if not tasks:
        return documents
    loaded = load_tasks(tasks, include=include)
    for name, task in loaded["tasks"].items():
        count = len(task.eval_docs)
        if min(count, spec.limit or count) < 2:
            raise EvaluationError(
                f"task {name}: a sweep needs two documents, one to choose on and one to test"
            )
        order = stratified_order(labels_of(task), spec.seed) if spec.limit else None
        parts = split_documents(
            count, spec.development, seed=spec.seed, limit=spec.limit, order=order
        )
        documents[DEVELOPMENT][name], documents[TEST][name] = (part.tolist() for part in parts)
    return documents
