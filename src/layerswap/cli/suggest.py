"""`layerswap suggest`: propose a composition from what fine-tuning changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli import options, output

if TYPE_CHECKING:
    from layerswap.deltas.atlas import Atlas


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
    third_expert: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="Third expert, such as one for safety, taken or blended in where it changed more.",
        ),
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, help="Difference of shares from which one expert is taken.")
    ] = 0.001,
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
    from layerswap.compose import swap
    from layerswap.deltas.atlas import Atlas as Opened
    from layerswap.deltas.suggestion import suggest as propose
    from layerswap.deltas.suggestion import with_third, write_proposal
    from layerswap.errors import RecipeError

    if (base is None) == (atlas is None):
        raise RecipeError("give --base, or --atlas with a folder that layerswap delta wrote")
    if recipe is not None and base is None:
        raise RecipeError("--recipe needs the checkpoints: give --base in place of --atlas")
    names = [task_expert, language_expert, *filter(None, [third_expert])]
    if base is not None:
        opened = _measured(base, names, threads)
        names = ["task", "language", "third"][: len(names)]
    else:
        assert atlas is not None
        opened = Opened.load(atlas)
    found = propose(opened, *names[:2])
    composition = None
    if third_expert is not None:
        plain = swap(opened.layers, task=names[0], language=names[1], zones=found.zones)
        composition = with_third(plain, opened, names[2], threshold=threshold)
    if recipe is not None and base is not None:
        third = None
        if third_expert is not None and composition is not None:
            third = third_expert, composition
        write_proposal(
            recipe, found.zones, base=base, task=task_expert, language=language_expert, third=third
        )
    lines: list[object] = [evidence_table(found.evidence), f"proposal: {found.zones}"]
    if not (found.zones.bottom or found.zones.top):
        lines.append(
            "the language expert changed no outer layer by a larger share than the task expert; "
            "the deltas alone speak for the task expert"
        )
    lines += [f"  {zones}  (score {score:+.4f})" for zones, score in found.ranked[:first]]
    facts = found.to_dict()
    if composition is not None:
        lines += ["", composition]
        facts["composition"] = composition.to_dict()
    output.finish("suggest", facts, lines)


def _measured(base: str, experts: list[str], threads: int | None) -> Atlas:
    from layerswap.cli.progress import byte_progress
    from layerswap.deltas.atlas import measure, open_subjects

    subjects = open_subjects(base, dict(zip(("task", "language", "third"), experts, strict=False)))
    with byte_progress("reading", subjects.nbytes) as progress:
        return measure(subjects, threads=threads, progress=progress)
