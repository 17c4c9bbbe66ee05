"""`layerswap suggest`: propose a composition from what fine-tuning changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options, output

if TYPE_CHECKING:
    from layerswap.deltas import Suggestion


def suggest(
    *,
    base: Annotated[
        str | None, typer.Option(help="Checkpoint that both experts were fine-tuned from.")
    ] = None,
    task_expert: Annotated[
        str, typer.Option(help="Task expert: a folder or a Hub id, or its name with --atlas.")
    ],
    language_expert: Annotated[
        str, typer.Option(help="Language expert: a folder or a Hub id, or its name with --atlas.")
    ],
    atlas: Annotated[
        Path | None,
        typer.Option(help="Folder that `layerswap delta` wrote. Replaces --base."),
    ] = None,
    first: Annotated[int, typer.Option(min=1, help="Number of compositions to list.")] = 10,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe file to write with the proposal.")
    ] = None,
    threads: options.Threads = None,
) -> None:
    """Propose bottom, top and transition layers from what fine-tuning changed.

    Evaluates nothing. Prints the evidence of each layer and the best compositions.

    Example: layerswap suggest --base b --task-expert math-expert --language-expert swahili-expert
    """
    from layerswap.cli.tables import evidence_table
    from layerswap.deltas.atlas import Atlas
    from layerswap.deltas.suggestion import suggest as propose
    from layerswap.deltas.suggestion import write_proposal
    from layerswap.errors import RecipeError

    if (base is None) == (atlas is None):
        raise RecipeError("give --base, or --atlas with a folder that layerswap delta wrote")
    if recipe is not None and base is None:
        raise RecipeError("--recipe needs the checkpoints: give --base in place of --atlas")
    if base is not None:
        found = _measured(base, task_expert, language_expert, threads)
    else:
        assert atlas is not None
        found = propose(Atlas.load(atlas), task_expert, language_expert)
    if recipe is not None and base is not None:
        write_proposal(recipe, found.zones, base=base, task=task_expert, language=language_expert)
    lines = [evidence_table(found.evidence), f"proposal: {found.zones}"]
    if not (found.zones.bottom or found.zones.top):
        lines.append(
            "the language expert changed no outer layer by a larger share than the task expert; "
            "the deltas alone speak for the task expert"
        )
    lines += [f"  {zones}  (score {score:+.4f})" for zones, score in found.ranked[:first]]
    output.finish("suggest", found.to_dict(), "\n".join(lines))


def _measured(base: str, task: str, language: str, threads: int | None) -> Suggestion:
    from layerswap.cli.progress import byte_progress
    from layerswap.deltas.atlas import measure, open_subjects
    from layerswap.deltas.suggestion import suggest as propose

    subjects = open_subjects(base, {"task": task, "language": language})
    with byte_progress("reading", subjects.nbytes) as progress:
        return propose(measure(subjects, threads=threads, progress=progress), "task", "language")
