"""Pydantic models of the parts of a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    model_validator,
)

from layerswap.checkpoint.places import ROLES, Pattern, Place
from layerswap.compose import presets
from layerswap.compose.blend import Blend, Operation, check_operation, summed
from layerswap.compose.composition import Composition, all_places
from layerswap.compose.presets import Outside, Zones, default_zones
from layerswap.ground.errors import RecipeError
from layerswap.ground.strict import Strict, once
from layerswap.ground.yaml_file import KeyPath, Mistake, nearest
from layerswap.methods import METHODS

BASE = "base"
"""The name of the base in compositions; with a base, no expert may have it."""
DTYPES = ("float32", "bfloat16", "float16")
BLEND_TYPES = ("F32", "BF16", "F16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
"""Types of a GGUF file in which blends can be written."""
WEIGHT_RULES = ("uniform", "magnitude")
LARGEST_WEIGHT = 1e100
LAYERS = re.compile(r"all|outside|\d{1,6}(?:-\d{1,6})?", re.ASCII)
"""Layers of an override."""
SHARD_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB)", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size such as `5GB` into bytes (1 GB = 1e9 bytes, as on the Hub)."""
    match = SHARD_SIZE.fullmatch(text.strip())
    unit = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    size = float(match[1]) * unit[match[2].upper()] if match else 0
    if not 1 <= size < 2**63:
        raise RecipeError(f"{text!r:.40} is not a size; write for example 5GB or 500MB")
    return int(size)


def as_source(value: object) -> object:
    """Read a bare text as an expert's source."""
    return {"source": value} if isinstance(value, str) else value


def _read_layers(value: object) -> str:
    if type(value) not in (int, str) or not LAYERS.fullmatch(text := str(value).strip()):
        raise ValueError(f"{value!r} is not a number, a range like 3-7, all or outside")
    first, _, last = text.partition("-")
    if last and int(first) > int(last):
        raise ValueError(f"{text} runs backwards; write {int(last)}-{int(first)}")
    return text


def _read_weights(value: object) -> dict[str, float]:
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return dict.fromkeys(once(value), 1.0)
    if not isinstance(value, dict) or not value or not all(isinstance(key, str) for key in value):
        raise ValueError(f"write a list of experts, or a weight per expert; found {value!r}")
    for name, weight in value.items():
        if type(weight) not in (int, float) or not 0 <= weight <= LARGEST_WEIGHT:
            text = f"{weight!r:.40}"
            raise ValueError(f"the weight of {name!r} is {text}; a weight is a number from 0")
    if not sum(value.values()):
        raise ValueError("every weight is 0")
    return {name: float(weight) for name, weight in value.items()}


def read_rule(value: object) -> object:
    """Check a rule: `uniform`, `magnitude`, or a weight per expert."""
    if not isinstance(value, str):
        return _read_weights(value)
    if value not in WEIGHT_RULES:
        raise ValueError(f"no rule {value!r}{nearest(value, list(WEIGHT_RULES))}")
    return value


def _read_take(value: object) -> object:
    return {value: 1.0} if isinstance(value, str) else _read_weights(value)


Weights = Annotated[dict[str, float], BeforeValidator(_read_weights)]
"""Weight per expert; a list of experts means equal weights."""


Shares = Mapping[str, float] | None
Tensors = Mapping[str, Place] | None


