"""A recipe as a mergekit configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend, Member
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit.read import renamed
from layerswap.compose.mergekit.resolve import llama_tensors
from layerswap.compose.mergekit.schema import read_reference
from layerswap.compose.mergekit.write import Said, Spelling, written
from layerswap.compose.operation import Operation
from layerswap.compose.schema import BASE, Expert
from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.compose.recipe import Recipe

SHARED = {"density": "density", "outliers": "gamma", "scale": "lambda"}
"""Parameters of ours by the name that mergekit has for them."""
AVERAGES = {"ties": True, "dare_ties": False}
"""Whether mergekit divides by the weights by default, of methods where it can be chosen."""


@dataclass(frozen=True)
class Exported:
    """A mergekit configuration.

    Attributes:
        config: its keys.
        notes: what to know before running it, one line each.
    """

    config: Mapping[str, Any]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        import yaml

        lines = "".join(f"# {note}\n" for note in self.notes)
        return lines + yaml.safe_dump(
            dict(self.config), sort_keys=False, width=100, default_flow_style=None
        )


def export(
    recipe: Recipe,
    *,
    layers: int | None = None,
    tensors: Mapping[str, Place] | None = None,
    stored: str | None = None,
) -> Exported:
    """The mergekit configuration that gives the same result.

    Args:
        recipe: the recipe.
        layers: number of layers of its experts; only a recipe that treats all alike can do
            without.
        tensors: the place of every tensor; those of a Llama when None.
        stored: dtype that the experts are stored in.

    Raises:
        RecipeError: mergekit cannot express it.
    """
    references = {name: _reference(name, expert) for name, expert in _stored(recipe).items()}
    if recipe.mergekit is not None and not recipe.places:
        config = recipe.mergekit.model_dump(exclude_unset=True)
        return _finished(renamed(_ordered(config), references), recipe, stored)
    if recipe.weights == "magnitude":
        raise RecipeError(
            "weights: magnitude weights are measured when merging; write the numbers that "
            "layerswap.json holds"
        )
    composition = _composition(recipe, layers, tensors)
    tensors = tensors or llama_tensors(composition.layers)
    tensors = {n: p for n, p in tensors.items() if p.layer is None or p.layer < composition.layers}
    spelling = _spelling(recipe, composition, tensors)
    config = {"merge_method": spelling.method, **written(composition.layers, spelling)}
    if spelling.base is not None:
        config["base_model"] = spelling.base
    return _finished(renamed(_ordered(config), references), recipe, stored)


def _stored(recipe: Recipe) -> dict[str, Expert]:
    """The experts that are checkpoints, and the base."""
    found = {name: expert for name, expert in recipe.experts.items() if expert.source is not None}
    return {**({BASE: recipe.base} if recipe.base is not None else {}), **found}


def _reference(name: str, expert: Expert) -> str:
    text = f"{expert.source}@{expert.revision}" if expert.revision else str(expert.source)
    try:
        return str(read_reference(text))
    except ValueError as error:
        raise RecipeError(f"{name}: mergekit cannot name it: {error}") from None


def _composition(
    recipe: Recipe, layers: int | None, tensors: Mapping[str, Place] | None
) -> Composition:
    alike = (recipe.soup is not None or recipe.merge is not None) and not recipe.places
    if layers is None and not alike:
        raise RecipeError("the number of layers is not known; give --layers")
    return recipe.resolve(1 if alike else layers or 1, None, tensors)


def _spelling(recipe: Recipe, composition: Composition, tensors: Mapping[str, Place]) -> Spelling:
    places = {place: composition[place] for place in tensors.values()}
    operations = [m for b in places.values() for m in b.members if not isinstance(m, str)]
    methods = sorted({operation.method for operation in operations})
    if len(methods) > 1:
        raise RecipeError(
            f"mergekit has one merge_method for all layers, and this has {' and '.join(methods)}"
        )
    order = [BASE, *recipe.experts] if recipe.base is not None else [*recipe.experts]
    models = [name for name in order if name in composition.experts]
    if not operations:
        method = "passthrough" if _passes_through(places, composition.layers) else "linear"
        said = {place: Said(_weights(blend), {}) for place, blend in places.items()}
        return Spelling(method, None, models, said, tensors)
    if methods[0] == "slerp":
        pair = _pair(operations)
        said = {place: _turned(place, blend, pair) for place, blend in places.items()}
        return Spelling("slerp", pair[0], pair, said, tensors)
    if operations[0].fishers:
        raise RecipeError(f"mergekit has no {methods[0]} method")
    if methods[0] == "model_stock" and len(set(places.values())) > 1:
        raise RecipeError("mergekit cannot put anything beside model_stock in one model")
    said = {place: _added(place, blend, operations[0]) for place, blend in places.items()}
    return Spelling(methods[0], BASE, models, said, tensors)


def _weights(blend: Blend) -> dict[str, float]:
    return {str(member): weight for member, weight in blend.weights}


def _passes_through(places: Mapping[Place, Blend], layers: int) -> bool:
    """Whether every layer is one expert's, and what is outside goes with the nearest layer."""
    of_layer: dict[int, Blend] = {}
    for place, blend in places.items():
        near = 0 if place.role == "embedding" else layers - 1
        layer = near if place.layer is None else place.layer
        if not blend.verbatim or of_layer.setdefault(layer, blend) != blend:
            return False
    return True


