"""SCE: selects the entries in which the experts differ most, and weighs experts by them."""

from __future__ import annotations

from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import SCALE, Array, Chunk, WholeTensor, density, merge_method


def variance(chunk: Chunk) -> Any:
    """Variance of each entry over the experts, float32."""
    import numpy as np

    return np.var(np.stack(chunk.parts).astype("float64"), axis=0).astype("float32")


def select(chunk: Chunk, threshold: float) -> list[Any]:
    """The deltas in float64, 0 where their variance is below the threshold."""
    parts = [part.astype("float64") for part in chunk.parts]
    return [part * (variance(chunk) >= threshold) for part in parts] if threshold else parts


def measure(whole: WholeTensor) -> Any:
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
    measure=measure,
)
def sce(chunk: Chunk) -> Array:
    """Select, calculate, erase.

    Keeps the `density` share of largest variances among the entries that differ. Weighs each
    expert by the mean square of what is kept of its delta. Drops entries that disagree with the
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


def _read(values: mergekit.TensorValues) -> mergekit.Reading:
    share = float(values.shared["select_topk"])
    settings = {"density": min(1.0, share)}
    return mergekit.selected("sce", values, settings) if share > 0 else str(values.base)


SPELLINGS = (
    mergekit.Spelling("sce", _read, base="deltas", shared={"select_topk": 1.0}, required=()),
)
