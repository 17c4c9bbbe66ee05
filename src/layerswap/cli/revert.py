"""`layerswap revert`: put a part of what fine-tuning changed back to the base."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from layerswap.cli import options


def revert(
    *,
    base: Annotated[str, typer.Option(help="What the expert was fine-tuned from.")],
    expert: Annotated[str, typer.Option(help="The expert: a folder or a Hub id.")],
    out: Annotated[Path, typer.Option(help="The folder to create.")],
    keep: Annotated[
        float | None, typer.Option(help="Keep this share of rows, those that changed most (0..1).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Keep rows whose mean absolute change is at least this.")
    ] = None,
    axis: Annotated[str, typer.Option(metavar="input|output", help="What a row is.")] = "input",
    scope: Annotated[
        str,
        typer.Option(metavar="tensor|model", help="Rank the rows of each tensor, or of the model."),
    ] = "tensor",
    layers: Annotated[
        str | None, typer.Option(help="Put these layers back: 0-3,30, outside or all.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Only these roles of them: attention,mlp.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="A|B|C|Z", help="Keep one part of a partition.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="task|language", help="The part that the expert keeps.")
    ] = None,
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Write an expert of which a part is the base's again, by magnitude or by place.

    Example: layerswap revert --base llama --expert math-expert --keep 0.2 --out sparse
    """
    from rich.filesize import decimal

    from layerswap.checkpoint import refuse_target
    from layerswap.cli.progress import byte_progress
    from layerswap.merge.api import revert as put_back
    from layerswap.merge.metadata import RECORD

    refuse_target(Path(out).expanduser().absolute(), marker=RECORD, overwrite=overwrite)
    settings: dict[str, Any] = {
        "keep": keep, "threshold": threshold, "axis": axis, "scope": scope,
        "layers": layers.split(",") if layers else None,
        "roles": roles.split(",") if roles else None,
        "partition": partition, "part": part, "dtype": dtype,
        "max_shard_size": max_shard_size or "5GB",
    }  # fmt: skip
    plan = put_back(base, expert, **settings)
    plan.check_target(out, overwrite=overwrite)
    typer.echo(str(plan))
    with byte_progress("writing", plan.nbytes) as progress:
        written = plan.save(out, overwrite=overwrite, threads=threads, progress=progress)
    typer.echo(f"wrote {written} ({decimal(plan.nbytes)})")
