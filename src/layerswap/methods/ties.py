"""TIES: trims each delta, elects a sign per entry, and averages the deltas that agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import (
    DISJOINT,
    RESCALE_L1,
    SCALE,
    Array,
    Chunk,
    Parameter,
    Value,
    WholeTensor,
    density,
    merge_method,
)


def bounds(tensors: Sequence[WholeTensor], threads: int = 1) -> steps.Bounds | None:
    """Per expert the smallest magnitude kept, of at least one entry; None if all are kept."""
    share = tensors[0].number("density")
    count = sum(tensor.elements for tensor in tensors)
    return steps.magnitudes(tensors, [max(1, int(share * count))], threads) if share < 1 else None


def measure(whole: WholeTensor) -> steps.Trim:
    """The magnitudes to keep of one tensor, ranked in it or in the whole model."""
    of_model = whole.parameters["scope"] == "model"
    return steps.measure_trim(whole, whole.model if of_model else bounds([whole]))


def rule(values: Mapping[str, Any]) -> str | None:
    """The norms of whole deltas are measured tensor by tensor."""
    if values["rescale"] == "l1" and values["scope"] == "model":
        return "rescale: l1 works tensor by tensor; set `scope: tensor`"
    return None


@merge_method(
    "Yadav et al., 2023 (2306.01708), Algorithm 1",
    parameters={
        "density": density(0.2),
        "scale": SCALE,
        "scope": Parameter("model", choices=("model", "tensor")),
        "disjoint": DISJOINT,
        "rescale": RESCALE_L1,
    },
    measure=measure,
    measure_model=bounds,
    rule=rule,
)
def ties(chunk: Chunk) -> Array:
    """Keep the `density` largest entries of each delta, elect signs, and merge what agrees.

    The paper ranks the entries of the whole model (`scope: model`); mergekit ranks tensor by
    tensor. With `rescale: l1` the sparse delta keeps the whole delta's sum of magnitudes.
    """
    return steps.elect_and_merge(chunk, steps.trim(chunk))


def _settings(model: mergekit.Model, shared: mergekit.Shared) -> dict[str, Value]:
    return {"density": model.density, "scope": "tensor", "rescale": mergekit.rescale_l1(shared)}


_SPARSE = mergekit.Sparse("ties", _settings)
SPELLINGS = (mergekit.delta_sum("ties", "ties", _SPARSE, elects=True, normalize=True),)
