"""Deltas weighed by where the experts agree or differ: Model Stock, RAM and SCE."""

from __future__ import annotations

import math
from typing import Any

from layerswap.methods import steps
from layerswap.methods.method import (
    SCALE,
    Array,
    Chunk,
    Parameter,
    WholeTensor,
    density,
    merge_method,
)


def measure_model_stock(whole: WholeTensor) -> Any:
    """Inner products of the tensor `[1, experts, experts]`, or of each row, float64."""
    by_row = whole.parameters["angle"] == "row"
    return steps.vector_products(whole) if by_row else steps.inner_products(whole)[None]


@merge_method(
    "Jang et al., 2024 (2403.19522), equation 6",
    parameters={"angle": Parameter("tensor", choices=("tensor", "row"))},
    experts=(2, math.inf),
    measure=measure_model_stock,
)
def model_stock(chunk: Chunk) -> Array:
    """The mean delta times `t = N cos / (1 + (N-1) cos)`.

    cos is the mean cosine between two deltas of the tensor, or of each row (`angle: row`).
    """
    import numpy as np

    count, grams = len(chunk.parts), chunk.measured
    norms = np.sqrt(np.diagonal(grams, axis1=1, axis2=2))
    sizes = norms[:, :, None] * norms[:, None]
    cosines = np.divide(grams, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    others = cosines.sum(axis=(1, 2)) - np.trace(cosines, axis1=1, axis2=2)
    cosine = np.maximum(others / (count * (count - 1)), 0.0)
    ratio = count * cosine / (1 + (count - 1) * cosine)
    merged = steps.weighted_sum(chunk.parts, [1 / count] * count)
    by_row = chunk.parameters["angle"] == "row"
    merged *= ratio[steps.vector_numbers(chunk)] if by_row else float(ratio[0])
    return merged


def measure_ram(whole: WholeTensor) -> list[float]:
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
    measure=measure_ram,
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


def variance(chunk: Chunk) -> Any:
    """Variance of each entry over the experts, float32."""
    import numpy as np

    return np.var(np.stack(chunk.parts).astype("float64"), axis=0).astype("float32")


def select(chunk: Chunk, threshold: float) -> list[Any]:
    """The deltas in float64, 0 where their variance is below the threshold."""
    parts = [part.astype("float64") for part in chunk.parts]
    return [part * (variance(chunk) >= threshold) for part in parts] if threshold else parts


def measure_sce(whole: WholeTensor) -> Any:
    """The smallest variance that is kept, and the weight of each expert."""
    import numpy as np

    share, threshold = whole.number("density"), 0.0
    if share < 1:
        count = int(share * sum(int(np.count_nonzero(variance(c))) for c in whole.chunks()))
        threshold = steps.score_quantiles(whole, variance, [count])[0]
    squares = np.zeros(len(whole.weights))
    for chunk in whole.chunks():
        squares += [float(np.square(part).sum()) for part in select(chunk, threshold)]
    shares = squares * np.asarray(whole.weights)
    return (threshold, *(shares / shares.sum() if shares.sum() > 0 else whole.weights))


@merge_method(
    "Wan et al., 2024 (2408.07990), section 3.3",
    parameters={"density": density(1.0), "scale": SCALE},
    measure=measure_sce,
)
def sce(chunk: Chunk) -> Array:
    """Select, calculate, erase.

    Keeps the `density` share of largest variances among the entries that differ. Weighs each
    expert by the mean square of its delta's kept entries. Drops entries that disagree with the
    sign of the sum, and averages the rest.
    """
    import numpy as np

    threshold, *shares = chunk.measured
    parts = select(chunk, threshold)
    sign = np.sign(sum(w * part for w, part in zip(chunk.weights, parts, strict=True)))
    total, mass = np.zeros(len(sign)), np.zeros(len(sign))
    for part, share in zip(parts, shares, strict=True):
        agrees = np.sign(part) * sign > 0
        total += share * (agrees * part)
        mass += share * agrees
    merged = total / np.where(mass > 0, mass, 1.0) * chunk.number("scale")
    return merged.astype(chunk.parts[0].dtype)
