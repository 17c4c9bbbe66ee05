"""Draws results with one backend, matplotlib: a grid of scores, intervals, ranks, and linearity.

The colours, the canvas and the SVG of every figure are here. An SVG of a `Drawing` needs no font,
link or script. Its text is text, a screen reader finds a title and a description, and its light
colours are inline, so that tools which know little CSS show it; a browser in dark mode exchanges
them. Equal facts give equal bytes.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import visible
from layerswap.evaluation.statistics import Friedman, Interval
from layerswap.report.tables import MINUS, score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from layerswap.evaluation.linearity import Additivity, Connectivity


INK, MUTED, LINE, ACCENT, WHITE = "#1f2430", "#5d6675", "#c9cfd8", "#1f6f9f", "#ffffff"
DARK = {INK: "#e9ebef", MUTED: "#a3acba", LINE: "#454d5a", ACCENT: "#6db8e0"}
"""The colour that dark mode shows in place of another."""
CELL_INKS = {
    (INK, INK): "#1f2431",
    (INK, WHITE): "#1f2432",
    (WHITE, INK): "#fffffe",
    (WHITE, WHITE): "#fffffd",
}
"""Ink on a cell of the scale in light and in dark mode: its colour, a shade apart from others."""
EXPERTS = {
    "#e8a33d": "#e5a548",
    "#2c6a9b": "#4f93c9",
    "#3f9f86": "#4fb69b",
    "#b4679f": "#c783b4",
    "#8fc3e6": "#a9d3ef",
    "#c4553b": "#d9745b",
    "#d9cc5a": "#ddd27a",
    "#7d8490": "#8f97a5",
}
"""Colours of experts, light: dark; far apart for colour-blind readers too (after Okabe, Ito)."""
SCALE = (
    ("#eef3f6", "#1c2733"),
    ("#d7e5ed", "#1e3142"),
    ("#bbd3e1", "#213f54"),
    ("#9cc1d4", "#265067"),
    ("#7badc6", "#2c627a"),
    ("#5a97b4", "#3f8097"),
    ("#34779a", "#6aa5b8"),
    ("#1f6184", "#93c3d1"),
    ("#124b6b", "#c2e2ea"),
)
"""Stops of the one colour scale, low to high, (light, dark); see `even_scale`."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "layerswap", "pdf.fonttype": 42,
    "text.parse_math": False, "axes.unicode_minus": True, "font.size": 13,
    "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": INK, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.labelsize": 11, "xtick.labelsize": 11, "ytick.labelsize": 11, "axes.titlesize": 13,
    "legend.fontsize": 11, "legend.frameon": False, "grid.color": LINE,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip


@contextmanager
def settings() -> Iterator[None]:
    """Settings of matplotlib for every figure; decorates the functions that draw."""
    import matplotlib

    with matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # A browser has the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", r"Glyph .* missing|.*[fF]ont family")
        yield


@dataclass(frozen=True)
class Drawing:
    """A figure, and what a screen reader says of it.

    Attributes:
        figure: one unit is a CSS pixel on a page, a point (1/72 inch) on paper.
        title: what is shown, in a few words.
        description: the numbers or zones, as a sentence.
    """

    figure: Figure
    title: str
    description: str

    def svg(self) -> str:
        """One `<svg>` element for a page or a file."""
        text = io.StringIO()
        with settings():
            self.figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        drawn = text.getvalue()
        mark = f"ls-{sha256((drawn + self.title).encode()).hexdigest()[:8]}"
        head, body = drawn[drawn.index("<svg ") :].split(">", 1)
        size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', head)
        assert size is not None
        body = re.sub(r"\s*<metadata>.*?</metadata>|<style.*?</style>", "", body, flags=re.DOTALL)
        body = re.sub(r"font-family: [^;\"]*", f"font-family: {FONT}", body)
        body = re.sub(r'\bid="(?=[mpch][0-9a-f]{10}")|#(?=[mpch][0-9a-f]{10}["\)])',
                      rf"\g<0>{mark}-", body)  # fmt: skip
        body = re.sub(r'<g id=([\'"])tip:(.*?)\1>', r"<g><title>\2</title>", body)
        body = re.sub(r' id="[\w.]+_\d+"', "", body)
        body = re.sub(r"\s*\n\s*", " ", body)
        title, description = escape(visible(self.title)), escape(visible(self.description))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {size[1]} {size[2]}" width="{size[1]}" height="{size[2]}" role="img" '
            f'aria-label="{title}" class="ls-figure {mark}"><title>{title}</title>'
            f"<desc>{description}</desc><style>{_style(body, mark)}</style>{body}"
        )

    def save(self, stem: Path) -> list[Path]:
        """Write `stem` with the suffixes .svg, .pdf and .png, the same bytes every time.

        Returns:
            The paths written.
        """
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "pdf", "png")]
        paths[0].write_text(self.svg() + "\n", "utf-8")
        with settings():
            self.figure.savefig(paths[1], metadata={"CreationDate": None, "Title": self.title})
            self.figure.savefig(paths[2], dpi=200)
        return paths

    def _repr_svg_(self) -> str:
        return self.svg()


def _style(body: str, mark: str) -> str:
    """The rules of one SVG: the canvas of a file by itself, and the colours of dark mode."""
    scale = dict(zip(even_scale(), even_scale(dark=True), strict=True))
    pairs = {**DARK, **EXPERTS, **scale, **{ink: dark for (_, dark), ink in CELL_INKS.items()}}
    rules = "".join(
        f'.{mark} [style*="{kind}: {light}"]{{{kind}:{dark}!important}}'
        for light, dark in pairs.items()
        for kind in ("fill", "stroke")
        if f"{kind}: {light}" in body
    )
    return (
        f"svg:root{{color-scheme:light dark}}.{mark} *{{stroke-linejoin:round}}"
        f".{mark} text{{font-variant-numeric:tabular-nums}}"
        f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
    )


