"""What the figure of a stack says: its zones in words, for the brackets and for screen readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, DrawnRow, stack_rows
from layerswap.report.svg import (
    EXPERTS,
    element,
    escaped,
    figure,
    number,
    stylesheet,
    text,
    wrapped,
)


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


def blend_words(blend: Blend, names: Mapping[str, str]) -> str:
    """A blend in words, such as `50% Swahili expert + 50% math expert`."""
    called = [(names.get(str(member), str(member)), weight) for member, weight in blend.weights]
    if len(called) == 1:
        return called[0][0]
    return " + ".join(f"{100 * weight:.3g}% {name}" for name, weight in called)


_LEFT, _STACK, _LABEL_X, _LABEL = 34, 150, 218, 200  # where the columns start, and their widths
_WIDTH = _LABEL_X + _LABEL
_SLAB, _SLAB_GAP, _OVERHANG = 24, 7, 8  # the slabs outside the layers are broader than a layer
_FONT, _LINE, _SMALL = 13, 17, 11
_TOP = 22
_MAX_LABELS = 12


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


def stack_svg(composition: Composition, names: Mapping[str, str] | None = None) -> str:
    """The stack of layers, output on top, coloured by expert, with a bracket for every zone.

    A blend is hatched in the colours of its experts, each as broad as its weight. A layer whose
    attention and mlp differ is divided. Rectangles carry `data-layer` (or `data-outside`),
    `data-roles` and `data-expert`.

    Args:
        composition: what to draw.
        names: what to call each expert, such as `{"language": "Swahili expert"}`; the names in
            the composition by default.

    Returns:
        A standalone SVG document.
    """
    called = {expert: (names or {}).get(expert, expert) for expert in composition.experts}
    colours = _colours(composition)
    rows = stack_rows(composition)
    slabs = _placed(rows, min(28.0, max(6.0, 320 / composition.layers)))
    spans = zones(rows, composition.layers, called)
    patterns, paint = _paint(rows, colours)
    notes, height = _notes(spans, slabs, called, colours)
    return figure(
        _WIDTH,
        height,
        patterns,
        _caption("output", 12),
        *(_slab_svg(slab, paint, called) for slab in slabs),
        *_numbers(slabs, composition.layers),
        _caption("input", slabs[-1].end + 16),
        *notes,
        title=f"Where each of {composition.layers} layers comes from, output on top",
        description="; ".join(zone.words for zone in spans),
        style=stylesheet({f"ls-e{i}": EXPERTS[i] for i in sorted(set(colours.values()))}),
    )


def _colours(composition: Composition) -> dict[str, int]:
    """A colour for each expert: the middle layer's first, so that a task has always the same."""
    middle = composition[Place(composition.layers // 2, "mlp")]
    first = max(middle.shares, key=lambda expert: middle.shares[expert])
    experts = sorted(composition.experts, key=lambda expert: (expert != first, expert))
    return {expert: i % len(EXPERTS) for i, expert in enumerate(experts)}


def _placed(rows: Sequence[DrawnRow], layer_height: float) -> list[_Slab]:
    slabs: list[_Slab] = []
    y = float(_TOP)
    for row in rows:
        layer = int(row.label) if row.label.isdigit() else None
        if slabs and (layer is None or slabs[-1].layer is None):
            y += _SLAB_GAP
        slabs.append(_Slab(row, layer, y, _SLAB if layer is None else layer_height))
        y = slabs[-1].end
    return slabs


def _paint(
    rows: Sequence[DrawnRow], colours: Mapping[str, int]
) -> tuple[str, dict[Blend, dict[str, str]]]:
    """The hatched patterns, as `<defs>`, and for every blend the attributes that paint it."""
    # Figures share one page, so an identifier has to be the figure's own.
    mark = sha256(repr((rows, sorted(colours.items()))).encode()).hexdigest()[:8]
    paint: dict[Blend, dict[str, str]] = {}
    patterns: list[str] = []
    for blend in (blend for row in rows for _, blend in row.blends):
        if blend.verbatim:
            paint[blend] = {"class_": f"ls-e{colours[blend.experts[0]]}"}
        elif blend not in paint:
            identifier = f"ls-{mark}-{len(patterns)}"
            paint[blend] = {"fill": f"url(#{identifier})"}
            patterns.append(_pattern(identifier, blend, colours))
    return (element("defs", *patterns) if patterns else ""), paint


def _pattern(identifier: str, blend: Blend, colours: Mapping[str, int]) -> str:
    size = 8 * len(blend.shares)
    stripes, x = [], 0.0
    for expert, share in blend.shares.items():
        width = share * size
        stripes.append(
            element("rect", x=x, width=width, height=size, class_=f"ls-e{colours[expert]}")
        )
        x += width
    return element(
        "pattern",
        *stripes,
        id=identifier,
        width=size,
        height=size,
        patternUnits="userSpaceOnUse",
        patternTransform="rotate(45)",
    )


def _slab_svg(
    slab: _Slab, paint: Mapping[Blend, Mapping[str, str]], names: Mapping[str, str]
) -> str:
    outside = slab.layer is None
    left, width = float(_LEFT), float(_STACK)
    if outside:
        left, width = left - _OVERHANG, width + 2 * _OVERHANG
    gap = 2.0 if slab.height > 8 else 1.0
    share = width / len(slab.row.blends)
    rects = []
    for i, (roles, blend) in enumerate(slab.row.blends):
        words = f"{slab.row.label if outside else f'layer {slab.layer}'}: "
        rects.append(
            element(
                "rect",
                element("title", escaped(words + blend_words(blend, names))),
                x=left + i * share,
                y=slab.y,
                width=share - (gap if i + 1 < len(slab.row.blends) else 0),
                height=slab.height - (0 if outside else gap),
                rx=6 if outside else min(3.0, slab.height / 5),
                data_layer=slab.layer,
                data_outside=slab.row.label if outside else None,
                data_roles=" ".join(roles),
                data_expert=str(blend),
                **paint[blend],
            )
        )
    return "".join(rects)


def _caption(words: str, y: float) -> str:
    middle = _LEFT + _STACK / 2
    return text(words, middle, y, class_="ls-muted", font_size=_SMALL, text_anchor="middle")


def _numbers(slabs: Sequence[_Slab], layers: int) -> list[str]:
    """The numbers of the layers, as many as fit, always with the first and the last."""
    height = next(slab.height for slab in slabs if slab.layer is not None)
    step = next(step for step in (1, 2, 4, 8, 16, 32) if step * height >= 12 or step == 32)
    return [
        text(
            str(slab.layer),
            _LEFT - 9,
            slab.y + slab.height / 2 + 3,
            class_="ls-muted",
            font_size=_SMALL,
            text_anchor="end",
        )
        for slab in slabs
        if slab.layer is not None
        and (slab.layer == layers - 1 or (slab.layer % step == 0 and layers - slab.layer > step))
    ]


def _notes(
    spans: Sequence[Zone],
    slabs: Sequence[_Slab],
    names: Mapping[str, str],
    colours: Mapping[str, int],
) -> tuple[list[str], float]:
    """Brackets and, where they do not name every colour, a legend; and the figure's height."""
    shown = spans if len(spans) <= _MAX_LABELS else [zone for zone in spans if not zone.inside]
    notes, labels_end = _brackets(shown, slabs)
    bottom = max(slabs[-1].end + 18, labels_end)
    named = {
        slabs[zone.first].row.blends[0][1].experts[0]
        for zone in shown
        if len(slabs[zone.first].row.blends) == 1 and slabs[zone.first].row.blends[0][1].verbatim
    }
    if not named.issuperset(names):
        legend, bottom = _legend(names, colours, bottom + 14)
        notes += legend
    return notes, bottom + 4


def _brackets(shown: Sequence[Zone], slabs: Sequence[_Slab]) -> tuple[list[str], float]:
    """A bracket, a leader and a label for each zone; and where the last label ends."""
    parts = []
    lines = [wrapped(zone.words, _LABEL, _FONT) for zone in shown]
    middles = [(slabs[zone.first].y + slabs[zone.last].end) / 2 for zone in shown]
    heights = [len(each) * _LINE for each in lines]
    tops = _spread(middles, heights, slabs[-1].end)
    right = _LEFT + _STACK + _OVERHANG + 5
    for zone, words, middle, top, height in zip(shown, lines, middles, tops, heights, strict=True):
        upper, lower = slabs[zone.first].y + 1, slabs[zone.last].end - 1
        path = f"M{right} {number(upper)}h4V{number(lower)}h-4"
        leader = f"M{right + 4} {number(middle)}L{_LABEL_X - 5} {number(top + height / 2)}"
        parts.append(element("path", d=path + leader, class_="ls-line", stroke_width=1.25))
        spans = [
            element("tspan", escaped(line + " "), x=_LABEL_X, y=top + 13 + i * _LINE)
            for i, line in enumerate(words)
        ]
        parts.append(element("text", *spans, class_="ls-ink", font_size=_FONT))
    return parts, max((t + h for t, h in zip(tops, heights, strict=True)), default=0.0)


def _spread(middles: Sequence[float], heights: Sequence[float], end: float) -> list[float]:
    """The top of each label: beside its middle where there is room, never over another."""
    gap = 5.0
    tops: list[float] = []
    free = 0.0
    for middle, height in zip(middles, heights, strict=True):
        tops.append(max(middle - height / 2, free))
        free = tops[-1] + height + gap
    limit = max(end, sum(heights) + gap * len(heights))
    for i in reversed(range(len(tops))):
        tops[i] = min(tops[i], limit - heights[i])
        limit = tops[i] - gap
    return tops


def _legend(
    names: Mapping[str, str], colours: Mapping[str, int], top: float
) -> tuple[list[str], float]:
    parts = []
    left = _LEFT - _OVERHANG
    for expert in sorted(names, key=lambda expert: colours[expert]):
        parts.append(
            element(
                "rect", x=left, y=top, width=12, height=12, rx=3, class_=f"ls-e{colours[expert]}"
            )
        )
        for line in wrapped(names[expert], _WIDTH - left - 20, _FONT):
            parts.append(text(line, left + 20, top + 11, class_="ls-ink", font_size=_FONT))
            top += _LINE
        top += 4
    return parts, top
