"""Merge methods beyond the weighted sum: what each is called, and what can be set.

Pure data; the arithmetic is in `merge.methods`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.errors import RecipeError

if TYPE_CHECKING:
    from layerswap.compose.blend import Blend

Value = float | int | str


@dataclass(frozen=True)
class Parameter:
    """A setting of a method: its default, and the values it may take.

    Attributes:
        default: used when a recipe does not set it.
        low: smallest number, itself allowed unless `open_low`.
        high: largest number.
        open_low: whether `low` itself is refused.
        choices: the allowed texts, for a setting that is not a number.
        whole: whether it must be a whole number.
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
    """What a recipe may say about a method.

    Attributes:
        paper: where the method is described.
        base: whether it works on deltas, and so needs the base.
        parameters: its settings.
        experts: the number of experts it takes: smallest and largest.
        fisher: whether it needs the diagonal Fisher of every expert.
    """

    paper: str
    base: bool
    parameters: Mapping[str, Parameter]
    experts: tuple[int, float] = (1, float("inf"))
    fisher: bool = False


SCALE = Parameter(1.0, high=1e6)


def _density(default: float) -> Parameter:
    return Parameter(default, high=1.0, open_low=True)


SEED = Parameter(0, high=2**63 - 1, whole=True)
DISJOINT = Parameter("mean", choices=("mean", "sum"))
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
        },
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
        (1, 1),
    ),
    "slerp": MethodSpec("Shoemake, 1985", False, {}, (2, 2)),
    "model_stock": MethodSpec("Jang et al., 2024", True, {}, (2, float("inf"))),
}
"""Every method that a recipe can name under `merge`, beside the blend of a soup."""


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
        if spec.base and base is None:
            raise RecipeError(f"{method} works on deltas and needs the base")
        values = {name: p.default for name, p in spec.parameters.items()} | dict(parameters or {})
        ordered = sorted(inputs.items(), key=lambda pair: str(pair[0]))
        if spec.fisher and set(fishers or ()) != set(inputs):
            raise RecipeError(f"{method} needs the Fisher of every expert")
        return cls(
            method,
            tuple(ordered),
            base if spec.base else None,
            tuple(sorted(values.items())),
            tuple(fishers[blend] for blend, _ in ordered) if spec.fisher and fishers else (),
        )

    @property
    def experts(self) -> tuple[str, ...]:
        """Every expert that it reads, the base included, sorted."""
        blends = [blend for blend, _ in self.inputs] + ([self.base] if self.base else [])
        return tuple(sorted({name for blend in blends for name in blend.experts}))

    @property
    def all_fishers(self) -> tuple[str, ...]:
        """Every expert whose Fisher it reads, or an operation among its inputs does; sorted."""
        blends = [blend for blend, _ in self.inputs] + ([self.base] if self.base else [])
        inner = {name for blend in blends for name in blend.fishers}
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


def check_operation(method: str, parameters: Mapping[str, object], experts: int) -> str:
    """The method's name, if its parameters and number of experts are allowed.

    Raises:
        RecipeError: what is wrong, with what would be right.
    """
    if method not in METHODS:
        raise RecipeError(f"no method {method!r}; there are {', '.join(sorted(METHODS))}")
    spec = METHODS[method]
    for name, value in parameters.items():
        if name not in spec.parameters:
            known = ", ".join(sorted(spec.parameters)) or "none"
            raise RecipeError(f"{method} has no parameter {name!r}; it has {known}")
        try:
            spec.parameters[name].check(value)
        except RecipeError as error:
            raise error.within(name) from None
    low, high = spec.experts
    if not low <= experts <= high:
        wanted = f"exactly {low}" if low == high else f"at least {low}"
        raise RecipeError(f"{method} takes {wanted} experts, not {experts}")
    return method
