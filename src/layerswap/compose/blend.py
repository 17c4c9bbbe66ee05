"""Blends of experts and merge operations on blends, as one recursive type of pure data.

A blend weighs members. A member is the name of an expert or an operation, and an operation is a
merge method applied to blends. `layerswap.methods` has the arithmetic.

Example: half of expert `c`, and half of the TIES merge of `a` and `b` over `base`.

    ties = Operation.of("ties", {Blend.of("a"): 1, Blend.of("b"): 1}, base=Blend.of("base"))
    Blend.of({ties: 0.5, "c": 0.5})          # prints 0.5 c + 0.5 ties(a, b)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from layerswap.ground.errors import RecipeError
from layerswap.ground.yaml_file import nearest
from layerswap.methods import METHODS
from layerswap.methods.method import Value


def check_operation(method: str, parameters: Mapping[str, object], experts: int) -> None:
    """Check a method's name, parameters and number of experts."""
    if method not in METHODS:
        raise RecipeError(f"no method {method!r}{nearest(method, sorted(METHODS))}")
    specification = METHODS[method]
    for name, value in parameters.items():
        if name not in specification.parameters:
            hint = nearest(name, sorted(specification.parameters)) or "; it has none"
            raise RecipeError(f"{method} has no parameter {name!r}{hint}")
        try:
            specification.parameters[name].check(value)
        except RecipeError as error:
            raise error.within(name) from None
    wrong = specification.rule(specification.settings(parameters))
    if wrong:
        raise RecipeError(f"{method}: {wrong}")
    low, high = specification.experts
    if not low <= experts <= high:
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        raise RecipeError(f"{method} takes {wanted} experts, not {experts}")


