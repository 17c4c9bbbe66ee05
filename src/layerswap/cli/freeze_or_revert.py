"""`layerswap freeze-or-revert`: the second paper's table 2 for one's own expert."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layerswap.cli.options import Device, ModelDtype
from layerswap.cli.select import Role

if TYPE_CHECKING:
    from layerswap.merge import Plan


def freeze_or_revert(
    spec: Annotated[Path, typer.Argument(metavar="EXPERT.yaml", help="The expert, whole.")],
    *,
    out: Annotated[Path, typer.Option(help="Folder of the trainings; an earlier one goes on.")],
    part: Annotated[Role, typer.Option(help="Whose part of a partition the expert keeps.")],
    task: Annotated[list[str], typer.Option(help="lm-eval task; may be given again.")],
    partitions: Annotated[str, typer.Option(help="Which, with commas between.")] = "A,B,C,Z",
    include: Annotated[
        list[Path] | None, typer.Option(help="Folder with task YAMLs of one's own.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Most documents of a task.")] = None,
    device: Device = None,
    dtype: ModelDtype = None,
) -> None:
    """Train a part alone, or train all and put the rest back? Both ways, for each partition.

    Example: layerswap freeze-or-revert math.yaml --out runs --part task --task mgsm_direct_en
    """
    from layerswap.cli.tables import places_table
    from layerswap.engine.devices import check_dtype, open_device, pick_device
    from layerswap.evaluation.harness import check_task_names
    from layerswap.training.expert.freezing import freeze_or_revert as both_ways
    from layerswap.training.expert.select import score_plan
    from layerswap.training.expert.spec import read_expert

    open_device(pick_device(device))
    check_dtype(dtype)
    check_task_names(task, include or ())

    def score(plan: Plan) -> dict[str, float]:
        return score_plan(
            plan, task, include=include or (), limit=limit, device=device, dtype=dtype
        )

    rows = both_ways(
        read_expert(spec),
        out,
        part=part.value,
        score=score,
        partitions=[name.strip() for name in partitions.split(",")],
        folder=spec.parent,
        log=lambda line: typer.echo(line, err=True),
    )
    typer.echo(places_table(rows))
