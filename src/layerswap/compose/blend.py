"""Blends of experts and merge operations on blends, as one recursive type of pure data.

A blend weighs members. A member is an expert's name or an operation, and an operation is a merge
method applied to blends. The arithmetic is in `merge.methods`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError

Value = float | int | str


@dataclass(frozen=True)
class Parameter:
    """A setting of a method: its default, and the values it may take.

    Attributes:
        default: used when a recipe does not set it.
        low: smallest number, itself allowed unless `open_low`.
        high: largest number.
        open_low: True if `low` itself is refused.
        choices: the allowed texts, for a setting that is not a number.
        whole: True if it must be a whole number.
    """

    default: Value
    low: float = 0.0
    high: float = float("inf")
    open_low: bool = False
    choices: tuple[str, ...] = ()
    whole: bool = False

    def check(self, value: object) -> Value:
        """The value, if it is allowed.

        Raises:
            RecipeError: saying what is allowed.
        """
        if self.choices:
            if value not in self.choices:
                raise RecipeError(f"{value!r} is not one of {', '.join(self.choices)}")
            return str(value)
        kinds = (int,) if self.whole else (int, float)
        inside = type(value) in kinds and self.low <= value <= self.high  # type: ignore[operator]
        if not inside or (self.open_low and value == self.low):
            kind = "a whole number" if self.whole else "a number"
            above = "above" if self.open_low else "from"
            limit = "" if self.high == float("inf") else f" to {self.high:g}"
            raise RecipeError(f"{value!r} is not {kind} {above} {self.low:g}{limit}")
        return value  # type: ignore[return-value]


@dataclass(frozen=True)
class MethodSpec:
    """The settings and needs of a merge method.

    Attributes:
        paper: where the method is described.
        base: True if it works on deltas, and so needs the base. A method with the parameter
            `origin` does so where that is `base`.
        parameters: its settings.
        experts: the number of experts it takes: smallest and largest.
        fisher: True if it needs the diagonal Fisher of every expert.
        rule: says what is wrong with all settings together, if anything.
    """

    paper: str
    base: bool
    parameters: Mapping[str, Parameter]
    experts: tuple[int, float] = (1, float("inf"))
    fisher: bool = False
    rule: Callable[[Mapping[str, Any]], str | None] = lambda values: None

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter of the method, those that are not given by their defaults."""
        return {name: p.default for name, p in self.parameters.items()} | dict(given)

    def needs_base(self, values: Mapping[str, object]) -> bool:
        """True if the method takes deltas from the base under these settings."""
        return self.base or values.get("origin") == "base"


SCALE = Parameter(1.0, high=1e6)


def _density(default: float) -> Parameter:
    return Parameter(default, high=1.0, open_low=True)


SEED = Parameter(0, high=2**63 - 1, whole=True)
DISJOINT = Parameter("mean", choices=("mean", "sum"))
ORIGIN = Parameter("zero", choices=("zero", "base"))
RESCALE = Parameter("none", choices=("none", "l1"))
ONE, TWO = (1, 1), (2, 2)


def _rescaled_by_tensor(values: Mapping[str, Any]) -> str | None:
    if values["rescale"] == "l1" and values["scope"] == "model":
        return "rescale: l1 is of each tensor's delta; set `scope: tensor`"
    return None


def _probabilities(values: Mapping[str, Any]) -> str | None:
    density, epsilon = values["density"], values["epsilon"]
    if density < 1 and not epsilon < min(density, 1 - density):
        return f"density {density:g} with epsilon {epsilon:g} leaves the range from 0 to 1"
    return None