class Method(Strict):
    """The part of a recipe that composes the experts.

    Attributes:
        conflicts: keys of a recipe that cannot be given with the method, with the reason.
    """

    conflicts: ClassVar[Mapping[str, str]] = {}

    @property
    def references(self) -> dict[KeyPath, str]:
        """The experts that the method combines, in its order, by the key path that names them."""
        raise NotImplementedError

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Compose the experts of a model of `layers` layers.

        Args:
            layers: number of layers.
            weights: weight of each expert in a blend; equal when None.
            tensors: the place of every tensor, for methods that go by their names.
        """
        raise NotImplementedError

    def mistakes(self) -> Iterator[Mistake]:
        """Find the mistakes that the types of the fields do not show."""
        return iter(())


class MergeMethod(Method):
    """A merge method over experts; other keys than `method` and `experts` are parameters."""

    conflicts = {"weights": "weights of a merge belong in `merge.experts`; remove `weights`"}

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    method: str
    experts: Weights

    @model_validator(mode="after")
    def _allowed(self) -> MergeMethod:
        try:
            check_operation(self.method, self.model_extra or {}, len(self.experts))
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def references(self) -> dict[KeyPath, str]:
        """The experts, by key path."""
        return {("experts", name): name for name in self.experts}

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Run the method at every place."""
        merged = Blend.of(self.operation(Blend.of))
        return Composition.build(layers, lambda place: merged)

    def operation(self, blend_of: Callable[[str], Blend]) -> Operation:
        """Make the operation over the blends of the experts."""
        blends = {name: blend_of(name) for name in self.experts}
        inputs = summed((blends[name], weight) for name, weight in self.experts.items())
        fishers = {blend: name for name, blend in blends.items()}
        if METHODS[self.method].fisher and len(fishers) < len(self.experts):
            raise RecipeError(f"{self.method}: two of {', '.join(self.experts)} are the same")
        return Operation.of(
            self.method,
            inputs,
            base=Blend.of(BASE),
            parameters=self.model_extra,
            fishers=fishers,
        )


