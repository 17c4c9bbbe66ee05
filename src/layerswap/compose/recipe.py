"""Recipes: the YAML that a person writes, checked whole and resolved to a composition.

Rules that need several keys (names, counts and combinations) are checked together, so that all
mistakes are reported at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from graphlib import TopologicalSorter
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
from layerswap.compose.blend import METHODS, Blend
from layerswap.compose.composition import Composition, summed
from layerswap.compose.mergekit import MergekitMethod, is_mergekit, recipe_data, resolve
from layerswap.compose.mergekit.read import mistakes as mergekit_mistakes
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
from layerswap.compose.yaml_file import (
    KeyPath,
    Mistake,
    nearest,
    parse_yaml,
    read_text,
    validate,
    validate_whole,
)
from layerswap.errors import RecipeError

METHOD_KEYS = ("swap", "soup", "partition", "merge", "instruct")
PAIRS = {
    "swap": ("task", "language"), "partition": ("task", "language"),
    "instruct": ("language", "instruct"),
}  # fmt: skip
"""The two experts of the methods that have two, by the keys that name them."""
DEPTH = 16
"""Most levels of experts that are made of experts; each one can double the terms of a blend."""
SHARD_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB)", re.IGNORECASE)


def mistakes(data: Mapping[Any, Any]) -> list[Mistake]:
    """Every mistake in a recipe's raw data that the types of its fields do not show.

    Tolerates data of any shape: what has the wrong type is left to the type check.

    Example: `mistakes({"experts": {"a": "x"}})` finds that no method is given.
    """
    found = list(_method_mistakes(data))
    experts = data.get("experts")
    if isinstance(experts, dict) and experts:
        unknown = list(_unknown_names(data, experts))
        found += unknown or _cycles(experts) or _too_deep(experts)
        found += _wrong_weights(data)
        found += _base_mistakes(data, experts)
        found += _fisher_mistakes(data, experts)
    size = data.get("max_shard_size")
    if isinstance(size, str):
        try:
            parse_size(size)
        except RecipeError as error:
            found.append((("max_shard_size",), str(error)))
    if data.get("weights") == "magnitude" and data.get("base") is None:
        found.append((("weights",), "magnitude weights need the base; give `base`"))
    return found


def parse_size(text: str) -> int:
    """A size such as `5GB` in bytes (1 GB = 1e9 bytes, as on the Hub).

    Raises:
        RecipeError: not a positive number with B, KB, MB or GB.
    """
    match = SHARD_SIZE.fullmatch(text.strip())
    unit = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
    size = float(match[1]) * unit[match[2].upper()] if match else 0
    if not 1 <= size < 2**63:
        raise RecipeError(f"{text!r:.40} is not a size; write for example 5GB or 500MB")
    return int(size)


def _method_mistakes(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    given = [name for name in (*METHOD_KEYS, "mergekit") if data.get(name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        empty = [name for name in METHOD_KEYS if name in data and data[name] is None]
        hint = f"; for the defaults write `{empty[0]}: {{}}`" if empty and not given else ""
        yield (), f"give exactly one of {', '.join(METHOD_KEYS)}; found {found}{hint}"
    for method, parts in PAIRS.items():
        pair = [name for path, name in _method_names(data).items() if path[0] == method]
        if len(pair) == 2 and pair[0] == pair[1]:
            yield (method,), f"the {parts[0]} and the {parts[1]} expert are both {pair[0]!r}"
    if data.get("instruct") is not None:
        if "weights" in data:
            yield ("weights",), "the weight of a chat vector is `instruct.weight`; remove `weights`"
        if data.get("base") is None:
            yield ("instruct",), "a chat vector is the difference from a base; give `base`"
        elif "base" in (data.get("experts") or ()):
            yield ("instruct",), "with deltas no expert can be called 'base'; give it another name"
    if data.get("partition") is not None and "weights" in data:
        yield ("weights",), "a partition blends nothing; remove `weights`"
    if data.get("mergekit") is not None and "weights" in data:
        yield ("weights",), "weights stand in `mergekit`; remove `weights`"
    if data.get("mergekit") is not None and data.get("stack") is not None:
        yield ("stack",), "the layers stand in `mergekit`; remove `stack`"
    if data.get("merge") is not None and "weights" in data:
        yield ("weights",), "weights of a merge stand in `merge.experts`; remove `weights`"
    base = data.get("base")
    if isinstance(base, dict) and base.get("soup") is not None:
        yield ("base", "soup"), "the base is one checkpoint, never a soup"


def _unknown_names(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    known = {*experts, *(["base"] if data.get("base") is not None else [])}
    for path, name in _references(data, experts):
        if isinstance(name, str) and name not in known:
            yield path, f"no expert {name!r}{nearest(name, [str(key) for key in experts])}"


def _references(
    data: Mapping[Any, Any], experts: Mapping[Any, Any]
) -> Iterator[tuple[KeyPath, object]]:
    for name, expert in experts.items():
        if isinstance(expert, dict):
            yield from _parts(("experts", name), expert)
    for path, name in _method_names(data).items():
        yield path, name
    places = data.get("places")
    for i, override in enumerate(places if isinstance(places, list) else ()):
        if isinstance(override, dict):
            yield from _names(("places", i, "take"), override.get("take"))
    if isinstance(data.get("weights"), dict | list):
        yield from _names(("weights",), data["weights"])


def _method_names(data: Mapping[Any, Any]) -> dict[KeyPath, object]:
    """The experts that the method combines, by the key path that names them."""
    names: dict[KeyPath, object] = {}
    for method, parts in PAIRS.items():
        if isinstance(data.get(method), dict):
            names |= {(method, part): data[method].get(part, part) for part in parts}
    soup = data.get("soup")
    if isinstance(soup, dict) and isinstance(soup.get("experts"), list):
        names |= {("soup", "experts", i): name for i, name in enumerate(soup["experts"])}
    names |= dict(_parts((), {"merge": data.get("merge")}))
    names |= dict(_models(("mergekit",), data.get("mergekit"), data.get("base") is not None))
    return names


def _models(path: KeyPath, value: object, base: bool) -> Iterator[tuple[KeyPath, object]]:
    """The experts that a mergekit configuration in a recipe names; it calls the base `base`."""
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in ("model", "base_model") and not (base and item == "base"):
            yield (*path, key), item
        elif key != "parameters":
            yield from _models((*path, key), item, base)
    for i, item in enumerate(value if isinstance(value, list) else ()):
        yield from _models((*path, i), item, base)


def _parts(path: KeyPath, expert: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, object]]:
    """The experts that a soup or a merge is made of, by the key path that names them."""
    yield from _names((*path, "soup"), expert.get("soup"))
    merge = expert.get("merge")
    if isinstance(merge, dict):
        yield from _names((*path, "merge", "experts"), merge.get("experts"))


def _names(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name in value:
            yield (*path, name), name
    elif isinstance(value, list):
        for i, name in enumerate(value):
            yield (*path, i), name


def _wrong_weights(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    weights, blended = data.get("weights"), list(_method_names(data).values())
    if isinstance(weights, list):
        weights = {name: 1 for name in weights if isinstance(name, str)}
    if isinstance(weights, dict) and blended:
        for name in blended:
            if isinstance(name, str) and name not in weights:
                yield ("weights",), f"no weight for {name!r}"
        for name in weights:
            if name in data["experts"] and name not in blended:
                yield ("weights", name), "the method does not blend this expert"


def _base_mistakes(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    if data.get("mergekit") is not None and data.get("base") is not None and "base" in experts:
        yield ("mergekit",), "beside the base no expert can be called 'base'; give it another name"
    for path, method, merge in _merges(data, experts):
        if not METHODS[method].needs_base(merge):
            continue
        if data.get("base") is None:
            yield path, f"{method} works on deltas; give `base`"
        if "base" in experts:
            yield path, "with deltas no expert can be called 'base'; give it another name"


def _fisher_mistakes(data: Mapping[Any, Any], experts: Mapping[Any, Any]) -> Iterator[Mistake]:
    for _, method, merge in _merges(data, experts):
        names = merge.get("experts") if METHODS[method].fisher else None
        for name in names if isinstance(names, dict | list) else ():
            if not isinstance(name, str) or name not in experts:
                continue
            if not isinstance(experts[name], dict) or experts[name].get("fisher") is None:
                yield ("experts", name), f"{method} needs its Fisher; give `fisher`"
            if f"fisher of {name}" in experts:
                yield ("experts", f"fisher of {name}"), "the name of a Fisher; give it another"


def _merges(
    data: Mapping[Any, Any], experts: Mapping[Any, Any]
) -> Iterator[tuple[KeyPath, str, Mapping[Any, Any]]]:
    """Every merge with a method that there is, by its key path."""
    merges: dict[KeyPath, object] = {("merge",): data.get("merge")}
    for name, expert in experts.items():
        if isinstance(expert, dict):
            merges["experts", name, "merge"] = expert.get("merge")
    for path, merge in merges.items():
        method = merge.get("method") if isinstance(merge, dict) else None
        if isinstance(merge, dict) and isinstance(method, str) and method in METHODS:
            yield path, method, merge


def _parts_of_experts(experts: Mapping[Any, Any]) -> dict[Any, list[Any]]:
    """By name of an expert, the names of those that it is made of."""
    return {
        name: [part for _, part in _parts((), expert) if isinstance(part, str)]
        for name, expert in experts.items()
        if isinstance(expert, dict)
    }


def _cycles(experts: Mapping[Any, Any]) -> list[Mistake]:
    parts = _parts_of_experts(experts)

    def reached(start: object) -> set[object]:
        found: set[object] = set()
        todo = list(parts.get(start, ()))
        while todo:
            name = todo.pop()
            if name not in found:
                found.add(name)
                todo += parts.get(name, ())
        return found

    return [(("experts", name), "is made of itself") for name in parts if name in reached(name)]


def _too_deep(experts: Mapping[Any, Any]) -> list[Mistake]:
    """The first expert that is nested too deeply, where none is made of itself."""
    parts = _parts_of_experts(experts)
    depth: dict[Any, int] = {}
    for name in TopologicalSorter(parts).static_order():
        depth[name] = 1 + max((depth[part] for part in parts.get(name, ())), default=0)
        if depth[name] > DEPTH:
            why = f"is made of experts that are made of others, more than {DEPTH} levels deep"
            return [(("experts", name), why)]
    return []


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