_DELLA = {
    "density": _density(0.5),
    "epsilon": Parameter(0.15, high=0.5),
    "rescale": Parameter("entry", choices=("entry", "none")),
    "scale": SCALE,
    "seed": SEED,
}
METHODS: dict[str, MethodSpec] = {
    "task_arithmetic": MethodSpec("Ilharco et al., 2023", True, {"scale": SCALE}),
    "ties": MethodSpec(
        "Yadav et al., 2023",
        True,
        {
            "density": _density(0.2),
            "scale": SCALE,
            "scope": Parameter("model", choices=("model", "tensor")),
            "disjoint": DISJOINT,
            "rescale": RESCALE,
        },
        rule=_rescaled_by_tensor,
    ),
    "dare_linear": MethodSpec(
        "Yu et al., 2024",
        True,
        {"density": _density(0.5), "scale": SCALE, "seed": SEED},
    ),
    "dare_ties": MethodSpec(
        "Yu et al., 2024",
        True,
        {"density": _density(0.5), "scale": SCALE, "seed": SEED, "disjoint": DISJOINT},
    ),
    "breadcrumbs": MethodSpec(
        "Davari and Belilovsky, 2024",
        True,
        {
            "density": _density(0.9),
            "outliers": Parameter(0.01, high=1.0),
            "scale": SCALE,
            "rescale": RESCALE,
        },
    ),
    "fisher": MethodSpec(
        "Matena and Raffel, 2022",
        False,
        {
            "floor": Parameter(1e-20, high=1e6, open_low=True),
            "normalise": Parameter("none", choices=("none", "model")),
        },
        fisher=True,
    ),
    "revert": MethodSpec(
        "Bandarkar et al., 2025, section 3.3",
        True,
        {
            "keep": Parameter(1.0, high=1.0),
            "threshold": Parameter(0.0),
            "axis": Parameter("input", choices=("input", "output")),
            "scope": Parameter("tensor", choices=("tensor", "model")),
        },
        ONE,
    ),
    "della": MethodSpec(
        "Deep et al., 2024", True, {**_DELLA, "disjoint": DISJOINT}, rule=_probabilities
    ),
    "della_linear": MethodSpec("Deep et al., 2024", True, _DELLA, rule=_probabilities),
    "sce": MethodSpec("Wan et al., 2024", True, {"density": _density(1.0), "scale": SCALE}),
    "ram": MethodSpec(
        "Reinforced Agent Merging, 2026",
        True,
        {
            "epsilon": Parameter(1e-5, high=1e6),
            "boost": Parameter(0.0, high=1e6),
            "limit": Parameter(0.2, high=1e6),
            "scale": SCALE,
        },
    ),
    "nearswap": MethodSpec("alchemonaut, 2024", True, {"t": Parameter(1e-4, high=1e6)}, ONE),
    "arcee_fusion": MethodSpec("Arcee AI, 2025", True, {}, ONE),
    "scale": MethodSpec(
        "Goddard et al., 2024", False, {"scale": Parameter(1.0, low=-1e6, high=1e6)}, ONE
    ),
    "slerp": MethodSpec("Shoemake, 1985", False, {}, TWO),
    "nuslerp": MethodSpec(
        "Shoemake, 1985",
        False,
        {"angle": Parameter("tensor", choices=("tensor", "row", "column")), "origin": ORIGIN},
        TWO,
    ),
    "multislerp": MethodSpec("Goddard, 2025", False, {"origin": ORIGIN, "scale": SCALE}),
    "karcher": MethodSpec(
        "Karcher, 1977",
        False,
        {
            "max_iter": Parameter(10, low=1, high=10_000, whole=True),
            "tol": Parameter(1e-5, high=1.0, open_low=True),
        },
    ),
    "model_stock": MethodSpec(
        "Jang et al., 2024",
        True,
        {"angle": Parameter("tensor", choices=("tensor", "row"))},
        (2, float("inf")),
    ),
}
"""Every method that a recipe can name under `merge`, beside the blend of a soup."""


def check_operation(method: str, parameters: Mapping[str, object], experts: int) -> str:
    """The method's name, if its parameters and number of experts are allowed.

    Raises:
        RecipeError: what is wrong, with what would be right.
    """
    if method not in METHODS:
        raise RecipeError(f"no method {method!r}{nearest(method, sorted(METHODS))}")
    spec = METHODS[method]
    for name, value in parameters.items():
        if name not in spec.parameters:
            hint = nearest(name, sorted(spec.parameters)) or "; it has none"
            raise RecipeError(f"{method} has no parameter {name!r}{hint}")
        try:
            spec.parameters[name].check(value)
        except RecipeError as error:
            raise error.within(name) from None
    wrong = spec.rule(spec.settings(parameters))
    if wrong:
        raise RecipeError(f"{method}: {wrong}")
    low, high = spec.experts
    if not low <= experts <= high:
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        raise RecipeError(f"{method} takes {wanted} experts, not {experts}")
    return method


