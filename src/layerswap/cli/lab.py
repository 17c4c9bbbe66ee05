"""`layerswap lab` and `layerswap quickstart`: the small world that ships with the package."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from typer import Option

from layerswap.cli import commands, options, output
from layerswap.cli.study import Where

app = commands.group("Work with the lab, the small multilingual world inside the package.")
Target = Annotated[
    str | None, Option(show_default="the farthest", help="Target language of the lab.")
]
Split = Annotated[
    Literal["development", "test"], Option(help="Split that the questions come from.")
]


@commands.command(app)
def build(*, out: Path, seed: int = 0) -> None:
    """Train the lab's base and experts from scratch, in under half an hour on two cores.

    Writes the models into the folder OUT.

    Example: layerswap lab build --out lab

    Options:
        out: Folder of the models. Finished ones are kept.
        seed: Seed of training and data order.
    """
    from layerswap.lab.build import build as build_lab

    with output.named_progress("steps") as progress:
        build_lab(out, seed=seed, progress=progress)
    output.say(f"wrote {out}")


@commands.command(app, json=True)
def score(
    models: list[Path],
    *,
    language: Target = None,
    n: Annotated[int, Option(min=1)] = 1000,
    split: Split = "test",
) -> None:
    """Score checkpoints on the lab: problems and comprehension, in target and source language.

    Prints a table; nothing is written.

    Example: layerswap lab score merged --n 200

    Options:
        models: Checkpoint folders, or a folder that `lab build` wrote.
        n: Number of questions per measure.
    """
    from layerswap.cli.tables import score_table
    from layerswap.lab.assets import shipped
    from layerswap.lab.scoring import score_folders

    target = shipped().scarce(language)
    scores = score_folders(models, language=target, split=split, n=n, progress=output.step_progress)
    plain = {
        name: {measure: asdict(interval) for measure, interval in measures.items()}
        for name, measures in scores.items()
    }
    output.finish("lab score", {"models": plain}, [score_table(scores, target)])


@commands.command(app)
def export(
    *,
    out: Path,
    n: Annotated[int, Option(min=1)] = 1000,
    split: Split = "test",
    seed: int = 0,
    overwrite: options.Overwrite = False,
) -> None:
    """Write the lab's questions as lm-eval tasks into the folder OUT.

    Example: layerswap lab export --out tasks

    Options:
        out: Folder of the tasks.
        n: Number of questions per task.
        seed: Seed of the questions.
    """
    from layerswap.lab.exports import export_tasks

    for name in export_tasks(out, split=split, n=n, seed=seed, overwrite=overwrite):
        output.say(name)
    output.say(f"wrote {out}; give it to a sweep as `include`, or to lm_eval as --include_path")


@commands.command(app)
def models(*, out: Path, overwrite: options.Overwrite = False) -> None:
    """Copy the base, the task expert and the language experts of the package into the folder OUT.

    Example: layerswap lab models --out lab

    Options:
        out: Folder of the models.
    """
    from layerswap.lab.assets import copy_models

    output.say(", ".join(copy_models(out, overwrite=overwrite)))
    output.say(f"wrote {out}")


@commands.command(app)
def study(
    *,
    out: Path,
    runs: Annotated[int, Option(min=1)] = 1,
    n: Annotated[int, Option(min=4)] = 500,
    steps: Annotated[int | None, Option(min=1)] = None,
    on: Where = None,
) -> None:
    """Run the papers' experiment on the lab: training, pairs, compositions, baselines, tables.

    Writes the study and its report into the folder OUT.

    Example: layerswap lab study --out lab-study

    Options:
        out: Folder of the study. Finished steps are kept.
        runs: Number of trainings per kind of expert.
        n: Number of questions per language.
        steps: Steps per training. (default: the lab's)
    """
    from layerswap.cli.study import run_file
    from layerswap.lab.exports import write_study
    from layerswap.study.plan import plan_study
    from layerswap.study.spec import read_study
    from layerswap.versions import need_extras

    need_extras("a study", "train", "eval")
    path = write_study(out, runs=runs, n=n, steps=steps)
    run_file(plan_study(read_study(path), path.parent), out / "study", on=on)


def quickstart(
    *,
    out: Path = Path("layerswap-quickstart"),
    language: Target = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Compose, search, write, score and report on the small world that ships with layerswap.

    Takes under two minutes on two processor cores. Writes report.html, results.json and the
    selected merged checkpoint into the folder OUT.

    Example: layerswap quickstart --out first-steps

    Options:
        out: Folder of the results.
    """
    from layerswap.lab.quickstart import measures_table, run

    folder, outcome = run(
        out, language=language, overwrite=overwrite, log=output.say, progress=output.step_progress
    )
    output.say(measures_table(outcome))
    for name in ("report.html", "results.json", "merged"):
        output.say(f"wrote {folder / name}")
