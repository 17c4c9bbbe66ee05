"""Reads a mergekit configuration as a recipe, and checks rules beyond the types of its fields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ModelWrapValidatorHandler, model_validator

from layerswap.compose.mergekit import (
    MergekitFile,
    MergekitMethod,
    Settings,
    StackSlice,
    needs_weight,
    read_stack,
    scalars,
)
from layerswap.compose.schema import BASE, DTYPES, LARGEST_STACK
from layerswap.compose.yaml_file import KeyPath, Mistake, nearest, validate, validate_whole
from layerswap.errors import RecipeError
from layerswap.methods import SPELLINGS
from layerswap.methods.mergekit import Spelling
from layerswap.methods.method import Parameter

PARAMETERS = sorted(
    {"int8_mask", "eps"}.union(*({*s.models, *s.shared} for s in SPELLINGS.values()))
)
"""mergekit's parameters. As in mergekit, those that the method does not have are ignored."""
BODIES = ("models", "slices", "modules")


def mistakes(data: Mapping[Any, Any]) -> list[Mistake]:
    """Every mistake in a configuration's raw data that the types of its fields do not show.

    Passes over data of a wrong type, which the type check reports.
    """
    name = data.get("merge_method")
    spelling = SPELLINGS.get(name) if isinstance(name, str) else None
    errors = list(_body_mistakes(data))
    if isinstance(name, str) and spelling is None:
        text = f"no method {name!r}{nearest(name, sorted(SPELLINGS))}"
        errors.append((("merge_method",), text))
    for path, parameters in _all_parameters(data):
        errors += _parameter_mistakes(path, parameters, spelling)
    stack = read_stack(data)
    for part in stack:
        errors += _layer_mistakes(part)
        if spelling is not None:
            errors += _source_mistakes(part, spelling)
    only_base = all(source.model == part.base for part in stack for source in part.sources)
    if spelling is not None and spelling.base == "deltas" and stack and only_base:
        errors.append(((), "there is no model beside the base model"))
    return errors


def file_mistakes(data: Mapping[Any, Any]) -> list[Mistake]:
    """Every mistake in a whole file: those of its method, and of dtypes and tokenizer."""
    errors = mistakes(data)
    for key in ("dtype", "out_dtype"):
        value = data.get(key)
        if isinstance(value, str) and value.removeprefix("torch.") not in DTYPES:
            errors.append(((key,), f"{value!r} is not allowed{nearest(value, list(DTYPES))}"))
    if data.get("chat_template") is not None:
        text = "layerswap copies the tokenizer with its template; remove `chat_template`"
        errors.append((("chat_template",), text))
    tokenizer = data.get("tokenizer")
    if tokenizer is not None and data.get("tokenizer_source") is not None:
        errors.append((("tokenizer",), "give tokenizer or tokenizer_source, not both"))
    if isinstance(tokenizer, dict):
        for key in ("tokens", "pad_to_multiple_of"):
            if tokenizer.get(key) is not None:
                text = "not supported; embedding rows are merged as they are"
                errors.append((("tokenizer", key), text))
    return errors


def _body_mistakes(data: Mapping[Any, Any]) -> Iterator[Mistake]:
    given = [key for key in BODIES if data.get(key)]
    if len(given) != 1:
        names = " and ".join(given) if given else "none"
        yield (), f"give exactly one of {', '.join(BODIES)}; found {names}"
    modules = data.get("modules")
    if not isinstance(modules, dict):
        return
    for name, module in modules.items():
        if name != "default":
            text = "layerswap composes one list of layers, which mergekit calls 'default'"
            yield ("modules", name), text
        if isinstance(module, dict) and bool(module.get("models")) == bool(module.get("slices")):
            yield ("modules", name), "give models or slices"


def _all_parameters(data: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any]]:
    """Every `parameters` of a configuration, with its key path."""
    if isinstance(data, Mapping):
        if isinstance(data.get("parameters"), Mapping):
            yield (*path, "parameters"), data["parameters"]
        for key in ("models", "slices", "sources", "modules"):
            yield from _all_parameters(data.get(key), (*path, key))
        if path and path[-1] == "modules":
            for key, value in data.items():
                yield from _all_parameters(value, (*path, key))
    elif isinstance(data, list):
        for i, item in enumerate(data):
            yield from _all_parameters(item, (*path, i))


def _parameter_mistakes(
    path: KeyPath, raw: Mapping[Any, Any], spelling: Spelling | None
) -> Iterator[Mistake]:
    for name in raw:
        if isinstance(name, str) and name not in PARAMETERS:
            yield (*path, name), f"mergekit has no parameter {name!r}{nearest(name, PARAMETERS)}"
    known = {**spelling.models, **spelling.shared} if spelling else {}
    for name, setting in _readable(raw).items():
        parameter = known.get(name)
        if isinstance(parameter, Parameter):
            try:
                for value in scalars(setting):
                    parameter.check(value)
            except RecipeError as error:
                yield (*path, name), str(error)


