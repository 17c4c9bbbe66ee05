"""Steps that merge methods share: sums, sparse deltas, elected signs, random draws, angles."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement, product
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.methods.thresholds import Stream, magnitude_thresholds

if TYPE_CHECKING:
    from layerswap.methods.method import Array, Chunk, WholeTensor

Bounds = tuple[tuple[float, ...], ...]
"""Per expert, the smallest magnitude that is kept; a second number is the smallest outlier."""


def weighted_sum(parts: Sequence[Array], weights: Sequence[float]) -> Array:
    """The sum of `weight * part`, in fresh memory."""
    total = parts[0] * float(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        add_product(total, part, float(weight))
    return total


def add_product(total: Array, part: Array, weight: float) -> None:
    """Add `weight * part` to the total, rounding the sum and not the product.

    Float64 holds the product of two float32, so this equals a fused multiply-add except for
    double rounding (about 1 in 2**29). If the weight is a power of two, the product is exact.
    """
    import numpy as np

    single = float(np.float32(weight))
    if part.dtype != np.float32 or total.dtype != np.float32 or abs(math.frexp(single)[0]) == 0.5:
        total += part if weight == 1 else part * weight
        return
    wide = np.multiply(part, single, dtype=np.float64)
    wide += total
    total[...] = wide


def times(merged: Array, factor: float) -> Array:
    """The array multiplied in place."""
    if factor != 1:
        merged *= factor
    return merged


def mask(part: Array, kept: Array) -> Array:
    """The part where `kept` is true, and 0 elsewhere.

    Multiplies, because selecting is several times slower; and in two steps, because a ufunc that
    converts as it multiplies is slower than both.
    """
    masked = kept.astype(part.dtype)
    masked *= part
    return masked


class Trim(NamedTuple):
    """The magnitudes of a delta that are kept, and its rescaling.

    Attributes:
        bounds: the magnitudes to keep; None keeps all.
        factors: per expert, the factor of its sparse delta; None for no rescaling.
    """

    bounds: Bounds | None
    factors: Sequence[float] | None


def trim(chunk: Chunk) -> Sequence[Array]:
    """The deltas without the entries outside the measured bounds, rescaled if measured so."""
    measured: Trim = chunk.measured
    parts = chunk.parts
    if measured.bounds is not None:
        pairs = zip(parts, measured.bounds, strict=True)
        parts = [mask(part, _between(part, bounds)) for part, bounds in pairs]
    if measured.factors is None:
        return parts
    return [
        part if factor == 1 else (part * factor).astype(part.dtype)
        for part, factor in zip(parts, measured.factors, strict=True)
    ]


def _between(part: Array, bounds: tuple[float, ...]) -> Array:
    import numpy as np

    magnitude = np.abs(part)
    kept: Array = magnitude >= bounds[0]
    for outlier in bounds[1:]:
        kept &= magnitude < outlier
    return kept


def measure_trim(whole: WholeTensor, bounds: Bounds | None) -> Trim:
    """The bounds, and with `rescale: l1` factors that restore each delta's sum of magnitudes."""
    import numpy as np

    if whole.parameters["rescale"] == "none":
        return Trim(bounds, None)
    sums = np.zeros((2, len(whole.weights)))
    for chunk in whole.chunks():
        for i, part in enumerate(chunk.parts):
            size = np.abs(part)
            kept = _between(part, bounds[i] if bounds else (0.0,))
            sums[:, i] += size.sum(dtype=np.float64), (size * kept).sum(dtype=np.float64)
    small = (sums < 1e-7).any(axis=0)
    return Trim(bounds, np.where(small, 1.0, sums[0] / np.where(small, 1.0, sums[1])).tolist())


def magnitudes(tensors: Sequence[WholeTensor], ranks: Sequence[int], threads: int = 1) -> Bounds:
    """Per expert, the exact magnitudes at ranks from 1, the largest; rank 0 gives infinity."""
    streams = [_stream(tensor, lambda chunk: chunk.parts) for tensor in tensors]
    return magnitude_thresholds(streams, len(tensors[0].weights), ranks, threads)


def score_quantiles(
    whole: WholeTensor, score: Callable[[Chunk], Array], ranks: Sequence[int]
) -> tuple[float, ...]:
    """The scores at these ranks, from 1 for the largest, of a score per element from 0."""
    return magnitude_thresholds([_stream(whole, lambda chunk: [score(chunk)])], 1, ranks)[0]


