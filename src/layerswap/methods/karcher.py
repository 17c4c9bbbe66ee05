"""The Karcher mean: the mean direction of several tensors on the sphere."""

from __future__ import annotations

import math
from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import Array, Chunk, Parameter, merge_method


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


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    shared = values.shared
    limits = {"max_iter": round(shared["max_iter"]), "tol": float(shared["tol"])}
    return mergekit.Call("karcher", mergekit.equal_weights(values.models), limits)


_LIMITS = {"max_iter": 10.0, "tol": 1e-5}
SPELLINGS = (mergekit.Spelling("karcher", _read, shared=_LIMITS, required=()),)
