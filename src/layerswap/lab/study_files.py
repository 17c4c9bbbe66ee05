"""The papers' experiment on the lab, as a study: its files, and the YAML that runs them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from layerswap.checkpoint.commit import write_json
from layerswap.errors import StudyError
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.datasets import language_stream, task_stream
from layerswap.lab.lm_eval_tasks import MARKER, export_tasks
from layerswap.lab.tasks import LabExample
from layerswap.lab.tokenizer import MAX_LENGTH
from layerswap.lab.train import OUTSIDE, PARTITION, Training, Trainings

INPUTS, STUDY, OURS = "inputs", "study.yaml", "lab_study.json"
HELD_OUT = 256
MORE = 3
"""Times as many rows as a training takes, so that each seed draws others of them."""
DEVELOPMENT = 0.2
"""Share of the questions on which compositions are chosen."""
FIRST_SEED = 900
"""Of the data; the shipped experts' seeds are far from it."""


def write_study(
    out: Path,
    *,
    runs: int = 1,
    n: int = 500,
    steps: int | None = None,
) -> Path:
    """Write the lab's study and its files into `out/inputs`.

    Args:
        out: the folder of the study.
        runs: trainings of each kind of expert, with other orders of the data.
        n: questions of each language to judge by; a quarter as many more to choose by.
        steps: of each training; the lab's own when None.

    Returns:
        The study's YAML; `layerswap study run` takes it too.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """
    lab, trainings = shipped(), Trainings()
    if steps is not None:
        trainings = replace(
            trainings,
            task=_cut(trainings.task, steps),
            language=_cut(trainings.language, steps),
        )
    folder = out / INPUTS
    questions = round(n / (1 - DEVELOPMENT))
    asked_before = _claim(out)
    streams = {"task": (task_stream(lab.world, seed=FIRST_SEED), trainings.task)}
    for name in lab.languages:
        stream = language_stream(lab.world, name, trainings.language_mix, seed=FIRST_SEED)
        streams[name] = (stream, trainings.language)
    for name, (stream, training) in streams.items():
        _write(folder / f"{name}-train.jsonl", stream, MORE * training.steps * training.batch)
        _write(folder / f"{name}-validation.jsonl", stream, HELD_OUT)
    if asked_before != questions or not (folder / "tasks" / MARKER).is_file():
        export_tasks(folder / "tasks", n=questions, overwrite=True)
    write_json(folder / OURS, {"questions": questions})
    study = _study(lab, trainings, runs)
    path = folder / STUDY
    path.write_text(json.dumps(study, indent=2) + "\n", "utf-8")  # JSON is YAML too
    return path


def _claim(out: Path) -> int | None:
    """Take the folder, unless it holds something else; the questions that an earlier run wrote."""
    ours = out / INPUTS / OURS
    try:
        if out.is_dir() and any(out.iterdir()) and not ours.is_file():
            raise StudyError(f"{out}: is no folder of `lab study`; choose another output")
        ours.parent.mkdir(parents=True, exist_ok=True)
        if not ours.is_file():
            write_json(ours, {"questions": None})
        found: int | None = json.loads(ours.read_text("utf-8"))["questions"]
    except OSError as error:
        raise StudyError(f"{out}: cannot be written ({error.strerror})") from None
    except (ValueError, TypeError, KeyError):
        raise StudyError(f"{ours}: is damaged; choose another output") from None
    return found


def _study(lab: Lab, trainings: Trainings, runs: int) -> dict[str, Any]:
    # As many steps as both experts take together, at the rate that the task needs.
    together = trainings.task.steps + trainings.language.steps
    both = replace(trainings.task, steps=together, part=None)
    return {
        "name": "Layer swapping on the lab",
        "description": "The papers' experiment on models that a laptop trains: experts of three "
        "kinds, every pair, a grid of compositions, and what they are compared with.",
        "base": str(lab.base),
        "billions": 0.001,
        "task": _experts("task", trainings.task, runs),
        "languages": {name: _experts(name, trainings.language, runs) for name in lab.languages},
        "both": _run(both),
        "simultaneous": {"partition": PARTITION, "outside": OUTSIDE},
        "pairs": "all",
        "grid": {"bottom": [0, 1, 2, 3], "top": [0, 1], "bottom_transition": [0, 1]},
        "baselines": [
            "base", "experts", "soup", "magnitude soup", "ties", "joint", "simultaneous", "soups",
            "multilingual soup",
        ],
        "ties": [0.2, 0.5],
        "evaluate": {
            "tasks": ["lab_problem_{language}"],
            "include": ["tasks"],
            "metric": ["exact_match", "whole"],
            "development": DEVELOPMENT,
            "other_languages": {"languages": [lab.world.source.name]},
        },
        "dtype": "float32",
    }  # fmt: skip


def _experts(name: str, training: Training, runs: int) -> dict[str, Any]:
    run = {**_run(training), "train": {"partition": PARTITION, "outside": OUTSIDE}}
    return {
        "data": {part: f"{name}-{part}.jsonl" for part in ("train", "validation")},
        "keep": runs,
        "runs": [{**run, "seed": seed} for seed in range(1, runs + 1)],
    }


def _cut(training: Training, steps: int) -> Training:
    """A training of fewer steps, which warms up in as small a share of them."""
    warmup = max(1, training.warmup * steps // training.steps)
    return replace(training, steps=steps, warmup=min(training.warmup, warmup))


def _run(training: Training) -> dict[str, Any]:
    return {
        "hyperparameters": {
            "learning_rate": training.learning_rate,
            "per_device_train_batch_size": training.batch,
            "warmup_steps": training.warmup,
            "adam_beta2": training.beta2,
            "max_length": MAX_LENGTH,
            "logging_steps": 50,
            "max_steps": training.steps,
        },
        "save_every": max(1, training.steps * training.batch // 2),
    }


def _write(path: Path, stream: Iterator[LabExample], n: int) -> None:
    rows = ({"prompt": one.prompt, "completion": one.completion} for one in islice(stream, n))
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
