"""Exports the lab: its questions as lm-eval tasks, and the papers' experiment as a study.

A task is a YAML file beside a JSON Lines file of its documents. `lab_problem_furo` has the problems
of the task in `furo`, `lab_comprehension_furo` the stories. Both compare the greedy answer with the
right one, as `layerswap lab score` does.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from layerswap.ground.commit import atomic_folder
from layerswap.ground.errors import StudyError
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.datasets import language_stream, take, task_stream
from layerswap.lab.scoring import NEW_TOKENS
from layerswap.lab.tasks import LabExample, LabSplit, Skill, examples
from layerswap.lab.train import OUTSIDE, PARTITION, Training, Trainings
from layerswap.lab.world import MAX_LENGTH

TASKS_MARKER = "lab_tasks.json"
SKILLS: tuple[Skill, ...] = ("problem", "comprehension")

INPUTS, STUDY, MARKER = "inputs", "study.yaml", "lab_study.json"
HELD_OUT = 256
"""Rows of validation data."""
MORE = 3
"""Rows of a data set per row that a training takes, so that each seed draws other rows."""
DEVELOPMENT = 0.2
"""Share of the questions on which compositions are chosen."""
FIRST_SEED = 900
"""Seed of the data, far from those of the shipped experts."""


def export_tasks(
    out: Path, *, split: LabSplit = "test", n: int = 1000, seed: int = 0, overwrite: bool = False
) -> list[str]:
    """Write `n` questions of the source language and of every scarce one as lm-eval tasks.

    `layerswap lab score` has seed 0. Returns the names of the tasks.
    """
    lab = shipped()
    target = out.expanduser().absolute()
    names = []
    with atomic_folder(target, marker=TASKS_MARKER, overwrite=overwrite) as folder:
        for language in (lab.world.source.name, *lab.languages):
            for skill in SKILLS:
                name = f"lab_{skill}_{language}"
                asked = examples(lab.world, language, skill, split, n, seed=seed)
                lines = [
                    json.dumps({"prompt": example.prompt, "answer": example.completion.strip()})
                    for example in asked
                ]
                (folder / f"{name}.jsonl").write_bytes(("\n".join(lines) + "\n").encode())
                data = str(target / f"{name}.jsonl")
                (folder / f"{name}.yaml").write_bytes(yaml.safe_dump(_task(name, data)).encode())
                names.append(name)
        (folder / TASKS_MARKER).write_bytes((json.dumps(names) + "\n").encode())
    return names


def _task(name: str, data: str) -> dict[str, Any]:
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": data}},
        "test_split": "test",
        "output_type": "generate_until",
        "num_fewshot": 0,
        "doc_to_text": "{{prompt}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW_TOKENS, "do_sample": False},
        "filter_list": [
            {
                "name": "whole",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }


def write_study(out: Path, *, runs: int = 1, n: int = 500, steps: int | None = None) -> Path:
    """Write the lab's study and its files into `out/inputs`; return the path of its YAML.

    Each kind of expert has `runs` trainings, with other orders of the data. A language has `n` test
    questions and a quarter as many development questions.
    """
    lab, trainings = shipped(), Trainings()
    if steps is not None:
        trainings = replace(
            trainings, task=_cut(trainings.task, steps), language=_cut(trainings.language, steps)
        )
    folder = out / INPUTS
    if out.is_dir() and any(out.iterdir()) and not (folder / MARKER).is_file():
        raise StudyError(f"{out}: is not a folder of `lab study`; choose another output")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    streams = {"task": (task_stream(lab.world, seed=FIRST_SEED), trainings.task)}
    for name in lab.languages:
        stream = language_stream(lab.world, name, trainings.language_mix, seed=FIRST_SEED)
        streams[name] = (stream, trainings.language)
    for name, (stream, training) in streams.items():
        write_examples(
            folder / f"{name}-train.jsonl", stream, MORE * training.steps * training.batch
        )
        write_examples(folder / f"{name}-validation.jsonl", stream, HELD_OUT)
    export_tasks(folder / "tasks", n=round(n / (1 - DEVELOPMENT)), overwrite=True)
    study = _study(lab, trainings, runs)
    path = folder / STUDY
    path.write_bytes((json.dumps(study, indent=2) + "\n").encode())  # JSON is YAML too
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
        "billions": 0.001,
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
            "other_languages": {"languages": [lab.world.source.name]},
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
