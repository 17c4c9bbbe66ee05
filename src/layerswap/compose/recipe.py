"""Recipes: YAML files, validated and resolved to compositions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    model_validator,
)

from layerswap.checkpoint.places import Pattern, Place
from layerswap.compose.blend import Blend, summed
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit import MergekitMethod, translate
from layerswap.compose.schema import (
    BASE,
    BLEND_TYPES,
    DTYPES,
    Expert,
    InstructMethod,
    MergeMethod,
    Method,
    Override,
    PartitionMethod,
    PatternEntry,
    SoupMethod,
    SwapMethod,
    as_source,
    parse_size,
    read_rule,
)
from layerswap.ground.errors import RecipeError
from layerswap.ground.strict import Strict
from layerswap.ground.types import PathLike
from layerswap.ground.yaml_file import (
    KeyPath,
    Mistake,
    nearest,
    parse_yaml,
    read_text,
    refuse_mistakes,
    validate,
)
from layerswap.methods import METHODS

METHOD_KEYS = ("swap", "soup", "partition", "merge", "instruct", "mergekit")


def _language_code(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z]{2,8}([-_][A-Za-z0-9]+)*", value):
        raise ValueError(f"{value!r} is not a language code such as sw")
    return value


class Recipe(Strict):
    """A whole recipe, with exactly one of swap, soup, partition, merge and instruct.

    Attributes:
        experts: the experts by name.
        base: the checkpoint that they were fine-tuned from.
        swap: layer swapping.
        soup: one blend at every place.
        partition: a partition of the second paper.
        merge: another merge method, such as TIES, at every place.
        instruct: a language model with a chat vector.
        mergekit: a mergekit configuration over the experts; `read_recipe` writes it.
        weights: weights of a blend: `uniform`, `magnitude`, or a number per expert.
        places: overrides, applied in order.
        tokenizer: the tokenizer of the output if the experts' differ: `task`, `language`, an
            expert's name, or `union`.
        bake: write full weights even if all experts are adapters.
        base_as: the base that adapters are added to, as QLoRA trains over it: `nf4` through 4-bit
            NormalFloat, `nf4-double` with double quantisation; as stored when None.
        rank: largest rank of a merged adapter; the exact rank when None.
        dtype: dtype of the output; the experts' when None.
        max_shard_size: largest size of a shard, such as `5GB`.
        blend_type: type of the blended matrices of a GGUF output, such as `Q8_0`; the wider of
            the experts' when None.
        languages: language codes for the model card.
        patterns: places of tensors that no built-in layout knows.
    """

    experts: Annotated[
        dict[str, Annotated[Expert, BeforeValidator(as_source)]], Field(min_length=1)
    ]
    base: Annotated[Expert, BeforeValidator(as_source)] | None = None
    swap: SwapMethod | None = None
    soup: SoupMethod | None = None
    partition: PartitionMethod | None = None
    merge: MergeMethod | None = None
    instruct: InstructMethod | None = None
    mergekit: MergekitMethod | None = None
    weights: Annotated[str | dict[str, float], BeforeValidator(read_rule)] = "uniform"
    places: list[Override] = []
    tokenizer: str | None = None
    bake: bool = False
    base_as: Literal["nf4", "nf4-double"] | None = None
    rank: PositiveInt | None = None
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    max_shard_size: str = "5GB"
    blend_type: Literal[BLEND_TYPES] | None = None  # type: ignore[valid-type]
    languages: list[Annotated[str, AfterValidator(_language_code)]] = []
    patterns: list[PatternEntry] = []

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[Recipe]) -> Recipe:
        recipe = handler(data)
        return refuse_mistakes(recipe, mistakes(recipe))

    @property
    def methods(self) -> dict[str, Method]:
        """The given methods by key; a valid recipe has one."""
        given = {key: getattr(self, key) for key in METHOD_KEYS}
        return {key: method for key, method in given.items() if method is not None}

    @property
    def method(self) -> Method:
        """The recipe's method."""
        (method,) = self.methods.values()
        return method

    def changed(
        self, fields: Mapping[str, Any], *, where: str, without: Sequence[str] = ()
    ) -> Recipe:
        """Copy the recipe with new `fields` and without some keys; errors name `where`."""
        kept = {name: getattr(self, name) for name in self.model_fields_set.difference(without)}
        return check_recipe({**kept, **fields}, where=where)

    def __str__(self) -> str:
        (name,) = self.methods
        if self.merge is not None:
            name = self.merge.method
        elif self.mergekit is not None:
            name = f"mergekit {self.mergekit.merge_method}"
        over = "" if self.base is None else ", with its base"
        return f"{name} of {', '.join(self.experts)}{over}"

    @property
    def place_patterns(self) -> tuple[Pattern, ...]:
        """The recipe's patterns, for `open_checkpoint`."""
        return tuple(Pattern(entry.match, entry.role) for entry in self.patterns)

    def resolve(
        self,
        layers: int,
        magnitude: Mapping[str, float] | None = None,
        tensors: Mapping[str, Place] | None = None,
    ) -> Composition:
        """Resolve to a composition for a model of `layers` layers, over experts with a source.

        Args:
            layers: number of layers of the experts, L.
            magnitude: the measured weight of each expert that the method blends, if `weights` is
                `magnitude`.
            tensors: the place of every tensor, which a mergekit configuration needs.

        Raises:
            RecipeError: the zones do not fit, or an override names places that do not exist.
        """
        composition = self.method.compose(layers, self._weights(magnitude), tensors)
        for i, override in enumerate(self.places):
            try:
                blend = Blend.of(override.take)
                changes = dict.fromkeys(override.places(composition.layers), blend)
            except RecipeError as error:
                raise error.within(f"places[{i}]") from None
            composition = composition.replace(changes)
        return composition.rename(self.flat_experts())

    @property
    def experts_in_order(self) -> list[str]:
        """The experts of the method in its order, then the others by name.

        The first expert gives the configuration, which must not depend on the order of a mapping.
        """
        flat = self.flat_experts()
        named = self.method.references.values()
        first = [name for name in named if name in self.experts]  # some methods name the base too
        members = [member for name in first for member in flat[name].experts]
        with_source = [member for member in members if member in self.experts]
        return list(dict.fromkeys([*with_source, *sorted(self.experts)]))

    def flat_experts(self) -> dict[str, Blend]:
        """Resolve each expert to a blend of experts that have a source."""
        flat: dict[str, Blend] = {} if BASE in self.experts else {BASE: Blend.of(BASE)}

        def flatten(name: str) -> Blend:
            if name not in flat:  # an expert in several others is flattened once
                expert = self.experts[name]
                if expert.merge is not None:
                    flat[name] = Blend.of(expert.merge.operation(flatten))
                elif expert.soup is not None:
                    parts = ((flatten(member), weight) for member, weight in expert.soup.items())
                    flat[name] = Blend.nested(summed(parts))
                else:
                    flat[name] = Blend.of(name)
            return flat[name]

        return {name: flatten(name) for name in self.experts}

    def _weights(self, magnitude: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if not isinstance(self.weights, str):
            return self.weights
        if self.weights == "uniform":
            return None
        if magnitude is None:
            raise RecipeError("weights: magnitude weights were not measured")
        return magnitude


def read_recipe(path: PathLike) -> Recipe:
    """Read a recipe, or a mergekit configuration, from a YAML file.

    Raises:
        RecipeError: the file cannot be read, or the recipe is wrong. All mistakes of single keys
            are reported at once, then all over several keys: one per line, each with its line in
            the file and its key path.

    Example:
        >>> import layerswap as ls
        >>> print(ls.read_recipe("recipe.yaml").resolve(3))
        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
    """
    return parse_recipe(read_text(Path(path)), where=str(path))


def parse_recipe(text: str, *, where: str = "recipe") -> Recipe:
    """Parse a recipe in YAML; errors name `where`. See `read_recipe`."""
    data, lines = translate(*parse_yaml(text, where), where=where)
    return check_recipe(data, where=where, lines=lines)


def check_recipe(data: Any, *, where: str, lines: Mapping[KeyPath, int] | None = None) -> Recipe:
    """Validate a recipe in plain data; errors name `where`, and the line if known."""
    expected = "a recipe is a mapping with `experts` and one of swap, soup, partition, merge"
    return validate(Recipe, data, where=where, expected=expected, lines=lines)


# --- rules over several keys ---

MERGES = 256
"""Most merge methods inside an expert; the record repeats each at every use."""
DEPTH = 16
"""Most levels of experts made of experts; each level can double the terms of a blend."""


def mistakes(recipe: Recipe) -> Iterator[Mistake]:
    """Find the mistakes in a recipe that the types of its fields do not show."""
    yield from _method_mistakes(recipe)
    unknown = list(_unknown_names(recipe))
    yield from unknown or _nesting_mistakes(recipe.experts)
    yield from _weight_mistakes(recipe)
    yield from _base_mistakes(recipe)
    yield from _fisher_mistakes(recipe)
    try:
        parse_size(recipe.max_shard_size)
    except RecipeError as error:
        yield ("max_shard_size",), str(error)


def _method_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    given = recipe.methods
    if len(given) != 1:
        names = " and ".join(given) if given else "none"
        empty = [key for key in METHOD_KEYS if key in recipe.model_fields_set]
        hint = f"; for the defaults write `{empty[0]}: {{}}`" if empty and not given else ""
        yield (), f"give exactly one of {', '.join(METHOD_KEYS[:-1])}; found {names}{hint}"
    for key, method in given.items():
        for path, text in method.mistakes():
            yield (key, *path), text
        for other_key, text in method.conflicts.items():
            if other_key in recipe.model_fields_set and getattr(recipe, other_key) is not None:
                yield (other_key,), text


def _names(recipe: Recipe) -> dict[KeyPath, str]:
    """The experts that the method combines, by the key path that names them."""
    return {
        (key, *path): name
        for key, method in recipe.methods.items()
        for path, name in method.references.items()
    }


def _parts(expert: Expert) -> dict[KeyPath, str]:
    """The experts that a soup or a merge is made of, by key path."""
    if expert.merge is not None:
        return {("merge", "experts", name): name for name in expert.merge.experts}
    return {("soup", name): name for name in expert.soup or ()}


def _unknown_names(recipe: Recipe) -> Iterator[Mistake]:
    references: dict[KeyPath, str] = {}
    for name, expert in recipe.experts.items():
        references |= {("experts", name, *path): part for path, part in _parts(expert).items()}
    references |= _names(recipe)
    for i, override in enumerate(recipe.places):
        references |= {("places", i, "take", name): name for name in override.take}
    if not isinstance(recipe.weights, str):
        references |= {("weights", name): name for name in recipe.weights}
    names = {*recipe.experts, *([] if recipe.base is None else [BASE])}
    for path, name in references.items():
        if name not in names:
            yield path, f"no expert {name!r}{nearest(name, list(recipe.experts))}"


def _weight_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    weights, blended = recipe.weights, set(_names(recipe).values())
    if weights == "magnitude" and recipe.base is None:
        yield ("weights",), "magnitude weights need the base; give `base`"
    if not isinstance(weights, str) and blended:
        for name in sorted(blended - set(weights)):
            yield ("weights",), f"no weight for {name!r}"
        for name in weights:
            if name in recipe.experts and name not in blended:
                yield ("weights", name), "the method does not blend this expert"


def _merges(recipe: Recipe) -> Iterator[tuple[KeyPath, MergeMethod]]:
    """Every merge, by its key path."""
    if recipe.merge is not None:
        yield ("merge",), recipe.merge
    for name, expert in recipe.experts.items():
        if expert.merge is not None:
            yield ("experts", name, "merge"), expert.merge


def _base_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    base, called_base = recipe.base, BASE in recipe.experts
    if base is not None and base.soup is not None:
        yield ("base", "soup"), "the base is one checkpoint, never a soup"
    needs: dict[KeyPath, str] = {
        path: f"{merge.method} takes deltas from the base"
        for path, merge in _merges(recipe)
        if METHODS[merge.method].needs_base(merge.model_extra or {})
    }
    if recipe.instruct is not None:
        needs["instruct",] = "a chat vector is the difference from a base"
    for path, why in needs.items():
        if base is None:
            yield path, f"{why}; give `base`"
        if called_base:
            yield path, "with deltas no expert can be called 'base'; give it another name"
    if recipe.mergekit is not None and base is not None and called_base:
        yield ("mergekit",), "beside the base no expert can be called 'base'; give it another name"


def _fisher_mistakes(recipe: Recipe) -> Iterator[Mistake]:
    experts = recipe.experts
    for _, merge in _merges(recipe):
        for name in merge.experts if METHODS[merge.method].fisher else ():
            if name in experts and experts[name].fisher is None:
                yield ("experts", name), f"{merge.method} needs its Fisher; give `fisher`"
            if f"fisher of {name}" in experts:
                taken = ("experts", f"fisher of {name}")
                yield taken, "is the name of a Fisher; choose another name"


def _nesting_mistakes(experts: Mapping[str, Expert]) -> Iterator[Mistake]:
    """Find the first cycle, or the first expert that is nested too deeply or often."""
    parts = {name: list(_parts(expert).values()) for name, expert in experts.items()}
    depth: dict[str, int] = {}
    merges: dict[str, int] = {}
    try:
        order = list(TopologicalSorter(parts).static_order())
    except CycleError as error:
        for name in experts:
            if name in error.args[1]:
                yield ("experts", name), "is made of itself"
        return
    for name in order:
        inner = parts.get(name, [])
        depth[name] = 1 + max((depth[member] for member in inner), default=0)
        merges[name] = sum(merges[member] for member in inner)
        merges[name] += name in experts and experts[name].merge is not None
        if depth[name] > DEPTH:
            why = f"is made of experts that are made of others, more than {DEPTH} levels deep"
        elif merges[name] > MERGES:
            why = f"is made of {merges[name]:,} merges written out; the most is {MERGES:,}"
        else:
            continue
        yield ("experts", name), why
        return
