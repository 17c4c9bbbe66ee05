"""mergekit configurations: read as recipes, checked, and resolved to the blend of each place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, PrivateAttr, model_validator

from layerswap.checkpoint.places import Place, renumbered, restacked_names
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition
from layerswap.compose.mergekit_methods import SPELLINGS, Scalar, Spelling, TensorSettings
from layerswap.compose.schema import BASE, DTYPES, Method, Shares, Tensors
from layerswap.ground.errors import RecipeError
from layerswap.ground.strict import Strict
from layerswap.ground.yaml_file import KeyPath, Mistake, nearest, refuse_mistakes, validate
from layerswap.methods.method import Parameter

# --- settings: numbers, gradients over layers, and values by a tensor's name ---

Setting = Any
"""A scalar, a list of scalars (a gradient), or a list of `{"filter": text, "value": ...}`, where
the filter may be left out."""
Settings = Mapping[str, Setting]
Lines = Mapping[KeyPath, int]
"""Line in the file of each key path."""


def read_setting(value: object) -> Setting:
    """Normalise a setting from any form that mergekit reads; ValueError otherwise."""
    if isinstance(value, Mapping):
        return [_condition(value)]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [_condition(item) for item in value]
    return _gradient(value)


def value_at(setting: Setting, tensor: str, t: float, *, discrete: bool = False) -> Scalar | None:
    """Resolve a setting for one tensor; None if no filter matches its name.

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
    """List the numbers and booleans in a setting."""
    for item in setting if isinstance(setting, list) else [setting]:
        yield from scalars(item["value"]) if isinstance(item, Mapping) else [item]


def _condition(value: Mapping[Any, Any]) -> dict[str, Any]:
    unknown = set(value) - {"filter", "value"}
    if unknown or "value" not in value:
        forms = "a number, a list of numbers, or {filter: ..., value: ...}"
        raise ValueError(f"write {forms}; found {value!r:.60}")
    wanted = value.get("filter")
    if wanted is not None and not isinstance(wanted, str):
        raise ValueError(f"filter is {wanted!r:.40}; write part of a tensor's name")
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
    """Write any mergekit model reference as one text: `model@revision+adapter@revision`."""
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
    return value


def _path(value: object) -> object:
    """A model's path with `@revision`, from a text or a mapping."""
    if not isinstance(value, dict):
        return value
    revision = value.get("revision")
    return f"{value.get('path')}@{revision}" if revision else value.get("path")


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

    layer_range: Annotated[tuple[int, int], Field(strict=False)]


