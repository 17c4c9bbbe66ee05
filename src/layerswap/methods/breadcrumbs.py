"""Model Breadcrumbs: masks outliers and small values of each delta."""

from __future__ import annotations

from layerswap.methods import mergekit, steps
from layerswap.methods.method import (
    RESCALE_L1,
    SCALE,
    Array,
    Chunk,
    Parameter,
    Value,
    WholeTensor,
    density,
    merge_method,
)


def measure(whole: WholeTensor) -> steps.Trim:
    """The smallest magnitude kept, and the smallest outlier."""
    kept = int(whole.number("density") * whole.elements)
    dropped = min(int(whole.number("outliers") * whole.elements), whole.elements - kept)
    return steps.measure_trim(whole, steps.magnitudes([whole], [dropped + kept, dropped]))


@merge_method(
    "Davari and Belilovsky, 2024 (2312.06795), equations 1 and 2",
    parameters={
        "density": density(0.9),
        "outliers": Parameter(0.01, high=1.0),
        "scale": SCALE,
        "rescale": RESCALE_L1,
    },
    measure=measure,
)
def breadcrumbs(chunk: Chunk) -> Array:
    """Drop the `outliers` share of largest magnitudes, keep `density` below them, and add.

    Ranks tensor by tensor. If both shares sum to more than 1, fewer outliers are dropped.
    """
    return steps.add_scaled(chunk, steps.trim(chunk))


def _settings(model: mergekit.Model, shared: mergekit.Shared) -> dict[str, Value]:
    rescale = mergekit.rescale_l1(shared)
    return {"density": model.density, "outliers": model.values["gamma"], "rescale": rescale}


_SPARSE = mergekit.Sparse("breadcrumbs", _settings, {"gamma": Parameter(0.01, high=1.0)})
SPELLINGS = (
    mergekit.delta_sum("breadcrumbs", "breadcrumbs", _SPARSE, signed=True),
    mergekit.delta_sum("breadcrumbs_ties", None, _SPARSE, elects=True),
)
