"""What the figure of a stack says: its zones in words, for the brackets and for screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerswap.compose.blend import Blend
from layerswap.compose.drawing import Row


@dataclass(frozen=True)
class Zone:
    """Neighbouring rows of the stack that take from the same experts.

    Attributes:
        first: index of its uppermost row.
        last: index of its lowest row.
        inside: whether it is made of layers.
        words: such as `bottom 2 layers: Swahili expert`.
    """

    first: int
    last: int
    inside: bool
    words: str


def zones(rows: Sequence[Row], layers: int, names: Mapping[str, str]) -> list[Zone]:
    """The zones of a stack of `layers` layers, from the top down."""
    runs: list[list[int]] = []
    for i, row in enumerate(rows):
        above = rows[runs[-1][-1]] if runs else None
        joins = above is not None and above.label.isdigit() and row.label.isdigit()
        if above is not None and joins and above.blends == row.blends:
            runs[-1].append(i)
        else:
            runs.append([i])
    return [
        Zone(
            run[0],
            run[-1],
            rows[run[0]].label.isdigit(),
            f"{_where(rows[run[0]], rows[run[-1]], layers)}: {_who(rows[run[0]], names)}",
        )
        for run in runs
    ]


def _where(upper: Row, lower: Row, layers: int) -> str:
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


def _who(row: Row, names: Mapping[str, str]) -> str:
    if len(row.blends) == 1:
        return blend_words(row.blends[0][1], names)
    return "; ".join(
        f"{' and '.join(roles)} from {blend_words(blend, names)}" for roles, blend in row.blends
    )


def blend_words(blend: Blend, names: Mapping[str, str]) -> str:
    """A blend in words, such as `50% Swahili expert + 50% math expert`."""
    called = [(names.get(str(member), str(member)), weight) for member, weight in blend.weights]
    if len(called) == 1:
        return called[0][0]
    return " + ".join(f"{100 * weight:.3g}% {name}" for name, weight in called)
