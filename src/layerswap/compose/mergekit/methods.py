"""mergekit's methods as blends and operations that give the same result.

mergekit writes a merge with deltas as four choices: how a delta is made sparse, whether signs are
elected, whether the sum is divided by the weights, and a factor. Ours fix some of them per method
and take one density for all experts; what no single operation says is an operation of operations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from layerswap.compose.blend import Blend, Operation, Parameter, Value
from layerswap.compose.mergekit.schema import Scalar
from layerswap.errors import RecipeError


@dataclass(frozen=True)
class MethodReading:
    """What a method of mergekit is made of.

    Attributes:
        deltas: True if it works on deltas from the base model.
        sparse: how it makes a delta sparse: by magnitude, at random, by magnitude without the
            outliers, or at random by the rank of the magnitude.
        elects: True if it elects a sign and merges what agrees with it, as TIES does.
        normalize: True if it divides by the sum of the weights unless told otherwise.
        required: parameters without a default.
        sources: how many models it takes, the base model included: fewest and most.
        optional_base: True if it works on deltas where a base model is among the models, which
            `sources` does not count then.
    """

    deltas: bool = False
    sparse: Literal["magnitude", "random", "band", "ranked"] | None = None
    elects: bool = False
    normalize: bool = False
    required: tuple[str, ...] = ()
    sources: tuple[int, float] = (1, math.inf)
    optional_base: bool = False


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
    "della": MethodReading(True, "ranked", True, True, required=_WEIGHT),
    "della_linear": MethodReading(True, "ranked", required=_WEIGHT),
    "model_stock": MethodReading(True, sources=(3, math.inf)),
    "sce": MethodReading(True),
    "ram": MethodReading(True),
    "ramplus_tl": MethodReading(True),
    "nearswap": MethodReading(True, required=("t",), sources=(2, 2)),
    "arcee_fusion": MethodReading(True, sources=(2, 2)),
    "nuslerp": MethodReading(required=_WEIGHT, sources=(2, 2), optional_base=True),
    "multislerp": MethodReading(required=_WEIGHT, optional_base=True),
    "karcher": MethodReading(),
}
"""The methods that both have, by mergekit's name."""
WEIGHTED_SUMS = tuple(name for name, m in METHODS.items() if m.deltas and m.required == _WEIGHT)
"""Methods that add weighted deltas."""
PER_MODEL = {"weight": 1.0, "density": 1.0, "gamma": 0.01, "epsilon": 0.15}
"""mergekit's defaults for what a model can set; the weight has none."""
SHARED: Mapping[str, Scalar] = {
    "rescale": True, "lambda": 1.0, "scale": 1.0, "select_topk": 1.0, "epsilon": 1e-5, "r": 0.1,
    "alpha": 0.2, "nuslerp_flatten": True, "nuslerp_row_wise": False, "normalize_weights": True,
    "max_iter": 10.0, "tol": 1e-5, "filter_wise": False,
}  # fmt: skip
"""mergekit's defaults for what all models share; `normalize` has one per method, `t` none."""
BY_SIZE = ("magnitude", "band")
"""Ways to make deltas sparse after which mergekit rescales only where it is asked to."""
_ANY = Parameter(1.0, low=-1e6, high=1e6)
_POSITIVE = Parameter(1.0, high=1e6)
RANGES: dict[str, Parameter] = {
    "weight": _POSITIVE,
    "density": Parameter(1.0, open_low=True),
    "gamma": Parameter(0.01, high=1.0),
    "lambda": _POSITIVE,
    "epsilon": Parameter(0.15, high=0.5),
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
        epsilon: how far DELLA's probabilities reach from the density.
    """

    model: str
    weight: float = 1.0
    density: float = 1.0
    gamma: float = 0.01
    epsilon: float = 0.15

    @property
    def one(self) -> Blend:
        """The model as a blend."""
        return Blend.of(self.model)


Shared = Mapping[str, Scalar]
"""The values that all models share for one tensor, under mergekit's names; see `SHARED`."""


def merged(name: str, entries: Sequence[ModelEntry], base: str | None, shared: Shared) -> Blend:
    """What a method makes of one tensor.

    Args:
        name: a key of `METHODS`.
        entries: the models, in order; with deltas or SLERP the base model is among them.
        base: the name of the base model, if it is among the models.
        shared: the other values.

    Raises:
        RecipeError: weights that no blend has.
    """
    if name == "passthrough":
        return _scaled(entries[0].one, shared["scale"])
    if name == "linear":
        return _linear(entries, bool(shared["normalize"]))
    others = [entry for entry in entries if entry.model != base]
    if name in ("nuslerp", "multislerp", "karcher"):
        chosen = entries if name == "karcher" else others
        return _spherical(name, chosen, None if base is None else Blend.of(base), shared)
    assert base is not None, "checked when the configuration was read"
    if name == "slerp":
        return _slerp(base, others[0].model, float(shared["t"]))
    add = _deltas if name in WEIGHTED_SUMS else _selected
    return add(name, others, Blend.of(base), shared)


def _selected(name: str, entries: Sequence[ModelEntry], base: Blend, shared: Shared) -> Blend:
    """A method that weighs the deltas itself."""
    if not entries or (name == "sce" and shared["select_topk"] <= 0):
        return base
    settings: dict[str, Value] = {}
    if name == "model_stock" and shared["filter_wise"]:
        settings = {"angle": "row"}
    elif name == "sce":
        settings = {"density": min(1.0, float(shared["select_topk"]))}
    elif name == "nearswap":
        settings = {"t": float(shared["t"])}
    elif name.startswith("ram"):
        settings = {"epsilon": float(shared["epsilon"])}
        if name == "ramplus_tl":
            settings |= {"boost": float(shared["r"]), "limit": float(shared["alpha"])}
        name = "ram"
    return _operation(name, entries, base, settings)


def _operation(
    name: str,
    entries: Sequence[ModelEntry],
    base: Blend | None,
    parameters: Mapping[str, Value],
    weights: Sequence[float] = (),
) -> Blend:
    """A method over models of equal weights, unless some are given."""
    shares = weights or [1.0] * len(entries)
    inputs = {entry.one: share for entry, share in zip(entries, shares, strict=True)}
    return Blend.of(Operation.of(name, inputs, base=base, parameters=parameters))


def _scaled(blend: Blend, scale: float) -> Blend:
    if scale == 1:
        return blend
    return Blend.of(Operation.of("scale", {blend: 1.0}, parameters={"scale": float(scale)}))


def _spherical(
    name: str, entries: Sequence[ModelEntry], base: Blend | None, shared: Shared
) -> Blend:
    if name == "karcher":
        limits = {"max_iter": round(shared["max_iter"]), "tol": float(shared["tol"])}
        return _operation(name, entries, None, limits)
    weights = [entry.weight for entry in entries]
    total = math.fsum(weights)
    parameters: dict[str, Value] = {"origin": "zero" if base is None else "base"}
    if name == "nuslerp":
        if not shared["nuslerp_flatten"]:
            parameters["angle"] = "column" if shared["nuslerp_row_wise"] else "row"
        if total < 1e-6:
            weights = [0.5, 0.5]
        elif 0 in weights:
            return entries[weights.index(0) ^ 1].one
    elif len(entries) == 1:
        return entries[0].one
    elif not total:
        raise RecipeError("every weight is 0")
    elif not shared["normalize_weights"]:
        parameters["scale"] = total
    return _operation(name, entries, base, parameters, weights)


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


def _deltas(name: str, entries: Sequence[ModelEntry], base: Blend, shared: Shared) -> Blend:
    """A sum of weighted deltas."""
    method = METHODS[name]
    if method.sparse is None:
        entries = [replace(entry, density=1.0) for entry in entries]
    if shared["normalize"] and not method.elects:
        total = math.fsum(entry.weight for entry in entries)
        if abs(total) >= 1e-8:  # mergekit leaves smaller sums as they are
            entries = [replace(entry, weight=entry.weight / total) for entry in entries]
    entries = [replace(e, density=min(1.0, e.density)) for e in entries if e.weight]
    if not entries or not shared["lambda"]:
        return base
    if len(entries) == 1 and entries[0].density == 1:
        # One whole delta on its base is the expert itself, and can be copied.
        own = 1.0 if method.elects and shared["normalize"] else entries[0].weight
        if own * shared["lambda"] == 1:
            return Blend.of(entries[0].model)
    settings = {(entry.density, entry.gamma, entry.epsilon) for entry in entries}
    if method.sparse == "band" and method.elects:
        return _nested(method, entries, base, shared)
    return (_flat if len(settings) == 1 else _nested)(method, entries, base, shared)


def _flat(
    method: MethodReading, entries: Sequence[ModelEntry], base: Blend, shared: Shared
) -> Blend:
    """All deltas made sparse alike: one operation."""
    density, gamma = entries[0].density, entries[0].gamma
    scale = float(shared["lambda"])
    if method.sparse == "random" and not shared["rescale"]:
        # Ours divides by the density; here nothing is to be divided.
        if method.elects and shared["normalize"]:
            scale *= density
        else:
            entries = [replace(entry, weight=entry.weight * density) for entry in entries]
    parameters: dict[str, Value] = {"scale": scale}
    if method.sparse is not None:
        parameters["density"] = density
    if method.sparse == "band":
        parameters["outliers"] = gamma
    if method.sparse == "ranked":
        parameters |= _ranked(entries[0], shared)
    if method.sparse == "magnitude":
        parameters["scope"] = "tensor"
    if method.sparse in BY_SIZE:
        parameters["rescale"] = "l1" if shared["rescale"] else "none"
    if method.elects:
        parameters["disjoint"] = "mean" if shared["normalize"] else "sum"
    names = {
        (None, False): "task_arithmetic",
        ("magnitude", True): "ties",
        ("random", False): "dare_linear",
        ("random", True): "dare_ties",
        ("band", False): "breadcrumbs",
        ("ranked", True): "della",
        ("ranked", False): "della_linear",
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
    parameters: dict[str, Value] = {"scale": float(shared["lambda"])}
    name = "task_arithmetic"
    if method.elects:
        name = "ties"
        parameters |= {"density": 1.0, "scope": "tensor"}
        parameters["disjoint"] = "mean" if shared["normalize"] else "sum"
    return Blend.of(Operation.of(name, inputs, base=base, parameters=parameters))


def _thinned(
    method: MethodReading, entry: ModelEntry, base: Blend, shared: Shared, seed: int
) -> Blend:
    """The base with the sparse delta of one expert."""
    expert = Blend.of(entry.model)
    if entry.density == 1:
        return expert
    weight = 1.0
    parameters: dict[str, Value] = {"density": entry.density}
    if method.sparse in BY_SIZE:
        parameters["rescale"] = "l1" if shared["rescale"] else "none"
    if method.sparse == "magnitude":
        name, parameters["scope"] = "ties", "tensor"
    elif method.sparse == "band":
        name, parameters["outliers"] = "breadcrumbs", entry.gamma
    else:
        # A seed for each expert: equal ones would drop the same entries of all.
        parameters["seed"] = seed
        name = "della_linear" if method.sparse == "ranked" else "dare_linear"
        if method.sparse == "ranked":
            parameters |= _ranked(entry, shared)
        elif not shared["rescale"]:
            weight = entry.density
    return Blend.of(Operation.of(name, {expert: weight}, base=base, parameters=parameters))


def _ranked(entry: ModelEntry, shared: Shared) -> dict[str, Value]:
    return {"epsilon": entry.epsilon, "rescale": "entry" if shared["rescale"] else "none"}
