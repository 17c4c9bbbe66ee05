"""Documents that score compositions in memory: prompts with answers, and tasks of lm-eval.

Both kinds have a `name`, a `measure` (a score in a few words) and development `prompts` to ask.
`open` prepares them for the model in memory, and `score` gives a vector of scores per composition.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from layerswap.experiment.answers import values_of
from layerswap.experiment.compare import Values, split_documents
from layerswap.experiment.conditions import Condition
from layerswap.experiment.evaluator import DEVELOPMENT, Evaluator
from layerswap.experiment.spec import SweepSettings
from layerswap.ground.errors import EvaluationError, RecipeError
from layerswap.versions import need_extras

if TYPE_CHECKING:
    from layerswap.engine.sweep import Sweep
    from layerswap.merge import Plan

Split = Literal["development", "test"]
Prompt = tuple[str, str | None]
"""A prompt, and its answer if it is known."""
SHOWN = 200
"""Most prompts to offer."""


class Answered:
    """Prompts with answers; a composition scores 1 where it writes the answer and ends, else 0."""

    measure = "answered exactly"

    def __init__(self, name: str, splits: Mapping[str, Sequence[Prompt]]) -> None:
        self.name, self._splits = name, splits
        self.prompts = splits["development"][:SHOWN]

    @classmethod
    def split(cls, name: str, prompts: Sequence[Prompt]) -> Answered:
        """Split documents into development and test, as a sweep with seed 0 does."""
        if any(answer is None for _, answer in prompts):
            raise RecipeError(f"{name}: every document needs a `prompt` and an `answer`")
        if len(prompts) < 2:
            raise EvaluationError(f"{name}: needs two documents, one to choose on and one to test")
        parts = split_documents(len(prompts), 0.5)._asdict().items()
        return cls(name, {part: [prompts[i] for i in sorted(own)] for part, own in parts})

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Encode the documents."""
        del sweep, plan
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]

        def encode(prompt: str, answer: str | None) -> tuple[list[int], list[int]]:
            spaced = prompt[-1:].isspace() or str(answer)[:1].isspace()
            ids = tokenizer(f"{'' if spaced else ' '}{answer}", add_special_tokens=False).input_ids
            return tokenizer(prompt).input_ids, [*ids, *end]

        self._requests = {split: [encode(*row) for row in rows]
                          for split, rows in self._splits.items()}  # fmt: skip

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score greedy answers by one pass, which gives the result of generating them."""
        scores = sweep.loglikelihood(
            self._requests[split], members=members, batch_size=256, share_prefixes=False
        )
        return list(scores.greedy.astype(np.float64))


class Tasks:
    """Tasks of lm-eval, split and scored as `layerswap sweep` does."""

    def __init__(self, names: Sequence[str], include: Sequence[Path] = (), **settings: Any) -> None:
        need_extras("lm-eval tasks", "eval")
        folders = [str(path.absolute()) for path in include]
        self._spec = SweepSettings(tasks=[*names], include=folders, **settings)
        self.name, self.measure = ", ".join(names), "score"
        self.prompts: Sequence[Prompt] = ()

    def open(self, sweep: Sweep, plan: Plan, tokenizer: Any) -> None:
        """Load the tasks."""
        del tokenizer
        self._evaluator = Evaluator(self._spec, {Condition("0"): plan}, sweep=sweep)
        self.prompts = self._evaluator.prompts(DEVELOPMENT, SHOWN)

    def score(self, sweep: Sweep, members: Sequence[int], split: Split) -> Sequence[Values]:
        """Score by the first measure of the tasks."""
        del sweep
        named = {Condition(str(member)): member for member in members}
        self._evaluator.members = named
        rows = self._evaluator.rows(split, list(named))
        chosen = self._evaluator.measure(rows)
        self.measure = f"{chosen[1]} of {chosen[0]}"
        scores = values_of(rows, chosen)
        return [scores[condition] for condition in named]


Documents = Answered | Tasks
