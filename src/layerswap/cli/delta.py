"""`layerswap delta`: what fine-tuning changed, measured and drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options


def delta(
    *,
    base: Annotated[str, typer.Option(help="What the experts were fine-tuned from.")],
    expert: Annotated[
        list[str], typer.Option(help="An expert: a folder or a Hub id; give it again for more.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    axis: Annotated[
        str, typer.Option(metavar="input|output", help="What a row is. The papers': input.")
    ] = "input",
    threshold: Annotated[
        float | None,
        typer.Option(min=0, help="Row MAV above which a row counts. Default: the top 15%."),
    ] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="Write numbers into the map.")] = False,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Map what fine-tuning changed: rows by layer and matrix, conflicts, what bfloat16 loses.

    Example: layerswap delta --base llama --expert math-expert --expert swahili-expert --out map
    """
    from layerswap.checkpoint.preconditions import check_apart
    from layerswap.cli.progress import byte_progress
    from layerswap.deltas.atlas import measure, open_subjects
    from layerswap.errors import RecipeError
    from layerswap.report.atlas_files import refuse_atlas, write_atlas

    if axis not in ("input", "output"):
        raise RecipeError(f"--axis: {axis!r} is neither input nor output")
    refuse_atlas(out, overwrite=overwrite)
    subjects = open_subjects(base, *expert)
    check_apart(out, {"the base": subjects.base, **subjects.experts})
    with byte_progress("reading", subjects.nbytes) as progress:
        atlas = measure(
            subjects,
            axis="output" if axis == "output" else "input",
            threads=threads,
            progress=progress,
        )
    written = write_atlas(atlas, out, threshold=threshold, numbers=numbers, overwrite=overwrite)
    for line in written.lines:
        typer.echo(line)
