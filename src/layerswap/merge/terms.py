"""The terms that output tensors are made of: stored, adapted, aligned, or merged by a method.

An output tensor is a weighted sum of terms. Terms are data: `merge.evaluate` computes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from layerswap.checkpoint import LowRank, TensorInfo
from layerswap.compose.blend import Operation
from layerswap.methods import METHODS
from layerswap.methods.method import Method


@dataclass(frozen=True)
class Adapted:
    """A stored tensor and the delta that an adapter adds to it."""

    stored: TensorInfo
    low_rank: LowRank

    @property
    def name(self) -> str:
        """The tensor's name."""
        return self.stored.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """Its stored dtype, before the adapter."""
        return self.stored.dtype


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of an aligned tensor, copied from neighbouring rows of one tensor."""

    source: TensorInfo | Adapted
    first: int
    count: int


@dataclass(frozen=True)
class Gathered:
    """An embedding or a head whose rows were brought to another vocabulary.

    Attributes:
        name: the tensor's name.
        shape: its shape in the other vocabulary, `[tokens, ...]`.
        dtype: safetensors dtype of the expert's own tensor.
        runs: its rows in order.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    runs: tuple[Run, ...]


Source = TensorInfo | Adapted | Gathered
"""A tensor of an expert."""
Terms = tuple[tuple["Term", float], ...]
"""A weighted sum: terms with weights that sum to 1."""


@dataclass(frozen=True)
class MergedTensor:
    """One tensor that a merge method computes.

    Attributes:
        name: the tensor's name.
        shape: its shape.
        operation: the method and its parameters.
        inputs: one weighted sum per input of the operation.
        base: the weighted sum that deltas are taken from; None for a method without deltas.
        fishers: the diagonal Fisher of each input, for a method that needs it.
        transposed: matrices are stored as [in, out].
    """

    name: str
    shape: tuple[int, ...]
    operation: Operation
    inputs: tuple[Terms, ...]
    base: Terms | None
    fishers: tuple[Terms, ...] = ()
    transposed: bool = False

    @cached_property
    def _hash(self) -> int:
        # Computed once: terms nest, and measured values are looked up for every chunk.
        return hash((self.name, self.operation, self.inputs, self.base, self.fishers))

    def __hash__(self) -> int:
        return self._hash

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def method(self) -> Method:
        """The method of its operation."""
        return METHODS[self.operation.method]

    @property
    def of_model(self) -> bool:
        """True if the method measures all tensors of the model together."""
        scope = dict(self.operation.parameters).get("scope")
        return scope == "model" and self.method.measure_model is not None


Term = Source | MergedTensor


def stored_tensors(terms: Terms) -> Iterator[TensorInfo]:
    """Every stored tensor that a weighted sum is read from."""
    for source in sources_of(terms):
        yield from stored_in(source)


def stored_in(source: Source) -> Iterator[TensorInfo]:
    """Every stored tensor that one source is read from."""
    if isinstance(source, TensorInfo):
        yield source
    elif isinstance(source, Adapted):
        yield from (source.stored, source.low_rank.a, source.low_rank.b)
    else:
        for inner in dict.fromkeys(run.source for run in source.runs):
            yield from stored_in(inner)


def sources_of(terms: Terms) -> Iterator[Source]:
    """Every tensor of an expert, or of its Fisher, that a weighted sum is made of."""
    for term, _ in terms:
        if isinstance(term, MergedTensor):
            for inner in (*term.inputs, *((term.base,) if term.base else ()), *term.fishers):
                yield from sources_of(inner)
        else:
            yield term


def merged_tensors(terms: Terms) -> Iterator[MergedTensor]:
    """Every merged tensor in a weighted sum, inner ones first; equal ones several times."""
    for term, _ in terms:
        if isinstance(term, MergedTensor):
            for inner in (*term.inputs, *((term.base,) if term.base else ())):
                yield from merged_tensors(inner)
            yield term
