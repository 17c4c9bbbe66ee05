"""SVG by hand: elements, text that fits, and the colours that every figure shares.

A figure is one string: well-formed XML that needs no font, link or script, with the same bytes
for the same facts. Colours are plain class rules, with a dark set for readers who prefer one, so
a figure reads the same alone, in a page, and in tools that know little CSS.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping

INK, MUTED, LINE, ACCENT = ("#1f2430", "#5d6675", "#c9cfd8", "#1f6f9f")
DARK_INK, DARK_MUTED, DARK_LINE, DARK_ACCENT = ("#e9ebef", "#a3acba", "#454d5a", "#6db8e0")

EXPERTS = (
    ("#e8a33d", "#e5a548"),
    ("#2c6a9b", "#4f93c9"),
    ("#3f9f86", "#4fb69b"),
    ("#b4679f", "#c783b4"),
    ("#8fc3e6", "#a9d3ef"),
    ("#c4553b", "#d9745b"),
    ("#d9cc5a", "#ddd27a"),
    ("#7d8490", "#8f97a5"),
)
"""Colours of experts, (light, dark): far apart for colour-blind readers too (after Okabe, Ito)."""

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"


def element(tag: str, *children: str, **attributes: str | float | None) -> str:
    """One element. `children` are finished markup; attributes are escaped, None is left out.

    Example: `element("rect", class_="ls-e0", data_layer=3)` is
    `<rect class="ls-e0" data-layer="3"/>`.
    """
    parts = [tag]
    for name, value in attributes.items():
        if value is not None:
            shown = value if isinstance(value, str) else number(value)
            parts.append(f'{name.rstrip("_").replace("_", "-")}="{escaped(shown)}"')
    opening = " ".join(parts)
    return f"<{opening}>{''.join(children)}</{tag}>" if children else f"<{opening}/>"


def text(content: str, x: float, y: float, **attributes: str | float | None) -> str:
    """One line of text with its baseline at y."""
    return element("text", escaped(content), x=x, y=y, **attributes)


def figure(
    width: float, height: float, *parts: str, title: str, description: str, style: str
) -> str:
    """The whole document: the size, what a screen reader says, the style, and the parts."""
    return element(
        "svg",
        element("title", escaped(title)),
        element("desc", escaped(description)),
        element("style", style),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=width,
        height=height,
        role="img",
        class_="ls-figure",
    )


def stylesheet(fills: Mapping[str, tuple[str, str]] | None = None) -> str:
    """The rules of a figure: text, ink and lines, and a (light, dark) fill for each class."""
    all_fills = {
        "ls-ink": (INK, DARK_INK),
        "ls-muted": (MUTED, DARK_MUTED),
        "ls-accent": (ACCENT, DARK_ACCENT),
        **(fills or {}),
    }
    strokes = {
        "ls-line": (LINE, DARK_LINE),
        "ls-mark": (INK, DARK_INK),
        "ls-whisker": (MUTED, DARK_MUTED),
        "ls-whisker-accent": (ACCENT, DARK_ACCENT),
    }
    sides = []
    for side in (0, 1):
        rules = [f".{name}{{fill:{pair[side]}}}" for name, pair in all_fills.items()]
        rules += [f".{name}{{stroke:{pair[side]};fill:none}}" for name, pair in strokes.items()]
        sides.append("".join(rules))
    return (
        f"svg:root{{color-scheme:light dark}}.ls-figure text{{font-family:{FONT};"
        f"font-variant-numeric:tabular-nums}}{sides[0]}"
        f"@media screen and (prefers-color-scheme:dark){{{sides[1]}}}"
    )


def escaped(content: str) -> str:
    """`content` for XML and HTML; what XML cannot hold at all becomes a replacement character."""
    kept = "".join(c if _allowed(c) else "\N{REPLACEMENT CHARACTER}" for c in content)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        kept = kept.replace(character, entity)
    return kept


def number(value: float) -> str:
    """A coordinate: at most two decimals, no trailing zeros, never `-0`.

    Raises:
        ValueError: the value is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"a figure cannot show {value}")
    short = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if short == "-0" else short


def score(value: float, unit: str = "%") -> str:
    """A number to read: a fraction as per cent with one decimal, or three digits of another unit.

    Example: `score(0.4567)` is `"45.7"`; `score(1.2345, "nats")` is `"1.23"`.

    Raises:
        ValueError: the value is not finite.
    """
    if not math.isfinite(value):
        raise ValueError(f"a report cannot show {value}")
    shown = f"{100 * value:.1f}" if unit == "%" else f"{value:.3g}"
    if float(shown) == 0:
        shown = shown.lstrip("-")
    return shown.replace("-", "\N{MINUS SIGN}")


def contrast(one: str, other: str) -> float:
    """How far apart two `#rrggbb` colours are, from 1 to 21 (WCAG 2; 4.5 is enough for text)."""
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def lightness(colour: str) -> float:
    """How light a `#rrggbb` colour looks, from 0 to 100 (CIE L*)."""
    luminance = _luminance(colour)
    return 116 * luminance ** (1 / 3) - 16 if luminance > 216 / 24389 else luminance * 24389 / 27


def _luminance(colour: str) -> float:
    linear = []
    for i in (1, 3, 5):
        share = int(colour[i : i + 2], 16) / 255
        linear.append(share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def text_width(content: str, size: float) -> float:
    """About how wide a line of text is, in the same unit as its font size."""
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in content)
    return size * (0.56 * (len(content) - wide) + wide)


def wrapped(content: str, width: float, size: float) -> list[str]:
    """`content` in lines of at most `width`, broken at spaces, or within a longer word."""
    lines: list[str] = []
    line = ""
    for word in content.split():
        joined = f"{line} {word}" if line else word
        if text_width(joined, size) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        *full, line = _pieces(word, width, size)
        lines += full
    return [*lines, line]


def _pieces(word: str, width: float, size: float) -> list[str]:
    pieces = [""]
    for character in word:
        if pieces[-1] and text_width(pieces[-1] + character, size) > width:
            pieces.append("")
        pieces[-1] += character
    return pieces


def _allowed(character: str) -> bool:
    code = ord(character)
    if code < 0x20:
        return character in "\t\n\r"
    return not (0xD800 <= code <= 0xDFFF or code in (0xFFFE, 0xFFFF) or 0x7F <= code <= 0x9F)
