"""The package's scale of one hue, resampled so that equal steps of a value look equal."""

from __future__ import annotations

from functools import cache

from layerswap.report.heat_map import SCALE
from layerswap.report.svg import lightness


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
