"""mergekit configurations: their settings, their stack of layers, and the blend of each place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from layerswap.checkpoint.places import Place, renumbered, restacked_names
from layerswap.compose.blend import Blend, Operation
from layerswap.compose.composition import Composition
from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import KeyPath
from layerswap.errors import RecipeError
from layerswap.methods import SPELLINGS
from layerswap.methods.mergekit import Call, Reading, Scalar, Shared, Spelling, TensorValues
from layerswap.methods.mergekit import Model as ModelValues
from layerswap.methods.method import Parameter

# --- settings: numbers, gradients over layers, and values by a tensor's name ---

Setting = Any
"""A scalar, a list of scalars (a gradient), or a list of `{"filter": text, "value": ...}`, where
the filter may be left out."""
Settings = Mapping[str, Setting]


def read_setting(value: object) -> Setting:
    """A setting in its plain form, from any form that mergekit reads; else a ValueError."""
    if isinstance(value, Mapping):
        return [_condition(value)]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [_condition(item) for item in value]
    return _gradient(value)


def value_at(setting: Setting, tensor: str, t: float, *, discrete: bool = False) -> Scalar | None:
    """The value for one tensor; None if no filter matches its name.

    `t` is the position in the slice, 0 at its first layer and 1 at its last. A `discrete` setting
    jumps between the values of a gradient, as for true and false.

    Example: the gradient `[0, 1]` is 0.25 at t = 0.25; `[0, 0.5, 1]` is 0.25 there too.
    """
    if not isinstance(setting, list):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting[0], Mapping):
        for condition in setting:
            wanted = condition.get("filter")
            if wanted in (None, "*") or wanted in tensor:
                return value_at(condition["value"], tensor, t, discrete=discrete)
        return None
    if discrete:
        return setting[int(t * (len(setting) - 1))]  # type: ignore[no-any-return]
    scaled = t * (len(setting) - 1)
    low = int(scaled)
    high = min(len(setting) - 1, low + 1)
    share = scaled - low
    return (1 - share) * setting[low] + share * setting[high]  # type: ignore[no-any-return]


def scalars(setting: Setting) -> Iterator[Scalar]:
    """Every number and truth value in a setting."""
    for item in setting if isinstance(setting, list) else [setting]:
        yield from scalars(item["value"]) if isinstance(item, Mapping) else [item]


def _condition(value: Mapping[Any, Any]) -> dict[str, Any]:
    unknown = set(value) - {"filter", "value"}
    if unknown or "value" not in value:
        forms = "a number, a list of numbers, or {filter: ..., value: ...}"
        raise ValueError(f"write {forms}; found {value!r:.60}")
    wanted = value.get("filter")
    if wanted is not None and not isinstance(wanted, str):
        raise ValueError(f"filter is {wanted!r:.40}; it is a part of a tensor's name")
    named = {} if wanted is None else {"filter": wanted}
    return {**named, "value": _gradient(value["value"])}


def _gradient(value: object) -> Scalar | list[Scalar]:
    if isinstance(value, list):
        if not value:
            raise ValueError("an empty list; write at least one number")
        return [_scalar(item) for item in value]
    return _scalar(value)


def _scalar(value: object) -> Scalar:
    if isinstance(value, bool):
        return value
    # YAML 1.1 reads 1e-3 as a text; mergekit reads the number.
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{value!r:.40} is not a number") from None
    if not isinstance(value, int | float) or not abs(value) <= 1e100:
        raise ValueError(f"{value!r:.40} is not a number")
    return value


def read_reference(value: object) -> object:
    """A model as one text, from any form that mergekit reads: `model@revision+adapter@revision`."""
    if isinstance(value, dict):
        extra = sorted(set(value) - {"model", "lora"})
        if extra:
            raise ValueError(f"{extra[0]!r} of a model is not supported; write the model alone")
        model, lora = _path(value.get("model")), _path(value.get("lora"))
        value = model if lora is None else f"{model}+{lora}"
    if not isinstance(value, str) or not value:
        return value
    if value.count("+") > 1:
        raise ValueError(f"{value!r:.80} adds two adapters; merge one into the model first")
    if any(part.count("@") > 1 for part in value.split("+")):
        raise ValueError(f"{value!r:.80} has two '@'; write owner/name@revision")
    if not all(value.split("+")):
        raise ValueError(f"{value!r:.80} names no adapter or no model")
    return value


def _path(value: object) -> object:
    """A model's path with `@revision`, from a text or a mapping."""
    if not isinstance(value, dict):
        return value
    revision = value.get("revision")
    return f"{value.get('path')}@{revision}" if revision else value.get("path")


