"""`layerswap lab`: build the small world's models from scratch, and score checkpoints on it."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.study import Where


class Split(enum.Enum):
    """The splits that are not for training."""

    development = "development"
    test = "test"


app = typer.Typer(no_args_is_help=True, help="The small multilingual world that ships inside.")


@app.command()
def build(
    out: Annotated[Path, typer.Option(help="Folder for the models; finished ones are kept.")],
    seed: Annotated[int, typer.Option(help="Seed of the training and of the data order.")] = 0,
) -> None:
    """Train the lab's base and experts from scratch (under half an hour on two cores)."""
    from layerswap.cli.progress import named_progress
    from layerswap.lab.build import build as build_lab

    with named_progress() as progress:
        build_lab(out, seed=seed, progress=progress)
    typer.echo(f"wrote {out}")


@app.command()
def score(
    models: Annotated[
        list[Path], typer.Argument(help="Checkpoint folders, or a folder that `lab build` wrote.")
    ],
    language: Annotated[
        str | None, typer.Option(help="Target language; the farthest if not given.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Questions per measure.")] = 1000,
    split: Annotated[Split, typer.Option(help="Which questions.")] = Split.test,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Score checkpoints on the lab: task and comprehension, in target and source language."""
    import json
    from dataclasses import asdict

    from layerswap.cli.progress import step_progress
    from layerswap.cli.tables import score_table
    from layerswap.lab.quickstart import score_folders

    scores = score_folders(
        models, language=language, split=split.value, n=n, progress=step_progress
    )
    if as_json:
        plain = {
            name: {measure: asdict(interval) for measure, interval in measures.items()}
            for name, measures in scores.items()
        }
        typer.echo(json.dumps(plain, indent=2))
    else:
        typer.echo(score_table(scores))


@app.command()
def export(
    out: Annotated[Path, typer.Option(help="Folder for the tasks.")],
    n: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 1000,
    split: Annotated[Split, typer.Option(help="Which questions.")] = Split.test,
    seed: Annotated[int, typer.Option(help="Seed of the questions.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
) -> None:
    """Write the lab's questions as lm-eval tasks.

    Example: layerswap lab export --out tasks
    """
    from layerswap.lab.lm_eval_tasks import export_tasks

    for name in export_tasks(out, split=split.value, n=n, seed=seed, overwrite=overwrite):
        typer.echo(name)
    typer.echo(f"wrote {out}; give it to a sweep as `include`, or to lm_eval as --include_path")


@app.command()
def models(
    out: Annotated[Path, typer.Option(help="Folder for the models.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the folder.")] = False,
) -> None:
    """Copy the shipped models: base, task experts, language experts.

    Example: layerswap lab models --out lab
    """
    from layerswap.lab.assets import copy_models

    typer.echo(", ".join(copy_models(out, overwrite=overwrite)))
    typer.echo(f"wrote {out}")


@app.command()
def study(
    out: Annotated[Path, typer.Option(help="The folder of the study; an earlier run goes on.")],
    runs: Annotated[int, typer.Option(min=1, help="Trainings of each kind of expert.")] = 1,
    n: Annotated[int, typer.Option(min=4, help="Questions to judge by, a language.")] = 500,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of each training; the lab's own if not given.")
    ] = None,
    on: Where = None,
) -> None:
    """The papers' experiment on the lab: trainings, pairs, compositions, baselines, tables.

    Example: layerswap lab study --out lab-study
    """
    from layerswap.cli.study import run_file
    from layerswap.lab.study_files import write_study
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import read_study
    from layerswap.versions import need_extras

    need_extras("a study", "train", "eval")
    path = write_study(out, runs=runs, n=n, steps=steps)
    run_file(plan_study(read_study(path), path.parent), str(out / "study"), on=on)
