"""mergekit's merge methods as layerswap operations with the same result.

mergekit writes a merge with deltas as four choices: the rule that sparsifies a delta, the election
of signs, the division by the sum of weights, and a factor. Our methods fix some choices and take
one density for all experts. Other combinations are operations of operations; see `delta_sum`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from layerswap.compose.blend import Blend, Operation
from layerswap.ground.errors import RecipeError
from layerswap.methods.method import Parameter, Value

Scalar = float | bool
Numbers = Mapping[str, float]


@dataclass(frozen=True)
class TensorSettings:
    """mergekit's values for one tensor.

    Attributes:
        models: the values of each model, in order; the base model is among them if it is merged.
        base: name of the base model, if it is among the models.
        shared: values that all models share, by mergekit's names.
    """

    models: Mapping[str, Numbers]
    base: str | None
    shared: Mapping[str, Scalar]

    @property
    def others(self) -> dict[str, Numbers]:
        """The models without the base model."""
        return {name: values for name, values in self.models.items() if name != self.base}

    def apply(self, method: str, inputs: Mapping[Any, float], **parameters: Value) -> Blend:
        """Apply our method to weighted models or blends, relative to the base."""
        return Blend.of(
            Operation.of(
                method,
                {Blend.of(m) if isinstance(m, str) else m: w for m, w in inputs.items()},
                base=None if self.base is None else Blend.of(self.base),
                parameters=parameters,
            )
        )

    def select(self, method: str, **parameters: Value) -> Blend:
        """Apply a method that weighs deltas itself; return the base if it is the only model."""
        if not self.others:
            return Blend.of(str(self.base))
        return self.apply(method, dict.fromkeys(self.others, 1.0), **parameters)


@dataclass(frozen=True)
class Spelling:
    """mergekit's spelling of a method.

    Attributes:
        read: returns the blend that the values for one tensor mean.
        base: `deltas` if the method takes deltas from the base model, `optional` if it does so
            only where one is given, `first` if the base model is the first of the models.
        models: parameters of each model.
        shared: parameters of all models. A `Parameter` has a range, another default has none.
        sources: smallest and largest number of models, the base model included unless optional.
    """

    read: Callable[[TensorSettings], Blend]
    base: Literal["deltas", "first", "optional"] | None = None
    models: Mapping[str, Parameter] = field(default_factory=dict)
    shared: Mapping[str, Parameter | Scalar] = field(default_factory=dict)
    sources: tuple[int, float] = (1, math.inf)

    @property
    def required(self) -> list[str]:
        """Required parameters."""
        return [name for name in ("weight", "t") if name in {*self.models, *self.shared}]


WEIGHT = {"weight": Parameter(1.0, high=1e6)}
SIGNED_WEIGHT = {"weight": Parameter(1.0, low=-1e6, high=1e6)}
"""For methods that can subtract a delta."""
T = Parameter(0.5, high=1.0)


def _linear(values: TensorSettings) -> Blend:
    weights = {name: model["weight"] for name, model in values.models.items() if model["weight"]}
    total, normalize = math.fsum(weights.values()), values.shared["normalize"]
    if not weights or (normalize and not total):
        raise RecipeError("every weight is 0" if not weights else "the weights sum to 0")
    if min(weights.values()) > 0 and (normalize or abs(total - 1) <= 1e-6):
        return Blend.of(weights)  # it copies a model that is alone
    divisor = total if normalize else 1.0
    return values.apply("linear", {name: weight / divisor for name, weight in weights.items()})


def _passthrough(values: TensorSettings) -> Blend:
    (only,), factor = values.models, float(values.shared["scale"])
    return Blend.of(only) if factor == 1 else values.apply("scale", {only: 1.0}, scale=factor)


def _slerp(values: TensorSettings) -> Blend:
    base, (other,), t = str(values.base), values.others, float(values.shared["t"])
    if t in (0, 1):
        return Blend.of(other if t else base)
    return values.apply("slerp", {base: 1 - t, other: t})


def _nuslerp(values: TensorSettings) -> Blend:
    weights = {name: model["weight"] for name, model in values.others.items()}
    if math.fsum(weights.values()) < 1e-6:
        weights = dict.fromkeys(weights, 0.5)
    elif 0 in weights.values():
        return Blend.of({name: weight for name, weight in weights.items() if weight})
    parameters: dict[str, Value] = {"origin": "zero" if values.base is None else "base"}
    if not values.shared["nuslerp_flatten"]:
        parameters["angle"] = "column" if values.shared["nuslerp_row_wise"] else "row"
    return values.apply("nuslerp", weights, **parameters)


def _multislerp(values: TensorSettings) -> Blend:
    weights = {name: model["weight"] for name, model in values.others.items()}
    if len(weights) == 1:
        return Blend.of(next(iter(weights)))
    total = math.fsum(weights.values())
    if not total:
        raise RecipeError("every weight is 0")
    parameters: dict[str, Value] = {"origin": "zero" if values.base is None else "base"}
    if not values.shared["normalize_weights"]:
        parameters["scale"] = total
    return values.apply("multislerp", weights, **parameters)


def _karcher(values: TensorSettings) -> Blend:
    steps, tol = round(values.shared["max_iter"]), float(values.shared["tol"])
    return values.apply("karcher", dict.fromkeys(values.models, 1.0), max_iter=steps, tol=tol)


def _model_stock(values: TensorSettings) -> Blend:
    return values.select(
        "model_stock", **({"angle": "row"} if values.shared["filter_wise"] else {})
    )


def _sce(values: TensorSettings) -> Blend:
    share = float(values.shared["select_topk"])
    if share <= 0:
        return Blend.of(str(values.base))
    return values.select("sce", density=min(1.0, share))


def renamed(
    method: str,
    names: Mapping[str, str],
    shared: Mapping[str, Parameter | Scalar],
    sources: tuple[int, float] = (1, math.inf),
) -> Spelling:
    """Make the spelling of a delta method with shared parameters; `names` maps ours to theirs."""

    def read(values: TensorSettings) -> Blend:
        parameters = {ours: float(values.shared[theirs]) for ours, theirs in names.items()}
        return values.select(method, **parameters)

    return Spelling(read, "deltas", shared=shared, sources=sources)


class Sparse(NamedTuple):
    """Sparsification of one delta by a family of methods.

    Attributes:
        method: our method that makes one delta sparse and adds it to the base.
        rescaled: our value of `rescale` where mergekit rescales; None if our method always divides
            what it keeps by the density, which mergekit does only with `rescale`.
        own: mergekit's other parameters of each model, by our name.
        fixed: our parameters that have one value.
        random: drops entries at random. mergekit then rescales by default.
    """

    method: str
    rescaled: str | None
    own: Mapping[str, tuple[str, Parameter]] = {}
    fixed: Mapping[str, Value] = {}
    random: bool = False

    def parameters(self, model: Numbers, rescale: Scalar) -> dict[str, Value]:
        """Our parameters, from the values of a model."""
        own = {ours: model[theirs] for ours, (theirs, _) in self.own.items()}
        parameters = {"density": model["density"], **self.fixed, **own}
        if self.rescaled is not None:
            parameters["rescale"] = self.rescaled if rescale else "none"
        return parameters

    def delta(self, values: TensorSettings, name: str, model: Numbers, seed: int) -> Blend:
        """Return the base plus the sparse delta of one expert."""
        rescale, density = values.shared["rescale"], model["density"]
        if density == 1:
            return Blend.of(name)
        parameters = self.parameters(model, rescale)
        if self.random:
            # A seed for each expert: equal seeds would drop the same entries of all.
            parameters["seed"] = seed
        weight = density if self.rescaled is None and not rescale else 1.0
        return values.apply(self.method, {name: weight}, **parameters)


TIES = Sparse("ties", "l1", fixed={"scope": "tensor"})
BREADCRUMBS = Sparse("breadcrumbs", "l1", {"outliers": ("gamma", Parameter(0.01, high=1.0))})
DARE = Sparse("dare_linear", None, random=True)
DELLA = Sparse(
    "della_linear", "entry", {"epsilon": ("epsilon", Parameter(0.15, high=0.5))}, random=True
)


def delta_sum(
    method: str | None,
    sparse: Sparse | None = None,
    *,
    elects: bool = False,
    normalize: bool = False,
    signed: bool = False,
) -> Spelling:
    """Make the spelling of a sum of weighted deltas.

    Args:
        method: our equivalent if all deltas are sparsified the same way; None otherwise.
        sparse: the rule that sparsifies deltas.
        elects: elects a sign per entry and adds what agrees, as TIES does.
        normalize: mergekit's default of `normalize`, which divides by the sum of the weights.
        signed: weights may be negative.
    """

    def read(values: TensorSettings) -> Blend:
        shared = values.shared
        scale, rescale = float(shared["lambda"]), shared.get("rescale", False)
        mean = bool(elects and shared["normalize"])
        models = _counted(values, elects)
        if not models or not scale:
            return Blend.of(str(values.base))
        weights = {name: model["weight"] for name, model in models.items()}
        if len(models) == 1:
            ((name, model),) = models.items()
            # One whole delta on its base is the expert itself, and can be copied.
            if model["density"] == 1 and (1.0 if mean else model["weight"]) * scale == 1:
                return Blend.of(name)
        parameters: dict[str, Value] = {"disjoint": "mean" if mean else "sum"} if elects else {}
        own = {name: sparse.parameters(m, rescale) for name, m in models.items()} if sparse else {}
        first = next(iter(own.values()), {})
        if sparse and (method is None or any(other != first for other in own.values())):
            # One operation per delta sparsifies it; the results are added.
            inputs = {
                sparse.delta(values, name, models[name], seed): weights[name]
                for seed, name in enumerate(sorted(models))
            }
            if not elects:
                return values.apply("task_arithmetic", inputs, scale=scale)
            parameters |= {"density": 1.0, "scope": "tensor"}
            return values.apply("ties", inputs, scale=scale, **parameters)
        if sparse and sparse.rescaled is None and not rescale:
            density = float(first["density"])
            if mean:
                scale *= density
            else:
                weights = {name: weight * density for name, weight in weights.items()}
        return values.apply(str(method), weights, scale=scale, **parameters, **first)

    weight = SIGNED_WEIGHT if signed else WEIGHT
    shared: dict[str, Parameter | Scalar] = {
        "lambda": Parameter(1.0, high=1e6),
        "normalize": normalize,
    }
    if sparse is None:
        return Spelling(read, "deltas", weight, shared)
    models = {
        **weight,
        "density": Parameter(1.0, high=1, open_low=True),
        **dict(sparse.own.values()),
    }
    return Spelling(read, "deltas", models, {**shared, "rescale": sparse.random})


def _counted(values: TensorSettings, elects: bool) -> dict[str, Numbers]:
    """Return the models with a weight, their densities at most 1, their weights normalised."""
    models, divisor = values.others, 1.0
    if values.shared["normalize"] and not elects:
        total = math.fsum(model["weight"] for model in models.values())
        if abs(total) >= 1e-8:  # mergekit does not divide by smaller sums
            divisor = total
    return {
        name: {
            **model,
            "weight": model["weight"] / divisor,
            "density": min(1.0, model.get("density", 1.0)),
        }
        for name, model in models.items()
        if model["weight"]
    }


SPELLINGS: Mapping[str, Spelling] = {
    "arcee_fusion": renamed("arcee_fusion", {}, {}, (2, 2)),
    "breadcrumbs": delta_sum("breadcrumbs", BREADCRUMBS, signed=True),
    "breadcrumbs_ties": delta_sum(None, BREADCRUMBS, elects=True),
    "dare_linear": delta_sum("dare_linear", DARE, signed=True),
    "dare_ties": delta_sum("dare_ties", DARE, elects=True),
    "della": delta_sum("della", DELLA, elects=True, normalize=True),
    "della_linear": delta_sum("della_linear", DELLA),
    "karcher": Spelling(_karcher, shared={"max_iter": 10.0, "tol": 1e-5}),
    "linear": Spelling(_linear, models=SIGNED_WEIGHT, shared={"normalize": True}),
    "model_stock": Spelling(
        _model_stock, "deltas", shared={"filter_wise": False}, sources=(3, math.inf)
    ),
    "multislerp": Spelling(_multislerp, "optional", WEIGHT, {"normalize_weights": True}),
    "nearswap": renamed("nearswap", {"t": "t"}, {"t": T}, (2, 2)),
    "nuslerp": Spelling(
        _nuslerp, "optional", WEIGHT, {"nuslerp_flatten": True, "nuslerp_row_wise": False}, (2, 2)
    ),
    "passthrough": Spelling(_passthrough, shared={"scale": 1.0}, sources=(1, 1)),
    "ram": renamed("ram", {"epsilon": "epsilon"}, {"epsilon": 1e-5}),
    "ramplus_tl": renamed(
        "ram",
        {"epsilon": "epsilon", "boost": "r", "limit": "alpha"},
        {"epsilon": 1e-5, "r": 0.1, "alpha": 0.2},
    ),
    "sce": Spelling(_sce, "deltas", shared={"select_topk": 1.0}),
    "slerp": Spelling(_slerp, "first", shared={"t": T}, sources=(2, 2)),
    "task_arithmetic": delta_sum("task_arithmetic", signed=True),
    "ties": delta_sum("ties", TIES, elects=True, normalize=True),
}
"""Every method of mergekit that can be read, by mergekit's name."""
