"""The papers' compositions: layer swapping, soups, partitions A, B, C and Z, and chat vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend, Operation
from layerswap.compose.composition import Composition
from layerswap.ground.errors import RecipeError

Outside = Literal["blend", "language", "task"]
"""Source of the places outside the layers: both experts blended, or one of them."""

DEFAULT_BOTTOM, DEFAULT_TOP, DEFAULT_DEPTH = 5, 2, 32
"""The paper's default zones and their depth (paper 1, section 4.2)."""


@dataclass(frozen=True)
class Zones:
    """The four layer counts that define a swap (paper 1, Algorithm 1).

    Attributes:
        bottom: layers from the language expert at the input, b.
        top: layers from the language expert at the output, u.
        bottom_transition: blended layers above the bottom zone, t_b.
        top_transition: blended layers below the top zone, t_u.
    """

    bottom: int
    top: int
    bottom_transition: int = 0
    top_transition: int = 0

    def check(self, layers: int) -> None:
        """Raise a RecipeError if a count is negative or the zones do not fit into the layers."""
        for name, count in vars(self).items():
            if count < 0:
                raise RecipeError(f"{name} is {count}; write a number of layers from 0")
        total = sum(vars(self).values())
        if total > layers:
            counts = " + ".join(f"{name} {count}" for name, count in vars(self).items() if count)
            raise RecipeError(f"zones overlap: {counts} = {total}, but there are {layers} layers")

    def part(self, layer: int, layers: int) -> Literal["outer", "transition", "inner"]:
        """The part of a stack of `layers` layers that a layer belongs to."""
        from_top = layers - 1 - layer
        if layer < self.bottom or from_top < self.top:
            return "outer"
        bottom, top = self.bottom + self.bottom_transition, self.top + self.top_transition
        return "transition" if layer < bottom or from_top < top else "inner"

    def __str__(self) -> str:
        text = f"bottom {self.bottom}, top {self.top}"
        if self.bottom_transition or self.top_transition:
            text += f", transitions {self.bottom_transition} and {self.top_transition}"
        return text


def default_zones(layers: int) -> Zones:
    """The paper's default, 5 bottom and 2 top layers of 32, scaled to another depth.

    Scales by L/32, rounded half up, at least 1.

    Example: `default_zones(32)` is `Zones(5, 2)`; 28 layers give `Zones(4, 2)`, 8 give
    `Zones(1, 1)`.
    """
    return Zones(scaled(DEFAULT_BOTTOM, layers), scaled(DEFAULT_TOP, layers))


def scaled(count: int, layers: int) -> int:
    """`count` layers of `DEFAULT_DEPTH`, scaled to `layers`: rounded half up, at least 1."""
    return max(1, math.floor(count * layers / DEFAULT_DEPTH + 0.5))


def swap(
    layers: int,
    *,
    task: str = "task",
    language: str = "language",
    zones: Zones | None = None,
    weights: Mapping[str, float] | None = None,
    outside: Outside = "blend",
) -> Composition:
    """Layer swapping: the language expert in the outer layers, the task expert in the middle.

    Layer l takes the language expert if `l < b` or `l >= L - u`; the blend of both if
    `b <= l < b + t_b` or `L - u - t_u <= l < L - u`; the task expert otherwise (paper 1,
    Algorithm 1). Line 5 of the algorithm, as printed, joins its two conditions with "or", so that
    no transition layer could exist. This function joins them with "and".
    """
    zones = zones or default_zones(layers)
    zones.check(layers)
    blend = Blend.of({task: 1.0, language: 1.0} if weights is None else weights)
    choice = {"blend": blend, "language": Blend.of(language), "task": Blend.of(task)}
    parts = {"outer": choice["language"], "transition": blend, "inner": choice["task"]}
    return Composition.build(
        layers,
        lambda place: (
            choice[outside] if place.layer is None else parts[zones.part(place.layer, layers)]
        ),
    )


