"""`layerswap train`: train an expert from a base and data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli import options, output


def train(
    spec: Annotated[
        Path | None,
        typer.Argument(metavar="EXPERT.yaml", help="Base, data and settings."),
    ] = None,
    *,
    out: Annotated[Path | None, typer.Option(help="Folder to create.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume from the newest checkpoint in OUT.")
    ] = False,
    overwrite: options.Overwrite = False,
    launch_config: Annotated[
        str | None,
        typer.Option(help="Print an accelerate configuration (ddp, fsdp2, zero3) and exit."),
    ] = None,
) -> None:
    """Train an expert: full or partial fine-tuning, LoRA, or two data sets in turns.

    Writes the expert and its checkpoints into the folder OUT. On several devices, run
    accelerate launch -m layerswap train EXPERT.yaml --out OUT.

    Example: layerswap train swahili.yaml --out experts/swahili
    """
    from layerswap.errors import RecipeError

    if launch_config is not None:
        from layerswap.training.expert.distributed import accelerate_configuration

        typer.echo(accelerate_configuration(launch_config), nl=False)
        return
    if spec is None or out is None:
        raise RecipeError("give EXPERT.yaml, and --out, the folder to create")
    from layerswap.training.expert import trainer

    written = trainer.train(spec, out, resume=resume, overwrite=overwrite, log=output.log)
    output.say(f"wrote {written}")
