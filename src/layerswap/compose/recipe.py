"""Recipes: the YAML that a person writes, checked whole and resolved to a composition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    model_validator,
)

from layerswap._types import PathLike
from layerswap.checkpoint.places import Pattern, Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, summed
from layerswap.compose.mergekit import MergekitMethod, is_mergekit, recipe_data, resolve
from layerswap.compose.mergekit.validation import mistakes as mergekit_mistakes
from layerswap.compose.presets import instruct, partition, soup, swap
from layerswap.compose.schema import (
    BASE,
    BLEND_TYPES,
    DTYPES,
    Expert,
    InstructMethod,
    MergeMethod,
    Override,
    PartitionMethod,
    PatternEntry,
    SoupMethod,
    StackedLayers,
    Strict,
    SwapMethod,
    as_source,
    read_rule,
    stacked,
)
from layerswap.compose.validation import METHOD_KEYS, mistakes
from layerswap.compose.yaml_file import (
    KeyPath,
    Mistake,
    parse_yaml,
    read_text,
    validate,
    validate_whole,
)
from layerswap.errors import RecipeError

OwnMethod = SwapMethod | SoupMethod | PartitionMethod | MergeMethod | InstructMethod
Method = OwnMethod | MergekitMethod
"""How a recipe composes."""


class Recipe(Strict):
    """A whole recipe; exactly one of swap, soup, partition, merge and instruct composes.

    Attributes:
        experts: the experts by name.
        base: the checkpoint they were fine-tuned from; magnitude weights need it.
        swap: layer swapping.
        soup: one blend everywhere.
        partition: a named partition of the second paper.
        merge: another merge method, such as TIES, at every place.
        instruct: a language model with a chat vector.
        mergekit: a mergekit configuration over the experts; `read_recipe` writes it.
        stack: the experts' layers that the output is made of, from the input up, where layers
            are repeated, dropped or moved; the method then composes the new stack.
        weights: weights of a blend: `uniform`, `magnitude`, or a number per expert.
        places: overrides, applied in order.
        tokenizer: whose tokenizer the output has where they differ: `task`, `language`, an
            expert's name, or `union`.
        bake: write full weights even where all experts are adapters.
        rank: largest rank of a merged adapter; as many as an exact blend needs when not given.
        dtype: dtype of the output; as the experts when not given.
        max_shard_size: largest size of a shard, such as `5GB`.
        blend_type: type of the blended matrices of a GGUF output, such as `Q8_0`; the wider of
            the experts' when not given.
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
    stack: StackedLayers | None = None
    weights: Annotated[str | dict[str, float], BeforeValidator(read_rule)] = "uniform"
    places: list[Override] = []
    tokenizer: str | None = None
    bake: bool = False
    rank: PositiveInt | None = None
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    max_shard_size: str = "5GB"
    blend_type: Literal[BLEND_TYPES] | None = None  # type: ignore[valid-type]
    languages: list[str] = []
    patterns: list[PatternEntry] = []

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[Recipe]) -> Recipe:
        return validate_whole(cls.__name__, data, handler, _all_mistakes)

    @property
    def method(self) -> Method:
        """The one method that is given."""
        keys = (*METHOD_KEYS, "mergekit")
        method: Method | None = next(filter(None, (getattr(self, key) for key in keys)), None)
        assert method is not None, "the validator let a recipe without a method through"
        return method

    def __str__(self) -> str:
        method, kind = self.method, "recipe"
        name = next(key for key in (*METHOD_KEYS, "mergekit") if getattr(self, key) is not None)
        if isinstance(method, MergekitMethod):
            kind, name = "mergekit configuration", method.merge_method
        elif isinstance(method, MergeMethod):
            name = method.method
        over = "" if self.base is None else ", with its base"
        return f"a {kind}: {name} of {', '.join(self.experts)}{over}"

    @property
    def place_patterns(self) -> tuple[Pattern, ...]:
        """The recipe's patterns as the checkpoint room takes them."""
        return tuple(Pattern(entry.match, entry.role) for entry in self.patterns)

    def resolve(
        self,
        layers: int,
        magnitude: Mapping[str, float] | None = None,
        tensors: Mapping[str, Place] | None = None,
        *,
        taken: tuple[int, ...] | None = None,
    ) -> Composition:
        """The composition for a model of `layers` layers, over experts that have a source.

        Args:
            layers: number of layers of the experts, L.
            magnitude: the measured weight of each expert that the method blends; needed when
                `weights` is `magnitude`.
            tensors: the place of every tensor, by which mergekit's filters are read; those of
                a Llama when None.
            taken: the stack, where `layers` counts its layers already and no longer the experts'.

        Raises:
            RecipeError: the zones do not fit, or an override names places that do not exist.
        """
        method = self.method
        if isinstance(method, MergekitMethod):
            composition = resolve(method, layers, tensors)
        else:
            if taken is None and self.stack is not None:
                taken = stacked(self.stack, layers)
            depth = layers if taken is None else len(taken)
            composition = _compose(method, depth, self._weights(magnitude))
            moved = taken is not None and taken != tuple(range(layers))
            composition = replace(composition, taken=taken if moved else None)
        layers = composition.layers
        for i, override in enumerate(self.places):
            try:
                blend = Blend.of(override.take)
                changes = dict.fromkeys(override.places(layers), blend)
            except RecipeError as error:
                raise error.within(f"places[{i}]") from None
            composition = composition.replace(changes)
        return composition.rename({name: self.flat(name) for name in self.experts})

    @property
    def experts_in_order(self) -> list[str]:
        """The experts: those of the method in its order, then the others by name.

        The order of the recipe's mapping must not decide which expert gives the configuration.
        """
        method = self.method
        first = (
            list(method.experts)
            if isinstance(method, SoupMethod | MergeMethod | MergekitMethod)
            else [method.language, method.instruct]
            if isinstance(method, InstructMethod)
            else [method.task, method.language]
        )
        first = [name for name in first if name in self.experts]  # mergekit names the base too
        parts = [part for name in first for part in self.flat(name).experts]
        known = [part for part in parts if part in self.experts]
        return list(dict.fromkeys([*known, *sorted(self.experts)]))

    def flat(self, name: str) -> Blend:
        """The blend of experts with a source that the expert `name` stands for."""
        if name == BASE and name not in self.experts:
            return Blend.of(BASE)
        expert = self.experts[name]
        if expert.merge is not None:
            return Blend.of(expert.merge.operation(self.flat))
        if expert.soup is None:
            return Blend.of(name)
        return Blend.nested(summed((self.flat(part), w) for part, w in expert.soup.items()))

    def _weights(self, magnitude: Mapping[str, float] | None) -> Mapping[str, float] | None:
        if not isinstance(self.weights, str):
            return self.weights
        if self.weights == "uniform":
            return None
        if magnitude is None:
            raise RecipeError("weights: magnitude weights were not measured")
        return magnitude


