"""The terms of output tensors, and their evaluation chunk by chunk.

An output tensor is a weighted sum of terms: tensors of experts, and merge methods over sums.
Example: half of expert `c`, and half of the TIES merge of `a` and `b` over `base`.

    sum
    |- 0.5  c
    `- 0.5  ties
            |- input  sum of a
            |- input  sum of b
            `- base   sum of base

1. `prepare` measures every merged tensor of the tree, inner ones first: here the thresholds of
   TIES, in passes over the whole tensor. `measured` holds the results.
2. `sum(terms, 0, 1000)` reads elements 0 to 999 of `a`, `b`, `base` and `c`, gives the deltas of
   `a` and `b` and the thresholds to TIES, adds the base to the result, and weighs both terms.
   It changes nothing, so that chunks can be computed in any order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import LowRank, TensorInfo
from layerswap.checkpoint.read import Handle, is_finite, read_floats, reuse_chunk_memory
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose.blend import Operation
from layerswap.ground.errors import MergeError
from layerswap.methods import METHODS
from layerswap.methods.method import Chunk, Method, WholeTensor, aligned

if TYPE_CHECKING:
    from layerswap.checkpoint.adapter import Factors
    from layerswap.checkpoint.read import Floats


@dataclass(frozen=True)
class Adapted:
    """A stored tensor and the delta that an adapter adds to it."""

    stored: TensorInfo
    low_rank: LowRank

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return self.stored.shape


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of an aligned tensor, copied from neighbouring rows of one tensor."""

    source: TensorInfo | Adapted
    first: int
    count: int


@dataclass(frozen=True)
class Gathered:
    """An embedding or a head aligned to another vocabulary: `[tokens, ...]` or `[1, tokens]`."""

    shape: tuple[int, ...]
    runs: tuple[Run, ...]


Source = TensorInfo | Adapted | Gathered
"""A tensor of an expert."""
Terms = tuple[tuple["Term", float], ...]
"""A weighted sum: terms with weights that sum to 1."""


@dataclass(frozen=True)
class MergedTensor:
    """One tensor that a merge method computes.

    A method without deltas has no `base`; only a method that needs Fishers has one for each input.
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
    def terms(self) -> tuple[Terms, ...]:
        """Weighted sums that the operation reads."""
        return (*self.inputs, *((self.base,) if self.base else ()), *self.fishers)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def method(self) -> Method:
        """Method of the operation."""
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
    """Every tensor of an expert, or of its Fisher, in a weighted sum."""
    yield from (term for term in _nodes(terms, set()) if not isinstance(term, MergedTensor))


def merged_tensors(terms: Terms) -> Iterator[MergedTensor]:
    """Every merged tensor in a weighted sum, inner ones first; equal ones once."""
    yield from (term for term in _nodes(terms, set()) if isinstance(term, MergedTensor))


def _nodes(terms: Terms, seen: set[Term]) -> Iterator[Term]:
    """Every distinct term, inner ones first."""
    for term, _ in terms:
        if term not in seen:
            seen.add(term)
            for inner in term.terms if isinstance(term, MergedTensor) else ():
                yield from _nodes(inner, seen)
            yield term


Handles = Mapping[WeightFile, Handle]
ModelFacts = Mapping[Operation, Any]
"""By operation, the result of its method's `measure_model`; hashable."""
NON_FINITE = "holds NaN or infinity; take an earlier checkpoint"
CHUNK_ELEMENTS = 1 << 18
"""Elements read at a time while a tensor is measured: few enough to stay in the cache."""


