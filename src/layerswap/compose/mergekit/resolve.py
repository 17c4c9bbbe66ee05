"""The layers that a configuration stacks, in one form whatever keys it is written with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.checkpoint.places import Place, renumbered, restacked_names
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit.methods import (
    BY_SIZE,
    METHODS,
    PER_MODEL,
    SHARED,
    ModelEntry,
    Shared,
    merged,
)
from layerswap.compose.mergekit.schema import (
    MergekitMethod,
    Scalar,
    Setting,
    read_reference,
    read_setting,
    value_at,
)
from layerswap.compose.yaml_file import KeyPath
from layerswap.errors import RecipeError

DISCRETE = (
    "filter_wise", "int8_mask", "normalize", "normalize_weights", "nuslerp_flatten",
    "nuslerp_row_wise", "rescale",
)  # fmt: skip
"""Parameters that are true or false."""
Parameters = Mapping[str, Setting]


@dataclass(frozen=True)
class StackSource:
    """A model in a slice.

    Attributes:
        path: where it is written.
        model: what it is called.
        parameters: its own settings.
        layers: first layer and the one after the last; None where all are meant, or for layers
            that cannot be read.
    """

    path: KeyPath
    model: str
    parameters: Parameters
    layers: tuple[int, int] | None

    @property
    def taken(self) -> range:
        """Its layers."""
        assert self.layers is not None, "checked before anything is resolved"
        return range(*self.layers)


@dataclass(frozen=True)
class StackSlice:
    """Neighbouring layers of the output.

    Attributes:
        path: where it is written.
        sources: what they are merged from, in order.
        base: the base model for these layers.
        scopes: settings for all sources, the nearest first.
    """

    path: KeyPath
    sources: tuple[StackSource, ...]
    base: str | None
    scopes: tuple[Parameters, ...]

    @property
    def taken(self) -> range:
        """The layers of its first model that it is made of."""
        return self.sources[0].taken

    def taken_of(self, model: str) -> range:
        """The layers of a model that it is made of; of one that it does not have, the first's."""
        return next((one.taken for one in self.sources if one.model == model), self.taken)

    def value(
        self, name: str, tensor: str, t: float, source: StackSource | None = None
    ) -> Scalar | None:
        """A parameter for one tensor, of one source or for all; None where nothing sets it.

        Args:
            name: the parameter.
            tensor: the tensor's name.
            t: position in the slice, 0..1.
            source: whose own settings are looked at first.
        """
        own = (source.parameters,) if source else ()
        for scope in (*own, *self.scopes):
            if name in scope:
                found = value_at(scope[name], tensor, t, discrete=name in DISCRETE)
                if found is not None:
                    return found
        return None


def read_stack(data: Mapping[Any, Any], layers: int | None = None) -> list[StackSlice]:
    """The slices of a configuration's plain data; passes over what has a wrong type.

    `models` are one slice of all `layers`, to which a base model that is not among them is added,
    as mergekit does.
    """
    top = _settings(data.get("parameters"))
    base = _model(data.get("base_model"))
    path, part, scopes = _body(data, top)
    models = part.get("models")
    if isinstance(models, list):
        whole = None if layers is None else (0, layers)
        sources = [*_sources((*path, "models"), models, whole)]
        if base is not None and base not in [source.model for source in sources]:
            sources.append(StackSource(("base_model",), base, {}, whole))
        return [StackSlice((*path, "models"), tuple(sources), base, scopes)] if sources else []
    found = []
    slices = part.get("slices")
    for i, entry in enumerate(slices if isinstance(slices, list) else ()):
        here = (*path, "slices", i)
        if isinstance(entry, Mapping) and isinstance(entry.get("sources"), list):
            sources = [*_sources((*here, "sources"), entry["sources"], None)]
            own = _model(entry.get("base_model")) or base
            if sources:
                inner = (_settings(entry.get("parameters")), *scopes)
                found.append(StackSlice(here, tuple(sources), own, inner))
    return found


