"""Reinforced agent merging: averages what several experts changed, keeps what one changed."""

from __future__ import annotations

from typing import Any

from layerswap.methods import mergekit
from layerswap.methods.method import SCALE, Array, Chunk, Parameter, WholeTensor, merge_method


def measure(whole: WholeTensor) -> list[float]:
    """The factor of each expert's own changes."""
    import numpy as np

    boost, limit = whole.number("boost"), whole.number("limit")
    epsilon, experts = whole.number("epsilon"), len(whole.weights)
    if not boost:
        return [1.0] * experts
    shared, alone = np.zeros(experts), np.zeros(experts)
    for chunk in whole.chunks():
        changed = np.stack([np.abs(part) > epsilon for part in chunk.parts])
        count = changed.sum(axis=0)
        shared += (changed & (count > 1)).sum(axis=1)
        alone += (changed & (count == 1)).sum(axis=1)
    ratio = shared / np.maximum(alone, max(epsilon, 1e-30))
    return list(1 + boost * np.minimum(ratio, limit))


@merge_method(
    "Reinforced Agent Merging, 2026 (2601.13572)",
    parameters={
        "epsilon": Parameter(1e-5, high=1e6),
        "boost": Parameter(0.0, high=1e6),
        "limit": Parameter(0.2, high=1e6),
        "scale": SCALE,
    },
    measure=measure,
)
def ram(chunk: Chunk) -> Array:
    """Average the changes that experts share, and keep the others whole.

    A change counts if it is larger than `epsilon`. With `boost` r and `limit` alpha (RAM+), the
    changes of one expert alone are scaled by `1 + r min(rho, alpha)`. rho is the number of entries
    that the expert changed with others over the number that it changed alone, in the tensor.
    """
    import numpy as np

    parts, epsilon = chunk.parts, chunk.number("epsilon")
    changed = [np.abs(part) > epsilon for part in parts]
    alone: Any = sum(kept.astype(np.int32) for kept in changed) == 1
    total, mass = np.zeros(len(parts[0])), np.zeros(len(parts[0]))
    for part, kept, weight, boost in zip(
        parts, changed, chunk.weights, chunk.measured, strict=True
    ):
        total += weight * kept * part.astype("float64") * np.where(alone, boost, 1.0)
        mass += weight * kept
    merged = total / np.where(mass > 0, mass, 1.0) * chunk.number("scale")
    return merged.astype(parts[0].dtype)


_PLUS = {"epsilon": "epsilon", "boost": "r", "limit": "alpha"}
SPELLINGS = (
    mergekit.renamed("ram", "ram", {"epsilon": "epsilon"}, {"epsilon": 1e-5}),
    mergekit.renamed("ramplus_tl", "ram", _PLUS, {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2}),
)
