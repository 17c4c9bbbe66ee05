"""`layerswap freeze-or-revert`: the second paper's table 2 for an expert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from layerswap.cli.options import Device, ModelDtype
from layerswap.cli.select import Role


def freeze_or_revert(
    spec: Annotated[Path, typer.Argument(metavar="EXPERT.yaml", help="Expert without `train`.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the trainings; existing ones are resumed.")],
    part: Annotated[Role, typer.Option(help="Part of a partition that the expert keeps.")],
    task: Annotated[list[str], typer.Option(help="lm-eval task to score; repeatable.")],
    partitions: Annotated[str, typer.Option(help="Partitions, separated by commas.")] = "A,B,C,Z",
    include: Annotated[
        list[Path] | None, typer.Option(help="Folder with additional task YAMLs.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of documents of a task.")
    ] = None,
    device: Device = None,
    dtype: ModelDtype = None,
) -> None:
    """Compare training a part alone with training all and reverting the rest.

    Trains the expert whole and once for each partition, and prints the scores of both ways.

    Example: layerswap freeze-or-revert math.yaml --out runs --part task --task mgsm_direct_en
    """
    from layerswap.cli.tables import places_table
    from layerswap.engine.devices import check_dtype, open_device, pick_device
    from layerswap.evaluation.harness import check_task_names
    from layerswap.training.expert.freezing import freeze_or_revert as both_ways
    from layerswap.training.expert.select import scorer
    from layerswap.training.expert.spec import read_expert

    open_device(pick_device(device))
    check_dtype(dtype)
    check_task_names(task, include or ())

    rows = both_ways(
        read_expert(spec),
        out,
        part=part.value,
        score=scorer(task, include=include or (), limit=limit, device=device, dtype=dtype),
        partitions=[name.strip() for name in partitions.split(",")],
        folder=spec.parent,
        log=lambda line: typer.echo(line, err=True),
    )
    typer.echo(places_table(rows))