def _stream(whole: WholeTensor, vectors: Callable[[Chunk], Sequence[Array]]) -> Stream:
    def part(start: int, stop: int) -> list[Array]:
        chunk, inside = whole.read_around(start, stop)
        return [vector[inside] for vector in vectors(chunk)]

    return Stream(whole.elements, lambda: map(vectors, whole.chunks()), part)


def elect_and_merge(chunk: Chunk, parts: Sequence[Array]) -> Array:
    """Per entry, the weighted mean of the parts whose sign has the larger total.

    With `disjoint: sum` their weighted sum; multiplied by `scale`.
    """
    import numpy as np

    plain = len(parts) < 256 and all(weight == 1 for weight in chunk.weights)
    # Float64 holds the products, so that deltas that cancel sum to exactly zero.
    wide = parts if plain else [np.asarray(part, np.float64) for part in parts]
    elected = weighted_sum(wide, [float(np.float32(weight)) for weight in chunk.weights])
    up, down = elected > 0, elected < 0
    total = np.zeros_like(parts[0])
    share = np.zeros(len(total), np.uint8 if plain else total.dtype)
    for part, weight in zip(parts, chunk.weights, strict=True):
        agrees = ((part > 0) & up) | ((part < 0) & down)
        share += agrees if plain else np.multiply(agrees, weight, dtype=share.dtype)
        add_product(total, mask(part, agrees), weight)
    if chunk.parameters["disjoint"] == "mean":
        # Where no part agrees, the total is 0 too.
        share += share == 0
        total /= share.astype(total.dtype, copy=False)
    return times(total, chunk.number("scale"))


def add_scaled(chunk: Chunk, parts: Sequence[Array]) -> Array:
    """The weighted sum of the parts, multiplied by `scale`."""
    return times(weighted_sum(parts, chunk.weights), chunk.number("scale"))


def random_draws(chunk: Chunk, expert: int) -> Array:
    """Random uint64, one per element, by seed, tensor name, expert and position alone."""
    import numpy as np

    text = f"{chunk.parameters['seed']}/{chunk.name}/{expert}".encode()
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    # One step of the counter gives four draws; a chunk may begin between two steps.
    stream.advance(chunk.start // 4)
    skip = chunk.start % 4
    return stream.random_raw(skip + len(chunk.parts[expert]))[skip:]


def inner_products(whole: WholeTensor) -> Array:
    """Inner products of all pairs of experts, float64 `[experts, experts]`."""
    import numpy as np

    count = len(whole.weights)
    gram = np.zeros((count, count))
    for chunk in whole.chunks():
        # Pair by pair: the sums of a product of matrices depend on the number of threads.
        for i, j in combinations_with_replacement(range(count), 2):
            gram[i, j] += np.multiply(chunk.parts[i], chunk.parts[j], dtype=np.float64).sum()
    return np.triu(gram) + np.triu(gram, 1).T


def vector_products(whole: WholeTensor) -> Array:
    """Inner products of all pairs of experts, of each vector: `[vectors, experts, experts]`."""
    import numpy as np

    experts = range(len(whole.weights))
    count = {
        "tensor": 1,
        "row": whole.elements // max(1, whole.width),
        "column": math.prod(whole.shape[1:]) if whole.shape else 1,
    }[str(whole.parameters["angle"])]
    products = np.zeros((count, len(experts), len(experts)))
    for chunk in whole.chunks():
        numbers = vector_numbers(chunk)
        parts = [part.astype("float64") for part in chunk.parts]
        for i, j in product(experts, experts):
            products[:, i, j] += np.bincount(numbers, parts[i] * parts[j], minlength=count)
    return products


def vector_numbers(chunk: Chunk) -> Any:
    """Return the number of each element's vector, by the parameter `angle`.

    A vector is the whole tensor, a row along the last axis, or a column along the first axis.
    """
    import numpy as np

    position = np.arange(chunk.start, chunk.start + len(chunk.parts[0]))
    if chunk.parameters["angle"] == "row":
        return position // chunk.width
    if chunk.parameters["angle"] == "column" and chunk.shape:
        return position % max(1, math.prod(chunk.shape[1:]))
    return np.zeros_like(position)
