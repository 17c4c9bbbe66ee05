"""`layerswap linearity`: how well two experts add up and interpolate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options


def linearity(
    *,
    base: Annotated[str, typer.Option(help="What both experts were fine-tuned from.")],
    task: Annotated[str, typer.Option(help="Task expert: a folder or a Hub id.")],
    language: Annotated[str, typer.Option(help="Language expert: a folder or a Hub id.")],
    text: Annotated[
        Path, typer.Option(help="Texts to measure on: one per line, or JSON Lines with `text`.")
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    steps: Annotated[int, typer.Option(min=2, help="Steps from one expert to the other.")] = 4,
    beyond: Annotated[int, typer.Option(min=0, help="Steps past each of the two.")] = 0,
    elsewhere: Annotated[
        str,
        typer.Option(
            metavar="task|language|base", help="The other layers while one is interpolated."
        ),
    ] = "task",
    max_length: Annotated[int, typer.Option(min=2, help="Most tokens of a text.")] = 256,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16",
            help="Of the measurement; in less than float32, rounding is measured too.",
        ),
    ] = "float32",
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Loss along the line between two experts, layer by layer, and how far their deltas add up.

    Example: layerswap linearity --base llama --task math --language swahili --text sw.txt --out lin
    """
    from layerswap.engine.devices import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.linearity import refuse_linearity, write_linearity

    refuse_linearity(out, overwrite=overwrite)
    found = measure_linearity(
        base, task, language, text, steps=steps, beyond=beyond, elsewhere=elsewhere,
        max_length=max_length, dtype=dtype, device=pick_device(device),
    )  # fmt: skip
    written = write_linearity(found, out, overwrite=overwrite)
    for line in (*found.lines(), f"wrote {written}"):
        typer.echo(line)
