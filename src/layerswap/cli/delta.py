"""`layerswap delta`: map the weights that fine-tuning changed."""

from __future__ import annotations

from typing import Annotated

import typer

from layerswap.cli import options, output


def delta(
    *,
    base: options.Base,
    expert: Annotated[list[str], typer.Option(help="Expert: a folder or a Hub id. Repeatable.")],
    out: options.OutFolder,
    axis: options.Axis = "input",
    threshold: Annotated[
        float | None,
        typer.Option(
            min=0, help="Smallest MAV of a row that counts. Default: each expert's top 15%."
        ),
    ] = None,
    numbers: Annotated[
        bool, typer.Option("--numbers", help="Write the percentages into the map.")
    ] = False,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Map the rows that fine-tuning changed, by layer and matrix.

    Also measures conflicts between experts, and how much of a delta bfloat16 loses. Writes
    tables, figures and an interactive page into the folder OUT.

    Example: layerswap delta --base llama --expert math-expert --expert swahili-expert --out map
    """
    from layerswap.cli.progress import byte_progress
    from layerswap.deltas.atlas import measure, open_subjects
    from layerswap.errors import RecipeError
    from layerswap.merge.writer import check_apart
    from layerswap.report.measurements import atlas_facts, refuse_atlas, write_atlas

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
    facts = {**atlas_facts(atlas, threshold), "folder": str(written.folder)}
    output.finish("delta", facts, written.lines)
