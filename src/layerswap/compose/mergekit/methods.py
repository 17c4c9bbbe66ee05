"""mergekit's methods as blends and operations that give the same result.

mergekit writes a merge with deltas as four choices: how a delta is made sparse, whether signs are
elected, whether the sum is divided by the weights, and a factor. Ours fix some of them per method
and take one density for all experts; what no single operation says is an operation of operations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from layerswap.compose.blend import Blend, Operation, Parameter, Value
from layerswap.errors import RecipeError


@dataclass(frozen=True)
class MethodReading:
    """What a method of mergekit is made of.

    Attributes:
        deltas: whether it works on deltas from the base model.
        sparse: how it makes a delta sparse: by magnitude, at random, or by magnitude without
            the outliers.
        elects: whether it elects a sign and merges what agrees with it, as TIES does.
        normalize: whether it divides by the sum of the weights unless told otherwise.
        required: parameters without a default.
        sources: how many models it takes, the base model included: fewest and most.
    """

    deltas: bool = False
    sparse: Literal["magnitude", "random", "band"] | None = None
    elects: bool = False
    normalize: bool = False
    required: tuple[str, ...] = ()
    sources: tuple[int, float] = (1, math.inf)


_WEIGHT = ("weight",)
METHODS: dict[str, MethodReading] = {
    "passthrough": MethodReading(sources=(1, 1)),
    "linear": MethodReading(normalize=True, required=_WEIGHT),
    "slerp": MethodReading(required=("t",), sources=(2, 2)),
    "task_arithmetic": MethodReading(True, required=_WEIGHT),
    "ties": MethodReading(True, "magnitude", True, True, required=_WEIGHT),
    "dare_linear": MethodReading(True, "random", required=_WEIGHT),
    "dare_ties": MethodReading(True, "random", True, required=_WEIGHT),
    "breadcrumbs": MethodReading(True, "band", required=_WEIGHT),
    "breadcrumbs_ties": MethodReading(True, "band", True, required=_WEIGHT),
    "model_stock": MethodReading(True, sources=(3, math.inf)),
}
"""The methods that both have, by mergekit's name."""
PER_MODEL = {"weight": 1.0, "density": 1.0, "gamma": 0.01}
"""mergekit's defaults for what a model can set; the weight has none."""
_ANY = Parameter(1.0, low=-1e6, high=1e6)
_POSITIVE = Parameter(1.0, high=1e6)
RANGES: dict[str, Parameter] = {
    "weight": _POSITIVE,
    "density": Parameter(1.0, open_low=True),
    "gamma": Parameter(0.01, high=1.0),
    "lambda": _POSITIVE,
    "t": Parameter(0.5, high=1.0),
}
SUBTRACTING = ("task_arithmetic", "dare_linear", "breadcrumbs")
"""Methods that take negative weights: they subtract a delta."""


def range_of(method: str, parameter: str) -> Parameter | None:
    """What a parameter may be; None for one that is not a number in a range."""
    if parameter == "weight" and method in SUBTRACTING:
        return _ANY
    return RANGES.get(parameter)


@dataclass(frozen=True)
class ModelEntry:
    """A model that is merged, with its values for one tensor.

    Attributes:
        model: its name in the composition.
        weight: its weight.
        density: the share of its delta that is kept.
        gamma: the share of largest magnitudes that breadcrumbs drop.
    """

    model: str
    weight: float = 1.0
    density: float = 1.0
    gamma: float = 0.01


@dataclass(frozen=True)
class Shared:
    """The values that all models share for one tensor, under mergekit's names."""

    normalize: bool
    rescale: bool
    scale: float  # mergekit's lambda
    t: float


def merged(name: str, entries: Sequence[ModelEntry], base: str | None, shared: Shared) -> Blend:
    """What a method makes of one tensor.

    Args:
        name: a key of `METHODS`.
        entries: the models, in order; with deltas or SLERP the base model is among them.
        base: the name of the base model.
        shared: the other values.

    Raises:
        RecipeError: weights that no blend has.
    """
    if name == "passthrough":
        return Blend.of(entries[0].model)
    if name == "linear":
        return _linear(entries, shared.normalize)
    assert base is not None, "checked when the configuration was read"
    others = [entry for entry in entries if entry.model != base]
    if name == "slerp":
        return _slerp(base, others[0].model, shared.t)
    if name == "model_stock":
        stocked: dict[Blend, float] = {Blend.of(entry.model): 1.0 for entry in others}
        return Blend.of(Operation.of(name, stocked, base=Blend.of(base)))
    return _deltas(METHODS[name], others, Blend.of(base), shared)


