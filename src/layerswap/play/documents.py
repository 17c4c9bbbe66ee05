"""Documents with answers, on which the map scores compositions: development and test.

Files of prompts and answers are scored by exact greedy answers, as the lab scores its problems.
Tasks of lm-eval are scored by the evaluator of `layerswap sweep`, on the same documents.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from layerswap.compose.yaml_file import read_text
from layerswap.errors import EvaluationError, RecipeError
from layerswap.search.conditions import Condition
from layerswap.search.evaluator import DEVELOPMENT, Evaluator, by_condition
from layerswap.search.protocol import Values, split_documents
from layerswap.search.spec import SweepSettings

if TYPE_CHECKING:
    from layerswap.engine.sweep import Sweep
    from layerswap.merge import Plan

Split = Literal["development", "test"]
SHOWN = 200
"""Most prompts that the page offers."""
DEVELOPMENT_SHARE = 0.5


class Prompt(NamedTuple):
    """A prompt, and its answer if it is known."""

    prompt: str
    answer: str | None = None


class Documents(ABC):
    """Documents that score compositions.

    Attributes:
        name: of the documents, for people and for the history.
        measure: what a score is, in a few words.
        prompts: development prompts, to ask.
    """

    name: str
    measure: str
    prompts: Sequence[Prompt]

    @abstractmethod
    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Prepare the documents for the model in memory."""

    @abstractmethod
    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score compositions on every document of a split: one vector per composition."""


class Answered(Documents):
    """Prompts with answers; a composition scores 1 where it writes the answer and ends, else 0."""

    measure = "answered exactly"

    def __init__(self, name: str, splits: Mapping[Split, Sequence[Prompt]]) -> None:
        self.name, self._splits, self._tokenizer = name, splits, None
        self.prompts = splits["development"][:SHOWN]

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Keep the tokenizer that encodes the documents."""
        del sweep, plan
        self._tokenizer = tokenizer

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score greedy answers by one pass, which gives the result of generating them."""
        right = np.zeros((len(members), len(self._requests[split])))
        for scores in sweep.iter_loglikelihood(
            self._requests[split], members=members, batch_size=256, share_prefixes=False
        ):
            right[:, scores.requests] = scores.greedy
        return list(right)

    @cached_property
    def _requests(self) -> dict[Split, list[tuple[list[int], list[int]]]]:
        tokenizer: Any = self._tokenizer
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def encode(one: Prompt) -> tuple[list[int], list[int]]:
            answer = f"{one.answer}"
            spaced = answer[:1].isspace() or one.prompt[-1:].isspace()
            answer = answer if spaced else f" {answer}"
            ids = tokenizer(answer, add_special_tokens=False).input_ids
            return tokenizer(one.prompt).input_ids, [*ids, *end]

        return {split: [encode(one) for one in rows] for split, rows in self._splits.items()}


class Tasks(Documents):
    """Tasks of lm-eval, split and scored as `layerswap sweep` does."""

    def __init__(self, spec: SweepSettings) -> None:
        self.name, self.measure, self.prompts = ", ".join(spec.tasks), "score", ()
        self._spec = spec
        self._evaluator: Evaluator | None = None

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Load the tasks."""
        del tokenizer
        self._evaluator = Evaluator(self._spec, {Condition("0"): plan}, sweep=sweep)
        asked = self._evaluator.prompts(DEVELOPMENT, SHOWN)
        self.prompts = [Prompt(prompt, answer) for prompt, answer in asked]

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score by the first measure of the tasks."""
        assert self._evaluator is not None, "tasks are opened before they score"
        named = {Condition(str(member)): member for member in members}
        self._evaluator.members = named
        rows = self._evaluator.rows(split, list(named))
        chosen = self._evaluator.measure(rows)
        self.measure = f"{chosen[1]} of {chosen[0]}"
        scores = by_condition(rows, chosen)
        return [scores[one] for one in named]


def split_prompts(name: str, prompts: Sequence[Prompt]) -> Answered:
    """Split prompts with answers into development and test, as a sweep with seed 0 does."""
    if len(prompts) < 2:
        raise EvaluationError(f"{name}: needs two documents, one to choose on and one to test")
    found = split_documents(len(prompts), DEVELOPMENT_SHARE)
    development, test = ([prompts[i] for i in sorted(part.tolist())] for part in found)
    return Answered(name, {"development": development, "test": test})


def read_prompts(path: Path, *, answers: bool) -> list[Prompt]:
    """Read prompts from a file: JSON Lines of `prompt` and `answer`, or lines of plain text."""
    lines = [pair for pair in enumerate(read_text(path).split("\n"), 1) if pair[1].strip()]
    if path.suffix != ".jsonl" and not answers:
        return [Prompt(line.strip()) for _, line in lines]
    found = []
    for number, line in lines:
        try:
            row = json.loads(line)
            prompt = row["prompt"]
            answer = row.get("answer", row.get("completion"))
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            prompt, answer = None, None
        if not isinstance(prompt, str) or not isinstance(answer, str | None):
            raise RecipeError(f"{path}, line {number}: needs a `prompt` and an `answer`, as texts")
        if answer is None and answers:
            raise RecipeError(f"{path}, line {number}: has no `answer`")
        found.append(Prompt(prompt, answer))
    return found
