"""Merges along arcs of the sphere: SLERP, NuSLERP, Multi-SLERP and the Karcher mean."""

from __future__ import annotations

import math
from typing import Any

from layerswap.methods import steps
from layerswap.methods.method import (
    ORIGIN,
    SCALE,
    TWO,
    Array,
    Chunk,
    Parameter,
    merge_method,
)


@merge_method("Shoemake, 1985", experts=TWO, deltas=False, measure=steps.inner_products)
def slerp(chunk: Chunk) -> Array:
    """`sin((1-t)w)/sin(w) a + sin(tw)/sin(w) b`, w the angle between the flattened tensors.

    t is the second expert's share of the weights. Nearly parallel tensors (cosine above 0.9995)
    are interpolated linearly.
    """
    gram = chunk.measured
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    norms = math.sqrt(gram[0, 0]) * math.sqrt(gram[1, 1])
    cosine = float(gram[0, 1]) / norms if norms else 1.0
    shares: tuple[float, ...] = (1 - t, t)
    if abs(cosine) <= 0.9995:
        angle = math.acos(cosine)
        shares = tuple(math.sin(share * angle) / math.sin(angle) for share in shares)
    return steps.weighted_sum(chunk.parts, shares)


@merge_method(
    "Shoemake, 1985",
    parameters={
        "angle": Parameter("tensor", choices=("tensor", "row", "column")),
        "origin": ORIGIN,
    },
    experts=TWO,
    deltas=False,
    measure=steps.vector_products,
)
def nuslerp(chunk: Chunk) -> Array:
    """As `slerp`, for each vector by itself.

    Vectors are interpolated linearly only if their cosine is 1 or -1 within float64's rounding.
    """
    import numpy as np

    first, second = chunk.parts
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    dots, numbers = chunk.measured, steps.vector_numbers(chunk)
    norms = np.maximum(np.sqrt(dots[:, 0, 0]), 1e-7) * np.maximum(np.sqrt(dots[:, 1, 1]), 1e-7)
    cosine = np.clip(dots[:, 0, 1] / norms, -1, 1)
    flat = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(flat, 0.0, cosine))
    sine = np.where(flat, 1.0, np.sin(angle))
    shares = [np.where(flat, share, np.sin(share * angle) / sine)[numbers] for share in (1 - t, t)]
    merged: Array = (shares[0] * first + shares[1] * second).astype(first.dtype)
    return merged


@merge_method(
    "Goddard, 2025",
    parameters={"origin": ORIGIN, "scale": SCALE},
    deltas=False,
    measure=steps.inner_products,
)
def multislerp(chunk: Chunk) -> Array:
    """The mean unit tensor, scaled to the mean norm; the plain mean if the mean unit is 0.

    The publication's tangent step, from the mean direction, is 0 for any weights: the mean of the
    units' tangent parts is the tangent part of the mean, and that is 0.
    """
    import numpy as np

    gram, weights = chunk.measured, np.asarray(chunk.weights) / math.fsum(chunk.weights)
    norms = np.sqrt(np.diagonal(gram)) + 1e-8
    shares = weights / norms
    length = math.sqrt(max(0.0, float(shares @ gram @ shares)))
    if len(chunk.parts) == 1 or length < 1e-8:
        shares = weights
    else:
        shares = shares / length * float(weights @ np.sqrt(np.diagonal(gram)))
    return steps.weighted_sum(chunk.parts, list(shares * chunk.number("scale")))


@merge_method(
    "Karcher, 1977 (2603.04972)",
    parameters={
        "max_iter": Parameter(10, low=1, high=10_000, whole=True),
        "tol": Parameter(1e-5, high=1.0, open_low=True),
    },
    deltas=False,
    measure=steps.inner_products,
)
def karcher(chunk: Chunk) -> Array:
    """The Karcher mean of the tensors' directions, at their mean norm.

    Repeats: map the units to the tangent space of the mean by the sphere's logarithm, average,
    and map back by its exponential; until the step is below `tol`, or `max_iter` times. All points
    are combinations of the tensors, so their inner products are enough.
    """
    import numpy as np

    gram, tol = chunk.measured, chunk.number("tol")
    norms, weights = np.sqrt(np.diagonal(gram)), np.asarray(chunk.weights, dtype="float64")
    weights = weights / weights.sum()
    valid = norms > tol
    inverse = np.where(valid, 1 / np.where(valid, norms, 1.0), 0.0)
    units = gram * np.outer(inverse, inverse)

    def length(point: Any) -> float:
        return math.sqrt(max(0.0, float(point @ units @ point)))

    shares = np.where(valid, weights, 0.0)
    if not shares.any():
        return steps.weighted_sum(chunk.parts, [0.0] * len(norms))
    shares = shares / shares.sum()
    mean = shares / length(shares) if length(shares) >= tol else np.eye(len(norms))[valid.argmax()]
    for _ in range(int(chunk.number("max_iter"))):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        moves = np.where(angles < tol, 0.0, shares * angles / np.maximum(np.sin(angles), 1e-300))
        tangent = moves - float(moves @ cosines) * mean
        step = length(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        mean = mean / length(mean)
    return steps.weighted_sum(chunk.parts, list(float(weights @ norms) * mean * inverse))
