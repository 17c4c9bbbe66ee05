"""Writes a recipe as a mergekit configuration of slices, sources and settings."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.places import Place, restacked_names
from layerswap.compose.blend import Blend, Member, Operation
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit.methods import METHODS
from layerswap.compose.mergekit.methods import SHARED as SHARED_DEFAULTS
from layerswap.compose.mergekit.read import renamed
from layerswap.compose.mergekit.resolve import llama_tensors
from layerswap.compose.mergekit.schema import read_reference, value_at
from layerswap.compose.schema import BASE, Expert
from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.compose.recipe import Recipe


Value = float | bool
DEFAULTS: Mapping[str, Value] = {
    **{name: value for name, value in SHARED_DEFAULTS.items() if name != "epsilon"},
    "density": 1.0,
    "gamma": 0.01,
}
"""What mergekit takes for a parameter that is not set; for epsilon it depends on the method."""
ALONE = (
    "model_stock", "sce", "ram", "nearswap", "arcee_fusion", "nuslerp", "multislerp", "karcher",
)  # fmt: skip
"""Methods that mergekit can put nothing beside in one model."""
WEIGHTED = [name for name, method in METHODS.items() if "weight" in method.required]
"""mergekit's methods whose models have weights."""


@dataclass(frozen=True)
class PlaceSettings:
    """The mergekit settings of one place.

    Attributes:
        weights: the models that are merged, and their weights.
        shared: the parameters that all models share.
    """

    weights: Mapping[str, float]
    shared: Mapping[str, Value]


@dataclass(frozen=True)
class MergekitLayout:
    """How a composition is to be written.

    Attributes:
        method: mergekit's `merge_method`.
        base: the base model's name, or None.
        models: every model, in the order to list them.
        settings: what to write for every place that has a tensor.
        tensors: the place of every tensor, by its name and layer in the output.
    """

    method: str
    base: str | None
    models: Sequence[str]
    settings: Mapping[Place, PlaceSettings]
    tensors: Mapping[str, Place]


def _body(taken: Sequence[int], layout: MergekitLayout) -> dict[str, Any]:
    """The keys `models` or `slices`, and `parameters`, of a configuration.

    Raises:
        RecipeError: no filter tells two tensors apart that must be told apart.
    """
    groups = list(_groups(taken, layout))
    contexts = [_context(groups, i, layout) for i in range(len(groups))]
    listed = _listed(contexts, layout)
    entries = []
    for (first, stop), context, models in zip(groups, contexts, listed, strict=True):
        default = _usual(context, layout)
        ranged = len(groups) > 1 or isinstance(taken, tuple)
        layer_range = {"layer_range": [taken[first], taken[stop - 1] + 1]} if ranged else {}
        sources = [
            {"model": model, **layer_range, **_own(model, context, default, layout)}
            for model in models
        ]
        shared = {
            parameter: _setting(
                {n: settings.shared[parameter] for n, settings in context.items()}, value
            )
            for parameter, value in default.shared.items()
        }
        entries.append({"sources": sources, "parameters": shared})
    # What sorts by size is rescaled only where it is asked for.
    by_size = {"rescale": False} if layout.method in ("ties", "breadcrumbs") else {}
    return _hoisted(entries, {**DEFAULTS, **by_size})


def _own(
    model: str,
    context: Mapping[str, PlaceSettings],
    default: PlaceSettings,
    layout: MergekitLayout,
) -> dict[str, Any]:
    """The settings of one source: its weight, where models have one."""
    if layout.method not in WEIGHTED or model == layout.base:
        return {}
    weights = {name: settings.weights.get(model, 0.0) for name, settings in context.items()}
    return {"parameters": {"weight": _setting(weights, default.weights.get(model, 0.0))}}


def _usual(context: Mapping[str, PlaceSettings], layout: MergekitLayout) -> PlaceSettings:
    """The settings of most tensors of the layers in a slice."""
    settings = [s for name, s in context.items() if layout.tensors[name].layer is not None]
    return max(settings, key=settings.count)


def _groups(taken: Sequence[int], layout: MergekitLayout) -> Iterator[tuple[int, int]]:
    """Neighbouring layers that are alike and stay neighbours, as [first, stop)."""
    layers = len(taken)
    by_layer: list[dict[str, PlaceSettings]] = [{} for _ in range(layers)]
    for place, settings in layout.settings.items():
        if place.layer is not None:
            by_layer[place.layer][place.role] = settings
    first = 0
    for layer in range(1, layers):
        if by_layer[layer] != by_layer[layer - 1] or taken[layer] != taken[layer - 1] + 1:
            yield first, layer
            first = layer
    yield first, layers


def _context(
    groups: Sequence[tuple[int, int]], number: int, layout: MergekitLayout
) -> dict[str, PlaceSettings]:
    """The settings of each tensor that a slice's settings reach."""
    first, stop = groups[number]
    found = {}
    for name, place in layout.tensors.items():
        reached = (
            first <= place.layer < stop
            if place.layer is not None
            else number == (len(groups) - 1 if _comes_after(place) else 0)
        )
        if reached:
            found[name] = layout.settings[place]
    return found


