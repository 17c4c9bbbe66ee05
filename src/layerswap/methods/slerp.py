"""SLERP and NuSLERP: interpolate along the arc between two tensors, or their rows or columns."""

from __future__ import annotations

import math
from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import (
    ORIGIN,
    TWO,
    Array,
    Chunk,
    Parameter,
    Value,
    WholeTensor,
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


def vector_products(whole: WholeTensor) -> Any:
    """Inner products `[3, vectors]`, float64: first with first, first with second, second twice."""
    import numpy as np

    count = {
        "tensor": 1,
        "row": whole.elements // max(1, whole.width),
        "column": math.prod(whole.shape[1:]) if whole.shape else 1,
    }[str(whole.parameters["angle"])]
    sums = np.zeros((3, count))
    for chunk in whole.chunks():
        a, b = (part.astype("float64") for part in chunk.parts)
        numbers = steps.vector_numbers(chunk)
        products = (a * a, a * b, b * b)
        sums += [np.bincount(numbers, product, minlength=count) for product in products]
    return sums


@merge_method(
    "Shoemake, 1985",
    parameters={
        "angle": Parameter("tensor", choices=("tensor", "row", "column")),
        "origin": ORIGIN,
    },
    experts=TWO,
    deltas=False,
    measure=vector_products,
)
def nuslerp(chunk: Chunk) -> Array:
    """As `slerp`, for each vector by itself.

    Vectors are interpolated linearly only if their cosine is 1 or -1 within float64's rounding.
    """
    import numpy as np

    first, second = chunk.parts
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    dots, numbers = chunk.measured, steps.vector_numbers(chunk)
    norms = np.maximum(np.sqrt(dots[0]), 1e-7) * np.maximum(np.sqrt(dots[2]), 1e-7)
    cosine = np.clip(dots[1] / norms, -1, 1)
    flat = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(flat, 0.0, cosine))
    sine = np.where(flat, 1.0, np.sin(angle))
    shares = [np.where(flat, share, np.sin(share * angle) / sine)[numbers] for share in (1 - t, t)]
    merged: Array = (shares[0] * first + shares[1] * second).astype(first.dtype)
    return merged


def _read_slerp(values: mergekit.TensorValues) -> mergekit.Reading:
    base, other, t = str(values.base), values.others[0].name, float(values.shared["t"])
    if t in (0, 1):
        return other if t else base
    return mergekit.Call("slerp", ((base, 1 - t), (other, t)))


def _read_nuslerp(values: mergekit.TensorValues) -> mergekit.Reading:
    models, shared = values.others, values.shared
    weights = [model.weight for model in models]
    if math.fsum(weights) < 1e-6:
        weights = [0.5, 0.5]
    elif 0 in weights:
        return models[weights.index(0) ^ 1].name
    parameters: dict[str, Value] = {"origin": "zero" if values.base is None else "base"}
    if not shared["nuslerp_flatten"]:
        parameters["angle"] = "column" if shared["nuslerp_row_wise"] else "row"
    names = [model.name for model in models]
    return mergekit.Call("nuslerp", tuple(zip(names, weights, strict=True)), parameters)


SPELLINGS = (
    mergekit.Spelling(
        "slerp", _read_slerp, base="first", shared={"t": mergekit.T}, required=("t",),
        sources=(2, 2),
    ),
    mergekit.Spelling(
        "nuslerp", _read_nuslerp, base="optional", models={"weight": mergekit.WEIGHT},
        shared={"nuslerp_flatten": True, "nuslerp_row_wise": False}, sources=(2, 2),
    ),
)  # fmt: skip
