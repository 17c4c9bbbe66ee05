"""Maps of experts: which rows of which matrices fine-tuning changed (paper 1, figure 2).

`write_atlas` writes the map as a figure, beside the tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import atomic_folder
from layerswap.deltas.atlas import ATLAS, Atlas
from layerswap.ground.errors import visible
from layerswap.report.drawing import Drawing, draw_cells, settings
from layerswap.report.tables import score

PAPERS_ORDER = ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
"""The papers' columns; other matrices follow in the order they are stored."""


@dataclass(frozen=True)
class Map:
    """A grid: the fraction of rows above the threshold, by layer and matrix.

    `columns` are the papers' names of the matrices if they exist, `labels` the headings.
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
def draw_maps(maps: Sequence[Map], *, caption: str = "") -> Drawing:
    """Draw maps side by side: layers down the side with the last on top, matrices across."""
    import numpy as np
    from matplotlib.figure import Figure

    layers, facts = maps[0].layers, []
    width = sum(0.9 + 0.36 * len(shown.columns) for shown in maps) + 1.2
    figure = Figure(figsize=(width, 1.6 + 0.2 * layers), layout="constrained")
    axes = figure.subplots(1, len(maps), squeeze=False)[0]
    for axis, shown in zip(axes, maps, strict=True):
        shares = np.full((layers, len(shown.columns)), np.nan)
        for (layer, column), value in shown.cells.items():
            shares[layer, shown.columns.index(column)] = value
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


def draw_changes(atlas: Atlas, threshold: float | None = None, *, caption: str = "") -> Drawing:
    """The maps of all experts; without a threshold, of the 15% of rows that each changed most."""
    at = thresholds_of(atlas, threshold)
    maps = [map_of(atlas, expert, at[expert]) for expert in atlas.experts]
    return draw_maps(maps, caption=caption)


# --- the folder of an atlas: tables and figures ---

LOSS = 0.3
"""Share of a delta lost to bfloat16 above which a warning is given."""


def write_atlas(
    atlas: Atlas, out: Path, *, threshold: float | None = None, overwrite: bool = False
) -> list[str]:
    """Write tables (Parquet) and the map (SVG, PDF, PNG); return lines on the content."""
    target = out.expanduser().absolute()
    with atomic_folder(target, marker=ATLAS, overwrite=overwrite) as folder:
        atlas.save(folder)
        at = thresholds_of(atlas, threshold)
        above = ", ".join(f"{value:.2g} ({expert})" for expert, value in at.items())
        if threshold is not None:
            above = f"{threshold:.2g}"
        caption = f"rows ({atlas.axis} features) with a MAV above {above}"
        draw_changes(atlas, threshold, caption=caption).save(folder / "map")
    return _lines(atlas, target)


def thresholds_of(atlas: Atlas, threshold: float | None) -> dict[str, float]:
    """The row MAV above which a row counts, by expert: as given, or that of its top 15%."""
    return {
        expert: atlas.threshold(expert) if threshold is None else threshold
        for expert in atlas.experts
    }


def atlas_facts(atlas: Atlas, threshold: float | None = None) -> dict[str, Any]:
    """The size of each expert's delta, as plain data."""
    experts = {
        expert: {
            "largest_relative_norm": max(change.relative_norm for change in atlas.of(expert)),
            "lost_to_bfloat16_share": atlas.lost(expert),
        }
        for expert in atlas.experts
    }
    return {
        "base": atlas.base,
        "axis": atlas.axis,
        "thresholds_mav": thresholds_of(atlas, threshold),
        "experts": experts,
    }


def _lines(atlas: Atlas, folder: Path) -> list[str]:
    lines = []
    for expert in atlas.experts:
        lost, changes = atlas.lost(expert), atlas.of(expert)
        biggest = max(change.relative_norm for change in changes)
        measured = all(change.lost_is_measured for change in changes if change.norm)
        if not biggest:
            lines.append(
                f"note: {expert} has the weights of its base: its training changed nothing"
            )
            continue
        lines.append(
            f"{expert}: deltas of up to {biggest:.2%} of their tensor's norm; "
            + (
                f"saved in bfloat16 it would lose {lost:.1%} of its delta"
                if measured
                else f"rounding to bfloat16 has cost about {min(lost, 1):.1%} of its delta, and at "
                f"most {atlas.lost_at_most(expert):.1%} of the delta's size"
            )
        )
        if lost > LOSS:
            lines.append(
                f"warning: much of the delta of {expert} "
                + (
                    "would be lost in bfloat16; keep experts in float32"
                    if measured
                    else "is lost to bfloat16; save experts in float32"
                )
            )
    return [*lines, f"wrote {folder}; open {folder / 'map.svg'}"]
