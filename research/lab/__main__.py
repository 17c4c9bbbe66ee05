"""`python -m research.lab`: build the lab, score models on it, and write its study."""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(no_args_is_help=True, help="The lab: its models, its questions and its study.")
Out = Annotated[Path, typer.Option(help="Folder to write.")]


@app.command()
def build(*, out: Out, seed: int = 0) -> None:
    """Train the lab's base and experts from scratch, in under half an hour on two cores.

    Finished models are kept.
    """
    from research.lab.build import build as build_lab

    def show(name: str, done: int, steps: int) -> None:
        print(f"\r{name}: {done} of {steps} steps", end="\n" * (done == steps), file=sys.stderr)

    build_lab(out, seed=seed, progress=show)


@app.command()
def score(
    models: list[Path],
    *,
    language: str | None = None,
    n: int = 1000,
    split: Literal["development", "test"] = "test",
) -> None:
    """Score checkpoints, or the folder of a build, in a scarce language and in the source one."""
    from layerswap.experiment.tables import models_table
    from research.lab.scoring import score_folders

    scores = score_folders(models, language=language, split=split, n=n)
    print(models_table(scores, caption="% right, with 95% bootstrap intervals"))


@app.command()
def study(*, out: Out, runs: int = 1, n: int = 500, steps: int | None = None) -> None:
    """Write the papers' experiment on the lab: data, tasks and `study.yaml`, into the folder OUT.

    `runs` counts the trainings of each kind of expert, `n` the test questions of a language, and
    `steps` those of a training, in place of the lab's own.
    """
    from research.lab.study import write_study

    print(f"layerswap study run {write_study(out, runs=runs, n=n, steps=steps)}")


@app.command()
def questions() -> None:
    """Draw the questions that ship with the package anew, and write them there."""
    from layerswap.lab.questions import QUESTIONS
    from research.lab.study import shipped_questions

    lines = "".join(json.dumps(row) + "\n" for row in shipped_questions())
    QUESTIONS.write_bytes(gzip.compress(lines.encode(), mtime=0))


if __name__ == "__main__":
    app()
