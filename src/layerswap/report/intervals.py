"""Means with their intervals, one row for each model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from layerswap.report.svg import element, escaped, figure, number, score, stylesheet, text, wrapped

if TYPE_CHECKING:
    from layerswap.evaluation.statistics import Interval

_WIDTH, _NAMES, _PLOT = 460, 144, 244  # the whole, and the columns of names and of whiskers
_LEFT = _NAMES + 12
_FONT, _LINE, _SMALL = 13, 16, 11
_TOP, _PAD = 12, 9


def interval_svg(
    rows: Sequence[tuple[str, Interval]],
    *,
    measure: str,
    highlight: str | None = None,
    unit: str = "%",
) -> str:
    """A dot and a whisker for each model: the mean of one measure and its interval.

    A dashed line carries the mean of the highlighted model through all rows. Rows keep their
    order. Whether two models differ is for a paired test to say: whiskers that overlap do not.

    Args:
        rows: (name, interval) of each model, from the top.
        measure: what was measured, for the axis.
        highlight: the name of the row to bring out, such as the swap.
        unit: `%` shows fractions of 1 as per cent; another unit is written on the axis.

    Returns:
        A standalone SVG document.

    Raises:
        ValueError: no rows, a number that is not finite, or a highlight that is no row's name.
    """
    if not rows:
        raise ValueError("an interval chart needs at least one row")
    if highlight is not None and highlight not in [name for name, _ in rows]:
        raise ValueError(f"no row is called {highlight!r}")
    ticks = _ticks(rows, unit)
    parts, y = [], float(_TOP)
    for name, interval in rows:
        row, height = _row(name, interval, y, ticks, unit, bold=name == highlight)
        parts.append(row)
        y += height
    guides = [_line(_x(tick, ticks), _TOP, y, "ls-line") for tick in ticks]
    guides += [
        _line(_x(interval.mean, ticks), _TOP, y, "ls-whisker-accent", dash="2 4")
        for name, interval in rows
        if name == highlight
    ]
    said = [f"{n} {score(i.mean, unit)} ({_range(i, unit)})" for n, i in rows]
    return figure(
        _WIDTH,
        y + 42,
        *guides,
        *parts,
        *_axis(ticks, y, f"{measure}, {unit}", unit),
        title=f"{measure}: means with their intervals",
        description="; ".join(said),
        style=stylesheet(),
    )


def _range(interval: Interval, unit: str) -> str:
    return f"{score(interval.low, unit)} to {score(interval.high, unit)}"


def _ticks(rows: Sequence[tuple[str, Interval]], unit: str) -> list[float]:
    """Round numbers around all whiskers: at most seven."""
    numbers = [v for _, i in rows for v in (i.low, i.mean, i.high)]
    for value in numbers:
        score(value, unit)  # refuses what is not finite
    low, high = min(numbers), max(numbers)
    rough = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 5, 10) if power * m >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, max(last, first + 1) + 1)]


def _x(value: float, ticks: Sequence[float]) -> float:
    return _LEFT + (value - ticks[0]) / (ticks[-1] - ticks[0]) * _PLOT


def _line(x: float, top: float, bottom: float, style: str, dash: str | None = None) -> str:
    return element(
        "path",
        d=f"M{number(x)} {number(top)}V{number(bottom)}",
        class_=style,
        stroke_width=1.25 if dash else 1,
        stroke_dasharray=dash,
    )


def _row(
    name: str, interval: Interval, y: float, ticks: Sequence[float], unit: str, *, bold: bool
) -> tuple[str, float]:
    """One model, and the height that it takes."""
    lines = wrapped(name, _NAMES, _FONT)
    height = len(lines) * _LINE + 2 * _PAD
    middle = y + height / 2
    low, mean, high = (_x(v, ticks) for v in (interval.low, interval.mean, interval.high))
    style: dict[str, str | float | None] = {
        "class_": "ls-accent" if bold else "ls-ink",
        "font_size": _FONT,
        "font_weight": 600 if bold else None,
    }
    names = [
        element("tspan", escaped(line + " "), x=0, y=y + _PAD + 12 + i * _LINE)
        for i, line in enumerate(lines)
    ]
    said = f"{name}: {score(interval.mean, unit)} ({_range(interval, unit)})"
    return (
        element(
            "g",
            element("title", escaped(said)),
            element("text", *names, **style),
            *_dot_and_whisker((low, mean, high), middle, bold=bold),
            text(score(interval.mean, unit), _WIDTH, middle + 4.5, text_anchor="end", **style),
            data_row=name,
            data_highlight="true" if bold else None,
        ),
        height,
    )


def _axis(ticks: Sequence[float], y: float, label: str, unit: str) -> list[str]:
    style: dict[str, str | float] = {
        "class_": "ls-muted", "font_size": _SMALL, "text_anchor": "middle",
    }  # fmt: skip
    step = ticks[1] - ticks[0]
    parts = [text(_tick(tick, step, unit), _x(tick, ticks), y + 16, **style) for tick in ticks]
    return [*parts, text(label, _LEFT + _PLOT / 2, y + 34, **style)]


def _tick(value: float, step: float, unit: str) -> str:
    scale = 100 if unit == "%" else 1
    decimals = max(0, -math.floor(math.log10(step * scale) + 1e-9))
    return f"{value * scale:.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def _dot_and_whisker(xs: tuple[float, float, float], y: float, *, bold: bool) -> list[str]:
    """The marks of one row, at the low end, the mean and the high end."""
    low, mean, high = xs
    ends = "".join(f"M{number(x)} {number(y - 4)}v8" for x in (low, high))
    return [
        element(
            "path",
            d=f"M{number(low)} {number(y)}H{number(high)}{ends}",
            class_="ls-whisker-accent" if bold else "ls-whisker",
            stroke_width=2.5 if bold else 1.75,
            stroke_linecap="round",
        ),
        element(
            "circle",
            cx=mean,
            cy=y,
            r=6 if bold else 4.5,
            class_="ls-accent" if bold else "ls-muted",
        ),
    ]
