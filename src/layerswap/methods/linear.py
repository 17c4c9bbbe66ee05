"""The weighted sum of experts, with weights of any sum."""

from __future__ import annotations

import math

from layerswap.errors import RecipeError
from layerswap.methods import mergekit, steps
from layerswap.methods.method import Array, Chunk, merge_method


@merge_method("Wortsman et al., 2022 (2203.05482)", deltas=False)
def linear(chunk: Chunk) -> Array:
    """`sum_i w_i theta_i`; a soup's weights sum to 1, these are taken as they are."""
    return steps.weighted_sum(chunk.parts, chunk.weights)


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    weights = {model.name: model.weight for model in values.models if model.weight}
    total, normalize = math.fsum(weights.values()), values.shared["normalize"]
    if not weights or (normalize and not total):
        raise RecipeError("every weight is 0" if not weights else "the weights sum to 0")
    if min(weights.values()) > 0 and (normalize or abs(total - 1) <= 1e-6):
        return weights  # a blend: it copies a model that is alone
    divisor = total if normalize else 1.0
    return mergekit.Call("linear", tuple((name, w / divisor) for name, w in weights.items()))


SPELLINGS = (
    mergekit.Spelling(
        "linear", _read, models={"weight": mergekit.SIGNED_WEIGHT}, shared={"normalize": True}
    ),
)
