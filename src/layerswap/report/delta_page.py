"""The map of an atlas as one interactive HTML file: a threshold slider, two experts, no network."""

from __future__ import annotations

import json
from typing import Any

from layerswap.delta.atlas import Atlas
from layerswap.report.delta_map import columns_of

STEPS = 120
"""Positions of the threshold slider, even in the logarithm."""


def delta_page(atlas: Atlas, threshold: float) -> str:
    """The page: the fraction of rows above any of 120 thresholds, for every cell and expert.

    Args:
        atlas: what to show.
        threshold: where the slider starts, as a MAV.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("layerswap.report"), autoescape=True, undefined=StrictUndefined
    )
    data = _data(atlas, threshold)
    # Inside a script element only "</" could end it, and U+2028 a line.
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return environment.get_template("delta.html.j2").render(data=text, atlas=atlas)


def _data(atlas: Atlas, threshold: float) -> dict[str, Any]:
    import numpy as np

    cells = atlas.matrices()
    rows = {
        (expert, cell): np.concatenate([atlas.changes[expert, tensor].rows for tensor in tensors])
        for expert in atlas.experts
        for cell, tensors in cells.items()
    }
    everything = np.concatenate(list(rows.values()))
    changed = everything[everything > 0]
    low, high = (
        (float(np.quantile(changed, 0.001)), float(changed.max())) if len(changed) else (1e-9, 1.0)
    )
    thresholds = np.sort(np.append(np.geomspace(low, max(high, low * 2), STEPS - 1), threshold))
    fractions = {}
    for expert in atlas.experts:
        fractions[expert] = {
            f"{layer} {column}": _above(rows[expert, (layer, column)], thresholds)
            for layer, column in cells
        }
    return {
        "experts": list(atlas.experts),
        "layers": atlas.layers,
        "columns": list(columns_of([column for _, column in cells])),
        "thresholds": [float(f"{value:.4g}") for value in thresholds],
        "start": int(np.searchsorted(thresholds, threshold)),
        "fractions": fractions,
    }


def _above(rows: Any, thresholds: Any) -> list[int]:
    """Rows above each threshold, in thousandths of all."""
    import numpy as np

    ordered = np.sort(rows)
    above = len(ordered) - np.searchsorted(ordered, thresholds, side="right")
    return [round(1000 * int(count) / len(ordered)) for count in above]
