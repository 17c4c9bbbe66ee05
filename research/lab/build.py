"""Builds the lab: a base, and experts of it, trained from scratch with fixed seeds.

Every finished model is a checkpoint folder in float16, whose finer mantissa keeps more of an
expert's small delta than bfloat16 would, and an entry in `record.json`. The record is rewritten
atomically after each model. A model that it lists is complete, and is not trained again.
"""

from __future__ import annotations

import json
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint.loading import load_tokenizer, without_progress_bars
from layerswap.engine.sweep import Sweep
from layerswap.ground.commit import write_json
from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import LAB_RECORD, read_record
from layerswap.lab.quickstart import LIBRARIES, SHOWN, TEST_QUESTIONS
from layerswap.lab.scoring import sweep_written
from layerswap.merge.api import soup
from layerswap.versions import need_extras, versions
from research.lab.datasets import base_stream, joint_stream, language_stream, task_stream
from research.lab.scoring import load, questions, score_folder
from research.lab.tasks import LabExample
from research.lab.train import Training, Trainings, new_model, train
from research.lab.world import World, make_tokenizer, make_world

RUNS = 3
"""Experts of each kind, with a seed each."""
RECORDED_EXAMPLES = 500
"""Development examples per measure for the scores in the record."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a model, the steps done and the steps in all."""


@dataclass(frozen=True)
class LabJob:
    """One model to train: its folder's name, training, data, seed and scarce languages."""

    name: str
    training: Training
    stream: Iterator[LabExample]
    seed: int
    languages: tuple[str, ...]


def build(
    out: Path,
    *,
    seed: int = 0,
    trainings: Trainings | None = None,
    runs: int = RUNS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train every model of the lab that is not in `out` yet, and record its scores.

    The folder gets `base`, `task-1`.., `language-<name>-1`.., `joint-<name>` and `record.json`. The
    same seed on the same machine gives the same models. Trainings are the shipped lab's by default;
    `runs` counts the experts of each kind. The record has settings, trainings, seeds,
    library versions, and per model the final loss (nats per completion token), seconds, and
    development scores after rounding to float16.
    """
    need_extras("training", "train")
    world = make_world()
    trainings = trainings or Trainings()
    record = _open_record(out, world, trainings, seed, runs)
    for job in _jobs(world, trainings, seed, runs):
        if job.name not in record["models"]:
            record["models"][job.name] = _train(out, job, world, trainings, progress)
            write_json(out / LAB_RECORD, record)
    return record


def _jobs(world: World, trainings: Trainings, seed: int, runs: int) -> Iterator[LabJob]:
    scarce = tuple(language.name for language in world.scarce)
    first = seed * 1000
    yield LabJob(
        "base", trainings.base, base_stream(world, trainings.base_mix, seed=first), first, scarce
    )
    for run in range(1, runs + 1):
        stream = task_stream(world, seed=first + run)
        yield LabJob(f"task-{run}", trainings.task, stream, first + run, scarce)
    for name in scarce:
        for run in range(1, runs + 1):
            stream = language_stream(world, name, trainings.language_mix, seed=first + run)
            yield LabJob(f"language-{name}-{run}", trainings.language, stream, first + run, (name,))
    steps = trainings.task.steps, trainings.language.steps
    for name in scarce:
        stream = joint_stream(
            world, name, trainings.language_mix, task=steps[0] / sum(steps), seed=first + 1
        )
        yield LabJob(f"joint-{name}", trainings.joint, stream, first + 1, (name,))


def _train(
    out: Path, job: LabJob, world: World, trainings: Trainings, progress: Progress | None
) -> dict[str, Any]:
    """Train and save one model; return its entry in the record."""
    start = time.perf_counter()
    tokenizer = make_tokenizer(world)
    if job.name == "base":
        model: Any = new_model(trainings.shape, tokenizer, seed=job.seed)
    else:
        model, _ = load(out / "base")

    def on_step(done: int, steps: int) -> None:
        if progress is not None:
            progress(job.name, done, steps)

    loss = train(model, tokenizer, job.stream, job.training, seed=job.seed, on_step=on_step)
    _save(out, job.name, model.half(), tokenizer)
    seconds = time.perf_counter() - start
    joint = job.name.startswith("joint")
    return {
        "seed": job.seed,
        "steps": job.training.steps,
        "seconds": round(seconds, 1),
        "final_loss": round(loss, 4),
        "development": _development(out / job.name, job, world),
        **(_test_answers(out / job.name, job.languages[0], world) if joint else {}),
    }


def _test_answers(folder: Path, language: str, world: World) -> dict[str, Any]:
    """A joint model's answers for the quickstart: right (1) or wrong (0), and the first texts."""
    scores = score_folder(folder, language, "test", TEST_QUESTIONS, world=world)
    right = {name: "".join(map(str, correct.astype(int))) for name, correct in scores.items()}
    sweep, tokenizer = Sweep([soup({"joint": folder})], dtype="float32"), load_tokenizer(folder)
    first = questions("task_target", language, "test", SHOWN, world=world)
    return {"test": right, "written": "\n".join(sweep_written(sweep, tokenizer, first)[0])}


def _development(folder: Path, job: LabJob, world: World) -> dict[str, dict[str, float]]:
    """The share of right answers by language and measure."""
    scores = {
        language: score_folder(folder, language, "development", RECORDED_EXAMPLES, world=world)
        for language in job.languages
    }
    return {
        language: {measure: round(float(right.mean()), 4) for measure, right in measures.items()}
        for language, measures in scores.items()
    }


def _save(out: Path, name: str, model: Any, tokenizer: Any) -> None:
    partial = out / f".{name}.partial"
    for leftover in (partial, out / name):
        if leftover.exists():
            shutil.rmtree(leftover)
    with without_progress_bars():
        model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out / name)


def _open_record(
    out: Path, world: World, trainings: Trainings, seed: int, runs: int
) -> dict[str, Any]:
    wanted = {
        "seed": seed,
        "runs": runs,
        "settings": asdict(world.settings),
        "trainings": asdict(trainings),
    }
    wanted = json.loads(json.dumps(wanted))
    if not (out / LAB_RECORD).exists():
        out.mkdir(parents=True, exist_ok=True)
        made_with = {"python": platform.python_version(), **versions(*LIBRARIES)}
        return {**wanted, "made_with": made_with, "models": {}}
    record = read_record(out)
    for key, value in wanted.items():
        if record.get(key) != value:
            raise RecipeError(
                f"{out}: holds a lab whose {key} differs from this one's; choose another folder, "
                "or delete this one"
            )
    return record
