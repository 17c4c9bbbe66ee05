"""The rows of docs/papers.md that the lab can show, by the settings in `lab-rows/settings.yaml`.

    python -m research.rows                         # prints the tables from the recorded scores
    layerswap lab build --out LAB                   # the experts, 26 minutes
    python -m research.rows train LAB OUT NAME...   # a model of `trained_names()`, or all of them
    python -m research.rows score LAB OUT           # records the scores of the models there are

The scores of a model are bits, one for each document, as hexadecimal digits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import yaml

from layerswap.ground.commit import write_json
from layerswap.lab.datasets import language_stream, task_stream
from layerswap.lab.tasks import LabExample, comprehension, examples
from layerswap.lab.train import OUTSIDE, PARTITION, Trainings, train

if TYPE_CHECKING:
    from layerswap.lab.assets import Lab
    from layerswap.lab.world import World
    from layerswap.merge import Plan

HERE = Path(__file__).parent / "lab-rows"
SETTINGS: Mapping[str, Any] = yaml.safe_load((HERE / "settings.yaml").read_text("utf-8"))
SCORES, LOSSES = HERE / "scores.json", HERE / "losses.json"
SOURCE, SCARCE = "basu", ("nela", "furo")
SKILLS = ("problem", "comprehension")
HELD_OUT = 256
"""Validation rows of each data set of a training in turns."""
Bits = npt.NDArray[np.float64]


# --- the models ---


def trained_names() -> list[str]:
    """The trainings beside the lab's own experts."""
    texts = [
        f"text-{name}-{seed}" for name in SETTINGS["text"]["languages"]
        for seed in SETTINGS["seeds"]
    ]  # fmt: skip
    turns = SETTINGS["turns"]
    return [
        *texts,
        *(f"turns-{every}-{seed}" for seed in turns["seeds"] for every in turns["every"]),
    ]  # fmt: skip


def train_model(lab: Lab, out: Path, name: str) -> None:
    """Train a model and save it in the folder of its name."""
    if name.startswith("turns"):
        _train_in_turns(lab, out, name)
        return
    from layerswap.checkpoint.loading import without_progress_bars
    from layerswap.lab.scoring import load

    _, language, seed = name.split("-")
    model, tokenizer = load(lab.base)
    stream = text_stream(lab.world, language, seed=int(seed))
    train(model, tokenizer, stream, Trainings().language, seed=int(seed))  # type: ignore[arg-type]
    with without_progress_bars():
        model.save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)


def text_stream(world: World, language: str, *, seed: int) -> Iterator[LabExample]:
    """Draw stories in a language, without a question, as completions of nothing."""
    import random

    rng = random.Random(f"text/{language}/{seed}")
    spoken = world.language(language)
    words, biggest = spoken.vocabulary(common_only=False), world.settings.biggest
    while True:
        told = comprehension(spoken, spoken, words, "train", rng, biggest=biggest)
        story = told.prompt.rpartition(".")[0]
        yield replace(told, prompt="", completion=f" {story}.")


def _train_in_turns(lab: Lab, out: Path, name: str) -> None:
    """Simultaneous partition SFT of an equal number of rows of both data sets."""
    from layerswap.lab.exports import _run, _write
    from layerswap.training.expert.trainer import train as train_expert

    turns = SETTINGS["turns"]
    _, every, seed = name.split("-")
    rows = turns["steps"] * turns["batch"] // 2
    streams = {
        "task": task_stream(lab.world, seed=int(seed)),
        "language": language_stream(lab.world, turns["language"], seed=int(seed)),
    }
    files = {}
    for kind, stream in streams.items():
        files[kind] = {part: str(out / f"{name}-{kind}-{part}.jsonl")
                       for part in ("train", "validation")}  # fmt: skip
        _write(Path(files[kind]["train"]), stream, rows)
        _write(Path(files[kind]["validation"]), stream, HELD_OUT)
    training = replace(
        Trainings().task, part=None,
        **{name: turns[name] for name in ("steps", "batch", "learning_rate")},
    )  # fmt: skip
    spec = {
        "base": str(lab.base),
        "simultaneous": {**files, "every": int(every)},
        "train": {"partition": PARTITION, "outside": OUTSIDE},
        **_run(training),
        "save_every": turns["steps"] * turns["batch"],
        "seed": int(seed),
    }
    train_expert(spec, out / name)


# --- their scores ---


