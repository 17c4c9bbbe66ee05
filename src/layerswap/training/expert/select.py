"""Selects the best checkpoints of several runs, and compares freezing with reverting.

Both papers keep the best three of many checkpoints, "striking a balance between top performance
and sufficient diversity" (paper 1, section 4.1). An expert of one part is trained on that part
alone, or trained whole and reverted outside of it (paper 2, table 2). Both keep the base's weights
outside the part. They differ in that the rest could move while the part trained.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.compose.presets import PARTITIONS
from layerswap.evaluation.languages import match
from layerswap.ground.errors import EvaluationError, RecipeError, TrainingError
from layerswap.ground.types import Log
from layerswap.merge.api import revert, soup
from layerswap.merge.plan import Plan
from layerswap.training.expert.save import CHECKPOINTS, checkpoints, read_training, trainer_state
from layerswap.training.expert.spec import ExpertSpec, Side
from layerswap.training.expert.trainer import train

if TYPE_CHECKING:
    from layerswap.evaluation.settings import EvaluationSettings

LANGUAGE_SIGNALS = {"belebele_": r"[a-z]{3}_[A-Z][a-z]{3}", "global_mmlu_full_": r"[a-z]{2,3}"}
"""Prefixes of lm-eval tasks, and the form of the language code that follows."""
ENGLISH_PROBLEMS = "mgsm_direct_en"
ScorePlan = Callable[[Plan], dict[str, float]]
"""Evaluates a plan; returns its score by task."""


@dataclass(frozen=True)
class Candidate:
    """One checkpoint of a run."""

    run: str  # the folder that `layerswap train` wrote
    step: int
    folder: str  # of the checkpoint
    loss: float | None  # validation loss in nats per token, where it was measured
    scores: dict[str, float] = field(default_factory=dict)  # mean score by task

    @property
    def value(self) -> float:
        """Value to rank by, larger is better: mean score, or the negative validation loss."""
        if self.scores:
            return sum(self.scores.values()) / len(self.scores)
        return -math.inf if self.loss is None else -self.loss


@dataclass(frozen=True)
class Selection:
    """A ranking of checkpoints."""

    ranked: tuple[Candidate, ...]  # every candidate, the best first
    chosen: tuple[Candidate, ...]  # the best, no more of one run than its share


@dataclass(frozen=True)
class FreezeOrRevert:
    """One row of the table."""

    partition: str | None  # None for the base, and for the expert that is trained whole
    treatment: str  # of the places outside the expert's part
    scores: dict[str, float]  # by task


def candidates(run: Path) -> list[Candidate]:
    """List the checkpoints of a run in the order of their steps, the finished expert last."""
    record = read_training(run)
    steps = list(checkpoints(run / CHECKPOINTS).items())
    losses = _validation_losses(record, steps[-1][1] if steps else None)
    if record["finished"]:
        steps.append((int(record["steps"]), run))
    if not steps:
        raise TrainingError(f"{run}: has no checkpoint yet")
    return [Candidate(str(run), step, str(path), losses.get(step)) for step, path in steps]


def select(runs: Sequence[Path], *, keep: int = 3, score: ScorePlan | None = None) -> Selection:
    """Score every checkpoint of several runs, and keep the best.

    Without `score`, the validation loss ranks them. Keeps at most ceil(keep / runs) checkpoints per
    run.
    """
    every = [candidate for run in runs for candidate in candidates(run)]
    if score is not None:
        every = [replace(each, scores=score(soup([each.folder]))) for each in every]
    elif all(candidate.loss is None for candidate in every):
        raise TrainingError("no run measured a validation loss; select by tasks instead")
    ranked = sorted(every, key=lambda candidate: (-candidate.value, candidate.run, candidate.step))
    share = math.ceil(keep / len(set(map(str, runs))))
    chosen: list[Candidate] = []
    for candidate in ranked:
        of_run = sum(other.run == candidate.run for other in chosen)
        if len(chosen) < keep and of_run < share:
            chosen.append(candidate)
    return Selection(tuple(ranked), tuple(chosen))


def signal_tasks(role: Side, language: str | None = None) -> list[str]:
    """List the lm-eval tasks that predict an expert's value in a merge (paper 2, section 5).

    These are Belebele and Global-MMLU in its language for a language expert, English MGSM for a
    task expert.
    """
    from layerswap.evaluation.harness import task_names

    if role == "task":
        return [ENGLISH_PROBLEMS]
    if language is None:
        raise EvaluationError("a language expert is selected in its language; give --language")
    tasks = []
    names = task_names()
    for prefix, form in LANGUAGE_SIGNALS.items():
        codes = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        code = match(language, filter(re.compile(form).fullmatch, codes))
        if code is not None:
            tasks.append(prefix + code)
    if not tasks:
        raise EvaluationError(f"neither Belebele nor Global-MMLU has {language}; give --task")
    return tasks


def scorer(settings: EvaluationSettings) -> ScorePlan:
    """Return a function from a plan to the mean of the first metric of each lm-eval task.

    The plan is evaluated without being written. An unknown task fails here, before any checkpoint
    is loaded.
    """
    from layerswap.evaluation.harness import check_task_names, evaluate_models

    include = [Path(folder) for folder in settings.include]
    check_task_names(settings.tasks, include)

    def score(plan: Plan) -> dict[str, float]:
        (result,) = evaluate_models(
            {"model": plan}, settings.tasks, include, settings=settings
        ).values()
        metrics = {
            task: [float(values[key]) for key in values if "," in key and "stderr" not in key]
            for task, values in result["results"].items()
        }
        return {task: values[0] for task, values in metrics.items() if values}

    return score


def _validation_losses(record: dict[str, Any], newest: Path | None) -> dict[int, float]:
    """Return the validation loss by step, from the record or from the newest checkpoint."""
    history = record.get("log")
    if history is None and newest is not None:
        history = trainer_state(newest).get("log_history")
    return {
        int(entry["step"]): float(entry["eval_loss"])
        for entry in history or ()
        if "eval_loss" in entry
    }


def freeze_or_revert(
    spec: ExpertSpec,
    out: Path,
    *,
    part: Side,
    score: ScorePlan,
    partitions: Sequence[str] = tuple(PARTITIONS),
    folder: Path | None = None,
    log: Log = lambda line: None,
) -> list[FreezeOrRevert]:
    """Train an expert whole and once for each partition, and evaluate both ways of keeping a part.

    Trainings are kept in `out` (`whole`, `frozen-A` and so on); a second call resumes them. A
    reverted expert is evaluated without being written. Paths of `spec` are relative to `folder`.
    """
    if spec.train is not None or spec.simultaneous is not None:
        raise RecipeError("freeze or revert: partitions choose the places; leave `train` out")
    unknown = next((name for name in partitions if name not in PARTITIONS), None)
    if unknown is not None:
        raise RecipeError(f"no partition {unknown!r}; there are {', '.join(PARTITIONS)}")

    def trained(name: str, **overrides: Any) -> Plan:
        log(f"training {name}")
        target = out / name
        train(spec, target, folder=folder, resume=target.is_dir(), log=log, **overrides)
        return soup([str(target)], base=base, bake=True)

    local = (folder or Path()) / Path(spec.base).expanduser()
    base = str(local) if local.is_dir() else spec.base
    whole = trained("whole")
    rows = [
        FreezeOrRevert(None, "the base", score(soup([base]))),
        FreezeOrRevert(None, "all trained", score(whole)),
    ]
    for name in partitions:
        plan = revert(base, str(out / "whole"), partition=name, part=part)
        rows.append(FreezeOrRevert(name, "reverted", score(plan)))
        frozen = trained(f"frozen-{name}", train={"partition": name, "part": part})
        rows.append(FreezeOrRevert(name, "frozen", score(frozen)))
    return rows
