"""Drawings: matplotlib figures as SVG that follows dark mode, and as PDF and PNG.

An SVG keeps its text as text and needs no font, link or script. A screen reader finds a title and
a description. Matplotlib writes the light colours of `COLOURS` into it, such as `fill: #1f2430`;
`stylesheet` replaces them by CSS variables, which have other values in dark mode. Tools without
CSS show the light colours. Equal facts give equal bytes.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

from layerswap.ground.errors import visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

INK, MUTED, LINE, ACCENT = "#1f2430", "#5d6675", "#dfe1e5", "#1f6f9f"
SHADE, ON_LOW, ON_HIGH = "#004d78", "#000000", "#ffffff"
COLOURS = {
    "ink": (INK, "#e9ebef"),
    "muted": (MUTED, "#a3acba"),
    "line": (LINE, "#2d333d"),
    "accent": (ACCENT, "#6db8e0"),
    "shade": (SHADE, "#4ea0d3"),
    "on-low": (ON_LOW, "#ffffff"),
    "on-high": (ON_HIGH, "#000000"),
}
"""CSS variables with their values in light and in dark mode. `shade` is the colour of a scale,
whose opacity is the value; `on-low` and `on-high` are inks on it."""
HIGH = 0.732
"""Opacity of `shade` above which `on-high` is easier to read than `on-low`, in both modes."""
EXPERTS = ("#e8a33d", "#2c6a9b", "#3f9f86", "#b4679f", "#8fc3e6", "#c4553b", "#d9cc5a", "#7d8490")
"""Colours of experts in both modes; distinct for colour-blind readers too (after Okabe, Ito)."""
FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none", "pdf.fonttype": 42,
    "text.parse_math": False, "font.size": 13, "font.sans-serif": ["DejaVu Sans"],
    "text.color": INK, "axes.labelcolor": MUTED, "axes.titlecolor": INK, "axes.edgecolor": LINE,
    "xtick.color": LINE, "ytick.color": LINE, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.labelsize": 11, "xtick.labelsize": 11, "ytick.labelsize": 11, "axes.titlesize": 13,
    "legend.fontsize": 11, "legend.frameon": False, "grid.color": LINE,
    "axes.spines.top": False, "axes.spines.right": False,
}  # fmt: skip
LOCK = RLock()
"""Held while matplotlib draws: its settings are those of the whole process."""


@contextmanager
def settings() -> Iterator[None]:
    """Settings of matplotlib for every figure; decorates the functions that draw."""
    import matplotlib

    with LOCK, matplotlib.rc_context(SETTINGS), warnings.catch_warnings():
        # A browser has the glyphs that matplotlib's own font lacks.
        warnings.filterwarnings("ignore", r"Glyph .* missing")
        yield


@dataclass(frozen=True)
class Drawing:
    """A figure with a title and a description for screen readers.

    One unit of the figure is a CSS pixel on a page, a point (1/72 inch) on paper.
    """

    figure: Figure
    title: str
    description: str

    def svg(self, *, style: bool = True) -> str:
        """One `<svg>` element, with the stylesheet that a page needs once."""
        import matplotlib

        text = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        title, description = (escape(visible(words)) for words in (self.title, self.description))
        # The identifiers of clips and markers come from this, so that no two figures share one.
        salt: dict[Any, Any] = {"svg.hashsalt": title + description}
        with settings(), matplotlib.rc_context(salt):
            self.figure.savefig(text, format="svg", transparent=True, metadata=nothing)
        self.figure.set_layout_engine("none")  # a second layout would move the parts a little
        head, _, drawn = text.getvalue().partition("</defs>")  # its style is for a whole page
        _, _, width, height = head.partition('viewBox="')[2].partition('"')[0].split()
        drawn = re.sub(r'<g id="[^"]*"', "<g", drawn)
        sheet = f"<style>{stylesheet()}</style>" if style else ""
        return (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f'aria-label="{title}" class="ls-figure"><title>{title}</title>'
            f"<desc>{description}</desc>{sheet}{drawn.strip()}"
        )

    def save(self, stem: Path) -> list[Path]:
        """Write `stem` with the suffixes .svg, .pdf and .png, the same bytes every time."""
        paths = [stem.with_name(f"{stem.name}.{kind}") for kind in ("svg", "pdf", "png")]
        paths[0].write_bytes((self.svg() + "\n").encode())
        with settings():
            self.figure.savefig(paths[1], metadata={"CreationDate": None, "Title": self.title})
            self.figure.savefig(paths[2], dpi=200)
        return paths

    def _repr_svg_(self) -> str:
        return self.svg()


def variables(*, dark: bool) -> str:
    """The CSS variables of the colours."""
    return "".join(f"--{name}:{values[dark]};" for name, values in COLOURS.items())


def stylesheet() -> str:
    """The CSS of figures."""
    rules = "".join(
        f'.ls-figure [style*="{kind}: {light}"]{{{kind}:var(--{name})!important}}'
        for name, (light, _) in COLOURS.items()
        for kind in ("fill", "stroke")
    )
    return (
        f"svg:root{{color-scheme:light dark}}.ls-figure{{{variables(dark=False)}}}"
        f"@media screen and (prefers-color-scheme:dark){{.ls-figure{{{variables(dark=True)}}}}}"
        f".ls-figure *{{stroke-linejoin:round}}.ls-figure text{{font-family:{FONT}!important;"
        # Matplotlib leaves out the fill of black text.
        "fill:var(--on-low);"
        f"font-variant-numeric:tabular-nums}}{rules}"
    )


def scale() -> ListedColormap:
    """The colour scale from 0 to 1: `shade`, more and more opaque."""
    from matplotlib.colors import ListedColormap, to_rgb

    return ListedColormap([(*to_rgb(SHADE), max(0.02, step / 255)) for step in range(256)])


def draw_cells(axes: Axes, shares: Any) -> Any:
    """Colour the cells of a grid of shares, the centre of the first at (0, 0); NaN stays empty."""
    rows, columns = shares.shape
    edges = [[place - 0.5 for place in range(count + 1)] for count in (columns, rows)]
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return axes.pcolormesh(*edges, shares, cmap=scale(), vmin=0, vmax=1)


def ink_on(share: float) -> str:
    """The ink for text on the colour of a share."""
    return ON_HIGH if share > HIGH else ON_LOW


def wrapped(words: str, characters: int) -> str:
    """Words in lines of at most so many characters."""
    return "\n".join(textwrap.wrap(visible(words), characters)) or " "
