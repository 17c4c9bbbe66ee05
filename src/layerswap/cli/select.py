"""`layerswap select`: select the best checkpoints of several trainings."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.options import Device, ModelDtype


class Role(enum.Enum):
    """Role of an expert."""

    task = "task"
    language = "language"


def select(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `layerswap train` wrote.")],
    *,
    keep: Annotated[int, typer.Option(min=1, help="Number of checkpoints to keep.")] = 3,
    of_any_run: Annotated[
        bool, typer.Option("--of-any-run", help="Allow all checkpoints to come from one run.")
    ] = False,
    task: Annotated[
        list[str] | None, typer.Option(help="lm-eval task to score; repeatable.")
    ] = None,
    include: Annotated[
        list[Path] | None, typer.Option(help="Folder with additional task YAMLs.")
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Score the tasks that predict a good merge for this role.")
    ] = None,
    language: Annotated[
        str | None, typer.Option(help="Language code or name (sw, swh_Latn, Swahili).")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of documents of a task.")
    ] = None,
    device: Device = None,
    dtype: ModelDtype = None,
    out: Annotated[Path | None, typer.Option(help="JSON file for all scores.")] = None,
) -> None:
    """Score every checkpoint of several runs and select the best, from different runs.

    Ranks by validation loss, by --task, or by --role: the signals that predicted a good merge in
    the second paper (Belebele and Global-MMLU for language experts, English MGSM for task
    experts). Prints a table, and writes all scores to --out.

    Example: layerswap select runs/* --role language --language sw --keep 3
    """
    from layerswap.cli.tables import selection_table
    from layerswap.errors import RecipeError
    from layerswap.training.expert import select as selection

    if task and role:
        raise RecipeError("give --task or --role, not both")
    names = list(task or [])
    if role is not None:
        names = selection.signal_tasks(role.value, language)
    score = None
    if names:
        score = selection.scorer(
            names, include=include or (), limit=limit, device=device, dtype=dtype
        )
    found = selection.select(runs, keep=keep, of_any_run=of_any_run, score=score)
    typer.echo(selection_table(found))
    if out is not None:
        out.write_text(found.to_json(), "utf-8")
        typer.echo(f"wrote {out}")
