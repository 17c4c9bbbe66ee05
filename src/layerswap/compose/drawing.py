"""A composition as text: the stack of layers and who each comes from (paper 1, figure 1)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import OUTSIDE_ROLES, Composition

EXPERT_GLYPHS = "░█▚▞▤▥▦▩"
BLEND_GLYPH = "▒"
WIDTH = 10


@dataclass(frozen=True)
class Row:
    """One line of the stack.

    Attributes:
        label: the layer number, or the roles outside the layers.
        blends: the distinct parts of the row, as (roles, blend).
    """

    label: str
    blends: tuple[tuple[tuple[str, ...], Blend], ...]


def stack_rows(composition: Composition) -> list[Row]:
    """The rows of the drawing, output on top: outside, layers L-1 to 0, embedding.

    Norms and other tensors of a layer are shown only where they differ from both attention and
    mlp.
    """
    outside = [role for role in OUTSIDE_ROLES[1:] if role != "other"]
    rows = [_row(composition, None, role.replace("_", " "), (role,)) for role in reversed(outside)]
    for layer in reversed(range(composition.layers)):
        rows.append(_row(composition, layer, str(layer), _shown_roles(composition, layer)))
    rows.append(_row(composition, None, "embedding", ("embedding",)))
    return _joined_outside(rows)


def draw(composition: Composition, *, glyphs: str = EXPERT_GLYPHS) -> str:
    """The stack as plain text, one line per layer, output on top.

    Example, for `swap(8)`:

        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       7 ██████████ language
                       6 ░░░░░░░░░░ task
                       ...
    """
    rows = stack_rows(composition)
    glyph_of = _glyphs(composition, glyphs)
    indent = max(len(row.label) for row in rows)
    lines, previous = [], None
    for row in rows:
        bar = _bar(row, glyph_of)
        note = _note(row)
        shown = "" if note == previous else " " + note
        lines.append(f"{row.label:>{indent}} {bar}{shown}".rstrip())
        previous = note
    return "\n".join(lines)


def _row(composition: Composition, layer: int | None, label: str, roles: Sequence[str]) -> Row:
    parts: list[tuple[tuple[str, ...], Blend]] = []
    for role in roles:
        blend = composition[Place(layer, role)]
        if parts and parts[-1][1] == blend:
            parts[-1] = ((*parts[-1][0], role), blend)
        else:
            parts.append(((role,), blend))
    return Row(label, tuple(parts))


def _shown_roles(composition: Composition, layer: int) -> list[str]:
    shown = ["attention", "mlp"]
    usual = {composition[Place(layer, role)] for role in shown}
    return shown + [r for r in ("norm", "other") if composition[Place(layer, r)] not in usual]


def _joined_outside(rows: list[Row]) -> list[Row]:
    """Neighbouring rows outside the layers on one line where their blends agree."""
    joined: list[Row] = []
    for row in rows:
        last = joined[-1] if joined else None
        both_outside = last and not last.label[0].isdigit() and not row.label[0].isdigit()
        if last and both_outside and [b for _, b in last.blends] == [b for _, b in row.blends]:
            joined[-1] = Row(f"{last.label}, {row.label}", last.blends)
        else:
            joined.append(row)
    return joined


def _glyphs(composition: Composition, glyphs: str) -> dict[str, str]:
    # The middle layer's expert is drawn lightest, so a swap looks like the paper's figure.
    experts = list(composition.experts)
    middle = composition[Place(composition.layers // 2, "mlp")].experts[-1]
    experts.sort(key=lambda expert: (expert != middle, expert))
    return {expert: glyphs[i % len(glyphs)] for i, expert in enumerate(experts)}


def _bar(row: Row, glyph_of: dict[str, str]) -> str:
    widths = _shares(len(row.blends))
    return "".join(
        (glyph_of[blend.experts[0]] if blend.verbatim else BLEND_GLYPH) * width
        for (_, blend), width in zip(row.blends, widths, strict=True)
    )


def _shares(parts: int) -> Iterator[int]:
    for i in range(parts):
        yield WIDTH * (i + 1) // parts - WIDTH * i // parts


def _note(row: Row) -> str:
    if len(row.blends) == 1:
        return str(row.blends[0][1])
    return "; ".join(f"{', '.join(roles)}: {blend}" for roles, blend in row.blends)
