"""Plans that put a part of what fine-tuning changed back to the base."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

from layerswap.compose.recipe import check_recipe
from layerswap.delta.rows import Axis
from layerswap.errors import RecipeError
from layerswap.merge.make import make_plan
from layerswap.merge.plan import Plan

Source = str | os.PathLike[str]


def revert(
    base: Source,
    expert: Source,
    *,
    keep: float | None = None,
    threshold: float | None = None,
    axis: Axis = "input",
    scope: Literal["tensor", "model"] = "tensor",
    layers: Sequence[str | int] | None = None,
    roles: Sequence[str] | None = None,
    partition: str | None = None,
    part: Literal["task", "language"] | None = None,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
) -> Plan:
    """Plan an expert of which a part is the base's again. Opens headers, writes nothing.

    Either by magnitude (paper 1, section 3.3: rows that changed little go back), or by place
    (paper 2, Table 2: all but one part of a partition goes back; or chosen layers and roles).
    What stays and what goes back is copied bit for bit.

    Args:
        base: what the expert was fine-tuned from.
        expert: a full checkpoint or an adapter.
        keep: the share of rows to keep, those with the largest MAV.
        threshold: the MAV from which a row is kept.
        axis: what a row is; the papers' is an input feature.
        scope: whether `keep` ranks the rows of each tensor, or of the whole model together.
        layers: layers to put back, as numbers and ranges such as `3-7`, `outside` or `all`.
        roles: only these roles of those layers; all layers when `layers` is None.
        partition: a partition of the second paper, `A`, `B`, `C` or `Z`.
        part: the part of the partition that the expert keeps.
        dtype: `float32`, `bfloat16` or `float16`; as stored when None.
        max_shard_size: largest size of an output file.

    Raises:
        LayerswapError: the checkpoints cannot be opened or do not fit together, or it is not
            said, or said twice, what to put back.
    """
    data: dict[str, Any] = {
        "base": os.fspath(base),
        "experts": {"expert": os.fspath(expert)},
        "bake": True,
        "dtype": dtype,
        "max_shard_size": max_shard_size,
    }
    by_size = keep is not None or threshold is not None
    by_place = layers is not None or roles is not None
    if [by_size, by_place, partition is not None].count(True) != 1:
        raise RecipeError(
            "say what to put back, in one way: keep or threshold; layers or roles; or partition"
        )
    if part is not None and partition is None:
        raise RecipeError("a part is one of a partition; say which partition")
    if by_size:
        data["merge"] = _by_size(keep, threshold, axis, scope)
    elif by_place:
        data["soup"] = {"experts": ["expert"]}
        data["places"] = [
            {"layers": where, "take": "base", **({"roles": list(roles)} if roles else {})}
            for where in layers or ("all",)
        ]
    else:
        if part not in ("task", "language"):
            raise RecipeError("say which part of the partition the expert keeps: task or language")
        sides = {"task": "base", "language": "base", part: "expert"}
        data["partition"] = {"name": partition, **sides}
    return make_plan(check_recipe(data, where="revert"))


def _by_size(keep: float | None, threshold: float | None, axis: Axis, scope: str) -> dict[str, Any]:
    given = {"keep": keep, "threshold": threshold}
    return {
        "method": "revert",
        "experts": ["expert"],
        "axis": axis,
        "scope": scope,
        **{name: value for name, value in given.items() if value is not None},
    }