def _readable(raw: Mapping[Any, Any]) -> Settings:
    stack = read_stack({"models": [{"model": "x", "parameters": raw}]})
    return stack[0].sources[0].parameters


def _layer_mistakes(part: StackSlice) -> Iterator[Mistake]:
    for source in part.sources:
        if source.layers is None:
            continue
        first, stop = source.layers
        if not 0 <= first < stop:
            yield (*source.path, "layer_range"), f"[{first}, {stop}] holds no layer"
        elif stop > LARGEST_STACK:
            yield (*source.path, "layer_range"), f"no model has {stop} layers"
    ranges = {source.layers for source in part.sources if source.layers}
    if len({stop - first for first, stop in ranges}) > 1:
        yield part.path, "the sources have different numbers of layers"


def _source_mistakes(part: StackSlice, spelling: Spelling) -> Iterator[Mistake]:
    name, models = spelling.name, [source.model for source in part.sources]
    for i, source in enumerate(part.sources):
        if source.model in models[:i]:
            yield source.path, f"{source.model!r} is given twice"
    low, high = spelling.sources
    optional = spelling.base == "optional"
    counted = set(models) - ({part.base} if optional else set())
    if not low <= len(counted) <= high:
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        with_base = ", the base model included"
        if high == 1 or optional:
            with_base = " beside the base model" if optional else ""
        noun = "model" if low == 1 else "models"
        yield part.path, f"{name} takes {wanted} {noun}{with_base}; found {len(counted)}"
    if spelling.base in ("deltas", "first"):
        if part.base is None:
            why = "works on deltas and needs" if spelling.base == "deltas" else "starts from"
            yield (), f"{name} {why} a base model; give `base_model`"
        elif part.base not in models:
            yield part.path, f"{part.base!r} is the base model and must be among the sources"
    for parameter in spelling.required:
        yield from _missing(part, spelling, parameter)


def _missing(part: StackSlice, spelling: Spelling, parameter: str) -> Iterator[Mistake]:
    """A required parameter that no level sets."""
    if any(parameter in scope for scope in part.scopes):
        return
    if parameter in spelling.shared:
        meant = "from 0 (the base model) to 1" if spelling.name == "slerp" else "the largest change"
        yield ("parameters", parameter), f"{spelling.name} needs {parameter}, {meant}"
        return
    for source in part.sources:
        if needs_weight(spelling, source, part) and parameter not in source.parameters:
            yield source.path, f"{spelling.name} needs a {parameter} for {source.model!r}"


KEYS = ("merge_method", "slices", "models", "modules", "base_model")
"""Keys by which a configuration is recognised; a recipe has none of them."""


class _File(MergekitFile):
    @model_validator(mode="wrap")
    @classmethod
    def _whole(cls, data: Any, handler: ModelWrapValidatorHandler[_File]) -> _File:
        return validate_whole(cls.__name__, data, handler, file_mistakes)


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


def recipe_data(
    data: Mapping[str, Any], *, where: str, lines: Mapping[KeyPath, int]
) -> dict[str, Any]:
    """The recipe that gives the same result, as plain data.

    Its `mergekit` holds the configuration, with every model under an expert's name. Reports all
    mistakes at once, each with its line and key path.
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
        "mergekit": _renamed(method.model_dump(exclude_unset=True), names),
        **({"dtype": dtype.removeprefix("torch.")} if dtype else {}),
        **_tokenizer(file, names),
    }


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    """A configuration's plain data with other names for its models."""
    if isinstance(value, Mapping):
        return {
            key: names[item]
            if key in ("model", "base_model") and isinstance(item, str)
            else item
            if key == "parameters"
            else _renamed(item, names)
            for key, item in value.items()
        }
    return [_renamed(item, names) for item in value] if isinstance(value, list | tuple) else value


def _base_of(method: MergekitMethod) -> str | None:
    """The model that becomes the recipe's base: deltas are taken from it, or nothing is."""
    if method.base_model is None:
        return None
    stack = read_stack(method.model_dump(exclude_none=True))
    merged = {source.model for part in stack for source in part.sources}
    deltas = SPELLINGS[method.merge_method].base in ("deltas", "optional")
    return method.base_model if deltas or method.base_model not in merged else None


def _names(models: list[str], base: str | None) -> dict[str, str]:
    """A name for every model: the last part of its path, numbered if two are the same."""
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
    """The tokenizer to align to; nothing for the base's, which all experts share."""
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