class Canvas:
    """Axes whose unit is one pixel, from the left and from the top.

    Args:
        width: in pixels.
        height: in pixels.
    """

    def __init__(self, width: float, height: float) -> None:
        from matplotlib.figure import Figure

        self.figure = Figure(figsize=(width / 72, height / 72))
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.axis("off")
        self.axes.set(xlim=(0, width), ylim=(height, 0))

    def box(
        self, x: float, y: float, width: float, height: float, *, radius: float = 0, tip: str = "",
        **style: Any,
    ) -> None:  # fmt: skip
        """A rectangle with round corners; a browser shows `tip` beside the pointer."""
        self.axes.add_patch(_rounded((x, y), (width, height), radius, tip, **style))

    def stripes(
        self, x: float, y: float, width: float, height: float, shares: Mapping[str, float], *,
        radius: float = 0, tip: str = "",
    ) -> None:  # fmt: skip
        """A rectangle in diagonal stripes, each as broad as the share of its colour."""
        from matplotlib.patches import PathPatch
        from matplotlib.path import Path as Outline

        period, start = 11.0 * len(shares), 0.0
        self.box(x, y, width, height, radius=radius, tip=tip, facecolor=next(iter(shares)))
        edge = _rounded((x, y), (width, height), radius, "")
        for colour, share in shares.items():
            corners: list[tuple[float, float]] = []
            left = x - height - (x - height) % period + start
            while left < x + width:
                right = left + share * period
                corners += [(left, y + height), (right, y + height), (right + height, y),
                            (left + height, y), (left, y + height)]  # fmt: skip
                left += period
            codes = [Outline.MOVETO, *[Outline.LINETO] * 3, Outline.CLOSEPOLY]
            path = Outline(corners, codes * (len(corners) // 5))
            stripes = PathPatch(path, facecolor=colour, edgecolor="none")
            self.axes.add_patch(stripes)
            edge.set_transform(self.axes.transData)
            stripes.set_clip_path(edge)
            start += share * period

    def line(self, xs: Sequence[float], ys: Sequence[float], **style: Any) -> None:
        """A line through points."""
        self.axes.plot(xs, ys, clip_on=False, solid_capstyle="round", **style)

    def text(self, x: float, y: float, words: str, **style: Any) -> None:
        """One line with its baseline at y."""
        self.axes.text(x, y, visible(words), **style)


def _rounded(
    corner: tuple[float, float], size: tuple[float, float], radius: float, tip: str, **style: Any
) -> Any:
    from matplotlib.patches import FancyBboxPatch

    shape = f"round,pad=0,rounding_size={min(radius, size[1] / 2)}" if radius else "square,pad=0"
    box = FancyBboxPatch(corner, *size, boxstyle=shape,
                         **{"edgecolor": "none", "clip_on": False, **style})  # fmt: skip
    if tip:
        box.set_gid(f"tip:{visible(tip)}")
    return box


def wrapped(words: str, width: float, size: float) -> list[str]:
    """Words in lines of about `width` pixels, broken at spaces, or within a longer word."""
    from rich.console import Console
    from rich.text import Text

    lines = Text(visible(words)).wrap(Console(), max(4, int(width / (0.56 * size))))
    return [line.plain.rstrip() for line in lines] or [""]


@cache
def even_scale(*, dark: bool = False, count: int = 33) -> tuple[str, ...]:
    """Colours of evenly spaced lightness, low to high: `#rrggbb`.

    One hue, ordered by lightness alone (CIE L*), which colour-blind readers see alike. On white
    the low end is nearly white, in dark mode nearly black: what has not changed stays quiet.

    Args:
        dark: for dark mode.
        count: how many colours.
    """
    stops = [_channels(pair[dark]) for pair in SCALE]
    levels = [lightness(pair[dark]) for pair in SCALE]
    found = []
    for k in range(count):
        level = levels[0] + (levels[-1] - levels[0]) * k / (count - 1)
        # The two stops around this lightness; levels fall in light mode and rise in dark mode.
        i = next((i for i in range(1, len(levels)) if (levels[i] >= level) == dark), -1)
        i %= len(levels)
        part = (level - levels[i - 1]) / (levels[i] - levels[i - 1])
        channels = (round(a + part * (b - a)) for a, b in zip(stops[i - 1], stops[i], strict=True))
        found.append("#" + "".join(f"{value:02x}" for value in channels))
    return tuple(found)


def shade(share: float) -> str:
    """The colour of a value from 0 to 1 on the light scale."""
    scale = even_scale()
    return scale[round(share * (len(scale) - 1))]


def ink_on(colour: str) -> str:
    """The ink that stands out most from a colour of the light scale, and from its dark one."""
    dark = even_scale(dark=True)[even_scale().index(colour)]
    light_ink, dark_ink = (
        max((INK, WHITE), key=lambda ink: contrast(ink, cell)) for cell in (colour, dark)
    )
    return CELL_INKS[light_ink, dark_ink]


def contrast(one: str, other: str) -> float:
    """How far apart two `#rrggbb` colours are, from 1 to 21 (WCAG 2; 4.5 is enough for text)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lightness(colour: str) -> float:
    """How light a `#rrggbb` colour looks, from 0 to 100 (CIE L*)."""
    luminance = _luminance(colour)
    return 116 * luminance ** (1 / 3) - 16 if luminance > 216 / 24389 else luminance * 24389 / 27


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    shares = [value / 255 for value in _channels(colour)]
    red, green, blue = (
        share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


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
