"""`layerswap sweep`: try many compositions for the price of a few, and choose one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="What to try, and on what.")],
    *,
    out: Annotated[Path, typer.Option(help="The folder for results; an earlier one is continued.")],
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let tasks run code that a model wrote.")
    ] = False,
) -> None:
    """Evaluate a grid of compositions, choose on one split, report on another.

    What was answered is kept in OUT: a second run computes only what is new.

    Example: layerswap sweep sweep.yaml --out results
    """
    from layerswap.cli.progress import step_progress
    from layerswap.cli.tables import board_table
    from layerswap.evaluate.answers import AnswerStore
    from layerswap.evaluate.board import run_sweep
    from layerswap.evaluate.sweep_spec import read_sweep
    from layerswap.report.sweep_files import ANSWERS, PAGE, RECIPE, prepare_folder, write_board

    checked, recipe = read_sweep(spec)
    folder = prepare_folder(out)
    with step_progress("judging compositions", 0) as progress:
        board = run_sweep(
            checked,
            recipe,
            store=AnswerStore(folder / ANSWERS),
            allow_code=allow_code,
            say=lambda line: typer.echo(line, err=True),
            progress=progress,
        )
    write_board(board, folder)
    typer.echo(board_table(board))
    typer.echo(f"best of {len(board.grid)}: {board.best}; see {folder / PAGE}")
    typer.echo(f"write it: layerswap merge {folder / RECIPE} --out merged")