@dataclass(frozen=True)
class Operation:
    """A merge method applied to blends of experts; stands wherever an expert can.

    Attributes:
        method: a key of `METHODS`.
        inputs: (blend, weight) pairs, as given and in a fixed order.
        base: the blend that deltas are taken from, None for a method without deltas.
        parameters: (name, value) of every parameter of the method, sorted by name.
        fishers: for a method that needs them, the expert of the recipe whose Fisher goes with
            each input.

    Example: `Operation.of("ties", {Blend.of("a"): 1, Blend.of("b"): 1}, base=Blend.of("base"))`
    """

    method: str
    inputs: tuple[tuple[Blend, float], ...]
    base: Blend | None
    parameters: tuple[tuple[str, Value], ...]
    fishers: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        method: str,
        inputs: Mapping[Blend, float],
        *,
        base: Blend | None = None,
        parameters: Mapping[str, Value] | None = None,
        fishers: Mapping[Blend, str] | None = None,
    ) -> Operation:
        """The operation, with defaults for parameters that are not given.

        Raises:
            RecipeError: no such method, a parameter that it does not have or allow, no base
                where deltas are needed, no Fisher where those are, or a number of experts that
                it cannot take.
        """
        spec = METHODS[check_operation(method, parameters or {}, len(inputs))]
        values = spec.settings(parameters or {})
        if spec.needs_base(values) and base is None:
            raise RecipeError(f"{method} works on deltas and needs the base")
        ordered = sorted(inputs.items(), key=lambda pair: str(pair[0]))
        if spec.fisher and set(fishers or ()) != set(inputs):
            raise RecipeError(f"{method} needs the Fisher of every expert")
        return cls(
            method,
            tuple(ordered),
            base if spec.needs_base(values) else None,
            tuple(sorted(values.items())),
            tuple(fishers[blend] for blend, _ in ordered) if spec.fisher and fishers else (),
        )

    @property
    def blends(self) -> tuple[Blend, ...]:
        """Every blend that it reads: its inputs, then the base."""
        return tuple(blend for blend, _ in self.inputs) + ((self.base,) if self.base else ())

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert that it reads, the base included, sorted."""
        return tuple(sorted({name for blend in self.blends for name in blend.experts}))

    @property
    def all_fishers(self) -> tuple[str, ...]:
        """Every expert whose Fisher it or an operation among its inputs reads, sorted."""
        inner = {name for blend in self.blends for name in blend.fishers}
        return tuple(sorted(inner.union(self.fishers)))

    @property
    def shares(self) -> dict[str, float]:
        """How much each expert takes part, summing to 1: the weighted mean of its inputs.

        An expert whose delta is subtracted takes part as much as one whose delta is added.
        """
        total = sum(abs(weight) for _, weight in self.inputs)
        shares: dict[str, float] = {}
        for blend, weight in self.inputs:
            for expert, share in blend.shares.items():
                shares[expert] = shares.get(expert, 0.0) + share * abs(weight) / total
        return shares

    def rename(self, blends: Mapping[str, Blend]) -> Operation:
        """A copy in which each expert named in `blends` is replaced by that blend."""
        inputs = [(blend.rename(blends), weight) for blend, weight in self.inputs]
        base = self.base.rename(blends) if self.base else None
        order = sorted(range(len(inputs)), key=lambda i: str(inputs[i][0]))
        fishers = tuple(self.fishers[i] for i in order) if self.fishers else ()
        ordered = tuple(inputs[i] for i in order)
        return Operation(self.method, ordered, base, self.parameters, fishers)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: `{"method", "inputs", "base", "parameters"}`."""
        inputs = [{**blend.to_dict(), "weight": weight} for blend, weight in self.inputs]
        if self.fishers:
            pairs = zip(inputs, self.fishers, strict=True)
            inputs = [{**entry, "fisher": name} for entry, name in pairs]
        return {
            "method": self.method,
            "inputs": inputs,
            "base": self.base.to_dict() if self.base else None,
            "parameters": dict(self.parameters),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Operation:
        """The operation that `to_dict` wrote. Raises as `Blend.from_dict`."""
        inputs = [(Blend.from_dict(entry), entry) for entry in data["inputs"]]
        return cls.of(
            data["method"],
            {blend: entry["weight"] for blend, entry in inputs},
            base=Blend.from_dict(data["base"]) if data["base"] else None,
            parameters=data["parameters"],
            fishers={blend: entry["fisher"] for blend, entry in inputs if "fisher" in entry},
        )

    def __str__(self) -> str:
        inputs = ", ".join(
            f"{blend}" if weight == 1 else f"{weight:g} x {blend}" for blend, weight in self.inputs
        )
        spec = METHODS[self.method].parameters
        settings = "".join(
            f", {name}={value:g}" if isinstance(value, float) else f", {name}={value}"
            for name, value in self.parameters
            if value != spec[name].default
        )
        return f"{self.method}({inputs}{settings})"


Member = str | Operation
"""What a blend weighs: an expert by name, or what a merge method makes."""

_ROUNDING = 1e-15  # weights that sum to 1 but for this are kept as they are: `of` is idempotent


@dataclass(frozen=True)
class Blend:
    """Weights over experts, summing to 1. A blend of one expert is *verbatim*.

    Attributes:
        weights: (member, weight) pairs, sorted; each weight in (0, 1]. A member is an expert's
            name, or an operation on blends that stands in an expert's place.

    Example: `Blend.of({"math": 1, "swahili": 3})` prints as `0.25 math + 0.75 swahili`.
    """

    weights: tuple[tuple[Member, float], ...]

    @classmethod
    def of(cls, weights: Member | Mapping[Any, float]) -> Blend:
        """One expert verbatim, or the given weights divided by their sum.

        An expert of weight 0 is left out.

        Raises:
            RecipeError: a weight is negative or not finite, or none is positive.
        """
        if isinstance(weights, str | Operation):
            return cls(((weights, 1.0),))
        for expert, weight in weights.items():
            if not math.isfinite(weight) or weight < 0:
                raise RecipeError(
                    f"weight of {str(expert)!r} is {weight}; weights are finite, from 0"
                )
        total = sum(weights.values())  # not fsum, which raises where the sum is not finite
        if not 0 < total < math.inf:
            raise RecipeError(f"weights {dict(weights)} have no positive, finite sum")
        total = math.fsum(weights.values())
        if abs(total - 1) < _ROUNDING:
            total = 1.0
        shares = ((expert, weight / total) for expert, weight in weights.items())
        kept = sorted(((m, share) for m, share in shares if share > 0), key=lambda p: str(p[0]))
        return cls(tuple(kept)) if len(kept) > 1 else cls.of(kept[0][0])

    @classmethod
    def uniform(cls, experts: Iterable[str]) -> Blend:
        """The same weight for every expert."""
        return cls.of(dict.fromkeys(experts, 1.0))

    @classmethod
    def nested(cls, parts: Mapping[Blend, float]) -> Blend:
        """A blend of blends, flattened: blends are linear, so the result is one blend.

        Example: half of `0.5 a + 0.5 b` and half of `c` is `0.25 a + 0.25 b + 0.5 c`.
        """
        flat: dict[Member, float] = {}
        for blend, weight in parts.items():
            for expert, share in blend.weights:
                flat[expert] = flat.get(expert, 0.0) + share * weight
        return cls.of(flat)

    @property
    def members(self) -> tuple[Member, ...]:
        """What has a positive weight, sorted."""
        return tuple(member for member, _ in self.weights)

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert that is read, sorted; those inside operations too."""
        names: set[str] = set()
        for member in self.members:
            names |= {member} if isinstance(member, str) else set(member.experts)
        return tuple(sorted(names))

    @property
    def fishers(self) -> tuple[str, ...]:
        """Every expert whose diagonal Fisher is read, sorted."""
        operations = [member for member in self.members if isinstance(member, Operation)]
        return tuple(sorted({name for o in operations for name in o.all_fishers}))

    @property
    def shares(self) -> dict[str, float]:
        """How much each expert takes part, summing to 1, for pictures.

        An operation takes part as the weighted mean of its inputs.
        """
        shares: dict[str, float] = {}
        for member, weight in self.weights:
            parts = {member: 1.0} if isinstance(member, str) else member.shares
            for expert, share in parts.items():
                shares[expert] = shares.get(expert, 0.0) + weight * share
        return shares

    @property
    def verbatim(self) -> bool:
        """True if the blend takes one expert unchanged."""
        return len(self.weights) == 1 and isinstance(self.weights[0][0], str)

    def rename(self, blends: Mapping[str, Blend]) -> Blend:
        """A copy in which each expert named in `blends` is replaced by that blend."""
        parts: dict[Blend, float] = {}
        for member, weight in self.weights:
            if isinstance(member, str):
                part = blends.get(member, Blend.of(member))
            else:
                part = Blend.of(member.rename(blends))
            parts[part] = parts.get(part, 0.0) + weight
        return Blend.nested(parts)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: `{"weights": {expert: weight}}`, and `"operations"` if it has any."""
        weights = {member: w for member, w in self.weights if isinstance(member, str)}
        operations = [
            {**member.to_dict(), "weight": weight}
            for member, weight in self.weights
            if isinstance(member, Operation)
        ]
        return {"weights": weights, **({"operations": operations} if operations else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Blend:
        """The blend that `to_dict` wrote.

        Raises:
            RecipeError: a weight, method or parameter that is not allowed.
            KeyError, TypeError, AttributeError: data of another shape.
        """
        weights: dict[Any, float] = dict(data["weights"])
        for entry in data.get("operations", ()):
            weights[Operation.from_dict(entry)] = entry["weight"]
        return cls.of(weights)

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return str(self.members[0])
        return " + ".join(f"{weight:.4g} {expert}" for expert, weight in self.weights)