def _listed(
    contexts: Sequence[Mapping[str, PlaceSettings]], layout: MergekitLayout
) -> list[list[str]]:
    """The models of each slice.

    After the layers mergekit takes as many sources of the last slice as the first one has, so the
    last begins with what is needed there and the first has at least as many.
    """

    def needed(settings: Iterable[PlaceSettings]) -> list[str]:
        named = {model for one in settings for model in one.weights}
        named |= {layout.base} if layout.base else set()
        named |= set(layout.models) if layout.method == "slerp" else set()
        return [model for model in layout.models if model in named]

    listed = [needed(context.values()) for context in contexts]
    after = needed(settings for place, settings in layout.settings.items() if _comes_after(place))
    listed[-1].sort(key=lambda model: model not in after)
    spare = [model for model in after if model not in listed[0]]
    listed[0] += spare[: max(0, len(after) - len(listed[0]))]
    return listed


def _comes_after(place: Place) -> bool:
    return place.layer is None and place.role != "embedding"


def _setting(values: Mapping[str, Value], default: Value) -> Any:
    """The setting that gives every tensor its value, and `default` to any other."""
    conditions: list[dict[str, Any]] = []
    for name, value in values.items():
        current: Any = [*conditions, {"value": default}]
        if value_at(current, name, 0.0) == value:
            continue
        word = next(
            (
                word
                for word in _words(name)
                if all(v == value for other, v in values.items() if word in other)
            ),
            None,
        )
        if word is None:
            raise RecipeError(f"no filter of mergekit's tells {name} from the other tensors")
        conditions.append({"filter": word, "value": value})
    return [*conditions, {"value": default}] if conditions else default


def _words(name: str) -> Iterator[str]:
    """Parts of a tensor's name to filter by, the shortest first."""
    parts = name.split(".")
    index = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if index is not None and index + 1 < len(parts):
        owner = parts[index + 1]
        yield from (owner, f".{owner}.")
    else:
        yield from (parts[-2] if len(parts) > 1 else name, ".".join(parts[:-1]) or name)
    yield name


def _hoisted(entries: list[dict[str, Any]], defaults: Mapping[str, Value]) -> dict[str, Any]:
    """The slices, with settings that all of them share written once, and defaults left out."""
    shared = {
        name: value
        for name, value in entries[0]["parameters"].items()
        if all(entry["parameters"][name] == value for entry in entries)
    }
    for entry in entries:
        own = {k: v for k, v in entry["parameters"].items() if k not in shared}
        entry["parameters"] = own
        if not own:
            del entry["parameters"]
    top = {name: value for name, value in shared.items() if defaults.get(name) != value}
    body = (
        {"models": entries[0]["sources"]}
        if "layer_range" not in entries[0]["sources"][0]
        else {"slices": entries}
    )
    return {**body, **({"parameters": top} if top else {})}


SHARED = {"density": "density", "outliers": "gamma", "scale": "lambda"}
"""Parameters of ours by the name that mergekit has for them."""
AVERAGES = {"ties": True, "dare_ties": False, "della": True}
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
    if composition.shifted:
        raise RecipeError(
            "places: a slice whose sources take different layers has none in mergekit"
        )
    taken = composition.taken or range(composition.layers)
    names = restacked_names(tensors or llama_tensors(max(taken) + 1), taken)
    layout = _layout_of(recipe, composition, {name: place for name, (_, place) in names.items()})
    config = {"merge_method": layout.method, **_body(taken, layout)}
    if layout.base is not None:
        config["base_model"] = layout.base
    return _finished(renamed(_ordered(config), references), recipe, stored)


def _stored(recipe: Recipe) -> dict[str, Expert]:
    """The experts that are checkpoints, and the base."""
    found = {name: expert for name, expert in recipe.experts.items() if expert.source is not None}
    return {**({BASE: recipe.base} if recipe.base is not None else {}), **found}


def _reference(name: str, expert: Expert) -> str:
    text = f"{expert.source}@{expert.revision}" if expert.revision else str(expert.source)
    text += f"+{expert.adapter}" if expert.adapter else ""
    try:
        return str(read_reference(text))
    except ValueError as error:
        raise RecipeError(f"{name}: mergekit cannot name it: {error}") from None


def _composition(
    recipe: Recipe, layers: int | None, tensors: Mapping[str, Place] | None
) -> Composition:
    alike = (recipe.soup is not None or recipe.merge is not None) and not (
        recipe.places or recipe.stack
    )
    if layers is None and not alike:
        raise RecipeError("the number of layers is not known; give --layers")
    return recipe.resolve(1 if alike else layers or 1, None, tensors)


