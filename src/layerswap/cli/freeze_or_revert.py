"""`layerswap freeze-or-revert`: compare partial training with reverting afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from layerswap.cli import options, output


def freeze_or_revert(
    spec: Annotated[Path, typer.Argument(metavar="EXPERT.yaml", help="Expert, trained in full.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the trainings. Finished ones are kept.")],
    part: Annotated[
        Literal["task", "language"], typer.Option(help="Part of a partition that the expert keeps.")
    ],
    task: Annotated[
        list[str], typer.Option("--task", help="Benchmark: an lm-eval task. Repeatable.")
    ],
    partitions: Annotated[
        str, typer.Option(help="Partitions to compare, separated by commas.")
    ] = "A,B,C,Z",
    include: options.Include = None,
    limit: options.Limit = None,
    device: options.Device = None,
    dtype: options.ModelDtype = None,
) -> None:
    """Compare training a part alone with training all and reverting the rest, per partition.

    Reproduces table 2 of the second paper for an expert. Prints the scores as a table.

    Example: layerswap freeze-or-revert math.yaml --out runs --part task --task mgsm_direct_en
    """
    from layerswap.checkpoint.loading import check_dtype, open_device, pick_device
    from layerswap.cli.tables import places_table
    from layerswap.evaluation.harness import check_task_names
    from layerswap.training.expert.freezing import freeze_or_revert as both_ways
    from layerswap.training.expert.select import scorer
    from layerswap.training.expert.spec import read_expert

    options.refuse_checkpoint("--task", task, takes="an lm-eval task")
    open_device(pick_device(device))
    check_dtype(dtype)
    check_task_names(task, include or ())

    rows = both_ways(
        read_expert(spec),
        out,
        part=part,
        score=scorer(task, include=include or (), limit=limit, device=device, dtype=dtype),
        partitions=[name.strip() for name in partitions.split(",")],
        folder=spec.parent,
        log=output.log,
    )
    output.say(places_table(rows))
