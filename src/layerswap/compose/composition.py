"""Compositions: a blend for every place of a model. Pure data: no tensors, no files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from layerswap.checkpoint.places import ROLES, Place
from layerswap.compose.blend import Blend
from layerswap.compose.plain import blend_from_dict, blend_to_dict
from layerswap.errors import RecipeError

LAYER_ROLES = ("attention", "mlp", "norm", "other")
"""What a tensor can do inside a layer."""
OUTSIDE_ROLES = ("embedding", "final_norm", "head", "other")
"""What a tensor can do outside the layers."""


@dataclass(frozen=True)
class Composition:
    """What goes where: a blend for every place of a model of `layers` layers.

    The same object is written to disk, held in memory, swept, and drawn.

    Attributes:
        layers: number of transformer layers, L.
        blends: the blend of every place: `layers * 4` places inside the layers, 4 outside.
    """

    layers: int
    blends: Mapping[Place, Blend]

    def __post_init__(self) -> None:
        expected = set(all_places(self.layers))
        if set(self.blends) != expected:
            wrong = (expected - set(self.blends), set(self.blends) - expected)
            missing, unknown = (sorted(f"{p.layer} {p.role}" for p in places) for places in wrong)
            raise RecipeError(
                "a composition needs a blend for every place of its layers; "
                f"missing: {', '.join(missing) or 'none'}; unknown: {', '.join(unknown) or 'none'}"
            )
        object.__setattr__(self, "blends", MappingProxyType(dict(self.blends)))

    @classmethod
    def build(cls, layers: int, blend_of: Callable[[Place], Blend]) -> Composition:
        """The composition that has `blend_of(place)` at every place.

        Raises:
            RecipeError: `layers` is not positive.
        """
        if layers < 1:
            raise RecipeError(f"a model has at least 1 layer, not {layers}")
        return cls(layers, {place: blend_of(place) for place in all_places(layers)})

    def replace(self, changes: Mapping[Place, Blend]) -> Composition:
        """A copy with other blends at some places."""
        return Composition(self.layers, {**self.blends, **changes})

    def rename(self, blends: Mapping[str, Blend]) -> Composition:
        """A copy in which each expert named in `blends` is replaced by that blend.

        This is nesting: a soup of experts may stand wherever an expert can (paper 1, table 6),
        and since blends are linear the result is again one blend per place.
        """
        return Composition(
            self.layers, {place: blend.rename(blends) for place, blend in self.blends.items()}
        )

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert that some place takes from, sorted."""
        return tuple(sorted({e for blend in self.blends.values() for e in blend.experts}))

    @property
    def fishers(self) -> tuple[str, ...]:
        """Every expert whose diagonal Fisher some place needs, sorted."""
        return tuple(sorted({e for blend in self.blends.values() for e in blend.fishers}))

    def __getitem__(self, place: Place) -> Blend:
        return self.blends[place]

    def __hash__(self) -> int:
        return hash((self.layers, tuple(sorted(self.blends.items(), key=str))))

    def __str__(self) -> str:
        from layerswap.compose.drawing import draw

        return draw(self)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: `{"layers": L, "places": [{"layer", "role", "weights"}, ...]}`."""
        return {
            "layers": self.layers,
            "places": [
                {"layer": place.layer, "role": place.role, **blend_to_dict(blend)}
                for place, blend in self.blends.items()
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Composition:
        """The composition that `to_dict` wrote.

        Raises:
            RecipeError: a place is missing, unknown or there twice, a weight is not allowed, or
                the data has another shape.
        """
        try:
            layers, entries = data["layers"], data["places"]
            blends = {Place(e["layer"], e["role"]): blend_from_dict(e) for e in entries}
            if len(blends) < len(entries):
                raise RecipeError("a composition has one blend for every place; some are twice")
            # Compared first, so that a false number of layers never costs memory.
            if len(blends) != layers * len(LAYER_ROLES) + len(OUTSIDE_ROLES):
                raise RecipeError(f"{len(blends)} places are not those of {layers} layers")
            return cls(layers, blends)
        except (KeyError, TypeError, AttributeError) as error:
            raise RecipeError(f"not a composition ({type(error).__name__}: {error})") from None


def all_places(layers: int) -> Iterator[Place]:
    """Every place of a model: the embedding first, the layers from 0 up, then the rest."""
    yield Place(None, "embedding")
    for layer in range(layers):
        for role in LAYER_ROLES:
            yield Place(layer, role)
    for role in OUTSIDE_ROLES[1:]:
        yield Place(None, role)


def check_role(role: str, layer: int | None) -> None:
    """Refuse a role that cannot occur inside (or outside) the layers.

    Raises:
        RecipeError: naming the roles that can.
    """
    allowed = OUTSIDE_ROLES if layer is None else LAYER_ROLES
    if role not in ROLES or role not in allowed:
        where = "outside the layers" if layer is None else "in a layer"
        raise RecipeError(f"no role {role!r} {where}; there are {', '.join(allowed)}")


def summed(parts: Iterable[tuple[Blend, float]]) -> dict[Blend, float]:
    """The total weight of each distinct blend, ready for `Blend.nested`."""
    total: dict[Blend, float] = {}
    for blend, weight in parts:
        total[blend] = total.get(blend, 0.0) + weight
    return total
