"""Multi-SLERP: the direction of the mean of several tensors, at their mean norm."""

from __future__ import annotations

import math

from layerswap.methods import mergekit, steps
from layerswap.methods.method import ORIGIN, SCALE, Array, Chunk, Value, merge_method


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


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    models = values.others
    if len(models) == 1:
        return models[0].name
    total = mergekit.checked_total([model.weight for model in models])
    parameters: dict[str, Value] = {"origin": "zero" if values.base is None else "base"}
    if not values.shared["normalize_weights"]:
        parameters["scale"] = total
    inputs = tuple((model.name, model.weight) for model in models)
    return mergekit.Call("multislerp", inputs, parameters)


_MODEL, _SHARED = {"weight": mergekit.WEIGHT}, {"normalize_weights": True}
SPELLINGS = (
    mergekit.Spelling("multislerp", _read, base="optional", models=_MODEL, shared=_SHARED),
)
