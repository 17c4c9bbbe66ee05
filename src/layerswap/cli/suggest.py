"""`layerswap suggest`: propose a composition from what fine-tuning changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options


def suggest(
    *,
    base: Annotated[str, typer.Option(help="What both experts were fine-tuned from.")],
    task: Annotated[str, typer.Option(help="Task expert: a folder or a Hub id.")],
    language: Annotated[str, typer.Option(help="Language expert: a folder or a Hub id.")],
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
    from layerswap.cli.progress import byte_progress
    from layerswap.cli.tables import evidence_table
    from layerswap.delta.atlas import measure, open_subjects
    from layerswap.delta.proposal import suggest as propose
    from layerswap.delta.proposal import write_proposal

    subjects = open_subjects(base, {"task": task, "language": language})
    with byte_progress("reading", subjects.nbytes) as progress:
        atlas = measure(subjects, threads=threads, progress=progress)
    found = propose(atlas, "task", "language")
    if recipe is not None:
        write_proposal(recipe, found.zones, base=base, task=task, language=language)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
        return
    typer.echo(evidence_table(found.evidence))
    typer.echo(f"proposal: {found.zones}")
    for zones, against in found.ranked[:first]:
        typer.echo(f"  {zones}  (evidence against it: {against:.4f})")