def score(lab: Lab, out: Path) -> None:
    """Score the models there are on what they have not answered yet."""
    from layerswap.checkpoint.loading import load_tokenizer
    from layerswap.engine.sweep import Sweep
    from layerswap.lab.scoring import sweep_correct

    recorded = json.loads(SCORES.read_text("utf-8")) if SCORES.is_file() else {}
    tokenizer = load_tokenizer(lab.base)
    for name, (plan, asked) in _evaluations(lab, out).items():
        missing = [one for one in asked if one not in recorded.get(name, {})]
        if missing:
            sweep = Sweep([plan()], dtype="float32")
        for one in missing:
            skill, language, split = one.split()
            documents = examples(lab.world, language, skill, split, SETTINGS["documents"])  # type: ignore[arg-type]
            right = sweep_correct(sweep, tokenizer, documents)[0]
            recorded.setdefault(name, {})[one] = np.packbits(right).tobytes().hex()
        _write_scores(recorded)
    losses = {
        folder.name: json.loads((folder / "layerswap-training.json").read_text("utf-8"))["losses"]
        for folder in sorted(out.glob("turns-*-*/"))
        if (folder / "layerswap-training.json").is_file()
    }
    write_json(LOSSES, losses)


def _write_scores(recorded: Mapping[str, Mapping[str, str]]) -> None:
    lines = [f"{json.dumps(name)}: {json.dumps(recorded[name])}" for name in sorted(recorded)]
    SCORES.write_bytes(("{\n" + ",\n".join(lines) + "\n}\n").encode())


def _evaluations(lab: Lab, out: Path) -> dict[str, tuple[Callable[[], Plan], list[str]]]:
    """The plan of every model by name, and what it is asked: `SKILL LANGUAGE SPLIT`."""
    import layerswap as ls

    def folder(name: str) -> Path:
        return (lab.base.parent if (lab.base.parent / name).is_dir() else out) / name

    def alone(name: str) -> Callable[[], Plan]:
        return lambda: ls.soup({"model": folder(name)})

    def tests(*languages: str, skills: tuple[str, ...] = SKILLS) -> list[str]:
        return [f"{skill} {language} test" for skill in skills for language in languages]

    found: dict[str, tuple[Callable[[], Plan], list[str]]] = {}
    found["base"] = alone("base"), tests(*(one.name for one in lab.world.languages.values()))
    for name in experts("task", folder):
        signals = [f"{skill} {language} development" for skill, language in TASK_SIGNALS]
        found[name] = alone(name), signals + tests(SOURCE, *SCARCE)
    for language in SCARCE:
        for kind in (f"language-{language}", f"text-{language}"):
            for name in experts(kind, folder):
                signals = [f"{skill} {language} development" for skill in SKILLS]
                signals.append(f"problem {SOURCE} development")
                found[name] = alone(name), signals + tests(SOURCE, language)
                for task in experts("task", folder):
                    found[f"{task} + {name}"] = (
                        lambda task=task, name=name: ls.swap(
                            task=folder(task), language=folder(name)
                        ),
                        tests(SOURCE, language, skills=("problem",)),
                    )
    for seed in SETTINGS["seeds"]:
        for name, asked in (
            (f"task-{seed}", tests(SOURCE, skills=("problem",))),
            *((f"language-{one}-{seed}", tests(one, skills=("comprehension",))) for one in SCARCE),
        ):
            for keep in SETTINGS["keep"]:
                found[f"{name} keeps {keep}"] = (
                    lambda name=name, keep=keep: ls.revert(lab.base, folder(name), keep=keep),
                    asked,
                )
    turns = SETTINGS["turns"]
    for name in (f"turns-{every}-{seed}" for seed in turns["seeds"] for every in turns["every"]):
        if (out / name / "model.safetensors").is_file():
            found[name] = alone(name), tests(SOURCE, turns["language"])
    return found


TASK_SIGNALS = [("problem", SOURCE), *((skill, name) for skill in SKILLS for name in SCARCE)]


def experts(kind: str, folder: Callable[[str], Path]) -> list[str]:
    """The experts of a kind that there are, by seed."""
    names = (f"{kind}-{seed}" for seed in SETTINGS["seeds"])
    return [name for name in names if folder(name).is_dir()]


def main() -> None:
    from layerswap.lab.assets import open_lab

    parser = argparse.ArgumentParser(description=__doc__)
    asked = parser.add_subparsers(dest="asked")
    for name in ("train", "score"):
        given = asked.add_parser(name)
        given.add_argument("lab", type=Path, help="folder that `layerswap lab build` wrote")
        given.add_argument("out", type=Path, help="folder of the models that are trained")
        if name == "train":
            given.add_argument("names", nargs="*", help="models to train; all by default")
    arguments = parser.parse_args()
    if arguments.asked is None:
        raise SystemExit(0)
    lab = open_lab(arguments.lab)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.asked == "score":
        score(lab, arguments.out)
        return
    for name in arguments.names or trained_names():
        if not (arguments.out / name).is_dir():
            train_model(lab, arguments.out, name)


if __name__ == "__main__":
    main()