class Slice(Strict):
    """Layers of the output, merged from the same layers of each source."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    base_model: Reference | None = None
    parameters: SettingsField = {}


class MergekitMethod(Method):
    """The part of a mergekit configuration that decides the weights: whole models, or slices.

    Under `mergekit` in a recipe, models have the names of `experts`, and `base` is the recipe's.
    """

    conflicts = {"weights": "weights belong in `mergekit`; remove `weights`"}

    merge_method: str
    models: list[Model] | None = None
    slices: list[Slice] | None = None
    parameters: SettingsField = {}
    base_model: Reference | None = None
    _lines: dict[KeyPath, str] = PrivateAttr(default_factory=dict)

    @property
    def references(self) -> dict[KeyPath, str]:
        """All models by key path, the base model first."""
        return {
            (*path, key): model
            for path, part in self.parts.items()
            for key in ("base_model", "model")
            if (model := getattr(part, key, None)) is not None
        }

    @property
    def parts(self) -> dict[KeyPath, MergekitMethod | Slice | Model]:
        """Key path -> part of the configuration with `parameters`."""
        parts: dict[KeyPath, MergekitMethod | Slice | Model] = {(): self}
        parts |= {("models", i): model for i, model in enumerate(self.models or ())}
        for i, stack_slice in enumerate(self.slices or ()):
            parts["slices", i] = stack_slice
            sources = enumerate(stack_slice.sources)
            parts |= {("slices", i, "sources", j): source for j, source in sources}
        return parts

    def compose(self, layers: int, weights: Shares, tensors: Tensors) -> Composition:
        """Compose the models of a depth, tensor by tensor.

        Every tensor's parameters are looked up as mergekit does, by its name and layer. The tensors
        of one place must agree.
        """
        if tensors is None:
            raise RecipeError("a mergekit configuration needs the names of its models' tensors")
        stack = read_stack(self, layers)
        for part in stack:
            if part.taken[-1] >= layers:
                where = self._lines.get(part.path, "mergekit")
                raise RecipeError(
                    f"{where}: {'.'.join(map(str, part.path))}: layer_range ends at "
                    f"{part.taken[-1] + 1}, but {part.sources[0].model} has {layers} layers"
                )
        taken = tuple(layer for stack_slice in stack for layer in stack_slice.taken)
        chosen: dict[Place, tuple[str, Blend]] = {}
        positions = _positions(stack)
        spelling = SPELLINGS[self.merge_method]
        for tensor, (_, place) in restacked_names(tensors, taken).items():
            blend = _blend_at(spelling, stack, positions, tensor, place)
            first, first_blend = chosen.setdefault(place, (tensor, blend))
            if first_blend != blend:
                where = place.role if place.layer is None else f"layer {place.layer} {place.role}"
                raise RecipeError(
                    f"{where}: {first} would be {first_blend} and {tensor} {blend}; layerswap "
                    "merges a place as a whole, so filters can separate self_attn, mlp and norms, "
                    "but not parts of them"
                )
        blends = {place: blend for place, (_, blend) in chosen.items()}
        moved = None if taken == tuple(range(layers)) else taken
        return Composition.build(len(taken), lambda place: _nearest(place, blends), moved)

    def mistakes(self) -> Iterator[Mistake]:
        """Find the mistakes over several keys, such as a missing base model."""
        given = [key for key in ("models", "slices") if getattr(self, key)]
        if len(given) != 1:
            yield (), f"give exactly one of models and slices; found {'both' if given else 'none'}"
        name, spelling = self.merge_method, SPELLINGS.get(self.merge_method)
        if spelling is None:
            yield ("merge_method",), f"no method {name!r}{nearest(name, sorted(SPELLINGS))}"
        for path, part in self.parts.items():
            yield from _setting_mistakes((*path, "parameters"), part.parameters, spelling)
        for i, layers in enumerate(self.slices or ()):
            yield from _layer_mistakes(("slices", i), layers.sources)
        if spelling is None:
            return
        stack, paths = read_stack(self), {id(part): path for path, part in self.parts.items()}
        for stack_slice in stack:
            yield from _source_mistakes(stack_slice, name, spelling, paths)
        others = [m for each in stack for m in each.models if m != each.base]
        if spelling.base == "deltas" and stack and not others:
            yield (), "there is no model beside the base model"


Dtype = Annotated[
    Literal[DTYPES] | None,  # type: ignore[valid-type]
    BeforeValidator(lambda name: name.removeprefix("torch.") if isinstance(name, str) else name),
]


class Tokenizer(Strict):
    """Origin of the output's tokenizer."""

    source: Any = "union"
    tokens: dict[Any, Any] | None = None
    pad_to_multiple_of: int | None = None


class MergekitFile(MergekitMethod):
    """A whole configuration file."""

    dtype: Dtype = None
    out_dtype: Dtype = None
    tokenizer_source: Any = None
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[MergekitFile]) -> MergekitFile:
        file = handler(data)
        return refuse_mistakes(file, file.mistakes())

    def mistakes(self) -> Iterator[Mistake]:
        """Also find keys that layerswap cannot follow."""
        yield from super().mistakes()
        if self.chat_template is not None:
            text = "layerswap copies the tokenizer with its template; remove `chat_template`"
            yield ("chat_template",), text
        if self.tokenizer is not None:
            if self.tokenizer_source is not None:
                yield ("tokenizer",), "give tokenizer or tokenizer_source, not both"
            for key in ("tokens", "pad_to_multiple_of"):
                if getattr(self.tokenizer, key) is not None:
                    text = "not supported; embedding rows are merged as they are"
                    yield ("tokenizer", key), text


