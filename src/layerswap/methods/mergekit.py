"""mergekit's spellings of merge methods, as calls of our methods with the same result.

A spelling reads mergekit's values for one tensor and returns a `Call`, or the name of one model
that passes unchanged, or a weighted sum of models.

mergekit writes a merge with deltas as four choices: how a delta is made sparse, whether signs are
elected, whether the sum is divided by the weights, and a factor. Our methods fix some of them and
take one density for all experts. Other combinations are calls of calls; see `delta_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from layerswap.errors import RecipeError
from layerswap.methods.method import Parameter, Value

Scalar = float | bool
Shared = Mapping[str, Scalar]
"""Values that all models share for one tensor, by mergekit's names."""


@dataclass(frozen=True)
class Call:
    """A merge method applied to models or to other calls, each with a weight."""

    method: str
    inputs: tuple[tuple[str | Call, float], ...]
    parameters: Mapping[str, Value] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Model:
    """A model that mergekit merges, with its own values for one tensor."""

    name: str
    values: Mapping[str, float]

    @property
    def weight(self) -> float:
        """Its weight."""
        return self.values["weight"]

    @property
    def density(self) -> float:
        """The share of its delta that is kept."""
        return self.values["density"]

    def with_values(self, **values: float) -> Model:
        """A copy with other values."""
        return replace(self, values={**self.values, **values})


@dataclass(frozen=True)
class TensorValues:
    """mergekit's values for one tensor.

    Attributes:
        models: the models in order; the base model is among them if the method uses one.
        base: name of the base model, if it is among the models.
    """

    models: Sequence[Model]
    base: str | None
    shared: Shared

    @property
    def others(self) -> list[Model]:
        """The models without the base model."""
        return [model for model in self.models if model.name != self.base]


Reading = str | Call | Mapping[str, float]
"""One model unchanged, a call, or weights of models."""


@dataclass(frozen=True)
class Spelling:
    """How mergekit writes a method.

    Attributes:
        read: returns what the values for one tensor mean.
        base: `deltas` if the method takes deltas from the base model, `optional` if it does so
            only where one is given, `first` if the base model is the first of the models.
        models: parameters of each model. A `Parameter` has a range, another default has none.
        required: parameters that must be written.
        sources: smallest and largest number of models, the base model included unless optional.
    """

    name: str
    read: Callable[[TensorValues], Reading]
    base: Literal["deltas", "first", "optional"] | None = None
    models: Mapping[str, Parameter] = field(default_factory=dict)
    shared: Mapping[str, Parameter | Scalar] = field(default_factory=dict)
    required: tuple[str, ...] = ("weight",)
    sources: tuple[int, float] = (1, math.inf)


WEIGHT = Parameter(1.0, high=1e6)
SIGNED_WEIGHT = Parameter(1.0, low=-1e6, high=1e6)
"""For methods that can subtract a delta."""
DENSITY = Parameter(1.0, open_low=True)
LAMBDA = Parameter(1.0, high=1e6)
T = Parameter(0.5, high=1.0)


def equal_weights(models: Sequence[Model]) -> tuple[tuple[str, float], ...]:
    """Inputs of a call, all of weight 1."""
    return tuple((model.name, 1.0) for model in models)


def selected(
    method: str, values: TensorValues, parameters: Mapping[str, Value] | None = None
) -> Reading:
    """A method that weighs the deltas itself; the base model if there is no other model."""
    if not values.others:
        return str(values.base)
    return Call(method, equal_weights(values.others), parameters or {})


def renamed(
    name: str,
    method: str,
    names: Mapping[str, str] | None = None,
    shared: Mapping[str, Parameter | Scalar] | None = None,
    **needs: Any,
) -> Spelling:
    """The spelling of a method that takes shared values as parameters; `names` are ours by its."""

    def read(values: TensorValues) -> Reading:
        given = {ours: float(values.shared[theirs]) for ours, theirs in (names or {}).items()}
        return selected(method, values, given)

    return Spelling(name, read, "deltas", shared=shared or {}, **{"required": (), **needs})


@dataclass(frozen=True)
class Sparse:
    """How a family of methods makes one delta sparse.

    Attributes:
        method: our method that makes one delta sparse and adds it to the base.
        settings: its parameters, from a model's values and the shared ones.
        models: mergekit's parameters of each model beside weight and density.
        rescale: mergekit's default of `rescale`.
        undivided: our method divides what it keeps by the density, and mergekit does so only
            with `rescale`.
    """

    method: str
    settings: Callable[[Model, Shared], dict[str, Value]]
    models: Mapping[str, Parameter] = field(default_factory=dict)
    rescale: bool = False
    random: bool = False
    undivided: bool = False


