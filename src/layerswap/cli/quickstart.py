"""`layerswap quickstart`: compose, evaluate and report on the lab, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import output


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder of the run. Finished steps are kept.")] = Path(
        "layerswap-quickstart"
    ),
    language: Annotated[
        str | None, typer.Option(help="Target language of the lab. Default: the farthest.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start anew in the folder of an earlier run.")
    ] = False,
) -> None:
    """Compose, search, write, score and report on the small world that ships with layerswap.

    Takes under two minutes on two processor cores, and resumes where it was interrupted. Writes
    report.html, results.json and the best merged checkpoint into the folder OUT.

    Example: layerswap quickstart --out first-steps
    """
    from layerswap.cli.progress import step_progress
    from layerswap.cli.tables import score_table
    from layerswap.lab.quickstart import run

    folder, outcome = run(
        out, language=language, overwrite=overwrite, log=output.say, progress=step_progress
    )
    measured = {
        str(model): {measure: test.intervals[model] for measure, test in outcome.tests.items()}
        for model in outcome.task.scores
    }
    output.say(score_table(measured))
    for name in ("report.html", "results.json", "merged"):
        output.say(f"wrote {folder / name}")