# --- the stack of layers ---


@dataclass(frozen=True)
class StackSlice:
    """Neighbouring layers of the output.

    `taken` are its layers in every source, and `scopes` the settings for all sources, the nearest
    first.
    """

    path: KeyPath
    taken: range
    sources: tuple[Model, ...]
    base: str | None
    scopes: tuple[Settings, ...]

    @property
    def models(self) -> list[str]:
        """Names of the slice's models."""
        return [source.model for source in self.sources]

    def value(
        self, name: str, tensor: str, t: float, source: Model | None, *, discrete: bool
    ) -> Scalar | None:
        """Resolve a parameter for one tensor at position `t`; None if unset.

        The settings of `source` win.
        """
        nearest_scope = (source.parameters,) if source else ()
        for scope in (*nearest_scope, *self.scopes):
            if name in scope:
                value = value_at(scope[name], tensor, t, discrete=discrete)
                if value is not None:
                    return value
        return None

    def needs(self, parameter: str, source: Model | None, spelling: Spelling) -> bool:
        """True if a model, or all, need a parameter; the base of deltas needs no weight."""
        deltas = spelling.base in ("deltas", "optional")
        is_base = deltas and source is not None and source.model == self.base
        return parameter in spelling.required and not is_base


def read_stack(method: MergekitMethod, layers: int = 0) -> list[StackSlice]:
    """The slices of a configuration.

    `models` are one slice of all `layers`. As in mergekit, a base model that is not among them is
    added to it.
    """
    base, top = method.base_model, method.parameters
    if method.models:
        merged = [entry.model for entry in method.models]
        added = [] if base is None or base in merged else [Model(model=base)]
        return [StackSlice(("models",), range(layers), (*method.models, *added), base, (top,))]
    return [
        StackSlice(
            ("slices", i),
            range(*stack_slice.sources[0].layer_range),
            tuple(stack_slice.sources),
            stack_slice.base_model or base,
            (stack_slice.parameters, top),
        )
        for i, stack_slice in enumerate(method.slices or ())
    ]


def _nearest(place: Place, blends: Mapping[Place, Blend]) -> Blend:
    """Return a place's blend; a neighbour's if the place has no tensors.

    A tied head has no tensor: it is the embedding.
    """
    if place.layer is None:
        roles = ["embedding"] if place.role == "head" else ["final_norm", "embedding"]
    else:
        roles = ["mlp", "attention", "norm"]
    for candidate in (place, *(Place(place.layer, role) for role in roles)):
        if candidate in blends:
            return blends[candidate]
    return next(iter(blends.values()))


def _positions(stack: Iterable[StackSlice]) -> list[tuple[StackSlice, int, float]]:
    """Return each layer's slice, number in the models, and position in the slice (0 to 1)."""
    return [
        (stack_slice, layer, i / last if last else 1.0)
        for stack_slice in stack
        for last in [len(stack_slice.taken) - 1]
        for i, layer in enumerate(stack_slice.taken)
    ]


