"""A composition as mergekit's slices, sources and settings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerswap.checkpoint.places import Place
from layerswap.compose.mergekit.settings import value_at
from layerswap.errors import RecipeError

Value = float | bool
DEFAULTS: Mapping[str, Value] = {"density": 1.0, "gamma": 0.01, "lambda": 1.0}
"""What mergekit takes for a parameter that is not set."""
WEIGHTLESS = ("passthrough", "slerp", "model_stock")
"""Methods whose models have no weights."""


@dataclass(frozen=True)
class Said:
    """What a configuration must say for one place.

    Attributes:
        weights: the models that are merged, and their weights.
        shared: the parameters that all models share.
    """

    weights: Mapping[str, float]
    shared: Mapping[str, Value]


@dataclass(frozen=True)
class Spelling:
    """How a composition is to be written.

    Attributes:
        method: mergekit's `merge_method`.
        base: the base model's name, or None.
        models: every model, in the order to list them.
        said: what must be said for every place that has a tensor.
        tensors: the place of every tensor.
    """

    method: str
    base: str | None
    models: Sequence[str]
    said: Mapping[Place, Said]
    tensors: Mapping[str, Place]


def written(layers: int, spelling: Spelling) -> dict[str, Any]:
    """The keys `models` or `slices`, and `parameters`, of a configuration.

    Raises:
        RecipeError: no filter tells two tensors apart that must be told apart.
    """
    groups = list(_groups(layers, spelling))
    contexts = [_context(groups, i, spelling) for i in range(len(groups))]
    listed = _listed(contexts, spelling)
    entries = []
    for (first, stop), context, models in zip(groups, contexts, listed, strict=True):
        default = _usual(context, spelling)
        layer_range = {"layer_range": [first, stop]} if len(groups) > 1 else {}
        sources = [
            {"model": model, **layer_range, **_own(model, context, default, spelling)}
            for model in models
        ]
        shared = {
            parameter: _setting({n: said.shared[parameter] for n, said in context.items()}, value)
            for parameter, value in default.shared.items()
        }
        entries.append({"sources": sources, "parameters": shared})
    return _hoisted(entries)


def _own(
    model: str, context: Mapping[str, Said], default: Said, spelling: Spelling
) -> dict[str, Any]:
    """The settings of one source: its weight, where models have one."""
    if spelling.method in WEIGHTLESS or model == spelling.base:
        return {}
    weights = {name: said.weights.get(model, 0.0) for name, said in context.items()}
    return {"parameters": {"weight": _setting(weights, default.weights.get(model, 0.0))}}


def _usual(context: Mapping[str, Said], spelling: Spelling) -> Said:
    """What is said for most tensors of the layers in a slice."""
    said = [s for name, s in context.items() if spelling.tensors[name].layer is not None]
    return max(said, key=said.count)


def _groups(layers: int, spelling: Spelling) -> Iterator[tuple[int, int]]:
    """Neighbouring layers that are alike, as [first, stop)."""
    by_layer: list[dict[str, Said]] = [{} for _ in range(layers)]
    for place, said in spelling.said.items():
        if place.layer is not None:
            by_layer[place.layer][place.role] = said
    first = 0
    for layer in range(1, layers):
        if by_layer[layer] != by_layer[layer - 1]:
            yield first, layer
            first = layer
    yield first, layers


def _context(groups: Sequence[tuple[int, int]], number: int, spelling: Spelling) -> dict[str, Said]:
    """What must be said for each tensor that a slice's settings reach."""
    first, stop = groups[number]
    found = {}
    for name, place in spelling.tensors.items():
        reached = (
            first <= place.layer < stop
            if place.layer is not None
            else number == (len(groups) - 1 if _comes_after(place) else 0)
        )
        if reached:
            found[name] = spelling.said[place]
    return found


def _listed(contexts: Sequence[Mapping[str, Said]], spelling: Spelling) -> list[list[str]]:
    """The models of each slice.

    After the layers mergekit takes as many sources of the last slice as the first one has, so the
    last begins with what is needed there and the first has at least as many.
    """

    def needed(said: Iterable[Said]) -> list[str]:
        named = {model for one in said for model in one.weights}
        named |= {spelling.base} if spelling.base else set()
        named |= set(spelling.models) if spelling.method == "slerp" else set()
        return [model for model in spelling.models if model in named]

    listed = [needed(context.values()) for context in contexts]
    after = needed(said for place, said in spelling.said.items() if _comes_after(place))
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


def _hoisted(entries: list[dict[str, Any]]) -> dict[str, Any]:
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
    top = {name: value for name, value in shared.items() if DEFAULTS.get(name) != value}
    body = (
        {"models": entries[0]["sources"]}
        if "layer_range" not in entries[0]["sources"][0]
        else {"slices": entries}
    )
    return {**body, **({"parameters": top} if top else {})}