def _layout_of(
    recipe: Recipe, composition: Composition, tensors: Mapping[str, Place]
) -> MergekitLayout:
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
        settings = {place: PlaceSettings(_weights(blend), {}) for place, blend in places.items()}
        return MergekitLayout(method, None, models, settings, tensors)
    if methods[0] == "slerp":
        pair = _pair(operations)
        settings = {place: _turned(place, blend, pair) for place, blend in places.items()}
        return MergekitLayout("slerp", pair[0], pair, settings, tensors)
    if operations[0].fishers:
        raise RecipeError(f"mergekit has no {methods[0]} method")
    if methods[0] == "scale":
        settings = {place: _copied(place, blend) for place, blend in places.items()}
        if not _passes_through(
            {place: Blend.of(next(iter(s.weights))) for place, s in settings.items()},
            composition.layers,
        ):
            raise RecipeError("mergekit scales only layers that pass through")
        return MergekitLayout("passthrough", None, models, settings, tensors)
    if methods[0] in ALONE:
        if len(set(places.values())) > 1:
            raise RecipeError(f"mergekit cannot put anything beside {methods[0]} in one model")
        name, alike = _alone(next(iter(places)), operations[0])
        base = BASE if operations[0].base is not None else None
        return MergekitLayout(name, base, models, dict.fromkeys(places, alike), tensors)
    settings = {place: _added(place, blend, operations[0]) for place, blend in places.items()}
    return MergekitLayout(methods[0], BASE, models, settings, tensors)


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


def _turned(place: Place, blend: Blend, pair: Sequence[str]) -> PlaceSettings:
    """The settings of SLERP for one place."""
    member = _only(place, blend, "slerp")
    if isinstance(member, str):
        if member not in pair:
            raise RecipeError(f"{_where(place)}: mergekit's slerp is of {' and '.join(pair)} alone")
        return PlaceSettings({}, {"t": float(pair.index(member))})
    weights = {_name(place, blend): weight for blend, weight in member.inputs}
    return PlaceSettings({}, {"t": weights[pair[1]] / math.fsum(weights.values())})


def _copied(place: Place, blend: Blend) -> PlaceSettings:
    """The settings of one place that passes through, scaled or not."""
    member = _only(place, blend, "scale")
    if isinstance(member, str):
        return PlaceSettings({member: 1.0}, {"scale": 1.0})
    inner = _name(place, member.inputs[0][0])
    return PlaceSettings({inner: 1.0}, {"scale": float(dict(member.parameters)["scale"])})


def _added(place: Place, blend: Blend, example: Operation) -> PlaceSettings:
    """The settings of a method with deltas for one place."""
    member = _only(place, blend, example.method)
    if isinstance(member, Operation):
        return _operation(place, member)
    # A whole delta of weight 1 on its base is the expert.
    shared = dict(_operation(place, example).shared)
    shared.update({key: 1.0 for key in ("density", "lambda") if key in shared})
    return PlaceSettings({} if member == BASE else {member: 1.0}, shared)


def _only(place: Place, blend: Blend, method: str) -> Member:
    if len(blend.members) > 1:
        raise RecipeError(f"{_where(place)}: mergekit cannot express {blend} beside {method}")
    return blend.members[0]


def _operation(place: Place, operation: Operation) -> PlaceSettings:
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
    if operation.method.startswith("della"):
        shared |= {
            "epsilon": float(parameters["epsilon"]),
            "rescale": parameters["rescale"] == "entry",
        }
    elif "rescale" in parameters:
        shared["rescale"] = parameters["rescale"] == "l1"
    return PlaceSettings(
        {_name(place, blend): weight for blend, weight in operation.inputs}, shared
    )


def _alone(place: Place, operation: Operation) -> tuple[str, PlaceSettings]:
    """The method and settings of mergekit for an operation that is at every place."""
    values = dict(operation.parameters)
    weights = {_name(place, blend): weight for blend, weight in operation.inputs}
    scale, name = float(values.get("scale", 1.0)), operation.method
    if operation.base is not None and operation.base != Blend.of(BASE):
        raise RecipeError(f"{operation} takes deltas from {operation.base}")
    weighs = name in ("nuslerp", "multislerp", "model_stock")
    if not weighs and (len(set(weights.values())) > 1 or scale != 1):
        raise RecipeError(f"mergekit's {name} has no weights and no scale")
    shared: dict[str, Value] = {}
    if name == "sce":
        shared = {"select_topk": float(values["density"])}
    elif name == "ram":
        shared = {"epsilon": float(values["epsilon"])}
        if values["boost"]:
            name = "ramplus_tl"
            shared |= {"r": float(values["boost"]), "alpha": float(values["limit"])}
    elif name == "model_stock" and values["angle"] == "row":
        shared = {"filter_wise": True}
    elif name == "nearswap":
        shared = {"t": float(values["t"])}
    elif name == "karcher":
        shared = {"max_iter": int(values["max_iter"]), "tol": float(values["tol"])}
    elif name == "nuslerp":
        flat = values["angle"] == "tensor"
        shared = {"nuslerp_flatten": flat, "nuslerp_row_wise": values["angle"] == "column"}
    elif name == "multislerp" and scale != 1:
        # mergekit multiplies by the sum of weights that are not normalised.
        total = math.fsum(weights.values())
        weights = {model: weight * scale / total for model, weight in weights.items()}
        shared = {"normalize_weights": False}
    return name, PlaceSettings(weights, shared)


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
    if method.startswith(("dare", "della")):
        notes.append("mergekit draws other masks: the result is the same only on average")
    return Exported(config, tuple(notes))
