"""Compares training a part alone with training all and reverting the rest (paper 2, table 2).

Both keep the base's weights outside the part; they differ in whether the rest could move while
the part trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap._types import Log
from layerswap.compose.presets import PARTITIONS
from layerswap.errors import RecipeError
from layerswap.merge import Plan
from layerswap.merge.api import revert, soup
from layerswap.training.expert.select import ScorePlan
from layerswap.training.expert.spec import ExpertSpec, Side
from layerswap.training.expert.trainer import train


@dataclass(frozen=True)
class FreezeOrRevert:
    """One row of the table."""

    partition: str | None  # None for the base, and for the expert that is trained whole
    treatment: str  # of the places outside the expert's part
    scores: dict[str, float]  # by task


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
    """Train an expert whole and once for each partition, and evaluate both ways of keeping a part.

    Trainings are kept in `out` (`whole`, `frozen-A` and so on); a second call resumes them. A
    reverted expert is evaluated without being written.

    Args:
        spec: the expert; without `train`.
        out: folder of the trainings.
        part: the part of a partition that the expert keeps.
        score: evaluates a plan.
        partitions: names of the partitions.
        folder: base of relative paths of the spec.
        log: called with one line about each training.
    """
    if spec.train is not None or spec.simultaneous is not None:
        raise RecipeError("freeze or revert: the partitions decide what trains; leave `train` out")
    unknown = next((name for name in partitions if name not in PARTITIONS), None)
    if unknown is not None:
        raise RecipeError(f"no partition {unknown!r}; there are {', '.join(PARTITIONS)}")

    def trained(name: str, **overrides: Any) -> Plan:
        log(f"training {name}")
        target = out / name
        train(spec, target, folder=folder, resume=target.is_dir(), log=log, **overrides)
        return soup([str(target)], base=base, bake=True)

    local = (folder or Path()) / Path(spec.base).expanduser()
    base = str(local) if local.is_dir() else spec.base
    whole = trained("whole")
    rows = [
        FreezeOrRevert(None, "the base", score(soup([base]))),
        FreezeOrRevert(None, "all trained", score(whole)),
    ]
    for name in partitions:
        plan = revert(base, str(out / "whole"), partition=name, part=part)
        rows.append(FreezeOrRevert(name, "reverted", score(plan)))
        frozen = trained(f"frozen-{name}", train={"partition": name, "part": part})
        rows.append(FreezeOrRevert(name, "frozen", score(frozen)))
    return rows
