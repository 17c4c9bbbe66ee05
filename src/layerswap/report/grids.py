"""Heat maps of a grid of swaps: one for each choice of transitions and of the outside."""

from __future__ import annotations

from collections.abc import Mapping

from layerswap.report.charts import draw_heat_map
from layerswap.report.drawing import Drawing
from layerswap.search.conditions import Condition


def draw_grid(
    scores: Mapping[Condition, float],
    *,
    best: Condition | None,
    default: Condition | None = None,
    unit: str = "%",
) -> dict[str, Drawing]:
    """Heat maps over bottom and top layers, with one colour scale.

    Args:
        scores: of swaps; conditions without zones are left out.
        best: the swap to outline as the best.
        default: the swap to outline as the paper's default.
        unit: as of `draw_heat_map`.

    Returns:
        The drawings by what distinguishes them, such as `transitions 1 and 0, outside blend`.
    """
    maps: dict[tuple[int, int, str], dict[tuple[int, int], float]] = {}
    for swap, value in scores.items():
        if swap.zones is not None:
            maps.setdefault(_map_of(swap), {})[_cell_of(swap)] = value
    limits = (min(scores.values()), max(scores.values())) if maps else None
    several = len({key[:2] for key in maps}) > 1
    drawn = {}
    for key, values in maps.items():
        bottom, top, outside = key
        words = [f"transitions {bottom} and {top}"] if several else []
        words += [f"outside {outside}"] if outside else []
        cells = [
            _cell_of(swap) if swap and swap.zones and _map_of(swap) == key else None
            for swap in (best, default)
        ]
        drawn[", ".join(words)] = draw_heat_map(
            values, row_label="bottom layers", column_label="top layers", best=cells[0],
            default=cells[1], unit=unit, limits=limits,
        )  # fmt: skip
    return drawn


def _map_of(swap: Condition) -> tuple[int, int, str]:
    assert swap.zones is not None
    return swap.zones.bottom_transition, swap.zones.top_transition, swap.outside


def _cell_of(swap: Condition) -> tuple[int, int]:
    assert swap.zones is not None
    return swap.zones.bottom, swap.zones.top