def _blend_at(
    spelling: Spelling,
    stack: list[StackSlice],
    positions: list[tuple[StackSlice, int, float]],
    tensor: str,
    place: Place,
) -> Blend:
    """Resolve the blend of one tensor.

    Outside the layers mergekit takes the first slice for the embedding and the last for the rest,
    at position 0 of both. Uses only the first n sources of the last slice, n being the number of
    sources of the first. A source's own settings go by the tensor's name in the source, the others
    by its name in the output.
    """
    inner = tensor
    if place.layer is not None:
        stack_slice, layer, t = positions[place.layer]
        sources = stack_slice.sources
        inner = renumbered(tensor, place.layer, layer)
    elif place.role == "embedding":
        stack_slice, t = stack[0], 0.0
        sources = stack_slice.sources
    else:
        stack_slice, t = stack[-1], 0.0
        sources = stack_slice.sources[: len(stack[0].sources)]
    if spelling.base in ("deltas", "first") and stack_slice.base not in [s.model for s in sources]:
        raise RecipeError(
            f"{tensor}: the first slice has fewer sources than the last, so mergekit ignores "
            f"the base model {stack_slice.base!r} there; list it first"
        )

    def value(
        parameter: str, declared: Parameter | Scalar, name: str, source: Model | None
    ) -> Scalar:
        default: Any = declared.default if isinstance(declared, Parameter) else declared
        found = stack_slice.value(parameter, name, t, source, discrete=isinstance(default, bool))
        if found is None and stack_slice.needs(parameter, source, spelling):
            whose = f" for {source.model!r}" if source else ""
            raise RecipeError(f"no {parameter}{whose}: no filter matches, and there is no default")
        return default if found is None else found

    try:
        models = {
            s.model: {p: float(value(p, d, inner, s)) for p, d in spelling.models.items()}
            for s in sources
        }
        # Only `passthrough` has one source, which may set the scale itself.
        shared = {
            p: value(p, d, inner, sources[0]) if p == "scale" else value(p, d, tensor, None)
            for p, d in spelling.shared.items()
        }
        base = stack_slice.base if stack_slice.base in models else None
        return spelling.read(TensorSettings(models, base, shared))
    except RecipeError as error:
        raise error.within(tensor) from None


# --- rules beyond the types of fields ---

PARAMETERS = sorted(
    {"int8_mask", "eps"}.union(*({*s.models, *s.shared} for s in SPELLINGS.values()))
)
"""mergekit's parameters. As in mergekit, those that the method does not have are ignored."""


def _setting_mistakes(
    path: KeyPath, settings: Settings, spelling: Spelling | None
) -> Iterator[Mistake]:
    declared = {**spelling.models, **spelling.shared} if spelling else {}
    for name, setting in settings.items():
        if name not in PARAMETERS:
            yield (*path, name), f"mergekit has no parameter {name!r}{nearest(name, PARAMETERS)}"
        parameter = declared.get(name)
        if isinstance(parameter, Parameter):
            try:
                for value in scalars(setting):
                    parameter.check(value)
            except RecipeError as error:
                yield (*path, name), str(error)


def _layer_mistakes(path: KeyPath, sources: Sequence[SliceSource]) -> Iterator[Mistake]:
    for j, source in enumerate(sources):
        first, stop = source.layer_range
        if not 0 <= first < stop:
            yield (*path, "sources", j, "layer_range"), f"[{first}, {stop}] holds no layer"
    if len({source.layer_range for source in sources}) > 1:
        yield path, "the sources have different layers; layerswap takes the same layers of each"


def _source_mistakes(
    stack_slice: StackSlice, name: str, spelling: Spelling, paths: Mapping[int, KeyPath]
) -> Iterator[Mistake]:
    models = stack_slice.models
    for i, source in enumerate(stack_slice.sources):
        if source.model in models[:i]:
            yield paths[id(source)], f"{source.model!r} is given twice"
    low, high = spelling.sources
    optional = spelling.base == "optional"
    counted = set(models) - ({stack_slice.base} if optional else set())
    if not low <= len(counted) <= high:
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        with_base = ", the base model included"
        if high == 1 or optional:
            with_base = " beside the base model" if optional else ""
        noun = "model" if low == 1 else "models"
        yield stack_slice.path, f"{name} takes {wanted} {noun}{with_base}; found {len(counted)}"
    if spelling.base in ("deltas", "first"):
        if stack_slice.base is None:
            why = "works on deltas and needs" if spelling.base == "deltas" else "starts from"
            yield (), f"{name} {why} a base model; give `base_model`"
        elif stack_slice.base not in models:
            yield (
                stack_slice.path,
                f"{stack_slice.base!r} is the base model and must be among the sources",
            )
    for parameter in spelling.required:
        if any(parameter in scope for scope in stack_slice.scopes):
            continue
        if parameter in spelling.shared:
            meant = "from 0 (the base model) to 1" if name == "slerp" else "the largest change"
            yield ("parameters", parameter), f"{name} needs {parameter}, {meant}"
            continue
        for source in stack_slice.sources:
            if (
                stack_slice.needs(parameter, source, spelling)
                and parameter not in source.parameters
            ):
                path = paths.get(id(source), ("base_model",))
                yield path, f"{name} needs a {parameter} for {source.model!r}"


