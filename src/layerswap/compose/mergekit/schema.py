"""The parts of a mergekit configuration: what each key may hold."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from layerswap.compose.mergekit.settings import read_setting
from layerswap.compose.schema import Strict


def read_reference(value: object) -> object:
    """A model as mergekit refers to it, as one text: a folder or Hub id, `@revision` at its end.

    Raises:
        ValueError: an adapter, another architecture, or no text.
    """
    if isinstance(value, dict):
        extra = sorted(set(value) - {"model"})
        if "lora" in value and value["lora"] is None:
            extra.remove("lora")
        if extra:
            raise ValueError(f"{extra[0]!r} of a model is not supported; write the model alone")
        inner = value.get("model")
        if isinstance(inner, dict):
            revision = inner.get("revision")
            inner = f"{inner.get('path')}@{revision}" if revision else inner.get("path")
        value = inner
    if not isinstance(value, str) or not value:
        return value
    if "+" in value:
        raise ValueError(
            f"{value!r:.80} puts an adapter onto a model, which is not supported here; merge the "
            "adapter into the model first"
        )
    if value.count("@") > 1:
        raise ValueError(f"{value!r:.80} has two '@'; write owner/name@revision")
    return value


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
    """Layers of the output, made of the same layers of one model or more."""

    sources: Annotated[list[SliceSource], Field(min_length=1)]
    base_model: Reference | None = None
    parameters: Settings = {}


class Body(Strict):
    """A list of layers: whole models to merge, or slices."""

    models: list[Model] | None = None
    slices: list[Slice] | None = None
    parameters: Settings = {}


class MergekitMethod(Body):
    """What a mergekit configuration says about the weights.

    In a recipe, under `mergekit`, models are named as in `experts`, and `base` is its base.

    Attributes:
        merge_method: mergekit's name of the method.
        models: whole models to merge; or
        slices: the layers of the output, from the input up; or
        modules: `{"default": ...}` with models or slices in it.
        base_model: what deltas are taken from, or the first model of SLERP.
        parameters: settings for all models.
    """

    merge_method: str
    modules: dict[str, Body] | None = None
    base_model: Reference | None = None

    @property
    def experts(self) -> list[str]:
        """Every model it refers to, the base model first, then in order."""
        parts: list[Body] = [self, *(self.modules or {}).values()]
        found = [self.base_model] if self.base_model else []
        for part in parts:
            found += [entry.model for entry in part.models or ()]
            for one in part.slices or ():
                found += [one.base_model] if one.base_model else []
                found += [source.model for source in one.sources]
        return list(dict.fromkeys(found))


class Tokenizer(Strict):
    """Where the tokenizer of the output comes from."""

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
