"""Blends: weights over experts at one place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from layerswap.errors import RecipeError

_ROUNDING = 1e-15  # weights that sum to 1 but for this are kept as they are: `of` is idempotent


@dataclass(frozen=True)
class Blend:
    """Weights over experts, summing to 1. A blend of one expert is *verbatim*.

    Attributes:
        weights: (expert, weight) pairs, sorted by expert; each weight in (0, 1].

    Example: `Blend.of({"math": 1, "swahili": 3})` prints as `0.25 math + 0.75 swahili`.
    """

    weights: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, weights: str | Mapping[str, float]) -> Blend:
        """One expert verbatim, or the given weights divided by their sum.

        An expert of weight 0 is left out.

        Raises:
            RecipeError: a weight is negative or not finite, or none is positive.
        """
        if isinstance(weights, str):
            return cls(((weights, 1.0),))
        for expert, weight in weights.items():
            if not math.isfinite(weight) or weight < 0:
                raise RecipeError(f"weight of {expert!r} is {weight}; weights are finite, from 0")
        total = sum(weights.values())  # not fsum, which raises where the sum is not finite
        if not 0 < total < math.inf:
            raise RecipeError(f"weights {dict(weights)} have no positive, finite sum")
        total = math.fsum(weights.values())
        if abs(total - 1) < _ROUNDING:
            total = 1.0
        shares = ((expert, weight / total) for expert, weight in weights.items())
        kept = sorted((expert, share) for expert, share in shares if share > 0)
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
        flat: dict[str, float] = {}
        for blend, weight in parts.items():
            for expert, share in blend.weights:
                flat[expert] = flat.get(expert, 0.0) + share * weight
        return cls.of(flat)

    @property
    def experts(self) -> tuple[str, ...]:
        """The experts with a positive weight, sorted."""
        return tuple(expert for expert, _ in self.weights)

    @property
    def verbatim(self) -> bool:
        """Whether one expert is taken as it is."""
        return len(self.weights) == 1

    def __str__(self) -> str:
        if self.verbatim:
            return self.experts[0]
        return " + ".join(f"{weight:.4g} {expert}" for expert, weight in self.weights)