class Expert(Strict):
    """The origin of an expert: a checkpoint, a soup of other experts, or a merge.

    Attributes:
        source: a folder, a GGUF file, a Hub id or a URL.
        revision: branch, tag or commit on the Hub.
        soup: weights of other experts.
        merge: a merge method over other experts.
        fisher: a folder or Hub id of its diagonal Fisher, for the merge method `fisher`.
        adapter: a folder or Hub id of a LoRA adapter that is added to the source.
    """

    source: Annotated[str, Field(min_length=1)] | None = None
    revision: str | None = None
    soup: Weights | None = None
    merge: MergeMethod | None = None
    fisher: Annotated[str, Field(min_length=1)] | None = None
    adapter: Annotated[str, Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_origin(self) -> Expert:
        if [self.source, self.soup, self.merge].count(None) != 2:
            raise ValueError("give exactly one of source, soup and merge")
        if self.revision is not None and self.source is None:
            raise ValueError("a revision needs a source")
        if self.adapter is not None and self.source is None:
            raise ValueError("an adapter needs a source that it is added to")
        return self


class PairMethod(Method):
    """A method over two experts, which the fields in `pair` name."""

    pair: ClassVar[tuple[str, str]] = ("task", "language")

    @property
    def references(self) -> dict[KeyPath, str]:
        """The experts, by key path."""
        return {(field,): getattr(self, field) for field in self.pair}

    def mistakes(self) -> Iterator[Mistake]:
        """Refuse one expert in both roles."""
        first, second = self.references.values()
        if first == second:
            yield (), f"the {self.pair[0]} and the {self.pair[1]} expert are both {first!r}"


class SwapMethod(PairMethod):
    """Layer swapping (paper 1, Algorithm 1); see `compose.presets.swap`."""

    task: str = "task"
    language: str = "language"
    bottom: NonNegativeInt | None = None
    top: NonNegativeInt | None = None
    bottom_transition: NonNegativeInt = 0
    top_transition: NonNegativeInt = 0
    outside: Outside = "blend"

    def zones(self, layers: int) -> Zones:
        """The zones for a model of `layers` layers, with scaled defaults."""
        default = default_zones(layers)
        return Zones(
            default.bottom if self.bottom is None else self.bottom,
            default.top if self.top is None else self.top,
            self.bottom_transition,
            self.top_transition,
        )

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Swap layers; see `compose.presets.swap`."""
        pair = {"task": self.task, "language": self.language}
        of_pair = None if weights is None else {name: weights[name] for name in pair.values()}
        zones = self.zones(layers)
        return presets.swap(layers, **pair, zones=zones, weights=of_pair, outside=self.outside)


class SoupMethod(Method):
    """One blend at every place; see `compose.presets.soup`."""

    experts: Annotated[list[str], Field(min_length=1), AfterValidator(once)]

    @property
    def references(self) -> dict[KeyPath, str]:
        """The experts, by key path."""
        return {("experts", i): name for i, name in enumerate(self.experts)}

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Blend the experts alike at every place."""
        of_soup = weights and {name: weights[name] for name in self.experts}
        return presets.soup(layers, of_soup or self.experts)


class PartitionMethod(PairMethod):
    """One of the second paper's partitions; see `compose.presets.partition`."""

    conflicts = {"weights": "a partition blends nothing; remove `weights`"}

    name: Literal["A", "B", "C", "Z"]
    task: str = "task"
    language: str = "language"
    outside: Literal["language", "task"] | None = None

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Divide the places; see `compose.presets.partition`."""
        pair = {"task": self.task, "language": self.language}
        return presets.partition(self.name, layers, **pair, outside=self.outside)


class InstructMethod(PairMethod):
    """The chat vector on a language model; see `compose.presets.instruct`."""

    pair = ("language", "instruct")
    conflicts = {"weights": "the weight of a chat vector is `instruct.weight`; remove `weights`"}

    language: str = "language"
    instruct: str = "instruct"
    weight: Annotated[float, Field(ge=0, le=LARGEST_WEIGHT)] = 1.0
    bottom: NonNegativeInt = 0
    top: NonNegativeInt = 0
    bottom_transition: NonNegativeInt = 0
    top_transition: NonNegativeInt = 0
    outside: Literal["add", "language"] = "add"

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Add the chat vector; see `compose.presets.instruct`."""
        zones = Zones(self.bottom, self.top, self.bottom_transition, self.top_transition)
        return presets.instruct(
            layers,
            language=self.language,
            instructed=self.instruct,
            weight=self.weight,
            zones=zones,
            outside=self.outside,
        )


class Where(Strict):
    """Places of a model, by layers and roles.

    The role `mlp` of a mixture includes its router; the role `router` is the router alone.
    """

    layers: Annotated[str, BeforeValidator(_read_layers)] = "all"
    roles: Annotated[list[Literal[ROLES]], Field(min_length=1)] | None = None  # type: ignore[valid-type]

    def places(self, layers: int) -> list[Place]:
        """The places in a model of `layers` layers; a RecipeError if there are none."""
        chosen = _layer_numbers(self.layers, layers)
        roles = {*self.roles, *(["router"] if "mlp" in self.roles else [])} if self.roles else None
        chosen_places = [
            place
            for place in all_places(layers)
            if place.layer in chosen and (roles is None or place.role in roles)
        ]
        if not chosen_places:
            asked = ", ".join(self.roles or ())
            raise RecipeError(f"no place in layers {self.layers} has a role of {asked}")
        return chosen_places


class Override(Where):
    """Places whose blend replaces the method's; later overrides win."""

    take: Annotated[dict[str, float], BeforeValidator(_read_take)]


class PatternEntry(Strict):
    """The place of tensors that no built-in layout knows."""

    match: str
    role: Literal[ROLES]  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _compiles(self) -> PatternEntry:
        try:
            Pattern(self.match, self.role)
        except RecipeError as error:
            raise ValueError(str(error)) from None
        return self


def _layer_numbers(text: str, layers: int) -> set[int | None]:
    if text == "outside":
        return {None}
    if text == "all":
        return {None, *range(layers)}
    first, _, last = text.partition("-")
    if int(last or first) >= layers:
        raise RecipeError(f"layers: {text} is not inside 0-{layers - 1}")
    return set(range(int(first), int(last or first) + 1))