@dataclass(frozen=True)
class Operation:
    """A merge method applied to blends of experts; it can stand in the place of an expert.

    Attributes:
        method: name of the method.
        inputs: (blend, weight) pairs, in a fixed order.
        base: the blend that deltas are taken from; None for a method without deltas.
        parameters: (name, value) of every parameter of the method, sorted by name.
        fishers: the expert whose Fisher goes with each input, for a method that needs them.
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
        """Make an operation, with defaults for missing parameters."""
        check_operation(method, parameters or {}, len(inputs))
        known = METHODS[method]
        values = known.settings(parameters or {})
        if known.needs_base(values) and base is None:
            raise RecipeError(f"{method} takes deltas and needs the base")
        ordered = sorted(inputs.items(), key=lambda pair: str(pair[0]))
        if known.fisher and set(fishers or ()) != set(inputs):
            raise RecipeError(f"{method} needs the Fisher of every expert")
        return cls(
            method,
            tuple(ordered),
            base if known.needs_base(values) else None,
            tuple(sorted(values.items())),
            tuple(fishers[blend] for blend, _ in ordered) if known.fisher and fishers else (),
        )

    @cached_property
    def _hash(self) -> int:
        # Computed once: operations nest, and a dictionary asks for the hash at every look-up.
        return hash((self.method, self.inputs, self.base, self.parameters, self.fishers))

    def __hash__(self) -> int:
        return self._hash

    @property
    def blends(self) -> tuple[Blend, ...]:
        """Every blend that is read: the inputs, then the base."""
        return tuple(blend for blend, _ in self.inputs) + ((self.base,) if self.base else ())

    @cached_property
    def experts(self) -> tuple[str, ...]:
        """Every expert that is read, the base included, sorted."""
        return tuple(sorted({name for blend in self.blends for name in blend.experts}))

    @property
    def all_fishers(self) -> tuple[str, ...]:
        """Every expert whose Fisher is read, by this operation or by its inputs."""
        inner = {name for blend in self.blends for name in blend.fishers}
        return tuple(sorted(inner.union(self.fishers)))

    @property
    def shares(self) -> dict[str, float]:
        """The share of each expert, summing to 1: the mean of its inputs by |weight|."""
        total = sum(abs(weight) for _, weight in self.inputs)
        return summed(
            (expert, share * abs(weight) / total)
            for blend, weight in self.inputs
            for expert, share in blend.shares.items()
        )

    def rename(self, blends: Mapping[str, Blend]) -> Operation:
        """Return a copy with each expert in `blends` replaced by its blend."""
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

    def __str__(self) -> str:
        inputs = ", ".join(
            f"{blend}" if weight == 1 else f"{weight:g} x {blend}" for blend, weight in self.inputs
        )
        declared = METHODS[self.method].parameters
        settings = "".join(
            f", {name}={value:g}" if isinstance(value, float) else f", {name}={value}"
            for name, value in self.parameters
            if value != declared[name].default
        )
        return f"{self.method}({inputs}{settings})"


Member = str | Operation
"""An expert by name, or the result of an operation."""

_ROUNDING = 1e-15  # weights that sum to 1 but for this are not divided, so that `of` is idempotent


@dataclass(frozen=True)
class Blend:
    """Weights over experts, summing to 1. A blend of one expert is *verbatim*.

    Attributes:
        weights: (member, weight) pairs, sorted; each weight in (0, 1]. A member is an expert's
            name, or an operation in the place of an expert.

    Example: `Blend.of({"math": 1, "swahili": 3})` prints as `0.25 math + 0.75 swahili`.
    """

    weights: tuple[tuple[Member, float], ...]

    @classmethod
    def of(cls, weights: Member | Mapping[Any, float]) -> Blend:
        """Make a blend: one expert verbatim, or weights divided by their sum.

        An expert of weight 0 is left out.

        Raises:
            RecipeError: a weight is negative or not finite, or none is positive.
        """
        if isinstance(weights, str | Operation):
            return cls(((weights, 1.0),))
        for expert, weight in weights.items():
            if not math.isfinite(weight) or weight < 0:
                raise RecipeError(
                    f"weight of {str(expert)!r} is {weight}; it must be finite and not negative"
                )
        total = sum(weights.values())  # fsum would raise if the sum is not finite
        if not 0 < total < math.inf:
            raise RecipeError(f"weights {dict(weights)} must have a positive, finite sum")
        total = math.fsum(weights.values())
        if abs(total - 1) < _ROUNDING:
            total = 1.0
        shares = ((expert, weight / total) for expert, weight in weights.items())
        kept = sorted(((m, share) for m, share in shares if share > 0), key=lambda p: str(p[0]))
        return cls(tuple(kept)) if len(kept) > 1 else cls.of(kept[0][0])

    @classmethod
    def nested(cls, parts: Mapping[Blend, float]) -> Blend:
        """Flatten a blend of blends, which is linear, to one blend.

        Example: half of `0.5 a + 0.5 b` and half of `c` is `0.25 a + 0.25 b + 0.5 c`.
        """
        pairs = ((blend.weights, weight) for blend, weight in parts.items())
        return cls.of(summed((m, share * weight) for inner, weight in pairs for m, share in inner))

    @property
    def members(self) -> tuple[Member, ...]:
        """The experts and operations with a weight, sorted."""
        return tuple(member for member, _ in self.weights)

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert that is read, those inside operations too, sorted."""
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
        """The share of each expert, summing to 1, for colours in figures."""
        return summed(
            (expert, weight * share)
            for member, weight in self.weights
            for expert, share in (
                {member: 1.0} if isinstance(member, str) else member.shares
            ).items()
        )

    @property
    def verbatim(self) -> bool:
        """True if the blend takes one expert unchanged."""
        return len(self.weights) == 1 and isinstance(self.weights[0][0], str)

    def rename(self, blends: Mapping[str, Blend]) -> Blend:
        """Return a copy with each expert in `blends` replaced by its blend."""

        def renamed(member: Member) -> Blend:
            if isinstance(member, str):
                return blends.get(member, Blend.of(member))
            return Blend.of(member.rename(blends))

        return Blend.nested(summed((renamed(member), w) for member, w in self.weights))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready form: `{"weights": {expert: weight}}`, and `"operations"` if it has any."""
        weights = {member: w for member, w in self.weights if isinstance(member, str)}
        operations = [
            {**member.to_dict(), "weight": weight}
            for member, weight in self.weights
            if isinstance(member, Operation)
        ]
        return {"weights": weights, **({"operations": operations} if operations else {})}

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return str(self.members[0])
        return " + ".join(f"{weight:.4g} {expert}" for expert, weight in self.weights)


Part = TypeVar("Part")


def summed(parts: Iterable[tuple[Part, float]]) -> dict[Part, float]:
    """Sum the weights of equal parts."""
    total: dict[Part, float] = {}
    for part, weight in parts:
        total[part] = total.get(part, 0.0) + weight
    return total
