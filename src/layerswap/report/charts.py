"""Draws results: a grid of scores, means with their intervals, ranks, and linearity."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerswap.evaluation.statistics import Friedman, Interval
from layerswap.report.drawing import (
    ACCENT,
    INK,
    MUTED,
    Canvas,
    Drawing,
    even_scale,
    ink_on,
    settings,
    shade,
    wrapped,
)
from layerswap.report.tables import MINUS, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from layerswap.evaluation.linearity import Additivity, Connectivity

GridCell = tuple[int, int]
MARKS = {"best": "best", "default": "the paper's default"}
LEFT, TOP, WIDE, HIGH, SPACE = 52, 44, 54, 38, 3
"""Of a heat map, in pixels: where the cells begin, their pitch, and the space between two."""


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
    """A grid of scores with its numbers, such as accuracy by bottom and top layers.

    Darker is higher in light mode, brighter is higher in dark mode. A pair that is not in
    `values`, such as zones that do not fit, stays empty.

    Args:
        values: score of each (row, column).
        row_label: what the rows count, such as `bottom layers`.
        column_label: what the columns count.
        best: the cell to outline as the best.
        default: the cell to outline as the paper's default; not marked where `values` lacks it.
        unit: `%` shows fractions of 1 as percentages; another unit is written beside the scale.
        limits: the scores at the two ends of the colour scale, so that grids can share one; the
            lowest and the highest of `values` by default.

    Raises:
        ValueError: no values, one that is not finite, or a best that is not among them.
    """
    if not values:
        raise ValueError("a heat map needs at least one value")
    if best is not None and best not in values:
        raise ValueError(f"the best cell {best} is not among the values")
    rows, columns = sorted({r for r, _ in values}), sorted({c for _, c in values})
    low, high = limits or (min(values.values()), max(values.values()))
    end = TOP + len(rows) * HIGH
    canvas = Canvas(max(LEFT + len(columns) * WIDE + 6, LEFT + 250), end + 56)
    quiet = {"color": MUTED, "fontsize": 11}
    canvas.text(LEFT + (len(columns) * WIDE - SPACE) / 2, 14, column_label, ha="center", **quiet)
    canvas.text(14, TOP + (len(rows) * HIGH - SPACE) / 2, row_label, rotation=90, ha="center",
                va="center", rotation_mode="anchor", **quiet)  # fmt: skip
    for i, column in enumerate(columns):
        middle = LEFT + i * WIDE + (WIDE - SPACE) / 2
        canvas.text(middle, TOP - 9, str(column), ha="center", **quiet)
    for i, row in enumerate(rows):
        canvas.text(LEFT - 9, TOP + i * HIGH + 22, str(row), ha="right", **quiet)

    def corner(cell: GridCell) -> tuple[float, float]:
        return LEFT + columns.index(cell[1]) * WIDE, TOP + rows.index(cell[0]) * HIGH

    for cell, value in sorted(values.items()):
        x, y = corner(cell)
        words = score(value, unit)
        colour = shade((value - low) / (high - low) if high > low else 0.5)
        canvas.box(x, y, WIDE - SPACE, HIGH - SPACE, radius=4, facecolor=colour,
                   tip=f"{row_label} {cell[0]}, {column_label} {cell[1]}: {words}")  # fmt: skip
        canvas.text(x + (WIDE - SPACE) / 2, y + (HIGH - SPACE) / 2 + 4.5, words, ha="center",
                    color=ink_on(colour), fontsize=13)  # fmt: skip
    wanted = {"best": best, "default": default}
    marks = {kind: cell for kind, cell in wanted.items() if cell is not None and cell in values}
    for kind, cell in marks.items():
        x, y = corner(cell)
        grow = 4.5 if best == default and kind == "default" else 1.5
        size = (WIDE - SPACE + 2 * grow, HIGH - SPACE + 2 * grow)
        _outline(canvas, kind, (x - grow, y - grow), size)
    _key(canvas, end + 16, (score(low, unit), f"{score(high, unit)} {unit}".rstrip()), marks)
    said = [f"{len(values)} combinations, from {score(min(values.values()), unit)} to "
            f"{score(max(values.values()), unit)} {unit}".rstrip()]  # fmt: skip
    for kind, cell in marks.items():
        words = f"{score(values[cell], unit)} {unit}".rstrip()
        said.append(f"{MARKS[kind]}: {row_label} {cell[0]}, {column_label} {cell[1]}, {words}")
    return Drawing(canvas.figure, f"Score by {row_label} and {column_label}", "; ".join(said))


def _outline(
    canvas: Canvas, kind: str, corner: tuple[float, float], size: tuple[float, float]
) -> None:
    dashed = kind == "default"
    canvas.box(
        *corner, *size, radius=min(5.0, size[1] / 4), facecolor="none", edgecolor=INK,
        linewidth=1.5 if dashed else 2.5, linestyle=(0, (3, 2)) if dashed else "-",
    )  # fmt: skip


def _key(canvas: Canvas, y: float, ends: tuple[str, str], marks: Mapping[str, GridCell]) -> None:
    """The scale with its two ends, and what the outlines mean."""
    quiet = {"color": MUTED, "fontsize": 11}
    canvas.text(LEFT, y + 9, ends[0], **quiet)
    x, colours = LEFT + 6.5 * len(ends[0]) + 6, even_scale()
    for i, colour in enumerate(colours):
        canvas.box(x + i * 108 / len(colours), y, 108 / len(colours) + 0.3, 10, facecolor=colour)
    canvas.text(x + 114, y + 9, ends[1], **quiet)
    x, y = LEFT + 2.0, y + 24
    for kind in marks:
        _outline(canvas, kind, (x, y), (16, 10))
        canvas.text(x + 23, y + 9, MARKS[kind], **quiet)
        x += 41 + 6.2 * len(MARKS[kind])


@settings()
def draw_intervals(
    rows: Sequence[tuple[str, Interval]],
    *,
    measure: str,
    highlight: str | None = None,
    unit: str = "%",
) -> Drawing:
    """A dot and a whisker for each model: the mean of one measure and its interval.

    A dashed line carries the mean of the highlighted model through all rows. Rows keep their
    order. Overlapping whiskers do not show that two models are equal: a paired test compares them.

    Args:
        rows: (name, interval) of each model, from the top.
        measure: what was measured, for the axis.
        highlight: the name of the row to bring out, such as the swap.
        unit: `%` shows fractions of 1 as percentages; another unit is written on the axis.

    Raises:
        ValueError: no rows, a number that is not finite, or a highlight that names no row.
    """
    if not rows:
        raise ValueError("an interval chart needs at least one row")
    if highlight is not None and highlight not in [name for name, _ in rows]:
        raise ValueError(f"no row is called {highlight!r}")
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    spans = [f"{score(i.low, unit)} to {score(i.high, unit)}" for _, i in rows]
    lines = [wrapped(name, 144, 13) for name, _ in rows]
    heights = [16 * len(each) + 18 for each in lines]
    height, width = sum(heights) + 54.0, 460.0
    canvas = Canvas(width, height)
    axes = canvas.figure.add_axes((156 / width, 42 / height, 244 / width, 1 - 54 / height))
    axes.set(ylim=(sum(heights), 0), yticks=(), xlabel=f"{measure}, {unit}")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=True, axis="x")
    axes.tick_params(axis="x", length=0)
    axes.set_axisbelow(True)
    scale = 100 if unit == "%" else 1
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: f"{at:g}".replace("-", MINUS)))
    y = 0.0
    for (name, interval), words, row_height in zip(rows, lines, heights, strict=True):
        bold, middle = name == highlight, y + row_height / 2
        low, mean, high = (scale * v for v in (interval.low, interval.mean, interval.high))
        colour = ACCENT if bold else MUTED
        axes.errorbar([mean], [middle], xerr=[[mean - low], [high - mean]], color=colour,
                      fmt="o", markersize=11 if bold else 8, capsize=4, clip_on=False,
                      elinewidth=2.5 if bold else 1.75)  # fmt: skip
        if bold:
            axes.axvline(mean, color=ACCENT, linewidth=1.25, linestyle=(0, (2, 3)), zorder=1)
        style = {"color": ACCENT if bold else INK, "weight": "bold" if bold else "normal"}
        for k, line in enumerate(words):
            canvas.text(0, y + 33 + 16 * k, line, **style)
        canvas.text(width, 12 + middle + 4.5, score(interval.mean, unit), ha="right", **style)
        y += row_height
    said = [f"{n} {score(i.mean, unit)} ({s})" for (n, i), s in zip(rows, spans, strict=True)]
    return Drawing(canvas.figure, f"{measure}: means with their intervals", "; ".join(said))


@settings()
def draw_ranks(found: Friedman) -> Drawing:
    """Friedman's mean ranks as a critical-difference diagram (Demsar, 2006).

    A bar joins the treatments whose mean ranks differ by less than Nemenyi's critical difference
    at 0.05.
    """
    import pandas as pd
    from matplotlib.figure import Figure
    from scikit_posthocs import critical_difference_diagram

    ranks = pd.Series(found.mean_ranks, index=list(found.treatments))
    p = pd.DataFrame(1.0, index=ranks.index, columns=ranks.index)
    for pair in found.pairs:
        apart = abs(ranks[pair.first] - ranks[pair.second]) > found.critical_difference
        p.loc[pair.first, pair.second] = p.loc[pair.second, pair.first] = 0.0 if apart else 1.0
    figure = Figure(figsize=(8, 1.2 + 0.22 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    critical_difference_diagram(ranks, p, ax=axes, label_fmt_left="{label} ({rank:.1f})  ",
                                label_fmt_right="  ({rank:.1f}) {label}",
                                crossbar_props={"color": INK},
                                color_palette=[INK] * len(ranks))  # fmt: skip
    axes.set_title(
        f"Mean ranks over {found.conditions} conditions; critical difference "
        f"{found.critical_difference:.2f}", fontsize=11,
    )  # fmt: skip
    said = "; ".join(
        f"{n} {r:.2f}" for n, r in zip(found.treatments, found.mean_ranks, strict=True)
    )
    return Drawing(figure, "Mean ranks, with bars over those that do not differ", said)


@settings()
def draw_linearity(line: Connectivity, sums: Additivity) -> Drawing:
    """Three panels: loss along the line, the same for each layer, and additivity by layer.

    Args:
        line: loss between two experts.
        sums: additivity of their deltas, over as many layers.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    left.plot(line.whole.positions, line.whole.losses, marker="o", markersize=4, color=ACCENT)
    loss_at = dict(zip(line.whole.positions, line.whole.losses, strict=True))
    left.plot((0, 1), (loss_at[0.0], loss_at[1.0]), linestyle=":", color=MUTED)
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

    # The lightest third of the scale would vanish on white.
    last, shades = max(1, len(line.layers) - 1), ListedColormap(even_scale()[10:])
    for layer, one in enumerate(line.layers):
        axes.plot(one.positions, one.losses, color=shades(layer / last))
    figure = axes.get_figure()
    assert figure is not None
    bar = figure.colorbar(ScalarMappable(Normalize(0, last), shades), ax=axes, label="layer")
    bar.locator = MaxNLocator(integer=True)
    bar.update_ticks()
    axes.set_title(f"one layer interpolated, {line.elsewhere} elsewhere")


def _draw_departures(axes: Axes, sums: Additivity) -> None:
    layers = range(len(sums.layers))
    axes.barh([layer + 0.2 for layer in layers], sums.layers, height=0.4, color="#e8a33d",
              label="all layers changed")  # fmt: skip
    if sums.alone:
        axes.barh([layer - 0.2 for layer in layers], sums.alone, height=0.4, color="#2c6a9b",
                  label="this layer alone")  # fmt: skip
    axes.axvline(sums.logits, linestyle=":", color=INK, label="logits")
    axes.set_yticks(layers[:: max(1, math.ceil(len(layers) / 16))])
    axes.set_ylabel("layer")
    axes.set_xlabel("departure from the sum of effects")
    axes.set_title("both deltas at once")
    axes.legend(loc="lower right")
