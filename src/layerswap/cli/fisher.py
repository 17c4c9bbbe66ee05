"""`layerswap fisher`: estimate the diagonal Fisher of an expert, for Fisher-weighted averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.options import Device


def fisher(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint or a Hub id.")],
    *,
    data: Annotated[
        Path,
        typer.Option(help=".jsonl with text, or prompt and completion; or .txt, a line each."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    labels: Annotated[
        str,
        typer.Option(
            metavar="model|data",
            help="Tokens drawn from the model's predictions (the Fisher), or those of the data "
            "(the empirical Fisher).",
        ),
    ] = "model",
    examples: Annotated[int, typer.Option(min=1, help="How many examples to draw.")] = 256,
    max_length: Annotated[int, typer.Option(min=2, help="Longest example, in tokens.")] = 1024,
    seed: Annotated[int, typer.Option(help="Of the examples and the labels.")] = 0,
    device: Device = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a folder that this command wrote.")
    ] = False,
) -> None:
    """Estimate how much each weight of an expert matters to what it was trained for.

    The folder goes into a recipe as `fisher` of the expert, for `merge: {method: fisher}`.
    Trains nothing; needs the model in memory twice, in float32.

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
    typer.echo(f"wrote {folder}")
