"""Draws a composition as a stack of layers, coloured by expert, with its zones in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, DrawnRow, stack_rows
from layerswap.ground.errors import visible
from layerswap.report.drawing import EXPERTS, INK, MUTED, Drawing, settings, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEFT, STACK, LABEL, WIDTH = 34, 150, 210, 470
"""Where the stack and the labels begin, the width of the stack, and that of the figure, px."""
OUTSIDE, OVERHANG, GAP, LEADING = 24, 8, 7, 17
"""Height of a row outside the layers, its overhang, its distance, and a line of text, px."""
MOST_LABELS = 12
"""With more zones than this, a legend names the experts in place of a label for each zone."""
NOTHING_ON_TOP = (
    "The best composition takes no layer on top from the language expert: the last layers write "
    "the answer, often in a form that the task expert learned, such as a number or a label."
)
"""A sentence for reports."""


@dataclass(frozen=True)
class Zone:
    """Neighbouring rows of the stack with the same blends, from the top.

    `words` are such as `bottom 2 layers: Swahili expert`.
    """

    rows: tuple[DrawnRow, ...]
    words: str

    @property
    def inside(self) -> bool:
        """True for layers, False for embedding, final norm and head."""
        return self.rows[0].label.isdigit()


@settings()
def draw_stack(composition: Composition, names: Mapping[str, str] | None = None) -> Drawing:
    """Draw the stack of layers, output on top, coloured by expert, with a bracket for every zone.

    A row is divided where attention and mlp differ, and each part by the weights of its blend.
    `names` gives display names of experts, such as `{"language": "Swahili expert"}`.
    """
    from matplotlib.figure import Figure

    names = {expert: (names or {}).get(expert, expert) for expert in composition.experts}
    colours = _colours(composition)
    zones = stack_zones(stack_rows(composition), composition.layers, names)
    labelled = len(zones) <= MOST_LABELS
    legend = {} if labelled and _name_all(zones, names) else colours
    figure = Figure()
    axes = figure.add_axes((0, 0, 1, 1))
    axes.axis("off")
    axes.text(LEFT + STACK / 2, 12, "output", color=MUTED, fontsize=11, ha="center")
    end = _draw_zones(axes, zones, composition.layers, colours, labelled=labelled)
    axes.text(LEFT + STACK / 2, end + 16, "input", color=MUTED, fontsize=11, ha="center")
    end += 30
    for expert, colour in legend.items():
        axes.barh(end, 12, left=LEFT - OVERHANG, height=12, color=colour)
        axes.text(LEFT + 12, end, visible(names[expert]), va="center")
        end += LEADING + 4
    figure.set_size_inches(WIDTH / 72, end / 72)
    axes.set(xlim=(0, WIDTH), ylim=(end, 0))
    return Drawing(
        figure,
        f"Where each of {composition.layers} layers comes from, output on top",
        "; ".join(zone.words for zone in zones),
    )


def stack_zones(rows: Sequence[DrawnRow], layers: int, names: Mapping[str, str]) -> list[Zone]:
    """The zones of a stack of `layers` layers, from the top down."""
    same = groupby(rows, lambda row: row.blends if row.label.isdigit() else row.label)
    return [
        Zone(tuple(run), f"{_where(run[0], run[-1], layers)}: {_source(run[0], names)}")
        for run in (list(zone) for _, zone in same)
    ]


def blend_words(blend: Blend, names: Mapping[str, str]) -> str:
    """A blend in words, such as `50% Swahili expert + 50% math expert`."""
    parts = [(names.get(str(member), str(member)), weight) for member, weight in blend.weights]
    if len(parts) == 1:
        return parts[0][0]
    return " + ".join(f"{100 * weight:.3g}% {name}" for name, weight in parts)


def _where(upper: DrawnRow, lower: DrawnRow, layers: int) -> str:
    if not upper.label.isdigit():
        return upper.label
    high, low = int(upper.label), int(lower.label)
    count = f"{high - low + 1} layers" if high > low else "1 layer"
    if high - low + 1 == layers:
        return f"all {count}"
    if low == 0 or high == layers - 1:
        return f"{'bottom' if low == 0 else 'top'} {count}"
    if not any(blend.verbatim for _, blend in upper.blends):
        return f"transition of {count}"
    if low <= layers // 2 <= high:
        return f"middle {count}"
    return f"layers {low} to {high}" if high > low else f"layer {low}"


def _source(row: DrawnRow, names: Mapping[str, str]) -> str:
    if len(row.blends) == 1:
        return blend_words(row.blends[0][1], names)
    return "; ".join(
        f"{' and '.join(roles)} from {blend_words(blend, names)}" for roles, blend in row.blends
    )


def _name_all(zones: Sequence[Zone], names: Mapping[str, str]) -> bool:
    """True if every expert fills a zone alone, whose label names it."""
    blends = [zone.rows[0].blends for zone in zones]
    alone = {parts[0][1].experts[0] for parts in blends if len(parts) == 1 and parts[0][1].verbatim}
    return alone >= set(names)


def _colours(composition: Composition) -> dict[str, str]:
    """A colour for each expert: the first for the middle layer's, which is the task's in a swap."""
    middle = composition[Place(composition.layers // 2, "mlp")]
    first = max(middle.shares, key=lambda expert: middle.shares[expert])
    experts = sorted(composition.experts, key=lambda expert: (expert != first, expert))
    return {expert: EXPERTS[i % len(EXPERTS)] for i, expert in enumerate(experts)}


def _draw_zones(
    axes: Axes, zones: Sequence[Zone], layers: int, colours: Mapping[str, str], *, labelled: bool
) -> float:
    """Draw the zones from the top down; returns where they end, px."""
    layer_height = min(28.0, max(6.0, 320 / layers))
    y, numbered = 22.0, 0.0
    for i, zone in enumerate(zones):
        if i and not (zone.inside and zones[i - 1].inside):
            y += GAP
        words = wrapped(zone.words, 34) if labelled else ""
        # A zone is at least as high as its label.
        room = (LEADING * (words.count("\n") + 1) + 2) / len(zone.rows) if labelled else 0
        height = max(layer_height if zone.inside else OUTSIDE, room)
        end = y + height * len(zone.rows)
        if labelled:
            axes.plot([LABEL - 8] * 2, [y + 2, end - 2], color=MUTED, linewidth=1.25)
            axes.text(LABEL, (y + end) / 2, words, va="center", color=INK, linespacing=1.1)
        for j, row in enumerate(zone.rows):
            middle = y + (j + 0.5) * height
            _draw_row(axes, row, middle, height, colours)
            edge = j in (0, len(zone.rows) - 1)
            if zone.inside and edge and middle - numbered >= 12:
                axes.text(LEFT - 9, middle, row.label, color=MUTED, fontsize=11, ha="right",
                          va="center")  # fmt: skip
                numbered = middle
        y = end
    return y


def _draw_row(
    axes: Axes, row: DrawnRow, middle: float, height: float, colours: Mapping[str, str]
) -> None:
    overhang, gap = (0, min(2, height / 6)) if row.label.isdigit() else (OVERHANG, 0)
    part = (STACK + 2 * overhang) / len(row.blends)
    for i, (_, blend) in enumerate(row.blends):
        left = LEFT - overhang + i * part
        room = part - (2 if i + 1 < len(row.blends) else 0)
        for expert, share in blend.shares.items():
            axes.barh(middle, share * room, left=left, height=height - gap, color=colours[expert])
            left += share * room
