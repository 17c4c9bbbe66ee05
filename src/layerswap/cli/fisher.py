"""`layerswap fisher`: estimate the diagonal Fisher information of an expert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def fisher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint or Hub id.")],
    *,
    data: Annotated[
        Path,
        typer.Option(help="Texts: .jsonl with text, or prompt and completion, or .txt by line."),
    ],
    out: options.OutFolder,
    labels: Annotated[
        str,
        typer.Option(
            metavar="model|data",
            help="Source of the labels: the model's predictions, or the data (empirical Fisher).",
        ),
    ] = "model",
    examples: Annotated[int, typer.Option(min=1, help="Number of examples drawn.")] = 256,
    max_length: Annotated[
        int, typer.Option(min=2, help="Largest length of an example, in tokens.")
    ] = 1024,
    seed: Annotated[int, typer.Option(help="Seed of the examples and the labels.")] = 0,
    device: options.Device = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Estimate the importance of each weight of an expert, for Fisher-weighted averaging.

    Trains nothing; holds the model twice in memory, in float32. Writes the folder OUT, which a
    recipe names as `fisher` of the expert.

    Example: layerswap fisher math-expert --data gsm8k.jsonl --out math-fisher
    """
    from layerswap.cli.progress import step_progress
    from layerswap.evaluation.fisher import estimate_fisher

    folder = estimate_fisher(
        model,
        data,
        out,
        labels=labels,
        examples=examples,
        max_length=max_length,
        seed=seed,
        device=device,
        overwrite=overwrite,
        progress=step_progress,
    )
    output.say(f"wrote {folder}")
