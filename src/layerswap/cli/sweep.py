"""`layerswap sweep`: evaluate many compositions together, and choose one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SWEEP.yaml", help="Recipe, grid and tasks.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of results. Answers in it are reused.")],
    allow_code: options.AllowCode = False,
) -> None:
    """Evaluate a grid of compositions, or random ones, and select the best.

    Selects on the development split and reports on the test split. Writes scores, the selected
    recipe and a report into the folder OUT. A second run computes only what is new.

    Example: layerswap sweep sweep.yaml --out results
    """
    from layerswap.cli.output import answer_progress
    from layerswap.report import sweeps as files
    from layerswap.search.spec import read_sweep
    from layerswap.search.sweeps import run_sweep
    from layerswap.versions import need_extras

    checked, recipe = read_sweep(spec)
    if allow_code:
        checked = checked.model_copy(update={"allow_code": True})
    need_extras("a sweep", "eval")
    folder = files.prepare_folder(out)
    with answer_progress("evaluating", folder / files.ANSWERS) as store:
        found = run_sweep(checked, recipe, store=store, log=output.log)
        facts = files.write_result(found, folder)
    table = files.results_table(found)
    lines: list[object] = [
        *([table] if table else []),
        *(f"note: {note}" for note in found.best.notes),
        files.lead(found),
        f"wrote {folder / files.PAGE} and {folder / files.RECIPE}",
        f"write it: layerswap merge {folder / files.RECIPE} --out merged",
    ]
    output.finish("sweep", {**facts, "folder": str(folder)}, lines)