def _linear(entries: Sequence[ModelEntry], normalize: bool) -> Blend:
    weights = {entry.model: entry.weight for entry in entries}
    total = math.fsum(weights.values())
    if not total:
        raise RecipeError("every weight is 0")
    if not normalize and abs(total - 1) > 1e-6:
        raise RecipeError(
            f"the weights sum to {total:g}; a blend's sum to 1, so leave out `normalize: false`"
        )
    return Blend.of(weights)


def _slerp(base: str, other: str, t: float) -> Blend:
    if t in (0, 1):
        return Blend.of(other if t else base)
    return Blend.of(Operation.of("slerp", {Blend.of(base): 1 - t, Blend.of(other): t}))


def _deltas(
    method: MethodReading, entries: Sequence[ModelEntry], base: Blend, shared: Shared
) -> Blend:
    if method.sparse is None:
        entries = [replace(entry, density=1.0) for entry in entries]
    if shared.normalize and not method.elects:
        total = math.fsum(entry.weight for entry in entries)
        if abs(total) >= 1e-8:  # mergekit leaves smaller sums as they are
            entries = [replace(entry, weight=entry.weight / total) for entry in entries]
    entries = [replace(e, density=min(1.0, e.density)) for e in entries if e.weight]
    if not entries or not shared.scale:
        return base
    if len(entries) == 1 and entries[0].density == 1:
        # One whole delta on its base is the expert itself, and can be copied.
        own = 1.0 if method.elects and shared.normalize else entries[0].weight
        if own * shared.scale == 1:
            return Blend.of(entries[0].model)
    settings = {(entry.density, entry.gamma) for entry in entries}
    if method.sparse == "band" and method.elects:
        return _nested(method, entries, base, shared)
    return (_flat if len(settings) == 1 else _nested)(method, entries, base, shared)


def _flat(
    method: MethodReading, entries: Sequence[ModelEntry], base: Blend, shared: Shared
) -> Blend:
    """All deltas made sparse alike: one operation."""
    density, gamma = entries[0].density, entries[0].gamma
    scale = shared.scale
    if method.sparse == "random" and not shared.rescale:
        # Ours divides by the density; here nothing is to be divided.
        if method.elects and shared.normalize:
            scale *= density
        else:
            entries = [replace(entry, weight=entry.weight * density) for entry in entries]
    parameters: dict[str, Value] = {"scale": scale}
    if method.sparse is not None:
        parameters["density"] = density
    if method.sparse == "band":
        parameters["outliers"] = gamma
    if method.sparse == "magnitude":
        parameters["scope"] = "tensor"
    if method.elects:
        parameters["disjoint"] = "mean" if shared.normalize else "sum"
    names = {
        (None, False): "task_arithmetic",
        ("magnitude", True): "ties",
        ("random", False): "dare_linear",
        ("random", True): "dare_ties",
        ("band", False): "breadcrumbs",
    }
    inputs = {Blend.of(entry.model): entry.weight for entry in entries}
    name = names[method.sparse, method.elects]
    return Blend.of(Operation.of(name, inputs, base=base, parameters=parameters))


def _nested(
    method: MethodReading, entries: Sequence[ModelEntry], base: Blend, shared: Shared
) -> Blend:
    """Each delta made sparse by an operation of its own, and the results merged."""
    ordered = sorted(entries, key=lambda entry: entry.model)
    inputs = {_thinned(method, e, base, shared, seed): e.weight for seed, e in enumerate(ordered)}
    parameters: dict[str, Value] = {"scale": shared.scale}
    name = "task_arithmetic"
    if method.elects:
        name = "ties"
        parameters |= {"density": 1.0, "scope": "tensor"}
        parameters["disjoint"] = "mean" if shared.normalize else "sum"
    return Blend.of(Operation.of(name, inputs, base=base, parameters=parameters))


def _thinned(
    method: MethodReading, entry: ModelEntry, base: Blend, shared: Shared, seed: int
) -> Blend:
    """The base with the sparse delta of one expert."""
    expert = Blend.of(entry.model)
    if entry.density == 1:
        return expert
    weight, parameters = 1.0, {"density": entry.density}
    if method.sparse == "magnitude":
        return Blend.of(
            Operation.of(
                "ties", {expert: 1.0}, base=base, parameters={**parameters, "scope": "tensor"}
            )
        )
    if method.sparse == "band":
        parameters["outliers"] = entry.gamma
        return Blend.of(
            Operation.of("breadcrumbs", {expert: 1.0}, base=base, parameters=parameters)
        )
    if not shared.rescale:
        weight = entry.density
    # A seed for each expert: equal ones would drop the same entries of all.
    return Blend.of(
        Operation.of(
            "dare_linear", {expert: weight}, base=base, parameters={**parameters, "seed": seed}
        )
    )