def read_recipe(path: PathLike) -> Recipe:
    """The recipe in a YAML file, which may be a mergekit configuration.

    Raises:
        RecipeError: the file cannot be read, or the recipe is wrong; all mistakes at once, each
            on a line with its key path.

    Example:
        >>> import layerswap as ls
        >>> print(ls.read_recipe("recipe.yaml").resolve(3))
        head, final norm ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
                       2 ██████████ language
                       1 ░░░░░░░░░░ task
                       0 ██████████ language
               embedding ▒▒▒▒▒▒▒▒▒▒ 0.5 language + 0.5 task
    """
    text = read_text(Path(path))
    return parse_recipe(text, where=str(path))


def parse_recipe(text: str, *, where: str = "recipe") -> Recipe:
    """The recipe in a YAML text; errors name `where`. See `read_recipe`."""
    data, lines = parse_yaml(text, where)
    if isinstance(data, dict) and is_mergekit(data):
        return check_recipe(recipe_data(data, where=where, lines=lines), where=where)
    return check_recipe(data, where=where, lines=lines)


def check_recipe(data: Any, *, where: str, lines: Mapping[KeyPath, int] | None = None) -> Recipe:
    """The recipe in plain data; errors name `where`, and the line of a key path if known."""
    expected = "a recipe is a mapping with `experts` and one of swap, soup, partition, merge"
    return validate(Recipe, data, where=where, expected=expected, lines=lines)


def _compose(
    method: OwnMethod,
    layers: int,
    weights: Mapping[str, float] | None,
) -> Composition:
    if isinstance(method, MergeMethod):
        merged = Blend.of(method.operation(Blend.of))
        return Composition.build(layers, lambda place: merged)
    if isinstance(method, SoupMethod):
        chosen = method.experts
        return soup(layers, chosen if weights is None else {n: weights[n] for n in chosen})
    if isinstance(method, PartitionMethod):
        return partition(
            method.name, layers, task=method.task, language=method.language, outside=method.outside
        )
    if isinstance(method, InstructMethod):
        return instruct(
            layers,
            language=method.language,
            instructed=method.instruct,
            weight=method.weight,
            zones=method.zones,
            outside=method.outside,
        )
    pair = (method.task, method.language)
    return swap(
        layers,
        task=method.task,
        language=method.language,
        zones=method.zones(layers),
        weights=None if weights is None else {name: weights[name] for name in pair},
        outside=method.outside,
    )


def _all_mistakes(data: Mapping[Any, Any]) -> list[Mistake]:
    """Every mistake in a recipe's raw data, those of a mergekit configuration in it too."""
    inner = data.get("mergekit")
    found = mergekit_mistakes(inner) if isinstance(inner, dict) else []
    return mistakes(data) + [(("mergekit", *path), text) for path, text in found]