class TermEvaluator:
    """Computes elements of terms from open files. One evaluator serves one thread."""

    def __init__(self, handles: Handles, model_facts: ModelFacts) -> None:
        reuse_chunk_memory()
        self.measured: dict[MergedTensor, Any] = {}
        self.handles = handles
        self._model_facts = model_facts
        self._factors: dict[LowRank, Factors] = {}
        self._shared: dict[MergedTensor, tuple[int, int, Floats] | None] = {}

    def prepare(self, terms: Terms) -> None:
        """Measure every merged tensor in a weighted sum."""
        import numpy as np

        merged = list(merged_tensors(terms))
        sums = [terms, *(inner for tensor in merged for inner in tensor.terms)]
        read = Counter(term for inner in sums for term, _ in inner)
        # Computed once per chunk; without that, work doubles with every level of nesting.
        self._shared = {tensor: None for tensor in merged if read[tensor] > 1}
        for tensor in merged:
            if tensor not in self.measured:
                measure = tensor.method.measure if tensor.elements else None
                model = self._model_facts[tensor.operation] if tensor.of_model else None
                with np.errstate(all="ignore"):
                    self.measured[tensor] = measure and measure(self.whole(tensor, model))

    def sum(self, terms: Terms, start: int, stop: int) -> Floats:
        """Compute elements [start, stop) of a prepared sum, float32 (float64 if a term is)."""
        import numpy as np

        with np.errstate(all="ignore"):  # the result is checked for NaN and infinity
            values = [self.term(term, start, stop) for term, _ in terms]
            return blend(values, [weight for _, weight in terms])

    def term(self, term: Term, start: int, stop: int) -> Floats:
        """Compute elements [start, stop) of a prepared term, in fresh memory."""
        if not isinstance(term, MergedTensor):
            return self._elements(term, start, stop)
        cached = self._shared.get(term)
        if cached is not None and cached[:2] == (start, stop):
            return cached[2].copy()
        first, last = aligned(start, stop, term.method.align(term.shape))
        inside = slice(start - first, stop - first)
        chunk = self.chunk(term, first, min(last, term.elements), self.measured[term])
        merged = term.method.combine(chunk)[inside]
        if chunk.base is not None and not term.method.selects:
            merged += chunk.base[inside]
        if term in self._shared:
            self._shared[term] = start, stop, merged.copy()
        return merged

    def whole(self, tensor: MergedTensor, model: object = None) -> WholeTensor:
        """A merged tensor whose inputs are prepared, for its method to measure."""
        return WholeTensor(
            weights=[weight for _, weight in tensor.operation.inputs],
            parameters=dict(tensor.operation.parameters),
            name=tensor.name,
            shape=tensor.shape,
            transposed=tensor.transposed,
            elements=tensor.elements,
            read=lambda start, stop: self.chunk(tensor, start, stop),
            step=CHUNK_ELEMENTS,
            align=tensor.method.align(tensor.shape),
            model=model,
        )

    def chunk(self, tensor: MergedTensor, start: int, stop: int, measured: object = None) -> Chunk:
        """Elements [start, stop) of the inputs of a merged tensor, for its method."""
        import numpy as np

        parts = [self.sum(terms, start, stop) for terms in tensor.inputs]
        base = None if tensor.base is None else self.sum(tensor.base, start, stop)
        checked = parts
        if base is not None:
            if tensor.method.selects:
                checked = parts if measured is not None else [*parts, base]
            else:
                with np.errstate(all="ignore"):
                    for part in parts:
                        np.subtract(part, base, out=part, casting="same_kind")
        # Checked before any method sees them: masks would drop a NaN silently.
        if not all(map(is_finite, checked)):
            culprit = self.blame(((tensor, 1.0),), start, stop)
            overflow = f"tensor {tensor.name!r}: {tensor.operation.method} overflows float32"
            raise MergeError(culprit or overflow)
        return Chunk(
            weights=[weight for _, weight in tensor.operation.inputs],
            parameters=dict(tensor.operation.parameters),
            name=tensor.name,
            shape=tensor.shape,
            transposed=tensor.transposed,
            start=start,
            parts=parts,
            base=base,
            fishers=[self.sum(terms, start, stop) for terms in tensor.fishers],
            measured=measured,
        )

    def blame(self, terms: Terms, start: int, stop: int) -> str | None:
        """Return a message on the first stored tensor with NaN or infinity; None if none has."""
        for source in sources_of(terms):
            if isinstance(source, TensorInfo) and self._is_finite(source, start, stop):
                continue
            for info in stored_in(source):
                if not self._is_finite(info, 0, info.elements):
                    return f"{info.file}: tensor {info.name!r} {NON_FINITE}"
        return None

    def _is_finite(self, info: TensorInfo, start: int, stop: int) -> bool:
        chunks = (
            read_floats(self.handles[info.file], info, first, min(first + CHUNK_ELEMENTS, stop))
            for first in range(start, stop, CHUNK_ELEMENTS)
        )
        return all(map(is_finite, chunks))

    def _elements(self, source: Source, start: int, stop: int) -> Floats:
        """Elements [start, stop) of an expert's tensor, in row-major order."""
        import numpy as np

        if isinstance(source, TensorInfo):
            return read_floats(self.handles[source.file], source, start, stop)
        if isinstance(source, Adapted):
            low = source.low_rank
            if low not in self._factors:
                self._factors[low] = low.factors()
            delta = low.elements(self._factors[low], start, stop)
            delta += self._elements(source.stored, start, stop)
            return delta
        pieces = [self._elements(*piece) for piece in _row_pieces(source, start, stop)]
        if not pieces:
            return np.empty(0, np.float32)
        single = any(piece_values.dtype == np.float32 for piece_values in pieces)
        return np.concatenate(
            [piece_values.astype(np.float32) for piece_values in pieces] if single else pieces
        )


def _row_pieces(gathered: Gathered, start: int, stop: int) -> Iterator[tuple[Source, int, int]]:
    """Map elements [start, stop) of gathered rows to ranges of stored elements."""
    width = math.prod(gathered.shape) // max(1, sum(run.count for run in gathered.runs))
    row = 0
    for run in gathered.runs:
        begin, end = max(start, row * width), min(stop, (row + run.count) * width)
        if begin < end:
            shift = (run.first - row) * width
            yield run.source, begin + shift, end + shift
        row += run.count


def blend(parts: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted sum of vectors (paper 1, Algorithm 1, line 8, with weights summing to 1).

    Overwrites the parts. The sum is float32, or float64 if a part is; the caller rounds it once.
    """
    import numpy as np

    if any(values.dtype == np.float64 for values in parts):
        parts = [values.astype(np.float64, copy=False) for values in parts]
    for values, weight in zip(parts, weights, strict=True):
        if weight != 1:
            np.multiply(values, weight, out=values)
    for values in parts[1:]:
        np.add(parts[0], values, out=parts[0])
    return parts[0]


def measure_model(terms: Terms, handles: Handles, threads: int = 1) -> dict[Operation, Any]:
    """Measure the operations that rank all tensors of the model together."""
    groups: dict[Operation, list[MergedTensor]] = {}
    for tensor in merged_tensors(terms):
        if tensor.of_model:
            groups.setdefault(tensor.operation, []).append(tensor)
    facts: dict[Operation, Any] = {}

    def prepared(tensor: MergedTensor) -> WholeTensor:
        evaluator = TermEvaluator(handles, facts)  # one per tensor: an evaluator serves one thread
        evaluator.prepare(tuple(part for inner in tensor.terms for part in inner))
        return evaluator.whole(tensor)

    # Inner operations come first, so an outer one finds their facts.
    for operation, tensors in groups.items():
        measure = tensors[0].method.measure_model
        assert measure is not None
        with ThreadPoolExecutor(threads) as pool:
            wholes = list(pool.map(prepared, tensors))
        facts[operation] = measure(wholes, threads)
    return facts
