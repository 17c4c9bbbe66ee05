"""Charts of results: a grid of scores, means with intervals, ranks, and linearity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import atomic_folder
from layerswap.evaluation.statistics import Friedman, Interval
from layerswap.ground.errors import visible
from layerswap.report.drawing import (
    ACCENT,
    EXPERTS,
    INK,
    MUTED,
    Drawing,
    draw_cells,
    ink_on,
    scale,
    settings,
    wrapped,
)
from layerswap.report.tables import MINUS, Difference, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Rectangle

    from layerswap.evaluation.linearity import Additivity, Connectivity, Linearity

GridCell = tuple[int, int]


@settings()
def draw_heat_map(
    values: Mapping[GridCell, float],
    *,
    row_label: str,
    column_label: str,
    best: GridCell | None = None,
    default: GridCell | None = None,
    unit: str = "%",
    limits: tuple[float, float] | None = None,
) -> Drawing:
    """Draw a grid of scores with its numbers, such as accuracy by bottom and top layers.

    `values` holds the score of each (row, column). The cells `best` and `default` are outlined.
    The unit `%` shows fractions of 1 as percentages. `limits` are the scores at the two ends of the
    colour scale, so that several grids can share a scale.
    """
    import numpy as np
    from matplotlib.figure import Figure

    rows, columns = sorted({r for r, _ in values}), sorted({c for _, c in values})
    words = {cell: score(value, unit) for cell, value in values.items()}
    low, high = limits or (min(values.values()), max(values.values()))
    shades = np.full((len(rows), len(columns)), np.nan)
    size = (max(4.0, 1 + 0.75 * len(columns)), 1.1 + 0.53 * len(rows))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots()
    for (row, column), value in values.items():
        y, x = rows.index(row), columns.index(column)
        shades[y, x] = (value - low) / (high - low) if high > low else 0.5
        axes.text(x, y, words[row, column], ha="center", va="center", color=ink_on(shades[y, x]))
    draw_cells(axes, shades)
    # The first row is below, as the first layer of a stack is.
    axes.set_xticks(range(len(columns)), list(map(str, columns)))
    axes.set_yticks(range(len(rows)), list(map(str, rows)))
    axes.set(xlabel=visible(column_label), ylabel=visible(row_label))
    outlines = {"best": best, "the paper's default": default}
    marked = {name: cell for name, cell in outlines.items() if cell and cell in values}
    for name, cell in marked.items():
        y, x = rows.index(cell[0]), columns.index(cell[1])
        # Where one cell has both outlines, the second lies inside the first.
        inset = 0.1 if name != "best" and best == cell else 0.04
        axes.add_patch(_outline(name, (x, y), inset, ink_on(shades[y, x])))
    if marked:
        keys = [_outline(name, (0, 0), 0, INK) for name in marked]
        axes.legend(keys, list(marked), loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    facts = [f"{len(values)} combinations, from {score(min(values.values()), unit)} to "
             f"{score(max(values.values()), unit)} {unit}".rstrip()]  # fmt: skip
    for name, cell in marked.items():
        at = f"{name}: {row_label} {cell[0]}, {column_label} {cell[1]}"
        facts.append(f"{at}, {words[cell]} {unit}".rstrip())
    return Drawing(figure, f"Score by {row_label} and {column_label}", "; ".join(facts))


def _outline(name: str, cell: tuple[float, float], inset: float, colour: str) -> Rectangle:
    """The outline of a cell of a heat map: solid for the best, dashed for the default."""
    from matplotlib.patches import Rectangle

    corner, side = (cell[0] - 0.5 + inset, cell[1] - 0.5 + inset), 1 - 2 * inset
    style = (2.5, "-") if name == "best" else (1.5, "--")
    return Rectangle(corner, side, side, fill=False, edgecolor=colour,
                     linewidth=style[0], linestyle=style[1])  # fmt: skip


@settings()
def draw_intervals(
    rows: Sequence[tuple[str, Interval]],
    *,
    measure: str,
    highlight: str | None = None,
    unit: str = "%",
    differences: bool = False,
) -> Drawing:
    """Draw a dot and a whisker for each model: the mean of one measure and its interval.

    A dotted line carries the mean of the highlighted model through all rows. Overlapping whiskers
    do not show that two models are equal: a paired test compares them. Such `differences` have a
    line at zero, and those that exclude it have colour and a star.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    words = [f"{score(i.low, unit)} to {score(i.high, unit)}" for _, i in rows]
    if differences:
        shown = [Difference(i, unit).words for _, i in rows]
        marks = [words.number + words.stars for words in shown]
    else:
        marks = [score(i.mean, unit) for _, i in rows]
    names = [wrapped(name, 22) for name, _ in rows]
    heights = [0.25 + 0.22 * (1 + name.count("\n")) for name in names]
    figure = Figure(figsize=(6.4, 0.8 + sum(heights)), layout="constrained")
    axes = figure.subplots()
    factor, top = 100 if unit == "%" else 1, 0.0
    middles = []
    for (name, interval), height, mark in zip(rows, heights, marks, strict=True):
        emphasised, middle = name == highlight or mark.endswith("*"), top + height / 2
        low, mean, high = (factor * v for v in (interval.low, interval.mean, interval.high))
        axes.errorbar([mean], [middle], xerr=[[mean - low], [high - mean]], fmt="o", capsize=4,
                      color=ACCENT if emphasised else MUTED, clip_on=False,
                      markersize=11 if emphasised else 8)  # fmt: skip
        if name == highlight:
            axes.axvline(mean, color=ACCENT, linewidth=1.25, linestyle=":", zorder=1)
        axes.text(1.03, middle, mark, va="center",
                  transform=axes.get_yaxis_transform(), **_emphasis(emphasised))  # fmt: skip
        middles.append(middle)
        top += height
    if differences:
        axes.axvline(0, color=INK, linewidth=1, zorder=1)
    label = "points" if differences and unit == "%" else unit
    axes.set(ylim=(top, 0), xlabel=visible(f"{measure}, {label}"))
    axes.set_yticks(middles, names)
    for tick, (name, _) in zip(axes.get_yticklabels(), rows, strict=True):
        tick.set(fontsize=13, linespacing=1.1, **_emphasis(name == highlight))
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=True, axis="x")
    axes.tick_params(length=0)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}".replace("-", MINUS)))
    facts = [f"{name} {score(interval.mean, unit)} ({span})"
             for (name, interval), span in zip(rows, words, strict=True)]  # fmt: skip
    return Drawing(figure, f"{measure}: means with their intervals", "; ".join(facts))