def _pair(operations: Sequence[Operation]) -> list[str]:
    """The two experts of every SLERP, the one at t = 0 first."""
    pairs = {tuple(str(blend) for blend, _ in operation.inputs) for operation in operations}
    if len(pairs) > 1:
        raise RecipeError("mergekit's slerp has one base model and one other for all layers")
    return list(pairs.pop())


def _turned(place: Place, blend: Blend, pair: Sequence[str]) -> Said:
    """What SLERP must be told for one place."""
    member = _only(place, blend, "slerp")
    if isinstance(member, str):
        if member not in pair:
            raise RecipeError(f"{_where(place)}: mergekit's slerp is of {' and '.join(pair)} alone")
        return Said({}, {"t": float(pair.index(member))})
    weights = {_name(place, blend): weight for blend, weight in member.inputs}
    return Said({}, {"t": weights[pair[1]] / math.fsum(weights.values())})


def _added(place: Place, blend: Blend, example: Operation) -> Said:
    """What a method with deltas must be told for one place."""
    member = _only(place, blend, example.method)
    if isinstance(member, Operation):
        return _operation(place, member)
    # A whole delta of weight 1 on its base is the expert.
    shared = dict(_operation(place, example).shared)
    shared.update({key: 1.0 for key in ("density", "lambda") if key in shared})
    return Said({} if member == BASE else {member: 1.0}, shared)


def _only(place: Place, blend: Blend, method: str) -> Member:
    if len(blend.members) > 1:
        raise RecipeError(f"{_where(place)}: mergekit cannot express {blend} beside {method}")
    return blend.members[0]


def _operation(place: Place, operation: Operation) -> Said:
    parameters = dict(operation.parameters)
    if parameters.get("scope") == "model":
        raise RecipeError(
            f"{_where(place)}: mergekit's ties ranks tensor by tensor; set `scope: tensor`"
        )
    if operation.base is not None and operation.base != Blend.of(BASE):
        raise RecipeError(f"{_where(place)}: {operation} takes deltas from {operation.base}")
    shared: dict[str, float | bool] = {
        theirs: float(parameters[ours]) for ours, theirs in SHARED.items() if ours in parameters
    }
    if operation.method in AVERAGES:
        shared["normalize"] = parameters["disjoint"] == "mean"
    return Said({_name(place, blend): weight for blend, weight in operation.inputs}, shared)


def _name(place: Place, blend: Blend) -> str:
    if not blend.verbatim:
        raise RecipeError(f"{_where(place)}: mergekit merges models, and {blend} is not one")
    return str(blend.members[0])


def _where(place: Place) -> str:
    return place.role if place.layer is None else f"layer {place.layer} {place.role}"


def _ordered(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys in the order in which people write them."""
    keys = ("merge_method", "base_model", "models", "slices", "modules", "parameters")
    return {key: config[key] for key in keys if key in config}


def _finished(config: dict[str, Any], recipe: Recipe, stored: str | None) -> Exported:
    """The configuration with its dtypes, and what is to be known about it."""
    notes = []
    dtype = recipe.dtype or stored
    method = config["merge_method"]
    if method == "passthrough":
        config |= {"dtype": dtype} if recipe.dtype else {}
    elif dtype is not None:
        # mergekit computes in `dtype`; in float32 it rounds once, as layerswap does.
        config |= (
            {"dtype": "float32"} if dtype == "float32" else {"dtype": "float32", "out_dtype": dtype}
        )
    else:
        notes.append("mergekit computes in the stored dtype: set dtype: float32, and out_dtype")
    if method.startswith("dare"):
        notes.append("mergekit draws other masks: the result is the same only on average")
    return Exported(config, tuple(notes))
