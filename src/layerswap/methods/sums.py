"""Weighted sums: of weights, of deltas, and by the diagonal Fisher information."""

from __future__ import annotations

from layerswap.methods import steps
from layerswap.methods.method import ONE, SCALE, Array, Chunk, Parameter, merge_method


@merge_method("Wortsman et al., 2022 (2203.05482)", deltas=False)
def linear(chunk: Chunk) -> Array:
    """`sum_i w_i theta_i`; the weights are not normalised."""
    return steps.weighted_sum(chunk.parts, chunk.weights)


@merge_method("Ilharco et al., 2023 (2212.04089), section 2", parameters={"scale": SCALE})
def task_arithmetic(chunk: Chunk) -> Array:
    """`scale * sum_i w_i delta_i`."""
    return steps.add_scaled(chunk, chunk.parts)


@merge_method(
    "Goddard et al., 2024 (2403.13257)",
    parameters={"scale": Parameter(1.0, low=-1e6, high=1e6)},
    experts=ONE,
    deltas=False,
)
def scale(chunk: Chunk) -> Array:
    """`scale * theta`, as mergekit's `passthrough` with a scale."""
    return steps.weighted_sum(chunk.parts, [chunk.number("scale")])


@merge_method(
    "Matena and Raffel, 2022 (2111.09832)",
    parameters={
        "floor": Parameter(1e-20, high=1e6, open_low=True),
        "normalise": Parameter("none", choices=("none", "model")),
    },
    deltas=False,
    fisher=True,
)
def fisher(chunk: Chunk) -> Array:
    """`sum_i w_i F_i theta_i / sum_i w_i F_i`, entry by entry, in float64.

    No F is below `floor`, so that entries without information become the plain weighted average.
    With `normalise: model` each F is divided by its Euclidean norm over the whole model, as the
    authors' code does by default (which raises only the first model's F to its floor).
    """
    import numpy as np

    total, mass = (np.zeros(chunk.parts[0].shape) for _ in range(2))
    for part, precision, weight in zip(chunk.parts, chunk.fishers, chunk.weights, strict=True):
        share = np.maximum(precision.astype(np.float64), chunk.number("floor"))
        share *= weight
        mass += share
        share *= part
        total += share
    total /= mass
    with np.errstate(over="ignore"):
        return total.astype(chunk.parts[0].dtype)
