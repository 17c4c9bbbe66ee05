"""`layerswap revert`: revert a part of an expert to the base."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from layerswap.cli import options, output


def revert(
    *,
    base: options.Base,
    expert: Annotated[str, typer.Option(help="Expert: a folder or a Hub id.")],
    out: options.OutFolder,
    keep: Annotated[
        float | None, typer.Option(help="Share of rows to keep, the most changed first (0 to 1).")
    ] = None,
    threshold: Annotated[
        float | None, typer.Option(help="Smallest mean absolute change of a row to keep.")
    ] = None,
    axis: options.Axis = "input",
    scope: Annotated[
        str, typer.Option(metavar="tensor|model", help="Set of rows that are ranked together.")
    ] = "tensor",
    layers: Annotated[
        str | None, typer.Option(help="Layers to revert: 0-3,30, outside or all.")
    ] = None,
    roles: Annotated[
        str | None, typer.Option(help="Roles to revert in these layers: attention,mlp.")
    ] = None,
    partition: Annotated[
        str | None, typer.Option(metavar="A|B|C|Z", help="Partition of which one part is kept.")
    ] = None,
    part: Annotated[
        str | None, typer.Option(metavar="task|language", help="Part of the partition to keep.")
    ] = None,
    dtype: options.Dtype = None,
    max_shard_size: options.MaxShardSize = None,
    overwrite: options.Overwrite = False,
    threads: options.Threads = None,
) -> None:
    """Revert a part of an expert to the base, by magnitude or by place.

    Choose one way: --keep or --threshold; --layers or --roles; or --partition. Writes the expert
    into the folder OUT.

    Example: layerswap revert --base llama --expert math-expert --keep 0.2 --out sparse
    """
    from rich.filesize import decimal

    from layerswap.checkpoint import refuse_target
    from layerswap.cli.progress import byte_progress
    from layerswap.merge.api import revert as revert_expert
    from layerswap.merge.metadata import RECORD

    refuse_target(out, marker=RECORD, overwrite=overwrite)
    settings: dict[str, Any] = {
        "keep": keep, "threshold": threshold, "axis": axis, "scope": scope,
        "layers": layers.split(",") if layers else None,
        "roles": roles.split(",") if roles else None,
        "partition": partition, "part": part, "dtype": dtype,
        "max_shard_size": max_shard_size or "5GB",
    }  # fmt: skip
    plan = revert_expert(base, expert, **settings)
    output.say(plan)
    with byte_progress("writing", plan.nbytes) as progress:
        written = plan.save(out, overwrite=overwrite, threads=threads, progress=progress)
    output.say(f"wrote {written} ({decimal(plan.nbytes)})")