# --- a configuration as a recipe ---

KEYS = ("merge_method", "slices", "models", "base_model")
"""Keys by which a configuration is recognised; a recipe has none of them."""


def is_mergekit(data: Mapping[Any, Any], where: str) -> bool:
    """True if a file's data is a mergekit configuration and not a recipe.

    A configuration of mergekit-moe is refused by name.
    """
    experts = data.get("experts")
    listed = experts if isinstance(experts, list) else ()
    if "gate_mode" in data or any(isinstance(e, dict) and "source_model" in e for e in listed):
        raise RecipeError(
            f"{where}: a mergekit-moe configuration; layerswap builds no mixtures of experts, so "
            "give it to mergekit-moe"
        )
    return any(key in data for key in KEYS) and "experts" not in data


def translate(data: Any, lines: Lines, *, where: str) -> tuple[Any, Lines]:
    """Translate a configuration with its lines into a recipe's data; other data stay.

    The `mergekit` of the recipe holds the configuration, with every model under an expert's name.
    Reports all mistakes at once, each with its line and key path.
    """
    if not isinstance(data, dict) or not is_mergekit(data, where):
        return data, lines
    file = validate(
        MergekitFile, data, where=where, expected="a configuration is a mapping", lines=lines
    )
    given = file.model_dump(exclude_unset=True, include=set(MergekitMethod.model_fields))
    base = _base_of(file)
    models = dict.fromkeys(file.references.values())
    names = _names([model for model in models if model != base], base)
    dtype = file.out_dtype or file.dtype
    for (*path, key), model in file.references.items():
        part: Any = given
        for step in path:
            part = part[step]
        part[key] = names[model]
    method = MergekitMethod.model_validate(given)
    method._lines.update({path: f"{where}, line {line}" for path, line in lines.items()})
    recipe = {
        "experts": {name: _expert(model) for model, name in names.items() if model != base},
        **({"base": _expert(base)} if base else {}),
        "mergekit": method,
        **({"dtype": dtype} if dtype else {}),
        **_tokenizer(file, names),
    }
    return recipe, {}


def _base_of(method: MergekitMethod) -> str | None:
    """Return the recipe's base: the model of deltas, or a base model that is not merged."""
    if method.base_model is None:
        return None
    merged = {model for stack_slice in read_stack(method) for model in stack_slice.models}
    deltas = SPELLINGS[method.merge_method].base in ("deltas", "optional")
    return method.base_model if deltas or method.base_model not in merged else None


def _names(models: list[str], base: str | None) -> dict[str, str]:
    """Name each model by the last part of its path, numbered if not unique."""
    names = {} if base is None else {base: BASE}
    taken = set(names.values())
    for model in models:
        stem = model.rpartition("+")[2].partition("@")[0].rstrip("/").rpartition("/")[2] or "model"
        number, name = 1, stem
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        taken.add(name)
        names[model] = name
    return names


def _tokenizer(file: MergekitFile, names: Mapping[str, str]) -> dict[str, str]:
    """Return the tokenizer to align to; None for the base's, which all experts share."""
    chosen = file.tokenizer.source if file.tokenizer else file.tokenizer_source
    name = "union" if chosen == "union" else names.get(chosen) if isinstance(chosen, str) else None
    return {"tokenizer": name} if name and name != BASE else {}


def _expert(model: str) -> dict[str, str]:
    whole, _, adapter = model.partition("+")
    source, _, revision = whole.partition("@")
    return {
        "source": source,
        **({"revision": revision} if revision else {}),
        **({"adapter": adapter} if adapter else {}),
    }
