"""`layerswap select`: the best checkpoints of several trainings."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.options import Device, ModelDtype


class Role(enum.Enum):
    """What an expert is for."""

    task = "task"
    language = "language"


def select(
    runs: Annotated[list[Path], typer.Argument(help="Folders that `layerswap train` wrote.")],
    *,
    keep: Annotated[int, typer.Option(min=1, help="How many to keep.")] = 3,
    of_any_run: Annotated[
        bool, typer.Option("--of-any-run", help="Let all of them come from one run.")
    ] = False,
    task: Annotated[
        list[str] | None, typer.Option(help="lm-eval task; may be given again.")
    ] = None,
    include: Annotated[
        list[Path] | None, typer.Option(help="Folder with task YAMLs of one's own.")
    ] = None,
    role: Annotated[
        Role | None, typer.Option(help="Use the tasks that predict a good merge for this role.")
    ] = None,
    language: Annotated[str | None, typer.Option(help="Of a language expert, any code.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents of a task.")] = None,
    device: Device = None,
    dtype: ModelDtype = None,
    out: Annotated[Path | None, typer.Option(help="Write all scores to this JSON file.")] = None,
) -> None:
    """Score every checkpoint of several runs and keep the best, not all of one run.

    By validation loss, or by --task, or by --role: the signals that predicted a good merge in the
    second paper (Belebele and Global-MMLU for language experts, English MGSM for task experts).

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
