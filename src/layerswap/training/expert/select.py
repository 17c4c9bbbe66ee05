"""Selects experts: scores every checkpoint of several runs and keeps the best, by run.

Both papers keep the best three of many checkpoints, "striking a balance between top performance
and sufficient diversity" (paper 1, section 4.1).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap.errors import EvaluationError, TrainingError
from layerswap.evaluation.languages import match
from layerswap.merge import Plan
from layerswap.merge.api import soup
from layerswap.merge.loading import plan_tokenizer
from layerswap.training.expert.save import (
    CHECKPOINTS,
    checkpoints,
    read_training,
    trainer_state,
)

if TYPE_CHECKING:
    from layerswap.evaluation.harness import PromptOptions

ExpertRole = Literal["task", "language"]
LANGUAGE_SIGNALS = {"belebele_": r"[a-z]{3}_[A-Z][a-z]{3}", "global_mmlu_full_": r"[a-z]{2,3}"}
"""Prefixes of lm-eval tasks, and the form of the language code that follows."""
ENGLISH_PROBLEMS = "mgsm_direct_en"
ScorePlan = Callable[[Plan], dict[str, float]]
"""Evaluates a plan; returns its score by task."""


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of a run.

    Attributes:
        run: the folder that `layerswap train` wrote.
        step: number of optimiser steps.
        folder: folder of the checkpoint.
        loss: validation loss in nats per token, where it was measured.
        scores: mean score by task.
    """

    run: str
    step: int
    folder: str
    loss: float | None
    scores: dict[str, float] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Its rank value, larger is better: mean score, or the negative validation loss."""
        if self.scores:
            return sum(self.scores.values()) / len(self.scores)
        return -math.inf if self.loss is None else -self.loss


@dataclass(frozen=True)
class Selection:
    """A ranking of checkpoints.

    Attributes:
        ranked: every candidate, the best first.
        chosen: the best `keep`, no more of one run than its share.
    """

    ranked: tuple[Candidate, ...]
    chosen: tuple[Candidate, ...]

    def to_json(self) -> str:
        """The whole selection, as JSON."""
        data = {"ranked": list(map(asdict, self.ranked)), "chosen": list(map(asdict, self.chosen))}
        return json.dumps(data, indent=2) + "\n"


def candidates(run: Path) -> list[Candidate]:
    """The checkpoints of a run in the order of their steps, the finished expert last.

    Raises:
        TrainingError: the folder is not a training, or has no checkpoint yet.
    """
    record = read_training(run)
    steps = list(checkpoints(run / CHECKPOINTS).items())
    losses = _losses(record, steps[-1][1] if steps else None)
    if record["finished"]:
        steps.append((int(record["steps"]), run))
    if not steps:
        raise TrainingError(f"{run}: has no checkpoint yet")
    return [Candidate(str(run), step, str(path), losses.get(step)) for step, path in steps]


def select(
    runs: Sequence[Path],
    *,
    keep: int = 3,
    of_any_run: bool = False,
    score: ScorePlan | None = None,
) -> Selection:
    """Score every checkpoint of several runs, and keep the best.

    Args:
        runs: folders that `layerswap train` wrote.
        keep: number of checkpoints to keep.
        of_any_run: allow all of them to come from one run. Otherwise each run gives as few as
            possible: one each where there are as many runs as checkpoints to keep.
        score: score by task of a checkpoint (or an adapter over its base), as a plan; rank by
            validation loss when None.

    Raises:
        TrainingError: a folder is not a training, or no validation loss was measured.
    """
    found = [candidate for run in runs for candidate in candidates(run)]
    if score is not None:
        found = [replace(one, scores=score(soup([one.folder]))) for one in found]
    elif not any(one.loss is not None for one in found):
        raise TrainingError("no run measured a validation loss; select by tasks instead")
    ranked = sorted(found, key=lambda one: (-one.value, one.run, one.step))
    share = len(ranked) if of_any_run else math.ceil(keep / len({one.run for one in found}))
    chosen: list[Candidate] = []
    for one in ranked:
        if len(chosen) < keep and sum(other.run == one.run for other in chosen) < share:
            chosen.append(one)
    return Selection(tuple(ranked), tuple(chosen))


def signal_tasks(role: ExpertRole, language: str | None = None) -> list[str]:
    """The lm-eval tasks that predict an expert's value in a merge (paper 2, section 5).

    Belebele and Global-MMLU in its language for a language expert, English MGSM for a task expert.

    Raises:
        EvaluationError: a language expert without a language, or neither benchmark has it.
    """
    from layerswap.evaluation.harness import task_names

    if role == "task":
        return [ENGLISH_PROBLEMS]
    if language is None:
        raise EvaluationError("a language expert is selected in its language; give --language")
    found = []
    names = task_names()
    for prefix, form in LANGUAGE_SIGNALS.items():
        codes = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        code = match(language, filter(re.compile(form).fullmatch, codes))
        if code is not None:
            found.append(prefix + code)
    if not found:
        raise EvaluationError(f"neither Belebele nor Global-MMLU has {language}; give --task")
    return found


def scorer(
    tasks: Sequence[str],
    *,
    include: Sequence[Path] = (),
    limit: int | None = None,
    num_fewshot: int | None = None,
    prompts: PromptOptions | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> ScorePlan:
    """A function from a plan to the mean of the first metric of each lm-eval task.

    The plan is evaluated without being written.

    Args:
        tasks: names of the tasks.
        include: folders with additional task YAMLs.
        limit: maximum number of documents of a task.
        num_fewshot: number of examples in a prompt; the task's own when None.
        prompts: how prompts are written; plain text when None.
        device: device of the models; a GPU if there is one when None.
        dtype: dtype of the models; the stored one when None.

    Raises:
        EvaluationError: a task is unknown; before any checkpoint is loaded.
    """
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.harness import check_task_names

    check_task_names(tasks, include)

    def score(plan: Plan) -> dict[str, float]:
        from layerswap.engine.sweep import Sweep
        from layerswap.evaluation.harness import evaluate

        sweep = Sweep([plan], device=pick_device(device), dtype=dtype)
        result = evaluate(
            sweep, plan_tokenizer(plan), tasks, include=include, limit=limit, batch_size=None,
            num_fewshot=num_fewshot, options=prompts,
        )  # fmt: skip
        return _first_metrics(result[0])

    return score


def _first_metrics(result: dict[str, Any]) -> dict[str, float]:
    found = {}
    for task, values in result["results"].items():
        name = next((key for key in values if "," in key and "stderr" not in key), None)
        if name is not None:
            found[task] = float(values[name])
    return found


def _losses(record: dict[str, Any], newest: Path | None) -> dict[int, float]:
    history = record.get("log")
    if history is None and newest is not None:
        history = trainer_state(newest).get("log_history")
    return {
        int(entry["step"]): float(entry["eval_loss"])
        for entry in history or ()
        if "eval_loss" in entry
    }
