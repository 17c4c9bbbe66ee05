"""The parts of a merge method: its settings, its needs, and its view of a tensor.

A method computes one chunk of one tensor at a time, so that memory does not grow with the model.
A method that depends on whole tensors, by a density or an angle, has a second function. `measure`
runs once for each tensor, in passes over its chunks; `combine` then runs once for each chunk and
finds the result in `chunk.measured`.

Example: TIES with density 0.5, on one delta of six elements in chunks of three.

    delta      3 -1  2 | 0 -5  1
    measure    2.0, the third largest magnitude
    combine    3  0  2 | 0 -5  0
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from layerswap.ground.errors import RecipeError

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Value = float | int | str


@dataclass(frozen=True)
class Parameter:
    """A setting of a method: its default, and its range (without `low` if `open_low`) or words."""

    default: Value
    low: float = 0.0
    high: float = math.inf
    open_low: bool = False
    choices: tuple[str, ...] = ()
    whole: bool = False

    def check(self, value: object) -> Value:
        """The value, if it is allowed; a RecipeError with the allowed values if not."""
        if self.choices:
            if value not in self.choices:
                raise RecipeError(f"{value!r} is not one of {', '.join(self.choices)}")
            return str(value)
        kinds = (int,) if self.whole else (int, float)
        inside = type(value) in kinds and self.low <= value <= self.high  # type: ignore[operator]
        if not inside or (self.open_low and value == self.low):
            expected = "a whole number" if self.whole else "a number"
            above = "above" if self.open_low else "from"
            limit = "" if self.high == math.inf else f" to {self.high:g}"
            raise RecipeError(f"{value!r} is not {expected} {above} {self.low:g}{limit}")
        return value  # type: ignore[return-value]


SCALE = Parameter(1.0, high=1e6)
SEED = Parameter(0, high=2**63 - 1, whole=True)
DISJOINT = Parameter("mean", choices=("mean", "sum"))
RESCALE_L1 = Parameter("none", choices=("none", "l1"))
ORIGIN = Parameter("zero", choices=("zero", "base"))
"""`base`: the method takes deltas from the base; `zero`: it takes weights."""
ONE, TWO = (1, 1), (2, 2)


def density(default: float) -> Parameter:
    """A share of entries to keep, above 0."""
    return Parameter(default, high=1.0, open_low=True)


@dataclass(frozen=True)
class TensorView:
    """A tensor as a method sees it (a matrix [in, out] if `transposed`), with its settings."""

    weights: Sequence[float]
    parameters: Mapping[str, Value]
    name: str
    shape: tuple[int, ...]
    transposed: bool

    @property
    def width(self) -> int:
        """Length of the last axis."""
        return self.shape[-1] if self.shape else 1

    def number(self, parameter: str) -> float:
        """A numeric parameter."""
        return float(self.parameters[parameter])


@dataclass(frozen=True)
class Chunk(TensorView):
    """Neighbouring elements of a tensor, for every expert.

    Attributes:
        start: position of the first element in the tensor.
        parts: one float vector per expert: its delta, or its weights if the method takes weights.
            Methods must not change them.
        base: the base's weights, for a method that takes deltas or selects.
        fishers: one vector per expert, its diagonal Fisher, for a method with `fisher`.
        measured: result of the method's `measure` for this tensor.
    """

    start: int
    parts: Sequence[Array]
    base: Array | None = None
    fishers: Sequence[Array] = ()
    measured: Any = None


@dataclass(frozen=True)
class WholeTensor(TensorView):
    """A tensor to measure before any chunk of it is combined.

    Attributes:
        read: returns elements [start, stop) as a chunk.
        step: number of elements to read at a time.
        align: chunks begin and end at multiples of this number of elements.
        model: result of the method's `measure_model`, if the recipe says `scope: model`.
    """

    elements: int
    read: Callable[[int, int], Chunk]
    step: int
    align: int
    model: Any = None

    def chunks(self, align: int | None = None) -> Iterator[Chunk]:
        """One pass over the tensor."""
        align = align or self.align
        step = max(1, self.step // align) * align
        for start in range(0, self.elements, step):
            yield self.read(start, min(start + step, self.elements))

    def read_around(self, start: int, stop: int) -> tuple[Chunk, slice]:
        """An aligned chunk around elements [start, stop), and the position of these in it."""
        first, last = aligned(start, stop, self.align)
        return self.read(first, min(last, self.elements)), slice(start - first, stop - first)


def aligned(start: int, stop: int, align: int) -> tuple[int, int]:
    """The bounds widened to multiples of `align`."""
    return start - start % align, stop + -stop % align


@dataclass(frozen=True)
class Method:
    """A merge method: its arithmetic, its settings and its needs.

    Attributes:
        combine: computes the merged delta, or the merged weights if it takes weights.
        deltas: it takes deltas from the base. With a parameter `origin` the recipe decides.
        selects: it takes each element unchanged from the expert or the base. It sees weights in
            place of deltas, and the base.
        fisher: it needs the diagonal Fisher of every expert.
        whole_rows: its chunks hold whole rows along the last axis.
        measure: measures a whole tensor; its result is `chunk.measured`.
        measure_model: measures all tensors together, on a number of threads, if the recipe says
            `scope: model`; its result, hashable, is `whole.model`.
        rule: returns the mistake in the settings taken together, or None.
    """

    name: str
    combine: Callable[[Chunk], Array]
    paper: str
    parameters: Mapping[str, Parameter] = field(default_factory=dict)
    experts: tuple[int, float] = (1, math.inf)
    deltas: bool = True
    selects: bool = False
    fisher: bool = False
    whole_rows: bool = False
    measure: Callable[[WholeTensor], Any] | None = None
    measure_model: Callable[[Sequence[WholeTensor], int], Any] | None = None
    rule: Callable[[Mapping[str, Any]], str | None] = lambda values: None

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter of the method, with defaults for those that are not given."""
        return {name: p.default for name, p in self.parameters.items()} | dict(given)

    def needs_base(self, values: Mapping[str, object]) -> bool:
        """True if the method takes deltas from the base under these settings."""
        return self.deltas or values.get("origin") == "base"

    def align(self, shape: Sequence[int]) -> int:
        """Chunks of a tensor begin and end at multiples of this number of elements."""
        return max(1, shape[-1]) if self.whole_rows and shape else 1


def merge_method(paper: str, **fields: Any) -> Callable[[Callable[[Chunk], Array]], Method]:
    """Declare a function on chunks as the merge method of its name; see `Method` for the fields.

    Example:
        @merge_method("Ilharco et al., 2023", parameters={"scale": SCALE})
        def task_arithmetic(chunk): ...
    """
    return lambda combine: Method(combine.__name__, combine, paper, **fields)
