"""`layerswap train`: an expert from a base and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def train(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="EXPERT.yaml", help="Specification: base, data, regime."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder to create.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in OUT.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Overwrite a folder that this command wrote.")
    ] = False,
    launch_config: Annotated[
        str | None,
        typer.Option(help="Print a configuration of accelerate (ddp, fsdp2, zero3) and exit."),
    ] = None,
) -> None:
    """Train an expert: full or partial SFT, LoRA, or two data sets in turns.

    Writes the expert, its card and the record of the training to OUT.

    On several devices: accelerate launch -m layerswap train EXPERT.yaml --out OUT

    Example: layerswap train swahili.yaml --out experts/swahili
    """
    from layerswap.errors import RecipeError

    if launch_config is not None:
        from layerswap.training.expert.distributed import launch_configuration

        typer.echo(launch_configuration(launch_config), nl=False)
        return
    if spec is None or out is None:
        raise RecipeError("give EXPERT.yaml, and --out, the folder to create")
    from layerswap.training.expert import trainer

    written = trainer.train(
        spec,
        out,
        resume=resume,
        overwrite=overwrite,
        log=lambda line: typer.echo(line, err=True),
    )
    typer.echo(f"wrote {written}")
