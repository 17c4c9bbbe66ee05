"""The one drawing backend: matplotlib, with the colours, the canvas and the SVG of every figure.

An SVG of a `Drawing` needs no font, link or script. Its text is text, a screen reader finds a title
and a description, and its light colours are inline, so that tools which know little CSS show it;
a browser in dark mode exchanges them. Equal facts give equal bytes.
"""

from __future__ import annotations

import io
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
