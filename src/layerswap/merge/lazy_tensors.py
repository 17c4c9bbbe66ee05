"""Tensors read and merged chunk by chunk: stored, adapted, aligned, or made by a method."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import LowRank, TensorInfo
from layerswap.checkpoint.read import Handle, is_finite, keep_freed_memory, read_floats
from layerswap.checkpoint.remote import WeightFile
from layerswap.compose.blend import Operation
from layerswap.deltas.measure import Axis, Rows
from layerswap.errors import MergeError
from layerswap.merge.methods import METHODS, Chunk, WholeTensor, aligned, kept_rows, model_floor
from layerswap.merge.thresholds import Stream, magnitude_thresholds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from layerswap.checkpoint.adapter import Factors
    from layerswap.checkpoint.read import Floats

    Known = dict[LowRank, Factors]


@dataclass(frozen=True)
class Adapted:
    """A stored tensor and what an adapter adds to it."""

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
        """The dtype that it is stored in, before the adapter."""
        return self.stored.dtype


@dataclass(frozen=True)
class Run:
    """Neighbouring rows of an aligned tensor that come from neighbouring rows of one tensor."""

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


StoredSource = TensorInfo | Adapted | Gathered


def stored(source: StoredSource) -> Iterator[TensorInfo]:
    """Every stored tensor that a source is read from."""
    if isinstance(source, TensorInfo):
        yield source
    elif isinstance(source, Adapted):
        yield from (source.stored, source.low_rank.a, source.low_rank.b)
    else:
        for inner in dict.fromkeys(run.source for run in source.runs):
            yield from stored(inner)


def elements(
    source: StoredSource,
    handles: Mapping[WeightFile, Handle],
    start: int,
    stop: int,
    factors: Known,
) -> Floats:
    """Elements [start, stop) of a source, as a vector.

    Args:
        source: what to read.
        handles: its files, open.
        start: first element, in row-major order.
        stop: one past the last element.
        factors: adapters' matrices that were read already; filled as they are read.

    Returns:
        Float32, or float64 where everything is stored so, in fresh memory.
    """
    import numpy as np

    if isinstance(source, TensorInfo):
        return read_floats(handles[source.file], source, start, stop)
    if isinstance(source, Adapted):
        low = source.low_rank
        if low not in factors:
            factors[low] = low.factors()
        delta = low.elements(factors[low], start, stop)
        delta += read_floats(handles[source.stored.file], source.stored, start, stop)
        return delta
    parts = [elements(*piece, factors) for piece in _pieces(source, handles, start, stop)]
    if not parts:
        return np.empty(0, np.float32)
    single = any(part.dtype == np.float32 for part in parts)
    return np.concatenate([part.astype(np.float32) for part in parts] if single else parts)


def _pieces(
    source: Gathered, handles: Mapping[WeightFile, Handle], start: int, stop: int
) -> Iterator[tuple[StoredSource, Mapping[WeightFile, Handle], int, int]]:
    width = math.prod(source.shape[1:])
    row = 0
    for run in source.runs:
        # Elements of this run within the output, and where they lie in its own tensor.
        begin, end = max(start, row * width), min(stop, (row + run.count) * width)
        if begin < end:
            shift = (run.first - row) * width
            yield run.source, handles, begin + shift, end + shift
        row += run.count


Terms = tuple[tuple["Term", float], ...]
"""A weighted sum: terms with weights that sum to 1."""
Thresholds = tuple[tuple[float, ...], ...]
"""Per expert, one magnitude per rank that a method asked for."""

CHUNK_ELEMENTS = 1 << 18
"""Elements handled at a time while a tensor is measured: few enough to stay in the cache."""


@dataclass(frozen=True)
class MergedTensor:
    """One tensor that an operation makes.

    Attributes:
        name: the tensor's name.
        shape: its shape.
        operation: the method and its parameters.
        inputs: a weighted sum per expert of the operation.
        base: the weighted sum that deltas are taken from; None for a method without deltas.
        fishers: the diagonal Fisher that goes with each input, for a method that needs it.
        transposed: whether matrices are stored [in, out].
    """

    name: str
    shape: tuple[int, ...]
    operation: Operation
    inputs: tuple[Terms, ...]
    base: Terms | None
    fishers: tuple[Terms, ...] = ()
    transposed: bool = False

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Term = StoredSource | MergedTensor
"""A tensor of an expert, or one that an operation makes."""


def leaves(terms: Terms) -> Iterator[TensorInfo]:
    """Every stored tensor that a weighted sum is made of."""
    for source in expert_tensors(terms):
        yield from stored(source)


def expert_tensors(terms: Terms) -> Iterator[StoredSource]:
    """Every tensor of an expert, or of its Fisher, that a weighted sum is made of."""
    for term, _ in terms:
        if isinstance(term, MergedTensor):
            for inner in (*term.inputs, *((term.base,) if term.base else ()), *term.fishers):
                yield from expert_tensors(inner)
        else:
            yield term


@dataclass(frozen=True)
class _Facts:
    """What a method needed to know of one whole tensor."""

    thresholds: Thresholds = ()
    gram: npt.NDArray[Any] | None = None
    kept: npt.NDArray[Any] | None = None
    measured: Any = None


def blend(parts: Sequence[Floats], weights: Sequence[float]) -> Floats:
    """The weighted sum of tensors (paper 1, Algorithm 1, line 8, with weights summing to 1).

    Args:
        parts: vectors of one length; they are overwritten.
        weights: one weight per part.

    Returns:
        The sum in float32 (float64 if a part is float64), in the memory of a part; the caller
        rounds it once into the output dtype.
    """
    import numpy as np

    if any(part.dtype == np.float64 for part in parts):
        parts = [part.astype(np.float64, copy=False) for part in parts]
    for part, weight in zip(parts, weights, strict=True):
        if weight != 1:
            np.multiply(part, weight, out=part)
    for part in parts[1:]:
        np.add(parts[0], part, out=parts[0])
    return parts[0]


class Reader:
    """Reads terms chunk by chunk, measuring a derived tensor when it first meets it.

    One reader serves one thread; the files it reads from are open already.
    """

    def __init__(
        self,
        handles: Mapping[WeightFile, Handle],
        model_thresholds: Mapping[Operation, Thresholds],
        *,
        allow_non_finite: bool = False,
    ) -> None:
        keep_freed_memory()
        self._handles = handles
        self._facts: dict[int, _Facts] = {}
        self._factors: Known = {}
        self._model_thresholds = model_thresholds
        self._allow_non_finite = allow_non_finite

    def total(self, terms: Terms, start: int, stop: int) -> Floats:
        """Elements [start, stop) of a weighted sum, float32 (float64 if a term is)."""
        import numpy as np

        with np.errstate(all="ignore"):  # what is not finite is looked for in the result
            parts = [self.term(term, start, stop) for term, _ in terms]
            return blend(parts, [weight for _, weight in terms])

    def term(self, term: Term, start: int, stop: int) -> Floats:
        """Elements [start, stop) of a term: as the expert has them, or as its method makes them."""
        if not isinstance(term, MergedTensor):
            return elements(term, self._handles, start, stop, self._factors)
        method = METHODS[term.operation.method]
        first, last = aligned(start, stop, method.align(term.shape))
        chunk = self._chunk(term, first, min(last, term.elements), self._measured(term))
        merged = method.combine(chunk)[start - first : stop - first]
        if term.base is None or method.rows:
            return merged
        merged += self.total(term.base, start, stop)
        return merged

    def _chunk(self, term: MergedTensor, start: int, stop: int, facts: _Facts) -> Chunk:
        """Elements [start, stop) of a derived tensor as its method sees them."""
        operation, method = term.operation, METHODS[term.operation.method]
        sees_base = (method.rows or method.sees_base) and term.base is not None
        return Chunk(
            parts=self._parts(term, start, stop),
            weights=[weight for _, weight in operation.inputs],
            parameters=dict(operation.parameters),
            thresholds=facts.thresholds,
            gram=facts.gram,
            base=self.total(term.base, start, stop) if sees_base and term.base else None,
            kept=None if facts.kept is None else _rows(term).spread(facts.kept, start, stop),
            fishers=[self.total(terms, start, stop) for terms in term.fishers],
            measured=facts.measured,
            name=term.name,
            shape=term.shape,
            start=start,
        )

    def blame(self, terms: Terms, start: int, stop: int) -> str | None:
        """What to say of the first expert's tensor that holds NaN or infinity, if one does."""
        for source in expert_tensors(terms):
            if isinstance(source, TensorInfo) and self._is_finite(source, start, stop):
                continue
            for info in stored(source):
                if not self._is_finite(info, 0, info.elements):
                    return f"{info.file}: tensor {info.name!r} holds NaN or infinity"
        return None

    def _is_finite(self, info: TensorInfo, start: int, stop: int) -> bool:
        return all(
            is_finite(
                read_floats(
                    self._handles[info.file], info, first, min(first + CHUNK_ELEMENTS, stop)
                )
            )
            for first in range(start, stop, CHUNK_ELEMENTS)
        )

    def parts(self, term: MergedTensor) -> Iterator[list[Floats]]:
        """A pass over a derived tensor: its experts' deltas (or weights), chunk by chunk."""
        for start in range(0, term.elements, CHUNK_ELEMENTS):
            yield self._parts(term, start, min(start + CHUNK_ELEMENTS, term.elements))

    def stream(self, term: MergedTensor) -> Stream:
        """A derived tensor's deltas (or weights) as the search for thresholds reads them."""
        return Stream(
            term.elements,
            lambda: self.parts(term),
            lambda start, stop: self._parts(term, start, stop),
        )

    def _parts(self, term: MergedTensor, start: int, stop: int) -> list[Floats]:
        import numpy as np

        parts = [self.total(terms, start, stop) for terms in term.inputs]
        if term.base is not None and not METHODS[term.operation.method].rows:
            base = self.total(term.base, start, stop)
            with np.errstate(all="ignore"):
                parts = [np.subtract(p, base, out=p, casting="same_kind") for p in parts]
        # Masks would drop a NaN silently, so it is looked for before any method sees it.
        if not self._allow_non_finite and not all(map(is_finite, parts)):
            raise MergeError(self._non_finite(term, start, stop))
        return parts

    def _non_finite(self, term: MergedTensor, start: int, stop: int) -> str:
        found = self.blame(((term, 1.0),), start, stop)
        return found or f"tensor {term.name!r}: {term.operation.method} overflows float32"

    def _measured(self, term: MergedTensor) -> _Facts:
        import numpy as np

        if id(term) not in self._facts:
            with np.errstate(all="ignore"):
                self._facts[id(term)] = self._measure(term)
        return self._facts[id(term)]

    def _measure(self, term: MergedTensor) -> _Facts:
        method, operation = METHODS[term.operation.method], term.operation
        known = self._model_thresholds.get(operation)
        if method.rows:
            floor = known[0][0] if known else None
            return _Facts(kept=kept_rows(self.row_mavs(term), dict(operation.parameters), floor))
        if known is not None:
            return _Facts(known)
        facts = _Facts(gram=self._gram(term) if method.gram else None)
        ranks = method.ranks(dict(operation.parameters), term.elements) if term.elements else ()
        if ranks:
            found = magnitude_thresholds([self.stream(term)], len(term.inputs), ranks)
            facts = replace(facts, thresholds=found)
        if method.measure is not None:
            seen = facts
            whole = WholeTensor(
                term.elements,
                lambda start, stop: self._chunk(term, start, stop, seen),
                CHUNK_ELEMENTS,
                method.align(term.shape),
            )
            facts = replace(facts, measured=method.measure(whole))
        return facts

    def row_mavs(self, term: MergedTensor) -> npt.NDArray[np.float64]:
        """The MAV of every row of the delta, float64.

        Raises:
            MergeError: a MAV is NaN or infinite.
        """
        import numpy as np

        assert term.base is not None
        rows = _rows(term)
        sums = np.zeros(rows.count)
        step = max(1, CHUNK_ELEMENTS // rows.width) * rows.width
        for start in range(0, term.elements, step):
            stop = min(start + step, term.elements)
            delta = self._parts(term, start, stop)[0]
            delta -= self.total(term.base, start, stop)
            rows.add(sums, start, np.abs(delta, out=delta))
        if not self._allow_non_finite and not is_finite(sums):
            raise MergeError(self._non_finite(term, 0, term.elements))
        return sums / rows.length

    def _gram(self, term: MergedTensor) -> npt.NDArray[np.float64]:
        """Inner products, added up pair by pair: a product of matrices adds by its threads."""
        import numpy as np

        count = len(term.inputs)
        gram = np.zeros((count, count))
        for parts in self.parts(term):
            for i, j in combinations_with_replacement(range(count), 2):
                gram[i, j] += np.multiply(parts[i], parts[j], dtype=np.float64).sum()
        return np.triu(gram) + np.triu(gram, 1).T


def _rows(term: MergedTensor) -> Rows:
    axis: Axis = "output" if dict(term.operation.parameters).get("axis") == "output" else "input"
    return Rows.of(term.shape, axis, transposed=term.transposed)


def model_thresholds(
    terms: Sequence[Term], handles: Mapping[WeightFile, Handle], threads: int = 1
) -> dict[Operation, Thresholds]:
    """Thresholds of the operations that rank the entries of all their tensors together.

    Args:
        terms: what every output tensor is made of.
        handles: its files, open.
        threads: tensors read at a time.
    """
    groups: dict[Operation, list[MergedTensor]] = {}
    for term in terms:
        for derived in derived_tensors(term):
            if dict(derived.operation.parameters).get("scope") == "model":
                groups.setdefault(derived.operation, []).append(derived)
    found: dict[Operation, Thresholds] = {}
    # Inner operations come first, so an outer one finds theirs in `found`.
    for operation, members in groups.items():
        if METHODS[operation.method].rows:
            with ThreadPoolExecutor(threads) as pool:
                mavs = list(pool.map(lambda m: Reader(handles, found).row_mavs(m), members))
            found[operation] = ((model_floor(mavs, dict(operation.parameters)),),)
            continue
        count = sum(member.elements for member in members)
        ranks = METHODS[operation.method].ranks(dict(operation.parameters), count)
        if not ranks:
            continue
        # A reader of its own for every tensor: a reader serves one thread.
        streams = [Reader(handles, found).stream(member) for member in members]
        found[operation] = magnitude_thresholds(streams, len(operation.inputs), ranks, threads)
    return found


def derived_tensors(term: Term) -> Iterator[MergedTensor]:
    """Every derived tensor below and including a term, inner ones first."""
    if isinstance(term, MergedTensor):
        for terms in (*term.inputs, *((term.base,) if term.base else ())):
            for inner, _ in terms:
                yield from derived_tensors(inner)
        yield term