def soup(layers: int, weights: Mapping[str, float] | Iterable[str]) -> Composition:
    """The same blend at every place (Wortsman et al., 2022): the papers' main baseline."""
    blend = Blend.of(weights if isinstance(weights, Mapping) else dict.fromkeys(weights, 1.0))
    return Composition.build(layers, lambda place: blend)


def zone_grid(
    layers: int,
    *,
    bottom: Iterable[int],
    top: Iterable[int],
    bottom_transition: Iterable[int] = (0,),
    top_transition: Iterable[int] = (0,),
) -> Iterator[Zones]:
    """Every combination of zone sizes that fits into `layers` layers, in order."""
    for sizes in product(bottom, top, bottom_transition, top_transition):
        if sum(sizes) <= layers:
            yield Zones(*sizes)


PARTITIONS = {"A": (6, 2), "B": (8, 4), "C": (6, 2), "Z": (8, 4)}
"""The second paper's partitions (section 3.3): bottom and top layers of 32 to 36, by name."""


def partition(
    name: str,
    layers: int,
    *,
    task: str = "task",
    language: str = "language",
    outside: Literal["language", "task"] | None = None,
) -> Composition:
    """A partition of the places between language and task (paper 2, section 3.3).

    The language gets: A: all attention, and mlp in the bottom 6 and top 2 layers. B: the bottom 8
    and top 4 layers. C: the bottom 6 and top 2 layers. Z: the inverse of B, as a control. The
    counts are for 32 to 36 layers; other depths scale by L/32. A partition is a composition with
    two experts, so training, reverting and swapping read the same object.

    Args:
        name: one of `PARTITIONS`.
        layers: number of layers.
        task: name of the task expert.
        language: name of the language expert.
        outside: owner of the places outside the layers; by default the owner of the inner layers.

    Raises:
        RecipeError: an unknown name, or zones that do not fit.
    """
    zones = partition_zones(name, layers)
    outer, inner = (task, language) if name == "Z" else (language, task)
    rest = {"language": language, "task": task, None: inner}[outside]

    def blend_of(place: Place) -> Blend:
        if place.layer is None:
            return Blend.of(rest)
        attention_everywhere = name == "A" and place.role == "attention"
        is_outer = attention_everywhere or zones.part(place.layer, layers) == "outer"
        return Blend.of(outer if is_outer else inner)

    return Composition.build(layers, blend_of)


def partition_zones(name: str, layers: int) -> Zones:
    """The outer layers of a partition, scaled to a depth."""
    if name not in PARTITIONS:
        raise RecipeError(f"no partition {name!r}; there are {', '.join(PARTITIONS)}")
    bottom, top = PARTITIONS[name]
    if not 32 <= layers <= 36:
        bottom, top = scaled(bottom, layers), scaled(top, layers)
    zones = Zones(bottom, top)
    zones.check(layers)
    return zones


def instruct(
    layers: int,
    *,
    language: str = "language",
    instructed: str = "instruct",
    base: str = "base",
    weight: float = 1.0,
    zones: Zones | None = None,
    outside: Literal["add", "language"] = "add",
) -> Composition:
    """A language model plus the chat vector of instruction tuning, layer by layer.

    Every place takes `L + w (I - B)` (Huang et al., 2024, equation 1; 2603.28263), which is task
    arithmetic over B with weight 1 for L and w for I. The outer zones keep the language model
    unchanged, and transition layers take half of w. With `outside="add"` the places outside the
    layers take w.
    """
    zones = zones or Zones(0, 0)
    zones.check(layers)
    shares = {"outer": 0.0, "transition": weight / 2, "inner": weight}

    def blend_of(place: Place) -> Blend:
        if place.layer is None:
            share = weight if outside == "add" else 0.0
        else:
            share = shares[zones.part(place.layer, layers)]
        if not share:
            return Blend.of(language)
        inputs = {Blend.of(language): 1.0, Blend.of(instructed): share}
        return Blend.of(Operation.of("task_arithmetic", inputs, base=Blend.of(base)))

    return Composition.build(layers, blend_of)
