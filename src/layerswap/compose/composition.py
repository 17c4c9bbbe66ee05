"""Compositions: a blend for every place of a model, and the drawing of its stack. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from itertools import cycle
from types import MappingProxyType
from typing import Any

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.ground.errors import RecipeError, visible

LAYER_ROLES = ("attention", "mlp", "router", "norm", "other")
"""Roles of tensors inside a layer."""
OUTSIDE_ROLES = ("embedding", "final_norm", "head", "other")
"""Roles of tensors outside the layers."""


@dataclass(frozen=True)
class Composition:
    """A blend for every place of a model of `layers` layers.

    The same object is written to disk, held in memory, swept, and drawn.

    Attributes:
        layers: number of transformer layers, L.
        blends: the blend of every place: `layers * 5` places inside the layers, 4 outside.
        taken: for every layer its layer number in the experts, if layers are repeated, dropped or
            moved; None if every layer stays in its position.

    Example: with `taken=(0, 1, 1)` layer 2 of the output is layer 1 of the experts again.
    """

    layers: int
    blends: Mapping[Place, Blend]
    taken: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if wrong := self.blends.keys() ^ set(all_places(self.layers)):
            shown = ", ".join(sorted(f"{place.layer} {place.role}" for place in wrong))
            raise RecipeError(f"places that are missing, or not of {self.layers} layers: {shown}")
        object.__setattr__(self, "blends", MappingProxyType(dict(self.blends)))

    @classmethod
    def build(
        cls,
        layers: int,
        blend_of: Callable[[Place], Blend],
        taken: tuple[int, ...] | None = None,
    ) -> Composition:
        """Make a composition with `blend_of(place)` at every place.

        Raises:
            RecipeError: `layers` is not positive.
        """
        if layers < 1:
            raise RecipeError(f"a model has at least 1 layer, not {layers}")
        blends = {place: blend_of(place) for place in all_places(layers)}
        return cls(layers, blends, taken)

    def replace(self, changes: Mapping[Place, Blend]) -> Composition:
        """Return a copy with other blends at some places."""
        return replace(self, blends={**self.blends, **changes})

    def rename(self, blends: Mapping[str, Blend]) -> Composition:
        """Return a copy with each expert in `blends` replaced by its blend.

        This is nesting: a soup of experts can stand in the place of an expert (paper 1, table 6).
        Blends are linear, so the result is again one blend per place.
        """
        return replace(
            self, blends={place: blend.rename(blends) for place, blend in self.blends.items()}
        )

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """Every expert that some place uses, sorted."""
        return tuple(sorted({e for blend in self.blends.values() for e in blend.experts}))

    @property
    def fishers(self) -> tuple[str, ...]:
        """Every expert whose diagonal Fisher some place uses, sorted."""
        return tuple(sorted({e for blend in self.blends.values() for e in blend.fishers}))

    def __getitem__(self, place: Place) -> Blend:
        return self.blends[place]

    def __hash__(self) -> int:
        return hash((self.layers, self.taken, tuple(sorted(self.blends.items(), key=str))))

    def __repr__(self) -> str:
        return f"<Composition of {', '.join(self.experts)}: {self.layers} layers>"

    def __str__(self) -> str:
        return draw(self)

    def _repr_html_(self) -> str:
        return f"<pre>{escape(draw(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: `{"layers": L, "places": [{"layer", "role", "weights"}, ...]}`."""
        return {
            "layers": self.layers,
            **({} if self.taken is None else {"taken": list(self.taken)}),
            "places": [
                {"layer": place.layer, "role": place.role, **blend.to_dict()}
                for place, blend in self.blends.items()
            ],
        }


def all_places(layers: int) -> Iterator[Place]:
    """Every place of a model: the embedding first, the layers from 0 up, then the rest."""
    yield Place(None, "embedding")
    for layer in range(layers):
        for role in LAYER_ROLES:
            yield Place(layer, role)
    for role in OUTSIDE_ROLES[1:]:
        yield Place(None, role)


EXPERT_GLYPHS = "░█▚▞▤▥▦▩"
BLEND_GLYPH = "▒"
WIDTH = 10


