"""mergekit's settings: numbers, gradients over layers, and values by a tensor's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from layerswap.compose.schema import Strict
from layerswap.methods.mergekit import Scalar

Setting = Any
"""A scalar, a list of scalars (a gradient), or a list of `{"filter": text, "value": ...}`, where
the filter may be left out."""
EVERYTHING = (None, "*")
"""Filters that match every tensor."""


def read_setting(value: object) -> Setting:
    """A setting in its plain form, from any form that mergekit reads; else a ValueError."""
    if isinstance(value, Mapping):
        return [_condition(value)]
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return [_condition(item) for item in value]
    return _gradient(value)


def value_at(setting: Setting, tensor: str, t: float, *, discrete: bool = False) -> Scalar | None:
    """The value for one tensor; None if no filter matches its name.

    Args:
        setting: result of `read_setting`.
        tensor: the tensor's name.
        t: position in the slice, 0 at its first layer and 1 at its last.
        discrete: jump between the values of a gradient, as for true and false.

    Example: the gradient `[0, 1]` is 0.25 at t = 0.25; `[0, 0.5, 1]` is 0.25 there too.
    """
    if not isinstance(setting, list):
        return setting  # type: ignore[no-any-return]
    if isinstance(setting[0], Mapping):
        for condition in setting:
            wanted = condition.get("filter")
            if wanted in EVERYTHING or wanted in tensor:
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
    """A model as one text, from any form that mergekit reads: `model@revision+adapter@revision`.

    A model and an adapter are folders or Hub ids; revision and adapter may be left out. Another
    architecture, two adapters, or anything but text is a ValueError.
    """
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
Settings = Annotated[
    dict[str, Annotated[Any, BeforeValidator(read_setting)]], BeforeValidator(_or_nothing)
]


class Model(Strict):
    """A whole model."""

    model: Reference
    parameters: Settings = {}


class SliceSource(Model):
    """The layers [first, stop) of a model."""

    layer_range: Annotated[tuple[int, int], BeforeValidator(_read_range)]


class Slice(Strict):
    """Layers of the output, merged from as many layers of each source."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    base_model: Reference | None = None
    parameters: Settings = {}


class Body(Strict):
    """A list of layers: whole models to merge, or slices."""

    models: list[Model] | None = None
    slices: list[Slice] | None = None
    parameters: Settings = {}


class MergekitMethod(Body):
    """The part of a mergekit configuration that decides the weights.

    Under `mergekit` in a recipe, models have the names of `experts`, and `base` is the recipe's.

    Attributes:
        merge_method: mergekit's name of the method.
        models: whole models to merge; or
        slices: the layers of the output, from the input up; or
        modules: `{"default": ...}` with models or slices in it.
        base_model: the model that deltas are taken from, or the first model of SLERP.
        parameters: settings for all models.
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