def _read_range(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _or_nothing(value: object) -> object:
    return {} if value is None else value


Reference = Annotated[str, BeforeValidator(read_reference), Field(min_length=1)]
SettingsField = Annotated[
    dict[str, Annotated[Any, BeforeValidator(read_setting)]], BeforeValidator(_or_nothing)
]


class Model(Strict):
    """A whole model."""

    model: Reference
    parameters: SettingsField = {}


class SliceSource(Model):
    """The layers [first, stop) of a model."""

    layer_range: Annotated[tuple[int, int], BeforeValidator(_read_range)]


class Slice(Strict):
    """Layers of the output, merged from as many layers of each source."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    base_model: Reference | None = None
    parameters: SettingsField = {}


class Body(Strict):
    """A list of layers: whole models to merge, or slices."""

    models: list[Model] | None = None
    slices: list[Slice] | None = None
    parameters: SettingsField = {}


class MergekitMethod(Body):
    """The part of a mergekit configuration that decides the weights.

    Under `mergekit` in a recipe, models have the names of `experts`, and `base` is the recipe's.
    """

    merge_method: str
    modules: dict[str, Body] | None = None
    base_model: Reference | None = None

    @property
    def experts(self) -> list[str]:
        """Every model in it, the base model first."""
        parts: list[Body] = [self, *(self.modules or {}).values()]
        models = [self.base_model] if self.base_model else []
        for part in parts:
            models += [entry.model for entry in part.models or ()]
            for layers in part.slices or ():
                models += [layers.base_model] if layers.base_model else []
                models += [source.model for source in layers.sources]
        return list(dict.fromkeys(models))


class Tokenizer(Strict):
    """Origin of the output's tokenizer."""

    source: Any = "union"
    tokens: dict[Any, Any] | None = None
    pad_to_multiple_of: int | None = None


class MergekitFile(MergekitMethod):
    """A whole configuration file."""

    dtype: str | None = None
    out_dtype: str | None = None
    tokenizer_source: Any = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None


# --- the stack of layers ---


@dataclass(frozen=True)
class StackSource:
    """A model in a slice, with its own settings and the key path of its entry.

    `layers` are the first layer and the one after the last; None for all layers, or if the entry
    cannot be read.
    """

    path: KeyPath
    model: str
    parameters: Settings
    layers: tuple[int, int] | None

    @property
    def taken(self) -> range:
        """Its layers."""
        assert self.layers is not None, "checked before anything is resolved"
        return range(*self.layers)


@dataclass(frozen=True)
class StackSlice:
    """Neighbouring layers of the output, with settings for all sources, the nearest first."""

    path: KeyPath
    sources: tuple[StackSource, ...]
    base: str | None
    scopes: tuple[Settings, ...]

    @property
    def taken(self) -> range:
        """The layers of its first model."""
        return self.sources[0].taken

    def taken_of(self, model: str) -> range:
        """The layers of a model; those of the first model if this one is not merged."""
        return next((s.taken for s in self.sources if s.model == model), self.taken)

    def value(
        self, name: str, tensor: str, t: float, source: StackSource | None, *, discrete: bool
    ) -> Scalar | None:
        """A parameter for one tensor at position `t`; None if nothing sets it.

        The settings of `source` win.
        """
        own = (source.parameters,) if source else ()
        for scope in (*own, *self.scopes):
            if name in scope:
                value = value_at(scope[name], tensor, t, discrete=discrete)
                if value is not None:
                    return value
        return None


def read_stack(data: Mapping[Any, Any], layers: int | None = None) -> list[StackSlice]:
    """The slices of a configuration's plain data, without entries of a wrong type.

    `models` are one slice of all `layers`. As in mergekit, a base model that is not among them is
    added to it.
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
    stack = []
    slices = part.get("slices")
    for i, entry in enumerate(slices if isinstance(slices, list) else ()):
        here = (*path, "slices", i)
        if isinstance(entry, Mapping) and isinstance(entry.get("sources"), list):
            sources = [*_sources((*here, "sources"), entry["sources"], None)]
            own = _model(entry.get("base_model")) or base
            if sources:
                inner = (_settings(entry.get("parameters")), *scopes)
                stack.append(StackSlice(here, tuple(sources), own, inner))
    return stack


def _body(
    data: Mapping[Any, Any], top: Settings
) -> tuple[KeyPath, Mapping[Any, Any], tuple[Settings, ...]]:
    """The mapping with models or slices, its path, and the settings around it, nearest first."""
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
        reference = read_reference(value)
    except ValueError:
        return None
    return reference if isinstance(reference, str) and reference else None


def _range(value: object) -> tuple[int, int] | None:
    if not isinstance(value, list | tuple) or [type(v) for v in value] != [int, int]:
        return None
    return value[0], value[1]


def _settings(value: object) -> Settings:
    settings = {}
    for name, setting in value.items() if isinstance(value, Mapping) else ():
        try:
            settings[name] = read_setting(setting)
        except ValueError:
            settings[name] = []  # the schema reports it; here it counts as set
    return settings


LLAMA = {
    "embedding": ("model.embed_tokens.weight",),
    "attention": tuple(f"self_attn.{word}_proj.weight" for word in "qkvo"),
    "mlp": tuple(f"mlp.{word}_proj.weight" for word in ("gate", "up", "down")),
    "norm": ("input_layernorm.weight", "post_attention_layernorm.weight"),
    "final_norm": ("model.norm.weight",),
    "head": ("lm_head.weight",),
}
"""The names of Llama's tensors by role; inside a layer without `model.layers.N.` before them."""


def llama_tensors(layers: int) -> dict[str, Place]:
    """The places of a Llama's tensors, whose names most families share."""
    places = {}
    for role, names in LLAMA.items():
        inside = role in ("attention", "mlp", "norm")
        for layer in range(layers) if inside else [None]:
            prefix = "" if layer is None else f"model.layers.{layer}."
            places.update({prefix + name: Place(layer, role) for name in names})
    return places


def resolve(
    method: MergekitMethod, layers: int, tensors: Mapping[str, Place] | None = None
) -> Composition:
    """The composition of a configuration, over the models as it names them.

    Every tensor's parameters are looked up as mergekit does, by its name and layer. The tensors of
    one place must agree. `layers` is that of the models; `tensors` are a Llama's when None.
    """
    stack = read_stack(method.model_dump(exclude_none=True), layers)
    taken = tuple(layer for part in stack for layer in part.taken)
    last = max(source.taken[-1] for part in stack for source in part.sources)
    if last >= layers:
        raise RecipeError(f"layer {last} is taken from models of {layers} layers")
    chosen: dict[Place, tuple[str, Blend]] = {}
    positions = _positions(stack)
    spelling = SPELLINGS[method.merge_method]
    for tensor, (_, place) in restacked_names(tensors or llama_tensors(layers), taken).items():
        blend = _blend_at(spelling, stack, positions, tensor, place)
        first, other = chosen.setdefault(place, (tensor, blend))
        if other != blend:
            raise RecipeError(_divided(place, first, other, tensor, blend))
    blends = {place: blend for place, (_, blend) in chosen.items()}
    moved = None if taken == tuple(range(layers)) else taken
    return Composition.build(
        len(taken), lambda place: _nearest(place, blends), moved, _shifted(stack, taken)
    )


def _shifted(stack: Sequence[StackSlice], taken: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The layers of each model that differ from those of the first model of its slice."""
    models = dict.fromkeys(source.model for part in stack for source in part.sources)
    layers = {m: tuple(layer for part in stack for layer in part.taken_of(m)) for m in models}
    return {model: own for model, own in layers.items() if own != taken}


def _nearest(place: Place, blends: Mapping[Place, Blend]) -> Blend:
    """The blend of a place; for a place without tensors, that of a neighbour.

    A tied head has no tensor: it is the embedding.
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
    """For every layer its slice, and its position in the slice: counted, and as 0..1."""
    positions = []
    for number, part in enumerate(stack):
        steps = len(part.taken) - 1
        positions += [(number, i, i / steps if steps else 1.0) for i in range(len(part.taken))]
    return positions


def _blend_at(
    spelling: Spelling,
    stack: list[StackSlice],
    positions: list[tuple[int, int, float]],
    tensor: str,
    place: Place,
) -> Blend:
    """The blend of one tensor.

    Outside the layers mergekit takes the first slice for the embedding and the last for the rest,
    at position 0 of both; of the last it takes as many sources as the first has. A source's own
    settings go by the tensor's name in the source, the others by its name in the output.
    """
    names: dict[str, str] = {}
    if place.layer is not None:
        number, step, t = positions[place.layer]
        part = stack[number]
        sources = part.sources
        names = {s.model: renumbered(tensor, place.layer, s.taken[step]) for s in sources}
    elif place.role == "embedding":
        part, t = stack[0], 0.0
        sources = part.sources
    else:
        part, t = stack[-1], 0.0
        sources = part.sources[: len(stack[0].sources)]
    if spelling.base in ("deltas", "first") and part.base not in [s.model for s in sources]:
        raise RecipeError(
            f"{tensor}: mergekit takes as many sources of the last slice as the first has, which "
            f"leaves out the base model {part.base!r}; write it first"
        )
    try:
        models = [_model_values(spelling, part, s, names.get(s.model, tensor), t) for s in sources]
        base = part.base if part.base in [model.name for model in models] else None
        inner = names.get(sources[0].model, tensor)
        shared = _shared(spelling, part, sources[0], (tensor, inner), t)
        return _blend(spelling.read(TensorValues(models, base, shared)), base)
    except RecipeError as error:
        raise error.within(tensor) from None


def _blend(reading: Reading, base: str | None) -> Blend:
    if not isinstance(reading, Call):
        return Blend.of(reading)
    return Blend.of(
        Operation.of(
            reading.method,
            {_blend(item, base): weight for item, weight in reading.inputs},
            base=None if base is None else Blend.of(base),
            parameters=reading.parameters,
        )
    )


def _model_values(
    spelling: Spelling, part: StackSlice, source: StackSource, tensor: str, t: float
) -> ModelValues:
    values = {}
    for parameter, known in spelling.models.items():
        value = part.value(parameter, tensor, t, source, discrete=False)
        if (
            value is None
            and parameter in spelling.required
            and needs_weight(spelling, source, part)
        ):
            raise RecipeError(
                f"no {parameter} for {source.model!r}: no filter matches, and there is no default"
            )
        values[parameter] = float(known.default if value is None else value)
    return ModelValues(source.model, values)


def needs_weight(spelling: Spelling, source: StackSource, part: StackSlice) -> bool:
    """True if a model must have a weight: a base that deltas are taken from has none."""
    return spelling.base not in ("deltas", "optional") or source.model != part.base


def _shared(
    spelling: Spelling, part: StackSlice, source: StackSource, tensors: tuple[str, str], t: float
) -> Shared:
    """The values for all sources, by a tensor's names in the output and in the first source."""
    values: dict[str, Scalar] = {}
    for parameter, known in spelling.shared.items():
        default = known.default if isinstance(known, Parameter) else known
        # Only `passthrough` has one source, which may set the scale itself.
        own = parameter == "scale"
        value = part.value(
            parameter, tensors[own], t, source if own else None, discrete=isinstance(default, bool)
        )
        if value is None and parameter in spelling.required:
            raise RecipeError(f"no {parameter}: no filter matches, and there is no default")
        values[parameter] = default if value is None else value  # type: ignore[assignment]
    return values


def _divided(place: Place, first: str, other: Blend, tensor: str, blend: Blend) -> str:
    where = place.role if place.layer is None else f"layer {place.layer} {place.role}"
    return (
        f"{where}: {first} would be {other} and {tensor} {blend}; layerswap merges a place as a "
        "whole, so filters can separate self_attn, mlp and norms, but not parts of them"
    )
