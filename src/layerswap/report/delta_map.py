"""Maps of experts: which rows of which matrices fine-tuning changed (paper 1, figure 2).

As a figure, and as an interactive page with a slider over the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.deltas.atlas import Atlas
from layerswap.report.drawing import Drawing, even_scale, ink_on, settings, shade
from layerswap.report.page import Panel, render_map_page
from layerswap.report.tables import score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAPERS_ORDER = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""The papers' columns; other matrices follow in the order they are stored."""
STEPS = 60
"""Positions of the slider in each of its modes, even in the logarithm; fewer for large models."""
SHARE = 0.15
"""Share of the rows of an expert that count, where nothing else is asked for."""
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


def columns_of(names: Sequence[str]) -> tuple[str, ...]:
    """The columns of a map: the papers' matrices in their order, then the others."""
    found = list(dict.fromkeys(names))
    known = [name for name in PAPERS_ORDER if name in found]
    return (*known, *(name for name in found if name not in known))


def label_of(column: str, tensor: str) -> str:
    """The heading of a column: the family's own name, and the papers' if it is another.

    Example: `label_of("w1", "model.layers.0.mlp.gate_proj.weight")` is `"gate_proj (w1)"`.
    """
    words = [word for word in tensor.removesuffix(".weight").split(".") if not word.isdecimal()]
    return column if column == words[-1] or "." in column else f"{words[-1]} ({column})"


def labels_of(atlas: Atlas) -> dict[str, str]:
    """The columns of an atlas's map in their order, with the heading of each."""
    first: dict[str, str] = {}
    for (_, column), tensors in atlas.matrices().items():
        first.setdefault(column, tensors[0])
    return {column: label_of(column, first[column]) for column in columns_of(list(first))}


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
    """Maps side by side: layers down the side with the last on top, matrices across.

    Args:
        maps: one or more, all of as many layers.
        caption: a line below, such as the threshold.
        numbers: write each fraction into its cell, as a percentage.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.figure import Figure

    wide = 0.46 if numbers else 0.36
    width = sum(0.9 + wide * len(one.columns) for one in maps) + 1.2
    figure = Figure(figsize=(width, 1.6 + 0.2 * maps[0].layers), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, one in zip(axes, maps, strict=True):
        _draw(axis, one, numbers)
    axes[0].set_ylabel("layer")
    scale = ScalarMappable(Normalize(0, 1), ListedColormap(even_scale()))
    bar = figure.colorbar(scale, ax=list(axes), shrink=0.6, aspect=30)
    # Beside few layers there is no room for more.
    room = maps[0].layers >= 16
    bar.set_label("fraction of rows above the threshold" if room else "fraction of rows")
    if caption:
        figure.supxlabel(caption, fontsize=11)
    highest = [max(one.cells.items(), key=lambda item: item[1], default=None) for one in maps]
    said = [f"{one.title}: most in layer {cell[0]}, {cell[1]}, {score(value)}% of rows"
            for one, (cell, value) in zip(maps, filter(None, highest), strict=False)]  # fmt: skip
    return Drawing(figure, "Rows that fine-tuning changed, by layer and matrix", "; ".join(said))


def _draw(axes: Axes, one: Map, numbers: bool) -> None:
    """One map; cells are rectangles, so that an SVG stays sharp and follows dark mode."""
    from matplotlib.patches import Rectangle

    for (layer, column), value in sorted(one.cells.items()):
        x, colour = one.columns.index(column), shade(value)
        # A little larger than the cell, or hairlines show between neighbours.
        axes.add_patch(Rectangle((x - 0.5, layer - 0.5), 1, 1, facecolor=colour,
                                 edgecolor=colour, linewidth=0.3))  # fmt: skip
        if numbers:
            axes.text(x, layer, f"{100 * value:.0f}", ha="center", va="center", fontsize=8,
                      color=ink_on(colour))  # fmt: skip
    axes.set(xlim=(-0.5, len(one.columns) - 0.5), ylim=(-0.5, one.layers - 0.5), title=one.title)
    axes.set_xticks(range(len(one.columns)), one.labels, rotation=45, ha="right",
                    rotation_mode="anchor")  # fmt: skip
    axes.set_yticks(range(0, one.layers, max(1, one.layers // 32)))
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def delta_page(atlas: Atlas, threshold: float | None = None) -> str:
    """The interactive map of an atlas as one HTML file: a threshold slider, two experts.

    It holds the number of rows above each position of the slider, for every cell and expert.

    Args:
        atlas: what to show.
        threshold: the MAV where the slider starts, one for all experts; where 15% of the rows of
            each are above its own when None.
    """
    return render_map_page(map_panel(atlas, threshold), atlas.experts, atlas.base, atlas.axis)


def map_panel(atlas: Atlas, threshold: float | None = None) -> Panel:
    """The maps of an atlas's experts with a slider, as a panel of a report; see `delta_page`.

    The slider has two modes: the share of the rows of each expert, and one MAV for all.
    """
    import numpy as np

    cells = atlas.matrices()
    rows = {
        (expert, cell): np.concatenate([atlas.changes[expert, tensor].rows for tensor in tensors])
        for expert in atlas.experts
        for cell, tensors in cells.items()
    }
    steps = max(10, min(STEPS, COUNTS // max(1, len(rows)) // 2))
    every = {
        expert: np.concatenate([rows[expert, cell] for cell in cells]).astype(np.float64)
        for expert in atlas.experts
    }
    shares = np.unique(np.append(np.geomspace(0.005, 0.6, steps - 1), SHARE))[::-1]
    own = [np.quantile(every[expert], 1 - shares) for expert in atlas.experts]
    at = float(np.quantile(np.concatenate(list(every.values())), 1 - SHARE))
    values = _thresholds(list(rows.values()), at if threshold is None else threshold, steps)
    start = int(np.searchsorted(values, at if threshold is None else threshold))
    labels = labels_of(atlas)

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

    return Panel("maps", {
        "experts": list(atlas.experts),
        "layers": atlas.layers,
        "columns": list(labels),
        "labels": list(labels.values()),
        "colours": {"light": even_scale(), "dark": even_scale(dark=True)},
        "rows": {
            f"{layer} {column}": len(rows[atlas.experts[0], (layer, column)])
            for layer, column in cells
        },
        "mode": 0 if threshold is None else 1,
        "modes": [
            mode("a share of each expert's", [f"top {100 * share:.3g}%" for share in shares],
                 int(np.argmin(abs(shares - SHARE))), own),
            mode("above one value for all", [f"{value:.2e}" for value in values], start,
                 [values] * len(atlas.experts)),
        ],
    })  # fmt: skip


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
