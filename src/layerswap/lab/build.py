"""Building the lab: a base, and experts of it, trained from nothing with fixed seeds.

Every finished model is a checkpoint folder in float16, whose finer mantissa keeps more of an
expert's small delta than bfloat16 would, and an entry in `record.json`. The record is written
anew, atomically, after each model: what it lists is whole, and is not trained again.
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

from layerswap.checkpoint.commit import write_json
from layerswap.checkpoint.loading import without_progress_bars
from layerswap.errors import RecipeError
from layerswap.evaluation.statistics import Interval, mean_interval
from layerswap.lab.datasets import base_stream, joint_stream, language_stream, task_stream
from layerswap.lab.scoring import load, score_model
from layerswap.lab.tasks import LabExample, LabSplit
from layerswap.lab.train import Training, Trainings, new_model, train
from layerswap.lab.world import World, WorldSettings, make_world
from layerswap.versions import need_extras, versions

LAB_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")
LAB_RECORD = "record.json"
RUNS = 3
"""Experts of each kind, with a seed each."""
RECORDED_EXAMPLES = 500
"""Development examples per measure behind the scores in the record."""

Progress = Callable[[str, int, int], None]
"""Called with what is being made or scored, how much of it is done, and how much there is."""

LabScores = dict[str, dict[str, dict[str, Interval]]]
"""Model name, scarce language, measure: an interval."""


@dataclass(frozen=True)
class LabJob:
    """One model to be trained: its folder's name, how, on what, and with which seed."""

    name: str
    training: Training
    stream: Iterator[LabExample]
    seed: int
    languages: tuple[str, ...]


def build(
    out: Path,
    *,
    seed: int = 0,
    settings: WorldSettings | None = None,
    trainings: Trainings | None = None,
    runs: int = RUNS,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Trains whatever of the lab is not in `out` yet, and records how each model does.

    Args:
        out: a folder; gets `base`, `task-1`.., `language-<name>-1`.., `joint-<name>` and
            `record.json`.
        seed: of everything drawn. The same seed on the same machine gives the same models.
        settings: of the world; the shipped lab's by default.
        trainings: of the training; the shipped lab's by default.
        runs: experts of each kind.
        progress: called with a model's name, the steps done and the steps in all.

    Returns:
        The record: settings, trainings, seeds, library versions, and per model the final loss
        (nats per completion token), seconds, and development scores after rounding to float16.

    Raises:
        LayerswapError: `out` holds a lab of another seed or of other settings, or the extra
            `train` is not installed.
    """
    need_extras("training", "train")
    world = make_world(settings)
    trainings = trainings or Trainings()
    record = _open_record(out, world, trainings, seed, runs)
    for job in _jobs(world, trainings, seed, runs):
        if job.name not in record["models"]:
            record["models"][job.name] = _make(out, job, world, trainings, progress)
            _write_record(out, record)
    return record


def score(
    folder: Path,
    *,
    split: LabSplit = "test",
    n: int = 1000,
    seed: int = 0,
    progress: Progress | None = None,
) -> LabScores:
    """How every model of a built lab does, in every scarce language it has to do with.

    Args:
        folder: what `build` wrote.
        split: which questions; `"test"` for a report, `"development"` to choose by.
        n: questions per measure.
        seed: of the questions, and of the intervals.
        progress: called with a model's name, the models done and the models in all.

    Raises:
        RecipeError: there is no lab in the folder, or the split or `n` is wrong.
    """
    record = read_record(folder)
    world = make_world(settings_of(record))
    scores: LabScores = {}
    for done, (name, entry) in enumerate(record["models"].items()):
        if progress is not None:
            progress(name, done, len(record["models"]))
        model, tokenizer = load(folder / name)
        scores[name] = {}
        for language in entry["development"]:
            answers = score_model(model, tokenizer, language, split, n, seed=seed, world=world)
            scores[name][language] = {
                measure: mean_interval(right, seed=seed) for measure, right in answers.items()
            }
    return scores


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a lab.

    Raises:
        RecipeError: there is none in the folder, or it is not JSON.
    """
    path = folder / LAB_RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecipeError(f"{folder}: no lab here ({LAB_RECORD} is missing)") from None
    except ValueError as error:
        raise RecipeError(f"{path}: not a lab's record: {error}") from None
    return record


def settings_of(record: dict[str, Any]) -> WorldSettings:
    """The settings of the world that a record was made in."""
    from layerswap.lab.world import LanguageSettings

    fields = dict(record["settings"])
    fields["languages"] = tuple(
        LanguageSettings(**{**entry, "order": tuple(entry["order"])})
        for entry in fields["languages"]
    )
    return WorldSettings(**fields)


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


def _make(
    out: Path, job: LabJob, world: World, trainings: Trainings, progress: Progress | None
) -> dict[str, Any]:
    from layerswap.lab.tokenizer import make_tokenizer

    start = time.perf_counter()
    tokenizer = make_tokenizer(world)
    if job.name == "base":
        model: Any = new_model(world, trainings.shape, tokenizer, seed=job.seed)
    else:
        model, _ = load(out / "base")

    def on_step(done: int, steps: int) -> None:
        if progress is not None:
            progress(job.name, done, steps)

    loss = train(model, tokenizer, job.stream, job.training, seed=job.seed, on_step=on_step)
    _save(out, job.name, model.half(), tokenizer)
    seconds = time.perf_counter() - start
    return {
        "seed": job.seed,
        "steps": job.training.steps,
        "seconds": round(seconds, 1),
        "final_loss": round(loss, 4),
        "development": _development(out / job.name, job, world),
    }


def _development(folder: Path, job: LabJob, world: World) -> dict[str, dict[str, float]]:
    model, tokenizer = load(folder)
    return {
        language: {
            measure: round(float(right.mean()), 4)
            for measure, right in score_model(
                model, tokenizer, language, "development", RECORDED_EXAMPLES, world=world
            ).items()
        }
        for language in job.languages
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
    asked = {
        "seed": seed,
        "runs": runs,
        "settings": asdict(world.settings),
        "trainings": asdict(trainings),
    }
    asked = json.loads(json.dumps(asked))
    if not (out / LAB_RECORD).exists():
        out.mkdir(parents=True, exist_ok=True)
        made_with = {"python": platform.python_version(), **versions(*LAB_LIBRARIES)}
        return {**asked, "made_with": made_with, "models": {}}
    record = read_record(out)
    for key, value in asked.items():
        if record.get(key) != value:
            raise RecipeError(
                f"{out}: holds a lab whose {key} differ from those asked for; "
                f"choose another folder, or remove this one"
            )
    return record


def _write_record(out: Path, record: dict[str, Any]) -> None:
    write_json(out / LAB_RECORD, record)
