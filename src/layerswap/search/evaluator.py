"""Judging compositions on lm-eval tasks: splits, scores per document, and who is compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap._types import Advance, Log
from layerswap.compose import Blend, Composition, Zones, default_zones
from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.harness import evaluate, load_tasks
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.statistics import Interval, mean_interval, paired_difference
from layerswap.merge.planner import Plan
from layerswap.search.protocol import split_documents
from layerswap.search.spec import SweepSpec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT, BEST = "default", "best"
DEVELOPMENT, TEST = "development", "test"
Measure = tuple[str, str, str]
"""Task, metric and filter."""


@dataclass(frozen=True)
class Row:
    """The score of one composition on one document.

    Attributes:
        split: `development` or `test`.
        composition: its name: zones as text, the number of a trial, or a contender's name.
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
class SweepTested:
    """Contenders on the test split.

    Attributes:
        measure: task, metric and filter that they are compared by; None without a task.
        test: per contender (`best` among them) the scores on the test split, by document.
        rows: every score of every document, of both splits.
    """

    measure: Measure | None
    test: Mapping[str, Sequence[float]]
    rows: Sequence[Row]

    def intervals(self) -> dict[str, Interval]:
        """Mean and 95% bootstrap interval of every contender on the test split."""
        import numpy as np

        return {name: mean_interval(np.array(scores)) for name, scores in self.test.items()}

    def differences(self) -> dict[str, Interval]:
        """Paired difference of the best composition to every other contender, on the test split."""
        import numpy as np

        if not self.test:
            return {}
        best = np.array(self.test[BEST])
        return {
            name: paired_difference(best, np.array(scores))
            for name, scores in self.test.items()
            if name != BEST
        }


class Evaluator:
    """Scores compositions of a sweep on the tasks of its file.

    Args:
        spec: the file.
        sweep: the compositions; more may be added to it later.
        tokenizer: of the models.
        store: keeps answers.
        allow_code: let tasks run code that a model wrote.
        log: told what will be in memory, before it is.
        progress: called with the number of compositions just judged.

    Raises:
        EvaluationError: the tasks cannot be had, or have too few documents.
    """

    def __init__(
        self,
        spec: SweepSpec,
        sweep: Sweep,
        tokenizer: Any,
        *,
        store: AnswerStore | None = None,
        allow_code: bool = False,
        log: Log = lambda line: None,
        progress: Advance | None = None,
    ) -> None:
        self.spec, self.sweep = spec, sweep
        self._plain, self.tokenizer = tokenizer, spec.options.tokenizer(tokenizer, log)
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

    def rows(
        self, split: str, members: Sequence[int], names: Sequence[str], first: int | None = None
    ) -> list[Row]:
        """Every score of compositions on a split.

        Args:
            split: `development` or `test`.
            members: positions of the compositions in the sweep.
            names: what the rows call them.
            first: documents of each task to judge on, in the order drawn; all when None.
        """
        samples = {task: sorted(docs[:first]) for task, docs in self._documents[split].items()}
        judged = evaluate(
            self.sweep, self._plain, self.spec.tasks, members=members, samples=samples,
            **self._settings,
        )  # fmt: skip
        return [
            row
            for name, found in zip(names, judged, strict=True)
            for row in _rows(found, split, name)
        ]

    def smallest(self, split: str) -> int:
        """How many documents of a split the task with the fewest has."""
        return min(len(docs) for docs in self._documents[split].values())

    def measure(self, rows: Sequence[Row]) -> Measure:
        """What the file chooses by, among what the tasks gave.

        Raises:
            EvaluationError: nothing fits.
        """
        known = list(dict.fromkeys((row.task, row.metric, row.filter) for row in rows))
        wanted = self.spec.choose_by
        for task, metric, name in known:
            if (wanted.task in (None, task) and wanted.metric in (None, metric)
                    and wanted.filter in (None, name)):  # fmt: skip
                return task, metric, name
        shown = "; ".join(" ".join(one) for one in known) or "nothing with a number per document"
        raise EvaluationError(f"choose_by fits none of what the tasks give: {shown}")

    def tested(
        self, best: int, others: Mapping[str, int], measure: Measure | None
    ) -> tuple[dict[str, list[float]], list[Row], Measure | None]:
        """The best composition and its contenders on the test split.

        Args:
            best: its position in the sweep.
            others: the position of every contender.
            measure: what they are compared by; chosen by the file when None.

        Returns:
            Scores by contender, all rows, and the measure.
        """
        if not self.spec.tasks:
            return {}, [], None
        names = [BEST, *others]
        rows = self.rows(TEST, [best, *others.values()], names)
        measure = measure or self.measure(rows)
        return {name: scores_of(rows, TEST, name, measure) for name in names}, rows, measure


def scores_of(rows: Sequence[Row], split: str, composition: str, measure: Measure) -> list[float]:
    """The scores of one composition under one measure, by document."""
    found = {
        row.document: row.score
        for row in rows
        if (row.split, row.composition) == (split, composition)
        and (row.task, row.metric, row.filter) == measure
    }
    return [found[document] for document in sorted(found)]


def score_table(
    rows: Sequence[Row], split: str, names: Sequence[str], measure: Measure
) -> npt.NDArray[np.float64]:
    """Scores `(compositions, documents)`, float64, the documents in order."""
    import numpy as np

    return np.array([scores_of(rows, split, name, measure) for name in names], dtype=np.float64)


def contenders(start: Plan) -> dict[str, Plan]:
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
    found = {DEFAULT: swapped(start, default_zones(layers))}
    for name, blend in blends.items():
        whole = Composition.build(layers, lambda place, blend=blend: blend).rename(flat)  # type: ignore[misc]
        found[name] = start.with_composition(whole)
    return found


def swapped(start: Plan, zones: Zones) -> Plan:
    """The swap with these zones."""
    (plan,) = start.grid(**{name: [size] for name, size in vars(zones).items()})
    return plan


def _split(spec: SweepSpec) -> dict[str, dict[str, list[int]]]:
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
