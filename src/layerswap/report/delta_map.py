"""The map of an expert: which rows of which matrices fine-tuning changed (paper 1, Figure 2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerswap.deltas.atlas import Atlas
from layerswap.report.heat_map import even_scale, readable_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

PAPERS_ORDER = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""The papers' columns; other matrices follow in the order they are stored."""


@dataclass(frozen=True)
class Map:
    """A grid of fractions.

    Attributes:
        title: whose it is.
        columns: names of the matrices, the papers' where they have one.
        labels: what to write above each column: the family's own name, and the papers' if it is
            another.
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
    """What to write above a column: the family's own name, and the papers' if it is another.

    Example: `label_of("w1", "model.layers.0.mlp.gate_proj.weight")` is `"gate_proj (w1)"`.
    """
    words = [word for word in tensor.removesuffix(".weight").split(".") if not word.isdecimal()]
    return column if column == words[-1] or "." in column else f"{words[-1]} ({column})"


def labels_of(atlas: Atlas) -> dict[str, str]:
    """The columns of an atlas's map in their order, and what to write above each."""
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


def map_figure(maps: Sequence[Map], *, caption: str = "", numbers: bool = False) -> Figure:
    """Maps side by side: layers down the side with the last on top, matrices across.

    Args:
        maps: one or more, all of as many layers.
        caption: a line below, such as the threshold.
        numbers: whether to write each fraction into its cell, in percent.
    """
    from matplotlib.figure import Figure

    wide = 0.42 if numbers else 0.34
    width = sum(0.9 + wide * len(m.columns) for m in maps) + 0.9
    figure = Figure(figsize=(width, 1.2 + 0.2 * maps[0].layers), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, one in zip(axes, maps, strict=True):
        image = _draw(axis, one, numbers)
    axes[0].set_ylabel("layer")
    bar = figure.colorbar(image, ax=list(axes), shrink=0.6, aspect=30)
    # Beside few layers there is no room for more.
    room = maps[0].layers >= 16
    bar.set_label("fraction of rows above the threshold" if room else "fraction of rows")
    if caption:
        figure.supxlabel(caption, fontsize="small")
    return figure


def save_figure(figure: Figure, stem: Path) -> list[Path]:
    """Write a figure as SVG, PDF and PNG, the same bytes every time; the paths written."""
    import matplotlib

    written = []
    with matplotlib.rc_context({"svg.hashsalt": "layerswap", "svg.fonttype": "none"}):
        for kind in ("svg", "pdf", "png"):
            path = stem.with_name(f"{stem.name}.{kind}")
            date = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[kind]
            figure.savefig(path, metadata=date, dpi=200)
            written.append(path)
    return written


def _draw(axis: Axes, one: Map, numbers: bool) -> AxesImage:
    import numpy as np
    from matplotlib.colors import LinearSegmentedColormap

    shades = even_scale()
    colours = LinearSegmentedColormap.from_list("even", shades)
    grid = np.full((one.layers, len(one.columns)), np.nan)
    for (layer, column), value in one.cells.items():
        grid[layer, one.columns.index(column)] = value
    image = axis.imshow(grid, cmap=colours, vmin=0, vmax=1, aspect="auto", origin="lower")
    axis.set_title(one.title, fontsize="medium")
    axis.set_xticks(range(len(one.columns)), one.labels, rotation=45, ha="right")
    step = max(1, one.layers // 32)
    axis.set_yticks(range(0, one.layers, step))
    axis.tick_params(labelsize="small")
    if numbers:
        for (layer, column), value in np.ndenumerate(grid):
            if not np.isnan(value):
                shade = readable_on(shades[round(value * (len(shades) - 1))])
                text = f"{100 * value:.0f}"
                axis.text(column, layer, text, ha="center", va="center", color=shade, fontsize=5.5)
    return image