def _body(
    data: Mapping[Any, Any], top: Parameters
) -> tuple[KeyPath, Mapping[Any, Any], tuple[Parameters, ...]]:
    """Where the models or slices are, and the settings around them, the nearest first."""
    modules = data.get("modules")
    if isinstance(modules, Mapping) and modules:
        name, module = next(iter(modules.items()))
        if isinstance(module, Mapping):
            return ("modules", name), module, (_settings(module.get("parameters")), top)
    return (), data, (top,)


def _sources(
    path: KeyPath, entries: list[Any], whole: tuple[int, int] | None
) -> Iterator[StackSource]:
    for i, entry in enumerate(entries):
        if isinstance(entry, Mapping) and (model := _model(entry.get("model"))) is not None:
            layers = _range(entry["layer_range"]) if "layer_range" in entry else whole
            yield StackSource((*path, i), model, _settings(entry.get("parameters")), layers)


def _model(value: object) -> str | None:
    try:
        found = read_reference(value)
    except ValueError:
        return None
    return found if isinstance(found, str) and found else None


def _range(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or [type(v) for v in value] != [int, int]:
        return None
    return value[0], value[1]


def _settings(value: object) -> Parameters:
    found = {}
    for name, setting in value.items() if isinstance(value, Mapping) else ():
        try:
            found[name] = read_setting(setting)
        except ValueError:
            found[name] = []  # set, but to nothing: its own mistake is reported elsewhere
    return found


LLAMA = {
    "embedding": ("model.embed_tokens.weight",),
    "attention": tuple(f"self_attn.{word}_proj.weight" for word in "qkvo"),
    "mlp": tuple(f"mlp.{word}_proj.weight" for word in ("gate", "up", "down")),
    "norm": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
"""The names of Llama's tensors by role; those of a layer without `model.layers.N.` before them."""


def llama_tensors(layers: int) -> dict[str, Place]:
    """The tensors of a Llama of `layers` layers, whose names most families share."""
    found = {}
    for role, names in LLAMA.items():
        inside = role in ("attention", "mlp", "norm")
        for layer in range(layers) if inside else [None]:
            prefix = "" if layer is None else f"model.layers.{layer}."
            found.update({prefix + name: Place(layer, role) for name in names})
    return found


def resolve(
    method: MergekitMethod, layers: int, tensors: Mapping[str, Place] | None = None
) -> Composition:
    """The composition of a configuration, over the models as it names them.

    Every tensor's parameters are looked up as mergekit does, by its name and layer; the tensors
    of one place must agree.

    Args:
        method: the configuration.
        layers: number of layers of the models, L.
        tensors: the place of every tensor; those of a Llama when None.

    Raises:
        RecipeError: layers that the models do not have, a filter that divides a place, or
            weights that no blend has.
    """
    stack = read_stack(method.model_dump(exclude_none=True), layers)
    taken = tuple(layer for one in stack for layer in one.taken)
    beyond = max(source.taken[-1] for one in stack for source in one.sources)
    if beyond >= layers:
        raise RecipeError(f"layer {beyond} is taken from models of {layers} layers")
    found: dict[Place, tuple[str, Blend]] = {}
    positions = _positions(stack)
    for tensor, (_, place) in restacked_names(tensors or llama_tensors(layers), taken).items():
        blend = _blend_at(method.merge_method, stack, positions, tensor, place)
        first, other = found.setdefault(place, (tensor, blend))
        if other != blend:
            raise RecipeError(_divided(place, first, other, tensor, blend))
    blends = {place: blend for place, (_, blend) in found.items()}
    moved = None if taken == tuple(range(layers)) else taken
    return Composition.build(
        len(taken), lambda place: _nearest(place, blends), moved, _shifted(stack, taken)
    )


def _shifted(stack: Sequence[StackSlice], taken: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The layers of each model of which others are taken than of the first of its slice."""
    models = dict.fromkeys(source.model for one in stack for source in one.sources)
    found = {m: tuple(layer for one in stack for layer in one.taken_of(m)) for m in models}
    return {model: own for model, own in found.items() if own != taken}


def _nearest(place: Place, blends: Mapping[Place, Blend]) -> Blend:
    """The blend of a place; one without tensors goes with another, as nothing is computed there.

    A tied head has none: it is the embedding.
    """
    if place.layer is None:
        roles = ["embedding"] if place.role == "head" else ["final_norm", "embedding"]
    else:
        roles = ["mlp", "attention", "norm"]
    for other in (place, *(Place(place.layer, role) for role in roles)):
        if other in blends:
            return blends[other]
    return next(iter(blends.values()))


def _positions(stack: Iterable[StackSlice]) -> list[tuple[int, int, float]]:
    """For every layer its slice, and where in the slice it is: counted, and as 0..1."""
    found = []
    for number, one in enumerate(stack):
        steps = len(one.taken) - 1
        found += [(number, i, i / steps if steps else 1.0) for i in range(len(one.taken))]
    return found


def _blend_at(
    name: str,
    stack: list[StackSlice],
    positions: list[tuple[int, int, float]],
    tensor: str,
    place: Place,
) -> Blend:
    """What one tensor is made of.

    Outside the layers mergekit takes the first slice for what comes before them and the last for
    what comes after, at position 0 of both; of the last it takes as many sources as the first has.
    What a source sets by itself goes by the tensor's name in the source, the rest by that in the
    output.
    """
    names: dict[str, str] = {}
    if place.layer is not None:
        number, step, t = positions[place.layer]
        one = stack[number]
        sources = one.sources
        names = {s.model: renumbered(tensor, place.layer, s.taken[step]) for s in sources}
    elif place.role == "embedding":
        one, t = stack[0], 0.0
        sources = one.sources
    else:
        one, t = stack[-1], 0.0
        sources = one.sources[: len(stack[0].sources)]
    if (METHODS[name].deltas or name == "slerp") and one.base not in [s.model for s in sources]:
        raise RecipeError(
            f"{tensor}: mergekit takes as many sources of the last slice as the first has, which "
            f"leaves out the base model {one.base!r}; write it first"
        )
    try:
        entries = [_entry(name, one, s, names.get(s.model, tensor), t) for s in sources]
        base = one.base if one.base in [entry.model for entry in entries] else None
        inner = names.get(sources[0].model, tensor)
        return merged(name, entries, base, _shared(name, one, sources[0], (tensor, inner), t))
    except RecipeError as error:
        raise error.within(tensor) from None


def _entry(name: str, one: StackSlice, source: StackSource, tensor: str, t: float) -> ModelEntry:
    values = {}
    for parameter, default in PER_MODEL.items():
        found = one.value(parameter, tensor, t, source)
        needed = parameter in METHODS[name].required and needs_weight(name, source, one)
        if found is None and needed:
            raise RecipeError(
                f"no {parameter} for {source.model!r}: no filter matches, and there is no default"
            )
        values[parameter] = default if found is None else float(found)
    return ModelEntry(source.model, **values)


def needs_weight(name: str, source: StackSource, one: StackSlice) -> bool:
    """True if a model must have a weight: a base that deltas are taken from has none."""
    method = METHODS[name]
    return not (method.deltas or method.optional_base) or source.model != one.base


def _shared(
    name: str, one: StackSlice, source: StackSource, tensors: tuple[str, str], t: float
) -> Shared:
    """What is set for all sources, by a tensor's names in the output and in the first source."""
    found: dict[str, Scalar] = {}
    own_defaults = {
        "normalize": METHODS[name].normalize, "t": None,
        "rescale": METHODS[name].sparse not in BY_SIZE,
    }  # fmt: skip
    for parameter, default in {**SHARED, **own_defaults}.items():
        # Only what passes through has one source, which may set the scale itself.
        passes = parameter == "scale"
        value = one.value(parameter, tensors[passes], t, source if passes else None)
        if value is None and parameter == "t" and "t" in METHODS[name].required:
            raise RecipeError("no t: no filter matches, and there is no default")
        if value is not None or default is not None:
            found[parameter] = default if value is None else value  # type: ignore[assignment]
    return found


def _divided(place: Place, first: str, other: Blend, tensor: str, blend: Blend) -> str:
    where = place.role if place.layer is None else f"layer {place.layer} {place.role}"
    return (
        f"{where}: {first} would be {other} and {tensor} {blend}; layerswap merges all of it "
        "alike, so filters can tell self_attn, mlp and norms apart, but not parts of them"
    )
