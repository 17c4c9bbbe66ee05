"""`layerswap quickstart`: the whole road on the lab, in two minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def quickstart(
    out: Annotated[
        Path, typer.Option(help="The folder; what is done in it is not done again.")
    ] = Path("layerswap-quickstart"),
    language: Annotated[
        str | None, typer.Option(help="Target language of the lab; the farthest if not given.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in the folder of an earlier one.")
    ] = False,
) -> None:
    """Compose, search, write, score and report on the small world that ships with layerswap.

    Takes under two minutes on two processor cores. Writes results.json, report.html and the
    best merged checkpoint. It is a small study: cut short, it goes on where it was.
    """
    from layerswap.cli.progress import step_progress
    from layerswap.cli.tables import score_table
    from layerswap.lab.quickstart import run

    folder, outcome = run(
        out, language=language, overwrite=overwrite, log=typer.echo, progress=step_progress
    )
    typer.echo(score_table(outcome.intervals()))
    for name in ("report.html", "results.json", "merged"):
        typer.echo(f"wrote {folder / name}")
