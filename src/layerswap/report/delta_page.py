"""The map of an atlas as one interactive HTML file: a threshold slider, two experts, no network."""

from __future__ import annotations

from typing import Any

from layerswap.deltas.atlas import Atlas
from layerswap.report.delta_map import labels_of
from layerswap.report.heat_map import even_scale
from layerswap.report.page import Panel, island

STEPS = 120
"""Positions of the threshold slider, even in the logarithm; fewer for very large models."""
COUNTS = 250_000
"""Most counts that a page holds, at about five characters each."""


def delta_page(atlas: Atlas, threshold: float) -> str:
    """The page: the rows above each threshold of the slider, counted, for every cell and expert.

    Args:
        atlas: what to show.
        threshold: where the slider starts, as a MAV.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("layerswap.report"), autoescape=True, undefined=StrictUndefined
    )
    data = island(map_panel(atlas, threshold))
    return environment.get_template("delta.html.j2").render(data=data, atlas=atlas)


def map_panel(atlas: Atlas, threshold: float) -> Panel:
    """The maps of an atlas's experts with a slider, as a panel of a report; see `delta_page`."""
    return Panel("maps", _data(atlas, threshold))


def _data(atlas: Atlas, threshold: float) -> dict[str, Any]:
    import numpy as np

    cells = atlas.matrices()
    rows = {
        (expert, cell): np.concatenate([atlas.changes[expert, tensor].rows for tensor in tensors])
        for expert in atlas.experts
        for cell, tensors in cells.items()
    }
    steps = max(20, min(STEPS, COUNTS // max(1, len(rows))))
    thresholds = _thresholds(list(rows.values()), threshold, steps)
    labels = labels_of(atlas)
    return {
        "experts": list(atlas.experts),
        "layers": atlas.layers,
        "columns": list(labels),
        "labels": list(labels.values()),
        "colours": {"light": even_scale(), "dark": even_scale(dark=True)},
        "thresholds": [float(value) for value in thresholds],
        "start": int(np.searchsorted(thresholds, threshold)),
        "rows": {
            f"{layer} {column}": len(rows[atlas.experts[0], (layer, column)])
            for layer, column in cells
        },
        "above": [
            {
                f"{layer} {column}": _above(rows[expert, (layer, column)], thresholds)
                for layer, column in cells
            }
            for expert in atlas.experts
        ],
    }


def _thresholds(rows: list[Any], threshold: float, steps: int) -> Any:
    """The slider's positions, from where nearly all changed rows are above to where none is."""
    import numpy as np

    everything = np.concatenate(rows)
    changed = everything[everything > 0]
    low, high = (
        (float(np.quantile(changed, 0.001)), float(changed.max())) if len(changed) else (1e-9, 1.0)
    )
    even = np.geomspace(low, max(high, low * 2), steps - 1)
    return np.unique(np.append(even, threshold))


def _above(rows: Any, thresholds: Any) -> list[int]:
    """Rows above each threshold."""
    import numpy as np

    ordered = np.sort(rows.astype(np.float64))
    return (len(ordered) - np.searchsorted(ordered, thresholds, side="right")).tolist()  # type: ignore[no-any-return]
