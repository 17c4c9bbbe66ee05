"""`layerswap sweep`: try many compositions for the price of a few, and choose one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="What to try, and on what.")],
    *,
    out: Annotated[Path, typer.Option(help="The folder for results; an earlier one is continued.")],
    allow_code: Annotated[
        bool, typer.Option("--allow-code", help="Let tasks run code that a model wrote.")
    ] = False,
) -> None:
    """Try a grid of compositions or search beyond one; choose on a split, report on another.

    What was answered is kept in OUT: a second run computes only what is new.

    Example: layerswap sweep sweep.yaml --out results
    """
    from layerswap.cli.progress import step_progress
    from layerswap.cli.tables import board_table
    from layerswap.evaluation.response_cache import AnswerStore
    from layerswap.report import sweep_files as files
    from layerswap.search.grid import run_sweep
    from layerswap.search.spec import read_sweep
    from layerswap.search.tpe import run_search
    from layerswap.versions import need_extras

    checked, recipe = read_sweep(spec)
    need_extras("a sweep", "eval")
    folder = files.prepare_folder(out)
    with step_progress("judging compositions", 0) as progress:
        settings: dict[str, Any] = {
            "store": AnswerStore(folder / files.ANSWERS),
            "allow_code": allow_code,
            "log": lambda line: typer.echo(line, err=True),
            "progress": progress,
        }
        if checked.search is None:
            board = run_sweep(checked, recipe, **settings)
            files.write_board(board, folder)
            best = f"best of {len(board.grid)}: {board.best}"
        else:
            found = run_search(checked, recipe, study=folder / files.STUDY, **settings)
            files.write_found(found, folder)
            best = f"best of {len(found.trials)}: number {found.best.number}"
    typer.echo(board_table(board if checked.search is None else found))
    typer.echo(f"{best}; see {folder / files.PAGE}")
    typer.echo(f"write it: layerswap merge {folder / files.RECIPE} --out merged")
