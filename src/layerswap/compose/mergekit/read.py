"""A mergekit configuration as a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ModelWrapValidatorHandler, model_validator

from layerswap.compose.mergekit.methods import METHODS
from layerswap.compose.mergekit.resolve import read_stack
from layerswap.compose.mergekit.schema import MergekitFile, MergekitMethod
from layerswap.compose.mergekit.validation import file_mistakes
from layerswap.compose.schema import BASE
from layerswap.compose.yaml_file import KeyPath, validate, validate_whole

KEYS = ("merge_method", "slices", "models", "modules", "base_model")
"""Keys by which a configuration is known; a recipe has none of them."""


class _File(MergekitFile):
    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[_File]) -> _File:
        return validate_whole(cls.__name__, data, handler, file_mistakes)


def is_mergekit(data: Mapping[Any, Any]) -> bool:
    """Whether a file's data is a mergekit configuration and no recipe."""
    return any(key in data for key in KEYS) and "experts" not in data


def recipe_data(
    data: Mapping[str, Any], *, where: str, lines: Mapping[KeyPath, int]
) -> dict[str, Any]:
    """The recipe that gives the same result, as plain data.

    Its `mergekit` holds the configuration, with every model called by an expert's name.

    Raises:
        RecipeError: all mistakes at once, each on a line with its key path.
    """
    file = validate(_File, data, where=where, expected="a configuration is a mapping", lines=lines)
    method = MergekitMethod.model_validate(
        file.model_dump(exclude_unset=True, include=set(MergekitMethod.model_fields))
    )
    base = _base_of(method)
    names = _names([model for model in method.experts if model != base], base)
    dtype = file.out_dtype or file.dtype
    return {
        "experts": {name: _expert(model) for model, name in names.items() if model != base},
        **({"base": _expert(base)} if base else {}),
        "mergekit": renamed(method.model_dump(exclude_unset=True), names),
        **({"dtype": dtype.removeprefix("torch.")} if dtype else {}),
        **_tokenizer(file, names),
    }


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A configuration's plain data with other names for its models."""
    if isinstance(value, Mapping):
        return {
            key: names[item]
            if key in ("model", "base_model") and isinstance(item, str)
            else item
            if key == "parameters"
            else renamed(item, names)
            for key, item in value.items()
        }
    return [renamed(item, names) for item in value] if isinstance(value, list | tuple) else value


def _base_of(method: MergekitMethod) -> str | None:
    """The model that becomes the recipe's base: deltas are taken from it, or nothing is."""
    if method.base_model is None:
        return None
    stack = read_stack(method.model_dump(exclude_none=True))
    merged = {source.model for one in stack for source in one.sources}
    reading = METHODS[method.merge_method]
    taken = reading.deltas or reading.optional_base or method.base_model not in merged
    return method.base_model if taken else None


def _names(models: list[str], base: str | None) -> dict[str, str]:
    """A name for every model: the last part of its path, numbered where two have the same."""
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


def _tokenizer(file: _File, names: Mapping[str, str]) -> dict[str, str]:
    """Whose tokenizer to align to; nothing for the base's, which experts of one base share."""
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
