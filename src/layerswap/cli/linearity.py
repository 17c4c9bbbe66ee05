"""`layerswap linearity`: measure how well two experts add up and interpolate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def linearity(
    *,
    base: options.Base,
    task_expert: options.TaskExpert,
    language_expert: options.LanguageExpert,
    text: Annotated[
        Path, typer.Option(help="Texts to measure on: one per line, or JSON Lines with `text`.")
    ],
    out: options.OutFolder,
    steps: Annotated[
        int, typer.Option(min=2, help="Number of steps from one expert to the other.")
    ] = 4,
    beyond: Annotated[int, typer.Option(min=0, help="Number of steps past each expert.")] = 0,
    elsewhere: Annotated[
        str,
        typer.Option(
            metavar="task|language|base",
            help="Source of the other layers while one is interpolated.",
        ),
    ] = "task",
    max_length: Annotated[
        int, typer.Option(min=2, help="Largest length of a text, in tokens.")
    ] = 256,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="float32|bfloat16|float16",
            help="Dtype of the arithmetic. Below float32, rounding adds to the result.",
        ),
    ] = "float32",
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure the loss on the line between two experts, and how far their deltas add up.

    Writes a table and a figure into the folder OUT.

    Example: layerswap linearity --base b --task-expert t --language-expert l --text sw.txt --out o
    """
    from layerswap.checkpoint.loading import pick_device
    from layerswap.evaluation.linearity import measure_linearity
    from layerswap.report.measurements import refuse_linearity, write_linearity

    refuse_linearity(out, overwrite=overwrite)
    found = measure_linearity(
        base, task_expert, language_expert, text, steps=steps, beyond=beyond, elsewhere=elsewhere,
        max_length=max_length, dtype=dtype, device=pick_device(device),
    )  # fmt: skip
    written = write_linearity(found, out, overwrite=overwrite)
    for line in (*found.lines(), f"wrote {written}"):
        output.say(line)
