"""Maps of experts: which rows of which matrices fine-tuning changed (paper 1, figure 2).

As a figure, and as an interactive map with a slider over the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.deltas.atlas import Atlas
from layerswap.errors import visible
from layerswap.report.drawing import Drawing, draw_cells, ink_on, settings
from layerswap.report.page import Report, Section, render
from layerswap.report.tables import score

PAPERS_ORDER = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""The papers' columns; other matrices follow in the order they are stored."""
STEPS = 60
"""Positions of the slider in each of its modes, even in the logarithm; fewer for large models."""
SHARE = 0.15
"""Default share of the rows of an expert that are shown as changed."""
COUNTS = 250_000
"""Most counts that a page holds, at about five characters each."""


@dataclass(frozen=True)
class Map:
    """A grid of fractions.

    Attributes:
        title: name of the expert.
        columns: names of the matrices, the papers' where they have one.
        labels: heading of each column: the family's own name, and the papers' if it is another.
        cells: fraction of rows above the threshold, by layer and column.
        layers: number of layers.
    """

    title: str
    columns: tuple[str, ...]
    labels: tuple[str, ...]
    cells: Mapping[tuple[int, str], float]
    layers: int


def label_of(column: str, tensor: str) -> str:
    """The heading of a column: the family's own name, and the papers' if it is another.

    Example: `label_of("w1", "model.layers.0.mlp.gate_proj.weight")` is `"gate_proj (w1)"`.
    """
    words = [word for word in tensor.removesuffix(".weight").split(".") if not word.isdecimal()]
    return column if column == words[-1] or "." in column else f"{words[-1]} ({column})"


def labels_of(atlas: Atlas) -> dict[str, str]:
    """The heading of each column of an atlas's map: the papers' in their order, then the others."""
    first: dict[str, str] = {}
    for (_, column), tensors in atlas.matrices().items():
        first.setdefault(column, tensors[0])
    order = [*(name for name in PAPERS_ORDER if name in first), *first]
    return {column: label_of(column, first[column]) for column in dict.fromkeys(order)}


def map_of(atlas: Atlas, expert: str, threshold: float) -> Map:
    """The map of one expert of an atlas at a threshold on the rows' MAV."""
    cells = {}
    for cell, tensors in atlas.matrices().items():
        rows = [atlas.changes[expert, tensor].rows for tensor in tensors]
        cells[cell] = sum(int((r > threshold).sum()) for r in rows) / sum(map(len, rows))
    labels = labels_of(atlas)
    return Map(expert, tuple(labels), tuple(labels.values()), cells, atlas.layers)


