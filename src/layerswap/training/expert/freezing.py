"""Freeze against revert: is it better to train a part alone, or to train all and put the rest back?

The second paper's table 2. Both leave the base's weights outside the part; they differ in whether
the part was trained while the rest could move too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerswap._types import Log
from layerswap.compose.presets import PARTITIONS
from layerswap.errors import RecipeError
from layerswap.merge.api import revert, soup
from layerswap.merge.plan import Plan
from layerswap.training.expert.spec import ExpertSpec, Side, Trained
from layerswap.training.expert.trainer import train_expert

ScorePlan = Callable[[Plan], dict[str, float]]


@dataclass(frozen=True)
class FreezeOrRevert:
    """One row of the table.

    Attributes:
        partition: its name; None for the base, and for the expert that is trained whole.
        treatment: what became of the places that are not the expert's part.
        scores: by task.
    """

    partition: str | None
    treatment: str
    scores: dict[str, float]


def freeze_or_revert(
    spec: ExpertSpec,
    out: Path,
    *,
    part: Side,
    score: ScorePlan,
    partitions: Sequence[str] = PARTITIONS,
    folder: Path | None = None,
    log: Log = lambda line: None,
) -> list[FreezeOrRevert]:
    """Train an expert whole and once for each partition, and judge both ways of keeping a part.

    Trainings are kept in `out` (`whole`, `frozen-A` and on) and gone on from, if it is called
    again. What is put back is evaluated without being written.

    Args:
        spec: the expert; without `train`.
        out: folder of the trainings.
        part: whose part of a partition the expert keeps.
        score: judges a plan.
        partitions: which.
        folder: what relative paths of the spec are relative to.
        log: told what is being done.

    Raises:
        RecipeError: the spec names places or two experts, or there is no such partition.
        LayerswapError: as `train_expert`.
    """
    if spec.train is not None or spec.simultaneous is not None:
        raise RecipeError("freeze or revert: the partitions say what trains; leave `train` out")
    unknown = next((name for name in partitions if name not in PARTITIONS), None)
    if unknown is not None:
        raise RecipeError(f"no partition {unknown!r}; there are {', '.join(PARTITIONS)}")

    def trained(name: str, wanted: ExpertSpec) -> Path:
        log(f"training {name}")
        target = out / name
        return train_expert(wanted, target, folder=folder, resume=target.is_dir(), log=log)

    base = _base(spec, folder)
    whole = trained("whole", spec)
    rows = [
        FreezeOrRevert(None, "the base", score(soup([base]))),
        FreezeOrRevert(None, "all trained", score(_alone(base, whole))),
    ]
    for name in partitions:
        plan = revert(base, whole, partition=name, part=part)
        rows.append(FreezeOrRevert(name, "reverted", score(plan)))
        frozen = spec.model_copy(update={"train": Trained(partition=name, part=part)})  # type: ignore[arg-type]
        plan = _alone(base, trained(f"frozen-{name}", frozen))
        rows.append(FreezeOrRevert(name, "frozen", score(plan)))
    return rows


def _alone(base: str, expert: Path) -> Plan:
    return soup([str(expert)], base=base, bake=True)


def _base(spec: ExpertSpec, folder: Path | None) -> str:
    local = (folder or Path()) / Path(spec.base).expanduser()
    return str(local) if local.is_dir() else spec.base
