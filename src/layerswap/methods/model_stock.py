"""Model Stock: shrinks the mean delta by the agreement of the experts."""

from __future__ import annotations

import math
from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import Array, Chunk, Parameter, Value, WholeTensor, merge_method


def measure(whole: WholeTensor) -> Any:
    """Inner products of the tensor `[1, experts, experts]`, or of each row, float64."""
    import numpy as np

    if whole.parameters["angle"] == "tensor":
        return steps.inner_products(whole)[None]
    count, experts = whole.elements // max(1, whole.width), len(whole.weights)
    products = np.zeros((count, experts, experts))
    for chunk in whole.chunks():
        numbers = steps.vector_numbers(chunk)
        parts = [part.astype("float64") for part in chunk.parts]
        for i in range(experts):
            for j in range(experts):
                products[:, i, j] += np.bincount(numbers, parts[i] * parts[j], minlength=count)
    return products


@merge_method(
    "Jang et al., 2024 (2403.19522), equation 6",
    parameters={"angle": Parameter("tensor", choices=("tensor", "row"))},
    experts=(2, math.inf),
    measure=measure,
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


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    settings: dict[str, Value] = {"angle": "row"} if values.shared["filter_wise"] else {}
    return mergekit.selected("model_stock", values, settings)


SPELLINGS = (
    mergekit.Spelling(
        "model_stock", _read, base="deltas", shared={"filter_wise": False}, required=(),
        sources=(3, math.inf),
    ),
)  # fmt: skip