def _emphasis(emphasised: bool) -> dict[str, Any]:
    return {"color": ACCENT, "weight": "bold"} if emphasised else {"color": INK}


@settings()
def draw_ranks(test: Friedman) -> Drawing:
    """Draw Friedman's mean ranks as a critical-difference diagram (Demsar, 2006).

    A bar joins the treatments whose mean ranks differ by less than Nemenyi's critical difference
    at 0.05.
    """
    import pandas as pd
    from matplotlib.figure import Figure
    from scikit_posthocs import critical_difference_diagram

    ranks = pd.Series(test.mean_ranks, index=list(map(visible, test.treatments)))
    gaps = abs(ranks.to_numpy()[:, None] - ranks.to_numpy())
    p = pd.DataFrame(1.0 * (gaps <= test.critical_difference), ranks.index, ranks.index)
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    critical_difference_diagram(ranks, p, ax=axes, label_fmt_left="{label} ({rank:.1f})  ",
                                label_fmt_right="  ({rank:.1f}) {label}",
                                crossbar_props={"color": INK},
                                color_palette=[INK] * len(ranks))  # fmt: skip
    axes.set_title(
        f"Mean ranks over {test.conditions} conditions; critical difference "
        f"{test.critical_difference:.2f}", fontsize=11,
    )  # fmt: skip
    facts = "; ".join(f"{name} {rank:.2f}" for name, rank in ranks.items())
    return Drawing(figure, "Mean ranks, with bars over those that do not differ", facts)


@settings()
def draw_linearity(line: Connectivity, sums: Additivity) -> Drawing:
    """Draw the loss along the line between two experts, also by layer, and additivity by layer."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(line.whole.positions, line.whole.losses, marker="o", markersize=4, color=ACCENT)
    ends = (line.whole.losses[0], line.whole.losses[-1])
    left.plot((0, 1), ends, linestyle=":", color=MUTED)
    left.set_title("all layers interpolated")
    _draw_layers(middle, line)
    for axes in (left, middle):
        axes.set_xticks((0, 1), ("task expert", "language expert"))
        axes.set_ylabel("loss, nats per token")
    _draw_departures(right, sums)
    return Drawing(
        figure,
        "Loss between two experts, and departure from additivity",
        f"Barrier {line.whole.barrier:.4f} nats per token with all layers interpolated; departure "
        f"{100 * sums.logits:.1f}% in the logits",
    )


def _draw_layers(axes: Axes, line: Connectivity) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap, Normalize
    from matplotlib.ticker import MaxNLocator

    # The lightest third of the scale would vanish on the page.
    last, shades = max(1, len(line.layers) - 1), ListedColormap(scale()(range(85, 256)))
    for layer, losses in enumerate(line.layers):
        axes.plot(losses.positions, losses.losses, color=shades(layer / last))
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), shades), ax=axes, label="layer")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    axes.set_title("one layer interpolated, task expert elsewhere")


def _draw_departures(axes: Axes, sums: Additivity) -> None:
    layers = range(len(sums.layers))
    axes.barh(layers, sums.layers, color=EXPERTS[0], label="hidden states after the layer")
    axes.axvline(sums.logits, linestyle=":", color=INK, label="logits")
    axes.set_yticks(layers[:: max(1, math.ceil(len(layers) / 16))])
    axes.set_ylabel("layer")
    axes.set_xlabel("departure from the sum of effects")
    axes.set_title("both deltas at once")
    axes.legend(loc="lower right")


TABLE = "linearity.parquet"


def write_linearity(measured: Linearity, out: Path, *, overwrite: bool = False) -> Path:
    """Write `linearity.parquet` and the figure as SVG, PDF and PNG; returns the absolute folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    target = out.expanduser().absolute()
    with atomic_folder(target, marker=TABLE, overwrite=overwrite) as folder:
        pq.write_table(pa.Table.from_pylist(measured.rows()), folder / TABLE)
        draw_linearity(measured.line, measured.sums).save(folder / "linearity")
    return target
