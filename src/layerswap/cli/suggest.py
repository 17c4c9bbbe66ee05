"""`layerswap suggest`: propose a composition from what fine-tuning changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options

if TYPE_CHECKING:
    from layerswap.deltas import Suggestion


def suggest(
    *,
    base: Annotated[
        str | None, typer.Option(help="What both experts were fine-tuned from.")
    ] = None,
    task: Annotated[
        str, typer.Option(help="Task expert: a folder or a Hub id; its name with --atlas.")
    ],
    language: Annotated[str, typer.Option(help="Language expert: likewise.")],
    atlas: Annotated[
        Path | None,
        typer.Option(help="A folder that `layerswap delta` wrote, in place of --base."),
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="How many compositions to list.")] = 10,
    recipe: Annotated[
        Path | None, typer.Option(help="Also write the proposal as a recipe.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    threads: options.Threads = None,
) -> None:
    """Propose bottom, top and transitions from what each expert changed; evaluates nothing.

    Example: layerswap suggest --base llama --task math-expert --language swahili-expert
    """
    from layerswap.cli.tables import evidence_table
    from layerswap.deltas.suggestion import write_proposal
    from layerswap.errors import RecipeError

    if (base is None) == (atlas is None):
        raise RecipeError("give --base, or --atlas with a folder that layerswap delta wrote")
    if recipe is not None and base is None:
        raise RecipeError("--recipe needs the checkpoints: give --base in place of --atlas")
    found = _measured(base, task, language, threads) if base else _from_atlas(atlas, task, language)
    if recipe is not None and base is not None:
        write_proposal(recipe, found.zones, base=base, task=task, language=language)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    typer.echo(evidence_table(found.evidence))
    typer.echo(f"proposal: {found.zones}")
    if not (found.zones.bottom or found.zones.top):
        typer.echo(
            "no outer layer was changed more by the language expert than by the task expert, in "
            "shares; the deltas alone speak for the task expert"
        )
    for zones, score in found.ranked[:first]:
        typer.echo(f"  {zones}  (score {score:+.4f})")


def _measured(base: str, task: str, language: str, threads: int | None) -> Suggestion:
    from layerswap.cli.progress import byte_progress
    from layerswap.deltas.atlas import measure, open_subjects
    from layerswap.deltas.suggestion import suggest as propose

    subjects = open_subjects(base, {"task": task, "language": language})
    with byte_progress("reading", subjects.nbytes) as progress:
        return propose(measure(subjects, threads=threads, progress=progress), "task", "language")


def _from_atlas(folder: Path | None, task: str, language: str) -> Suggestion:
    from layerswap.deltas.atlas import Atlas
    from layerswap.deltas.suggestion import suggest as propose

    assert folder is not None
    return propose(Atlas.load(folder), task, language)
