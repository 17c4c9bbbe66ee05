"""Writes the papers' experiment on the lab as a study, and the questions that the package ships."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerswap.lab.assets import Lab, shipped
from layerswap.lab.questions import write_tasks
from research.lab.datasets import language_stream, take, task_stream
from research.lab.tasks import LabExample, examples
from research.lab.train import OUTSIDE, PARTITION, Training, Trainings
from research.lab.world import MAX_LENGTH, make_world

HELD_OUT = 256
"""Rows of validation data."""
MORE = 3
"""Rows of a data set per row that a training takes, so that each seed draws other rows."""
DEVELOPMENT = 0.2
"""Share of the questions on which compositions are chosen."""
FIRST_SEED = 900
"""Seed of the data, far from those of the shipped experts."""


def shipped_questions() -> Iterator[dict[str, str]]:
    """Draw the questions of the quickstart, `layerswap play` and `layerswap lab models`."""
    world = make_world()
    scarce = [language.name for language in world.scarce]
    for split, n, spoken in (
        ("development", 500, scarce),
        ("test", 1000, [world.source.name, *scarce]),
    ):
        for language in spoken:
            for skill in ("problem", "comprehension")[: 1 if split == "development" else 2]:
                asked = {"skill": skill, "language": language, "split": split}
                for example in examples(world, language, skill, split, n):
                    yield {**asked, "prompt": example.prompt, "answer": example.answer}


def write_study(out: Path, *, runs: int = 1, n: int = 500, steps: int | None = None) -> Path:
    """Write the lab's study and its files into `out`; return the path of its YAML.

    Each kind of expert has `runs` trainings, with other orders of the data. A language has `n` test
    questions and a quarter as many development questions.
    """
    lab, world, trainings = shipped(), make_world(), Trainings()
    if steps is not None:
        trainings = replace(
            trainings, task=_cut(trainings.task, steps), language=_cut(trainings.language, steps)
        )
    out.mkdir(parents=True, exist_ok=True)
    streams = {"task": (task_stream(world, seed=FIRST_SEED), trainings.task)}
    for name in lab.languages:
        stream = language_stream(world, name, trainings.language_mix, seed=FIRST_SEED)
        streams[name] = (stream, trainings.language)
    for name, (stream, training) in streams.items():
        write_examples(out / f"{name}-train.jsonl", stream, MORE * training.steps * training.batch)
        write_examples(out / f"{name}-validation.jsonl", stream, HELD_OUT)
    write_tasks(out / "tasks", round(n / (1 - DEVELOPMENT)))
    path = out / "study.yaml"
    study = json.dumps(_study(lab, trainings, runs), indent=2)  # JSON is YAML too
    path.write_bytes(f"{study}\n".encode())
    return path


def _study(lab: Lab, trainings: Trainings, runs: int) -> dict[str, Any]:
    # As many steps as both experts together, at the task expert's learning rate.
    together = trainings.task.steps + trainings.language.steps
    joint = replace(trainings.task, steps=together, part=None)
    return {
        "name": "Layer swapping on the lab",
        "description": "The papers' experiment on models that a laptop trains: experts of three "
        "kinds, every pair, a grid of compositions, and what they are compared with.",
        "base": str(lab.base),
        "task": _experts("task", trainings.task, runs),
        "languages": {name: _experts(name, trainings.language, runs) for name in lab.languages},
        "both": training_run(joint),
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
            "other_languages": {"languages": [lab.source]},
        },
        "dtype": "float32",
    }  # fmt: skip


def _experts(name: str, training: Training, runs: int) -> dict[str, Any]:
    run = {**training_run(training), "train": {"partition": PARTITION, "outside": OUTSIDE}}
    return {
        "data": {part: f"{name}-{part}.jsonl" for part in ("train", "validation")},
        "keep": runs,
        "runs": [{**run, "seed": seed} for seed in range(1, runs + 1)],
    }


def _cut(training: Training, steps: int) -> Training:
    """Change the number of steps of a training, and its warmup in proportion."""
    warmup = max(1, training.warmup * steps // training.steps)
    return replace(training, steps=steps, warmup=min(training.warmup, warmup))


def training_run(training: Training) -> dict[str, Any]:
    """The settings of a lab training, in the form that a study reads."""
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


def write_examples(path: Path, stream: Iterator[LabExample], n: int) -> None:
    """Write the next `n` examples of a stream as JSON Lines."""
    rows = (
        {"prompt": example.prompt, "completion": example.completion} for example in take(stream, n)
    )
    path.write_bytes(("\n".join(map(json.dumps, rows)) + "\n").encode())
