"""Choosing a composition without labels, by signals on the files that a sweep names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError
from layerswap.evaluation.examples import read_examples
from layerswap.search import signals
from layerswap.search.cross_lingual_similarity import cross_lingual_similarity
from layerswap.search.signals import Answers
from layerswap.search.spec import NEEDS, Signal, WithoutLabels

if TYPE_CHECKING:
    from layerswap.search.conditions import Condition
    from layerswap.search.evaluator import Evaluator
    from layerswap.search.signals import Values


BEST_FIRST: tuple[Signal, ...] = ("agreement", "closeness", "consensus", "fluency")
"""Signals by how well they chose on the lab (docs/sweeps.md); the default is the first possible."""


def choose_without_labels(
    evaluator: Evaluator, candidates: Sequence[Condition], task_expert: Condition
) -> tuple[Values, str]:
    """The value of the settings' signal for every candidate, and the signal's name.

    Args:
        evaluator: of the sweep.
        candidates: the compositions to choose from.
        task_expert: the task expert alone.

    Raises:
        EvaluationError: the files do not fit together, or there is no task expert.
    """
    spec = evaluator.spec.without_labels
    assert spec is not None, "the settings say how to choose without labels"
    if task_expert not in evaluator.members:
        raise EvaluationError("choosing without labels needs swaps, which have a task expert")
    chosen = spec.by or [_default(spec)]
    bench = _Signals(evaluator, spec, list(candidates), evaluator.members[task_expert])
    found: dict[str, Values] = {name: bench.value(name) for name in chosen}
    if len(found) == 1:
        return next(iter(found.values())), chosen[0]
    return signals.combined(found), "mean rank of " + ", ".join(chosen)


def _default(spec: WithoutLabels) -> Signal:
    return next(
        name for name in BEST_FIRST if all(getattr(spec, file) is not None for file in NEEDS[name])
    )


class _Signals:
    """Reads the files once, asks once, and gives every signal from that."""

    def __init__(
        self,
        evaluator: Evaluator,
        spec: WithoutLabels,
        candidates: list[Condition],
        task_expert: int,
    ) -> None:
        assert isinstance(evaluator.sweep, Sweep), "signals read what vLLM does not give"
        self._evaluator, self._sweep, self._spec = evaluator, evaluator.sweep, spec
        self._candidates, self._expert = candidates, task_expert
        self._members = [evaluator.members[one] for one in candidates]
        self._read = _reader(evaluator.tokenizer, spec.answer)

    def value(self, signal: Signal) -> Values:
        """One signal for every composition."""
        ways: dict[str, Callable[[], Values]] = {
            "agreement": self._agreement,
            "consensus": lambda: signals.consensus(self._answers),
            "confidence": lambda: signals.confidence(
                self._sweep, self._prompts, self._answers, batch_size=self._batch
            ),
            "self_consistency": lambda: signals.self_consistency(
                self._sweep, self._prompts, self._read, members=self._members, **self._settings
            ),
            "fluency": lambda: signals.fluency(
                self._sweep, self._ids("text"), members=self._members, batch_size=self._batch
            ),
            "closeness": self._closeness,
            "tasks": self._tasks,
        }
        return ways[signal]()

    @cached_property
    def _prompts(self) -> list[list[int]]:
        return self._ids("prompts")

    @cached_property
    def _twins(self) -> list[list[int]]:
        found = self._ids("parallel")
        if len(found) != len(self._prompts):
            raise EvaluationError(
                f"{self._spec.parallel} has {len(found)} prompts and {self._spec.prompts} "
                f"{len(self._prompts)}; they must be the same, line by line"
            )
        return found

    @cached_property
    def _answers(self) -> Answers:
        return signals.ask(
            self._sweep, self._prompts, self._read, members=self._members, **self._settings
        )

    @property
    def _settings(self) -> dict[str, Any]:
        return {
            "max_new_tokens": self._spec.max_new_tokens,
            "stop": tuple(self._spec.stop),
            "tokenizer": self._evaluator.tokenizer,
        }

    @property
    def _batch(self) -> int:
        size = self._evaluator.spec.batch_size
        return 16 if size == "auto" else size

    def _agreement(self) -> Values:
        expert = signals.ask(
            self._sweep, self._twins, self._read, members=[self._expert], **self._settings
        )
        return signals.agreement(self._answers, expert.texts[0])

    def _closeness(self) -> Values:
        pairs = list(zip(self._twins, self._prompts, strict=True))
        found: Values = cross_lingual_similarity(self._sweep, pairs, members=self._members).mean(
            axis=1
        )
        return found

    def _tasks(self) -> Values:
        """Mean rank over the file's tasks: the task in the source language, reading in the target.

        Each task counts once, by the first number that it gives.
        """
        from layerswap.search.evaluator import DEVELOPMENT, by_condition

        rows = self._evaluator.rows(DEVELOPMENT, self._candidates)
        measures: dict[str, tuple[str, str, str]] = {}
        for row in rows:
            measures.setdefault(row.task, (row.task, row.metric, row.filter))
        means = {
            task: np.array([v.mean() for v in by_condition(rows, measure).values()])
            for task, measure in measures.items()
        }
        return signals.combined(means)

    def _ids(self, key: str) -> list[list[int]]:
        path = Path(getattr(self._spec, key))
        options, tokenizer = self._evaluator.spec.options, self._evaluator.tokenizer
        texts = [one.prompt + one.text for one in read_examples(path)]
        if key == "text":
            return [list(tokenizer(text).input_ids) for text in texts]
        return [options.prompt_ids(tokenizer, text) for text in texts]


def _reader(tokenizer: Any, pattern: str | None) -> Callable[[Sequence[int]], str]:
    """What reads an answer from generated tokens."""

    def read(tokens: Sequence[int]) -> str:
        text = str(tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()
        if pattern is None:
            return text
        found = [match.group() for match in re.finditer(pattern, text)]
        return found[-1] if found else ""

    return read