def delta_sum(
    name: str,
    method: str | None,
    sparse: Sparse | None = None,
    *,
    elects: bool = False,
    normalize: bool = False,
    signed: bool = False,
) -> Spelling:
    """The spelling of a sum of weighted deltas.

    Args:
        name: mergekit's name.
        method: our method that does all of it if every delta is made sparse alike; None if there
            is none.
        sparse: how deltas are made sparse.
        elects: elects a sign per entry and adds what agrees, as TIES does.
        normalize: mergekit's default of `normalize`, which divides by the sum of the weights.
        signed: weights may be negative.
    """

    def read(values: TensorValues) -> Reading:
        assert values.base is not None, "checked when the configuration was read"
        shared = values.shared
        models = _counted(values, sparse, elects)
        if not models or not shared["lambda"]:
            return values.base
        if len(models) == 1 and models[0].density == 1:
            # One whole delta on its base is the expert itself, and can be copied.
            own = 1.0 if elects and shared["normalize"] else models[0].weight
            if own * shared["lambda"] == 1:
                return models[0].name
        settings = {tuple(v for k, v in model.values.items() if k != "weight") for model in models}
        if method is None or len(settings) > 1:
            assert sparse is not None, "only sparse deltas differ in their settings"
            return _sum_of_sparse(models, sparse, shared, elects)
        return _one_call(method, models, sparse, shared, elects)

    weight = {"weight": SIGNED_WEIGHT if signed else WEIGHT}
    shared: dict[str, Parameter | Scalar] = {"lambda": LAMBDA, "normalize": normalize}
    if sparse is None:
        return Spelling(name, read, "deltas", weight, shared)
    models = {**weight, "density": DENSITY, **sparse.models}
    return Spelling(name, read, "deltas", models, {**shared, "rescale": sparse.rescale})


def _counted(values: TensorValues, sparse: Sparse | None, elects: bool) -> list[Model]:
    """The models that take part, with densities up to 1 and weights as our methods take them."""
    shared = values.shared
    models = [model if sparse else model.with_values(density=1.0) for model in values.others]
    if shared["normalize"] and not elects:
        total = math.fsum(model.weight for model in models)
        if abs(total) >= 1e-8:  # mergekit does not divide by smaller sums
            models = [model.with_values(weight=model.weight / total) for model in models]
    models = [model for model in models if model.weight]
    return [model.with_values(density=min(1.0, model.density)) for model in models]


def _one_call(
    method: str, models: Sequence[Model], sparse: Sparse | None, shared: Shared, elects: bool
) -> Call:
    """All deltas made sparse alike, by one method."""
    scale = float(shared["lambda"])
    if sparse and sparse.undivided and not shared["rescale"]:
        density = models[0].density
        if elects and shared["normalize"]:
            scale *= density
        else:
            models = [model.with_values(weight=model.weight * density) for model in models]
    parameters: dict[str, Value] = {"scale": scale}
    if sparse:
        parameters |= sparse.settings(models[0], shared)
    if elects:
        parameters["disjoint"] = "mean" if shared["normalize"] else "sum"
    return Call(method, tuple((model.name, model.weight) for model in models), parameters)


def _sum_of_sparse(models: Sequence[Model], sparse: Sparse, shared: Shared, elects: bool) -> Call:
    """Each delta made sparse by a call of its own, and the results added."""
    ordered = sorted(models, key=lambda model: model.name)
    inputs = tuple(
        (_sparse_delta(model, sparse, shared, seed), model.weight)
        for seed, model in enumerate(ordered)
    )
    parameters: dict[str, Value] = {"scale": float(shared["lambda"])}
    if not elects:
        return Call("task_arithmetic", inputs, parameters)
    parameters |= {"density": 1.0, "scope": "tensor"}
    parameters["disjoint"] = "mean" if shared["normalize"] else "sum"
    return Call("ties", inputs, parameters)


def _sparse_delta(model: Model, sparse: Sparse, shared: Shared, seed: int) -> str | Call:
    """The base with the sparse delta of one expert."""
    if model.density == 1:
        return model.name
    parameters = sparse.settings(model, shared)
    if sparse.random:
        # A seed for each expert: equal seeds would drop the same entries of all.
        parameters["seed"] = seed
    weight = model.density if sparse.undivided and not shared["rescale"] else 1.0
    return Call(sparse.method, ((model.name, weight),), parameters)


def rescale_l1(shared: Shared) -> str:
    """Our parameter `rescale` of methods that trim by magnitude."""
    return "l1" if shared["rescale"] else "none"


def checked_total(weights: Sequence[float]) -> float:
    """The sum of the weights; a RecipeError if it is 0."""
    total = math.fsum(weights)
    if not total:
        raise RecipeError("every weight is 0")
    return total
