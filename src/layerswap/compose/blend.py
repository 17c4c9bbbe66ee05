"""Blends: weights over experts at one place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from layerswap.compose.operation import Operation
from layerswap.errors import RecipeError

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
        """Whether one expert is taken as it is."""
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

    def __str__(self) -> str:
        if len(self.weights) == 1:
            return str(self.members[0])
        return " + ".join(f"{weight:.4g} {expert}" for expert, weight in self.weights)