@dataclass(frozen=True)
class DrawnRow:
    """One line of the stack: a layer number or roles outside the layers, and the distinct parts."""

    label: str
    blends: tuple[tuple[tuple[str, ...], Blend], ...]


def stack_rows(composition: Composition) -> list[DrawnRow]:
    """The rows of the drawing, output on top: outside, layers L-1 to 0, embedding.

    Norms and other tensors of a layer are shown only where they differ from both attention and
    mlp, and a router where it differs from the mlp.
    """
    outside = [role for role in OUTSIDE_ROLES[1:] if role != "other"]
    rows = [_row(composition, None, role.replace("_", " "), (role,)) for role in reversed(outside)]
    for layer in reversed(range(composition.layers)):
        rows.append(_row(composition, layer, str(layer), _shown_roles(composition, layer)))
    rows.append(_row(composition, None, "embedding", ("embedding",)))
    return _joined_outside(rows)


def draw(composition: Composition) -> str:
    """The stack as plain text, one line per layer, output on top.

    Example, for `swap(8)`:

        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       7 ██████████ language
                       6 ░░░░░░░░░░ task
                       ...
    """
    rows = stack_rows(composition)
    glyph_of = _glyphs(composition)
    labels = [_label(row, composition) for row in rows]
    indent = max(map(len, labels))
    lines, previous = [], None
    for row, label in zip(rows, labels, strict=True):
        note = _note(row)
        shown = "" if note == previous else " " + note
        lines.append(visible(f"{label:>{indent}} {_bar(row, glyph_of)}{shown}").rstrip())
        previous = note
    return "\n".join(lines)


def _label(row: DrawnRow, composition: Composition) -> str:
    """The row's label; for a moved layer, with its number in the experts."""
    if composition.taken is None or not row.label.isdigit():
        return row.label
    taken = composition.taken[int(row.label)]
    return row.label if taken == int(row.label) else f"{row.label} = {taken}"


def _row(composition: Composition, layer: int | None, label: str, roles: Sequence[str]) -> DrawnRow:
    parts: list[tuple[tuple[str, ...], Blend]] = []
    for role in roles:
        blend = composition[Place(layer, role)]
        if parts and parts[-1][1] == blend:
            parts[-1] = ((*parts[-1][0], role), blend)
        else:
            parts.append(((role,), blend))
    return DrawnRow(label, tuple(parts))


def _shown_roles(composition: Composition, layer: int) -> list[str]:
    shown = ["attention", "mlp"]
    usual = {composition[Place(layer, role)] for role in shown}
    if composition[Place(layer, "router")] != composition[Place(layer, "mlp")]:
        shown.append("router")
    return shown + [r for r in ("norm", "other") if composition[Place(layer, r)] not in usual]


def _joined_outside(rows: list[DrawnRow]) -> list[DrawnRow]:
    """Joins neighbouring rows outside the layers that have the same blends."""
    joined: list[DrawnRow] = []
    for row in rows:
        last = joined[-1] if joined else None
        both_outside = last and not last.label[0].isdigit() and not row.label[0].isdigit()
        if last and both_outside and [b for _, b in last.blends] == [b for _, b in row.blends]:
            joined[-1] = DrawnRow(f"{last.label}, {row.label}", last.blends)
        else:
            joined.append(row)
    return joined


def _glyphs(composition: Composition) -> dict[str, str]:
    # The middle layer's expert gets the lightest glyph, as in the paper's figure.
    experts = list(composition.experts)
    middle = composition[Place(composition.layers // 2, "mlp")].experts[-1]
    experts.sort(key=lambda expert: (expert != middle, expert))
    return dict(zip(experts, cycle(EXPERT_GLYPHS), strict=False))


def _bar(row: DrawnRow, glyph_of: dict[str, str]) -> str:
    bar, parts = "", len(row.blends)
    for i, (_, blend) in enumerate(row.blends, start=1):
        glyph = glyph_of[blend.experts[0]] if blend.verbatim else BLEND_GLYPH
        bar = bar.ljust(WIDTH * i // parts, glyph)
    return bar


def _note(row: DrawnRow) -> str:
    if len(row.blends) == 1:
        return str(row.blends[0][1])
    return "; ".join(f"{', '.join(roles)}: {blend}" for roles, blend in row.blends)
