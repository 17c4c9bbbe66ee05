"""Fisher merging: averages weights by the diagonal Fisher information of each expert."""

from __future__ import annotations

from layerswap.methods.method import Array, Chunk, Parameter, merge_method


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
