"""The package's scale of one hue, resampled so that equal steps of a value look equal."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from layerswap.report.svg import (
    INK,
    contrast,
    element,
    figure,
    lightness,
    number,
    score,
    stylesheet,
    text,
    text_width,
)


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
    low, high = levels[0], levels[-1]
    return tuple(
        _at(low + (high - low) * i / (count - 1), levels, stops, rising=high > low)
        for i in range(count)
    )


def _at(level: float, levels: list[float], stops: list[tuple[int, ...]], *, rising: bool) -> str:
    """The colour of a lightness, between the two stops around it."""
    i = next((i for i in range(1, len(levels)) if (levels[i] >= level) == rising), len(levels) - 1)
    part = (level - levels[i - 1]) / (levels[i] - levels[i - 1])
    channels = (round(a + part * (b - a)) for a, b in zip(stops[i - 1], stops[i], strict=True))
    return "#" + "".join(f"{value:02x}" for value in channels)


def _channels(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


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
"""The scale, low to high, for light and dark mode. Lightness alone orders it, for every eye."""

_CELL_W, _CELL_H, _GAP = 54, 38, 3
_HALF = (_CELL_W - _GAP) / 2
_LEFT, _TOP, _FONT, _SMALL = 52, 44, 13, 11
_MARKS = {"best": "best", "default": "the paper's default"}

GridCell = tuple[int, int]


def heat_map_svg(
    values: Mapping[GridCell, float],
    *,
    row_label: str,
    column_label: str,
    best: GridCell | None = None,
    default: GridCell | None = None,
    unit: str = "%",
) -> str:
    """A grid of scores with its numbers, such as accuracy by bottom and top layers.

    Darker is higher in light mode, brighter is higher in dark mode. A pair that is not in
    `values`, such as zones that do not fit, stays empty.

    Args:
        values: score of each (row, column).
        row_label: what the rows count, such as `bottom layers`.
        column_label: what the columns count.
        best: the cell to outline as the best.
        default: the cell to outline as the paper's default; not marked where `values` lacks it.
        unit: `%` shows fractions of 1 as per cent; another unit is written beside the scale.

    Returns:
        A standalone SVG document.

    Raises:
        ValueError: no values, one that is not finite, or a best that is not among them.
    """
    if not values:
        raise ValueError("a heat map needs at least one value")
    if best is not None and best not in values:
        raise ValueError(f"the best cell {best} is not among the values")
    rows, columns = sorted({r for r, _ in values}), sorted({c for _, c in values})
    width = max(_LEFT + len(columns) * _CELL_W + 6, _LEFT + 250)
    grid_end = _TOP + len(rows) * _CELL_H
    wanted = {"best": best, "default": default}
    marks = {kind: cell for kind, cell in wanted.items() if cell is not None and cell in values}
    return figure(
        width,
        grid_end + 56,
        *_axes(rows, columns, row_label, column_label),
        *(_cell_svg(cell, rows, columns, values, unit) for cell in sorted(values)),
        *(
            _outline(kind, cell, rows, columns, _grow(kind, best == default))
            for kind, cell in marks.items()
        ),
        *_key(grid_end + 16, values, marks, unit),
        title=f"Score by {row_label} and {column_label}",
        description=_described(values, marks, row_label, column_label, unit),
        style=stylesheet(_fills()),
    )


def _grow(kind: str, both: bool) -> float:
    """How far outside its cell a mark is drawn: further for the second mark of one cell."""
    return 4.5 if both and kind == "default" else 1.5


def _fills() -> dict[str, tuple[str, str]]:
    fills = {}
    for i, (light, dark) in enumerate(SCALE):
        fills[f"ls-h{i}"] = (light, dark)
        fills[f"ls-t{i}"] = (readable_on(light), readable_on(dark))
    return fills


def readable_on(colour: str) -> str:
    """Dark or light ink, whichever stands out more from `colour`."""
    return max((INK, "#ffffff"), key=lambda ink: contrast(ink, colour))


def _level(value: float, values: Mapping[GridCell, float]) -> int:
    low, high = min(values.values()), max(values.values())
    if high == low:
        return len(SCALE) // 2
    return round((value - low) / (high - low) * (len(SCALE) - 1))


def _corner(cell: GridCell, rows: list[int], columns: list[int]) -> tuple[int, int]:
    return _LEFT + columns.index(cell[1]) * _CELL_W, _TOP + rows.index(cell[0]) * _CELL_H


def _cell_svg(
    cell: GridCell, rows: list[int], columns: list[int], values: Mapping[GridCell, float], unit: str
) -> str:
    x, y = _corner(cell, rows, columns)
    level = _level(values[cell], values)
    return element(
        "rect",
        x=x,
        y=y,
        width=_CELL_W - _GAP,
        height=_CELL_H - _GAP,
        rx=4,
        data_row=cell[0],
        data_column=cell[1],
        class_=f"ls-h{level}",
    ) + text(
        score(values[cell], unit),
        x + _HALF,
        y + (_CELL_H - _GAP) / 2 + 4.5,
        class_=f"ls-t{level}",
        font_size=_FONT,
        text_anchor="middle",
    )


def _outline(kind: str, cell: GridCell, rows: list[int], columns: list[int], grow: float) -> str:
    x, y = _corner(cell, rows, columns)
    size = (_CELL_W - _GAP + 2 * grow, _CELL_H - _GAP + 2 * grow)
    return _frame(kind, (x - grow, y - grow), size, data_mark=kind)


def _frame(kind: str, corner: tuple[float, float], size: tuple[float, float], **data: str) -> str:
    return element(
        "rect",
        x=corner[0],
        y=corner[1],
        width=size[0],
        height=size[1],
        rx=min(5.0, size[1] / 4),
        stroke_width=2.5 if kind == "best" else 1.5,
        stroke_dasharray=None if kind == "best" else "4 3",
        class_="ls-mark",
        **data,
    )


def _axes(rows: list[int], columns: list[int], row_label: str, column_label: str) -> list[str]:
    style: dict[str, str | float] = {"class_": "ls-muted", "font_size": _SMALL}
    middle = _LEFT + (len(columns) * _CELL_W - _GAP) / 2
    centre = _TOP + (len(rows) * _CELL_H - _GAP) / 2
    turned = f"rotate(-90 14 {number(centre)})"
    parts = [
        text(column_label, middle, 14, text_anchor="middle", **style),
        text(row_label, 14, centre, text_anchor="middle", transform=turned, **style),
    ]
    for column in columns:
        x, _ = _corner((rows[0], column), rows, columns)
        parts.append(text(str(column), x + _HALF, _TOP - 9, text_anchor="middle", **style))
    for row in rows:
        _, y = _corner((row, columns[0]), rows, columns)
        parts.append(text(str(row), _LEFT - 9, y + 22, text_anchor="end", **style))
    return parts


def _key(
    y: float, values: Mapping[GridCell, float], marks: Mapping[str, GridCell], unit: str
) -> list[str]:
    """The scale with its two ends, and what the outlines mean."""
    low, high = score(min(values.values()), unit), score(max(values.values()), unit)
    swatch, x = 12, _LEFT + text_width(low, _SMALL) + 6
    style: dict[str, str | float] = {"class_": "ls-muted", "font_size": _SMALL}
    parts = [text(low, _LEFT, y + 9, **style)]
    for i in range(len(SCALE)):
        parts.append(
            element("rect", x=x + i * swatch, y=y, width=swatch, height=10, class_=f"ls-h{i}")
        )
    parts.append(text(f"{high} {unit}", x + len(SCALE) * swatch + 6, y + 9, **style))
    x, y = float(_LEFT) + 2, y + 24
    for kind in marks:
        parts.append(_frame(kind, (x, y), (16, 10)))
        words = _MARKS[kind]
        parts.append(text(words, x + 23, y + 9, **style))
        x += 23 + text_width(words, _SMALL) + 18
    return parts


def _described(
    values: Mapping[GridCell, float],
    marks: Mapping[str, GridCell],
    row_label: str,
    column_label: str,
    unit: str,
) -> str:
    low, high = score(min(values.values()), unit), score(max(values.values()), unit)
    said = [f"{len(values)} combinations, from {low} to {high} {unit}"]
    for kind, (row, column) in marks.items():
        value = score(values[row, column], unit)
        said.append(f"{_MARKS[kind]}: {row_label} {row}, {column_label} {column}, {value} {unit}")
    return "; ".join(said)