@settings()
def draw_maps(maps: Sequence[Map], *, caption: str = "", numbers: bool = False) -> Drawing:
    """Draw maps side by side: layers down the side with the last on top, matrices across.

    Args:
        maps: one or more, all of as many layers.
        caption: a line below, such as the threshold.
        numbers: write each fraction into its cell, as a percentage.
    """
    import numpy as np
    from matplotlib.figure import Figure

    layers, facts = maps[0].layers, []
    wide = 0.46 if numbers else 0.36
    width = sum(0.9 + wide * len(shown.columns) for shown in maps) + 1.2
    figure = Figure(figsize=(width, 1.6 + 0.2 * layers), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, shown in zip(axes, maps, strict=True):
        shares = np.full((layers, len(shown.columns)), np.nan)
        for (layer, column), value in shown.cells.items():
            x = shown.columns.index(column)
            shares[layer, x] = value
            if numbers:
                axis.text(x, layer, f"{100 * value:.0f}", ha="center", va="center", fontsize=8,
                          color=ink_on(value))  # fmt: skip
        mesh = draw_cells(axis, shares)
        axis.set_title(visible(shown.title))
        axis.set_xticks(range(len(shown.columns)), list(map(visible, shown.labels)), rotation=45,
                        ha="right", rotation_mode="anchor")  # fmt: skip
        axis.set_yticks(range(0, layers, max(1, layers // 32)))
        if shown.cells:
            (layer, column), value = max(shown.cells.items(), key=lambda item: item[1])
            facts.append(f"{shown.title}: most in layer {layer}, {column}, {score(value)}% of rows")
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(mesh, ax=list(axes), shrink=0.6, aspect=30)
    bar.outline.set_visible(False)
    # Beside few layers there is no room for more.
    bar.set_label("fraction of rows above the threshold" if layers >= 16 else "fraction of rows")
    if caption:
        figure.supxlabel(visible(caption), fontsize=11)
    return Drawing(figure, "Rows that fine-tuning changed, by layer and matrix", "; ".join(facts))


def delta_page(atlas: Atlas, threshold: float | None = None) -> str:
    """The interactive map of an atlas as one HTML file: a threshold slider, two experts.

    Args:
        atlas: what to show.
        threshold: the MAV where the slider starts, one for all experts; where 15% of the rows of
            each are above its own when None.
    """
    experts = ", ".join(map(visible, atlas.experts))
    lead = (
        f"Against {visible(atlas.base)}: for every layer and matrix, the share of rows "
        f"({atlas.axis} features) whose mean absolute change is above a threshold."
    )
    section = Section(f"Map of {experts}", maps=map_panel(atlas, threshold))
    return render(Report("What fine-tuning changed", lead, [section]))


def map_panel(atlas: Atlas, threshold: float | None = None) -> dict[str, Any]:
    """The data of an interactive map, for `Section`; see `delta_page`.

    It holds the number of rows above each position of the slider, for every cell and expert. The
    slider has two modes: the share of the rows of each expert, and one MAV for all.
    """
    import numpy as np

    cells = atlas.matrices()
    rows = {
        (expert, cell): np.concatenate([atlas.changes[expert, tensor].rows for tensor in tensors])
        for expert in atlas.experts
        for cell, tensors in cells.items()
    }
    steps = max(10, min(STEPS, COUNTS // max(1, len(rows)) // 2))
    of_expert = [
        np.concatenate([rows[expert, cell] for cell in cells]).astype(np.float64)
        for expert in atlas.experts
    ]
    shares = np.unique(np.append(np.geomspace(0.005, 0.6, steps - 1), SHARE))[::-1]
    if threshold is None:
        start = float(np.quantile(np.concatenate(of_expert), 1 - SHARE))
    else:
        start = threshold
    values = _thresholds(np.concatenate(of_expert), start, steps)

    def mode(name: str, positions: list[str], start: int, thresholds: Sequence[Any]) -> Any:
        return {
            "name": name, "positions": positions, "start": start,
            "thresholds": [list(map(float, of)) for of in thresholds],
            "above": [
                {f"{layer} {column}": _above(rows[expert, (layer, column)], of)
                 for layer, column in cells}
                for expert, of in zip(atlas.experts, thresholds, strict=True)
            ],
        }  # fmt: skip

    labels = labels_of(atlas)
    return {
        "experts": list(atlas.experts),
        "layers": atlas.layers,
        "columns": list(labels),
        "labels": list(labels.values()),
        "rows": {
            f"{layer} {column}": len(rows[atlas.experts[0], (layer, column)])
            for layer, column in cells
        },
        "mode": 0 if threshold is None else 1,
        "modes": [
            mode("a share of each expert's", [f"top {100 * share:.3g}%" for share in shares],
                 int(np.argmin(abs(shares - SHARE))),
                 [np.quantile(all_rows, 1 - shares) for all_rows in of_expert]),
            mode("above one value for all", [f"{value:.2e}" for value in values],
                 int(np.searchsorted(values, start)), [values] * len(atlas.experts)),
        ],
    }  # fmt: skip


def _thresholds(rows: Any, threshold: float, steps: int) -> Any:
    """The slider's positions, from where nearly all changed rows are above to where none is."""
    import numpy as np

    changed = rows[rows > 0]
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
