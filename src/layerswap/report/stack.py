"""Draws a composition: the stack of layers, coloured by expert, with its zones in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, DrawnRow, stack_rows
from layerswap.report.drawing import EXPERTS, INK, LINE, MUTED, Canvas, Drawing, settings, wrapped

LEFT, STACK, LABEL_LEFT, LABEL = 34, 150, 218, 200
"""Where the columns of the stack and of the labels start, and their widths, in pixels."""
SLAB, GAP, OVERHANG = 24, 7, 8
"""The slabs outside the layers: height, distance, and how much broader than a layer."""
FONT, LEADING, SMALL, TOP = 13, 17, 11, 22
MOST_LABELS = 12
"""With more zones than this, a legend names the experts in place of a label for each zone."""


@dataclass(frozen=True)
class Zone:
    """Neighbouring rows of the stack that take from the same experts.

    Attributes:
        first: index of its uppermost row.
        last: index of its lowest row.
        inside: True for layers, False for embedding, final norm and head.
        words: such as `bottom 2 layers: Swahili expert`.
    """

    first: int
    last: int
    inside: bool
    words: str


@dataclass(frozen=True)
class _Slab:
    """A row of the stack with its place in the figure; `layer` is None outside the layers."""

    row: DrawnRow
    layer: int | None
    y: float
    height: float

    @property
    def end(self) -> float:
        return self.y + self.height


@settings()
def draw_stack(composition: Composition, names: Mapping[str, str] | None = None) -> Drawing:
    """The stack of layers, output on top, coloured by expert, with a bracket for every zone.

    A blend is striped in the colours of its experts, each as broad as its weight. A layer whose
    attention and mlp differ is divided.

    Args:
        composition: what to draw.
        names: display name of each expert, such as `{"language": "Swahili expert"}`; the names
            in the composition by default.
    """
    called = {expert: (names or {}).get(expert, expert) for expert in composition.experts}
    colours = _colours(composition)
    rows = stack_rows(composition)
    slabs = _slabs(rows, min(28.0, max(6.0, 320 / composition.layers)))
    spans = zones(rows, composition.layers, called)
    shown = spans if len(spans) <= MOST_LABELS else [zone for zone in spans if not zone.inside]
    labels = [wrapped(zone.words, LABEL, FONT) for zone in shown]
    tops = _label_tops(shown, slabs, [len(lines) * LEADING for lines in labels])
    bottom = max(
        [
            slabs[-1].end + 18,
            *(top + len(lines) * LEADING for top, lines in zip(tops, labels, strict=True)),
        ]
    )
    verbatim = [rows[zone.first].blends for zone in shown]
    named = {blends[0][1].experts[0] for blends in verbatim
             if len(blends) == 1 and blends[0][1].verbatim}  # fmt: skip
    legend = [] if named >= set(called) else sorted(called, key=lambda one: colours[one])
    entries = [wrapped(called[one], LABEL_LEFT + LABEL - LEFT - 12, FONT) for one in legend]
    height = bottom + sum(len(lines) * LEADING + 4 for lines in entries) + (14 if legend else 0)

    canvas = Canvas(LABEL_LEFT + LABEL, height + 4)
    for words, y in (("output", 12.0), ("input", slabs[-1].end + 16)):
        canvas.text(LEFT + STACK / 2, y, words, color=MUTED, fontsize=SMALL, ha="center")
    for slab in slabs:
        _draw_slab(canvas, slab, colours, called)
    _draw_numbers(canvas, slabs, composition.layers)
    for zone, lines, top in zip(shown, labels, tops, strict=True):
        _draw_label(canvas, lines, top, slabs[zone.first].y + 1, slabs[zone.last].end - 1)
    y = bottom + 14
    for expert, lines in zip(legend, entries, strict=True):
        canvas.box(LEFT - OVERHANG, y, 12, 12, radius=3, facecolor=_tint(colours[expert]))
        for line in lines:
            canvas.text(LEFT + 12, y + 11, line, fontsize=FONT)
            y += LEADING
        y += 4
    return Drawing(
        canvas.figure,
        f"Where each of {composition.layers} layers comes from, output on top",
        "; ".join(zone.words for zone in spans),
    )


def zones(rows: Sequence[DrawnRow], layers: int, names: Mapping[str, str]) -> list[Zone]:
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


def blend_words(blend: Blend, names: Mapping[str, str]) -> str:
    """A blend in words, such as `50% Swahili expert + 50% math expert`."""
    called = [(names.get(str(member), str(member)), weight) for member, weight in blend.weights]
    if len(called) == 1:
        return called[0][0]
    return " + ".join(f"{100 * weight:.3g}% {name}" for name, weight in called)


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


def _who(row: DrawnRow, names: Mapping[str, str]) -> str:
    if len(row.blends) == 1:
        return blend_words(row.blends[0][1], names)
    return "; ".join(
        f"{' and '.join(roles)} from {blend_words(blend, names)}" for roles, blend in row.blends
    )


def _colours(composition: Composition) -> dict[str, int]:
    """A colour for each expert: the middle layer's first, so that a task always has the same."""
    middle = composition[Place(composition.layers // 2, "mlp")]
    first = max(middle.shares, key=lambda expert: middle.shares[expert])
    experts = sorted(composition.experts, key=lambda expert: (expert != first, expert))
    return {expert: i for i, expert in enumerate(experts)}


def _tint(index: int) -> str:
    return list(EXPERTS)[index % len(EXPERTS)]


def _slabs(rows: Sequence[DrawnRow], layer_height: float) -> list[_Slab]:
    slabs: list[_Slab] = []
    y = float(TOP)
    for row in rows:
        layer = int(row.label) if row.label.isdigit() else None
        if slabs and (layer is None or slabs[-1].layer is None):
            y += GAP
        slabs.append(_Slab(row, layer, y, SLAB if layer is None else layer_height))
        y = slabs[-1].end
    return slabs


def _draw_slab(
    canvas: Canvas, slab: _Slab, colours: Mapping[str, int], names: Mapping[str, str]
) -> None:
    outside = slab.layer is None
    left = float(LEFT - OVERHANG if outside else LEFT)
    gap = 2.0 if slab.height > 8 else 1.0
    width = (STACK + (2 * OVERHANG if outside else 0)) / len(slab.row.blends)
    where = slab.row.label if outside else f"layer {slab.layer}"
    for i, (_, blend) in enumerate(slab.row.blends):
        last = i + 1 == len(slab.row.blends)
        shares: dict[str, float] = {}
        for expert, share in blend.shares.items():
            tint = _tint(colours[expert])
            shares[tint] = shares.get(tint, 0) + share
        canvas.stripes(
            left + i * width,
            slab.y,
            width - (0 if last else gap),
            slab.height - (0 if outside else gap),
            shares,
            radius=6 if outside else min(3.0, slab.height / 5),
            tip=f"{where}: {blend_words(blend, names)}",
        )


def _draw_numbers(canvas: Canvas, slabs: Sequence[_Slab], layers: int) -> None:
    """The numbers of the layers, as many as fit, always with the first and the last."""
    height = next(slab.height for slab in slabs if slab.layer is not None)
    step = next(step for step in (1, 2, 4, 8, 16, 32) if step * height >= 12 or step == 32)
    for slab in slabs:
        if slab.layer is not None and (
            slab.layer == layers - 1 or (slab.layer % step == 0 and layers - slab.layer > step)
        ):
            y = slab.y + slab.height / 2 + 3
            canvas.text(LEFT - 9, y, str(slab.layer), color=MUTED, fontsize=SMALL, ha="right")


def _draw_label(
    canvas: Canvas, lines: Sequence[str], top: float, upper: float, lower: float
) -> None:
    """The words of a zone, its bracket, and a leader between the two."""
    right, middle = LEFT + STACK + OVERHANG + 5, (upper + lower) / 2
    bracket = [right, right + 4, right + 4, right]
    canvas.line(bracket, [upper, upper, lower, lower], color=LINE, linewidth=1.25)
    ends = [middle, top + len(lines) * LEADING / 2]
    canvas.line([right + 4, LABEL_LEFT - 5], ends, color=LINE, linewidth=1.25)
    for i, line in enumerate(lines):
        canvas.text(LABEL_LEFT, top + 13 + i * LEADING, line, color=INK, fontsize=FONT)


def _label_tops(
    shown: Sequence[Zone], slabs: Sequence[_Slab], heights: Sequence[float]
) -> list[float]:
    """The top of each label: beside its middle where there is room, never over another."""
    gap, free = 5.0, 0.0
    tops: list[float] = []
    for zone, height in zip(shown, heights, strict=True):
        middle = (slabs[zone.first].y + slabs[zone.last].end) / 2
        tops.append(max(middle - height / 2, free))
        free = tops[-1] + height + gap
    limit = max(slabs[-1].end, sum(heights) + gap * len(heights))
    for i in reversed(range(len(tops))):
        tops[i] = min(tops[i], limit - heights[i])
        limit = tops[i] - gap
    return tops
