"""The merge methods, each on one chunk of one tensor at a time.

A method is one function from deltas to a delta (or from weights to weights), and an entry in
`METHODS`. What a method must know of a whole tensor before it can work on a chunk, it asks for
in its entry; the caller measures it in passes over the same chunks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerswap.compose.blend import Value
from layerswap.merge.thresholds import Stream, magnitude_thresholds

if TYPE_CHECKING:
    import numpy.typing as npt

    Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Chunk:
    """What a method sees.

    Attributes:
        parts: one float32 vector per expert: its delta, or its weights for a method without
            deltas. All of one length, none to be changed.
        weights: one per expert, as given.
        parameters: every parameter of the method.
        thresholds: per expert, the magnitudes at the ranks that the method asked for.
        gram: float64 `[experts, experts]`, inner products of the whole tensors, if asked for.
        fishers: per expert, the diagonal Fisher at the same elements, for a method that needs it.
        base: the base's weights, for a method that sees them.
        kept: whether each element lies in a row that is kept, for a method that selects rows.
        measured: what the method's `measure` returned for the whole tensor.
        name: the tensor's name.
        shape: the tensor's shape.
        start: position of the chunk's first element in the tensor.
    """

    parts: Sequence[Array]
    weights: Sequence[float]
    parameters: Mapping[str, Value]
    thresholds: Sequence[Sequence[float]] = ()
    gram: Array | None = None
    fishers: Sequence[Array] = ()
    base: Array | None = None
    kept: Array | None = None
    measured: Any = None
    name: str = ""
    shape: tuple[int, ...] = ()
    start: int = 0

    @property
    def width(self) -> int:
        """Length of a row: of the last axis."""
        return self.shape[-1] if self.shape else 1

    def number(self, parameter: str) -> float:
        """A numeric parameter."""
        return float(self.parameters[parameter])


@dataclass(frozen=True)
class WholeTensor:
    """A tensor as a method measures it, before it combines any chunk of it.

    Attributes:
        elements: number of its elements.
        read: the chunk of elements [start, stop), without anything measured.
        step: elements to read at a time.
        align: a multiple of elements at which chunks begin and end.
    """

    elements: int
    read: Callable[[int, int], Chunk]
    step: int
    align: int = 1

    def chunks(self) -> Iterator[Chunk]:
        """A pass over the tensor."""
        step = max(1, self.step // self.align) * self.align
        for start in range(0, self.elements, step):
            yield self.read(start, min(start + step, self.elements))

    def quantile_magnitudes(self, score: Callable[[Chunk], Any], ranks: Sequence[int]) -> Any:
        """The magnitudes at the given ranks, from 1 for the largest, of a score per element."""

        def part(start: int, stop: int) -> list[Any]:
            first, last = aligned(start, stop, self.align)
            values = score(self.read(first, min(last, self.elements)))[start - first :]
            return [values[: stop - start]]

        stream = Stream(self.elements, lambda: ([score(c)] for c in self.chunks()), part)
        return magnitude_thresholds([stream], 1, ranks)[0]


def aligned(start: int, stop: int, align: int) -> tuple[int, int]:
    """The bounds widened to multiples of `align`."""
    return start - start % align, stop + -stop % align


@dataclass(frozen=True)
class ChunkMethod:
    """How a method is computed, and what it must know of the whole tensor first.

    Attributes:
        combine: from a chunk to the merged delta (or weights), float32.
        ranks: the ranks in magnitude, from 1 for the largest, whose thresholds it needs, from
            its parameters and the number of elements; 0 asks for infinity.
        gram: whether it needs the inner products.
        rows: whether it takes whole rows from the expert or the base as they are: it sees
            weights, not deltas, and which elements lie in kept rows.
        measure: what the method must know of the whole tensor beyond that, as plain numbers; it
            sees the thresholds. None where its parameters ask for nothing.
        whole_rows: whether chunks are made of whole rows along the last axis.
        sees_base: whether it needs the base's weights beside the deltas.
    """

    combine: Callable[[Chunk], Array]
    ranks: Callable[[Mapping[str, Value], int], Sequence[int]] = field(default=lambda p, n: ())
    gram: bool = False
    rows: bool = False
    measure: Callable[[WholeTensor], Any] | None = None
    whole_rows: bool = False
    sees_base: bool = False

    def align(self, shape: Sequence[int]) -> int:
        """The multiple of elements at which a chunk of a tensor may begin and end."""
        return max(1, shape[-1]) if self.whole_rows and shape else 1


def task_arithmetic(chunk: Chunk) -> Array:
    """Scaled sum of deltas: `scale * sum_i w_i tau_i` (Ilharco et al., 2023, section 2)."""
    return _scaled(_weighted(chunk.parts, chunk.weights), chunk)


def ties(chunk: Chunk) -> Array:
    """Trim, elect sign and merge (Yadav et al., 2023, Algorithm 1).

    Keeps the `density` largest entries of each delta, elects per entry the sign with the larger
    total, and averages the entries that agree with it, weighted (or adds them, with
    `disjoint: sum`); scaled by `scale`. The paper ranks the entries of the whole model
    (`scope: model`); mergekit ranks tensor by tensor. With `rescale: l1` what is kept of a delta
    has the sum of magnitudes of the whole delta, as mergekit's `rescale`.
    """
    import numpy as np

    kept = (
        [
            _masked(np.abs(part) >= threshold, part)
            for part, (threshold,) in zip(chunk.parts, chunk.thresholds, strict=True)
        ]
        if chunk.thresholds
        else chunk.parts
    )
    return _elect_and_merge(_rescaled(kept, chunk), chunk)


def dare_linear(chunk: Chunk) -> Array:
    """Drop and rescale, then add (Yu et al., 2024, equations 1 and 2, with task arithmetic).

    Each entry of a delta is dropped with probability 1 - `density`; the rest is divided by
    `density`. The draw depends on seed, tensor name, expert and position alone.
    """
    return _scaled(_weighted(_dropped(chunk), chunk.weights), chunk)


def dare_ties(chunk: Chunk) -> Array:
    """Drop and rescale (Yu et al., 2024), then elect signs and merge as TIES, untrimmed."""
    return _elect_and_merge(_dropped(chunk), chunk)


def breadcrumbs(chunk: Chunk) -> Array:
    """Mask outliers and small values of each delta, then add (Davari & Belilovsky, 2024, eq. 1-2).

    Tensor by tensor, drops the `outliers` share of largest magnitudes and keeps the `density`
    share below them; where the two add up to more than 1, fewer outliers are dropped.
    """
    return _scaled(_weighted(_rescaled(_band(chunk), chunk), chunk.weights), chunk)


def _band(chunk: Chunk) -> list[Any]:
    """Each delta without its smallest and largest magnitudes."""
    import numpy as np

    kept = []
    for part, (low, high) in zip(chunk.parts, chunk.thresholds, strict=True):
        magnitude = np.abs(part)
        mask = magnitude >= low
        mask &= magnitude < high
        kept.append(_masked(mask, part))
    return kept


def _rescaled(kept: Sequence[Array], chunk: Chunk) -> Sequence[Array]:
    """Sparse deltas with the sums of magnitudes of the whole ones, where that was measured."""
    if chunk.measured is None:
        return kept
    return [
        part if factor == 1 else (part * factor).astype(part.dtype)
        for part, factor in zip(kept, chunk.measured, strict=True)
    ]


def _measure_l1(whole: WholeTensor) -> Any:
    """Per expert, the sum of magnitudes over that of what is kept; None without `rescale: l1`."""
    import numpy as np

    sample = whole.read(0, 0)
    if sample.parameters["rescale"] == "none":
        return None
    sums = np.zeros((2, len(sample.parts)))
    for chunk in whole.chunks():
        for i, part in enumerate(chunk.parts):
            size = np.abs(part)
            low, *high = chunk.thresholds[i] if chunk.thresholds else (0.0,)
            kept = (size >= low) & (size < high[0] if high else True)
            sums[:, i] += size.sum(dtype=np.float64), (size * kept).sum(dtype=np.float64)
    small = (sums < 1e-7).any(axis=0)
    return np.where(small, 1.0, sums[0] / np.where(small, 1.0, sums[1])).tolist()


def revert(chunk: Chunk) -> Array:
    """Put rows that changed little back to the base (Bandarkar et al., 2025, section 3.3).

    A row is kept if its MAV is at least `threshold` and among the `keep` share of largest MAVs of
    its tensor (of all tensors, with `scope: model`). Both sides are taken as they are: nothing is
    subtracted and added again.
    """
    import numpy as np

    assert chunk.base is not None
    assert chunk.kept is not None
    return np.where(chunk.kept, chunk.parts[0], chunk.base)


def model_floor(mavs: Sequence[Array], parameters: Mapping[str, Value]) -> float:
    """The MAV from which `revert` keeps the rows of a whole model, from those of its tensors.

    It lies between two rows, so that no rounding of a MAV moves a row across; equal MAVs go
    together.
    """
    import numpy as np

    mav = np.sort(np.concatenate(list(mavs)))[::-1]
    count = round(float(parameters["keep"]) * len(mav))
    if count in (0, len(mav)):
        return 0.0 if count else float("inf")
    return float(mav[count - 1] + mav[count]) / 2


def kept_rows(mav: Array, parameters: Mapping[str, Value], floor: float | None = None) -> Array:
    """Which rows `revert` keeps, from their MAVs; of equal MAVs the first.

    Args:
        mav: of every row of a tensor, float64.
        parameters: of the method.
        floor: what `model_floor` gave, where the rows of the whole model are ranked together.
    """
    import numpy as np

    if floor is not None:
        return mav >= max(floor, float(parameters["threshold"]))
    count = round(float(parameters["keep"]) * len(mav))
    kept = np.zeros(len(mav), bool)
    kept[np.argsort(-mav, kind="stable")[:count]] = True
    return kept & (mav >= float(parameters["threshold"]))


def scale(chunk: Chunk) -> Array:
    """The weights of one expert times `scale`, as mergekit scales what passes through."""
    return _weighted(chunk.parts, [chunk.number("scale")])


def slerp(chunk: Chunk) -> Array:
    """Along the arc between two tensors (Shoemake, 1985), at t = the second's share of weight.

    `sin((1-t)w)/sin(w) a + sin(tw)/sin(w) b`, w the angle between the flattened tensors; nearly
    parallel tensors (cosine above 0.9995) are interpolated linearly.
    """
    assert chunk.gram is not None
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    norms = math.sqrt(chunk.gram[0, 0]) * math.sqrt(chunk.gram[1, 1])
    cosine = float(chunk.gram[0, 1]) / norms if norms else 1.0
    shares: tuple[float, ...] = (1 - t, t)
    if abs(cosine) <= 0.9995:
        angle = math.acos(cosine)
        shares = tuple(math.sin(share * angle) / math.sin(angle) for share in shares)
    return _weighted(chunk.parts, shares)


def model_stock(chunk: Chunk) -> Array:
    """Shrink the mean delta by the experts' agreement (Jang et al., 2024, equation 6).

    `t = N cos / (1 + (N-1) cos)`, with cos the mean cosine between two deltas of the tensor, or of
    each of its rows (`angle: row`), and the merged delta is t times the mean delta.
    """
    import numpy as np

    assert chunk.gram is not None
    count, grams = len(chunk.parts), chunk.gram[None]
    if chunk.measured is not None:
        grams = chunk.measured
    norms = np.sqrt(np.diagonal(grams, axis1=1, axis2=2))
    sizes = norms[:, :, None] * norms[:, None]
    cosines = np.divide(grams, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    others = cosines.sum(axis=(1, 2)) - np.trace(cosines, axis1=1, axis2=2)
    cosine = np.maximum(others / (count * (count - 1)), 0.0)
    ratio = count * cosine / (1 + (count - 1) * cosine)
    merged = _weighted(chunk.parts, [1 / count] * count)
    merged *= ratio[_vectors(chunk)] if chunk.measured is not None else float(ratio[0])
    return merged


def _measure_rows(whole: WholeTensor) -> Any:
    """Inner products of each row `[rows, experts, experts]`, float64; None for whole tensors."""
    import numpy as np

    sample = whole.read(0, 0)
    if sample.parameters["angle"] == "tensor":
        return None
    count, experts = whole.elements // max(1, sample.width), len(sample.parts)
    found = np.zeros((count, experts, experts))
    for chunk in whole.chunks():
        place, parts = _vectors(chunk), [part.astype("float64") for part in chunk.parts]
        for i in range(experts):
            for j in range(experts):
                found[:, i, j] += np.bincount(place, parts[i] * parts[j], minlength=count)
    return found


def fisher(chunk: Chunk) -> Array:
    """Fisher-weighted average (Matena & Raffel, 2022: Fisher merging with diagonal Fishers).

    `sum_i w_i F_i theta_i / sum_i w_i F_i`, element by element, in float64. No F is below
    `floor`, so that where no expert's Fisher says anything the result is the plain weighted
    average. With `normalise: model` each F is divided by its Euclidean norm over the whole model,
    as the authors' code does by default (which raises to its floor only the first model's F).
    """
    import numpy as np

    total, mass = (np.zeros(chunk.parts[0].shape) for _ in range(2))
    for part, precision, weight in zip(chunk.parts, chunk.fishers, chunk.weights, strict=True):
        share = np.maximum(precision.astype(np.float64), chunk.number("floor"))
        share *= weight
        mass += share
        share *= part
        total += share
    total /= mass
    with np.errstate(over="ignore"):
        return total.astype(chunk.parts[0].dtype)


def della(chunk: Chunk) -> Array:
    """Drop by rank, rescale, elect signs and merge (Deep et al., 2024: MagPrune and TIES).

    Along each row of the last axis an entry is kept with a probability that rises with the rank
    of its magnitude, from `density - epsilon` to `density + epsilon` (the paper's window is twice
    this epsilon), and is divided by that probability.
    """
    return _elect_and_merge(_pruned(chunk), chunk)


def della_linear(chunk: Chunk) -> Array:
    """Drop by rank and rescale as `della`, then add."""
    return _scaled(_weighted(_pruned(chunk), chunk.weights), chunk)


def _pruned(chunk: Chunk) -> list[Array]:
    import numpy as np

    density, epsilon, found = chunk.number("density"), chunk.number("epsilon"), []
    if density >= 1:
        return list(chunk.parts)
    for expert, part in enumerate(chunk.parts):
        rows = np.abs(part).reshape(-1, chunk.width)
        order = np.argsort(rows, axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(chunk.width)[None], axis=1)
        share = ranks.ravel() / (chunk.width - 1) if chunk.width > 1 else np.full(len(part), 0.5)
        probability = (density - epsilon) + share * 2 * epsilon
        kept = part * (_draws(chunk, expert) < (probability * 2.0**64).astype(np.uint64))
        if chunk.parameters["rescale"] == "entry":
            kept = (kept / probability).astype(part.dtype)
        found.append(kept)
    return found


def sce(chunk: Chunk) -> Array:
    """Select, calculate, erase (Wan et al., 2024, FuseChat, section 3.3).

    Keeps the `density` share of entries, of those that differ, whose variance over the experts is
    largest; weighs each expert by the mean square of what it keeps; drops what disagrees with the
    sign of the sum; and averages the rest.
    """
    import numpy as np

    threshold, *shares = chunk.measured
    parts = _selected(chunk, threshold)
    sign = np.sign(sum(w * part for w, part in zip(chunk.weights, parts, strict=True)))
    total, mass = np.zeros(len(sign)), np.zeros(len(sign))
    for part, share in zip(parts, shares, strict=True):
        agrees = np.sign(part) * sign > 0
        total += share * (agrees * part)
        mass += share * agrees
    merged = total / np.where(mass > 0, mass, 1.0) * chunk.number("scale")
    return merged.astype(chunk.parts[0].dtype)


def _selected(chunk: Chunk, threshold: float) -> list[Any]:
    """The parts in float64, 0 where their variance is below the threshold."""
    parts = [part.astype("float64") for part in chunk.parts]
    return [part * (_variance(chunk) >= threshold) for part in parts] if threshold else parts


def _variance(chunk: Chunk) -> Any:
    import numpy as np

    return np.var(np.stack(chunk.parts).astype("float64"), axis=0).astype("float32")


def _measure_sce(whole: WholeTensor) -> Any:
    """The smallest variance that is kept, and the weight of each expert."""
    import numpy as np

    sample = whole.read(0, 0)
    density, threshold = sample.number("density"), 0.0
    if density < 1:
        count = int(density * sum(int(np.count_nonzero(_variance(c))) for c in whole.chunks()))
        threshold = whole.quantile_magnitudes(_variance, [count])[0]
    squares = np.zeros(len(sample.parts))
    for chunk in whole.chunks():
        squares += [float(np.square(part).sum()) for part in _selected(chunk, threshold)]
    shares = squares * np.asarray(sample.weights)
    return (threshold, *(shares / shares.sum() if shares.sum() > 0 else sample.weights))


def ram(chunk: Chunk) -> Array:
    """Reinforced agent merging (2601.13572): shared changes are averaged, others kept whole.

    A change counts if it is larger than `epsilon`. With `boost` r and `limit` alpha, what one
    expert alone changed is scaled by `1 + r min(rho, alpha)`, rho being the number of entries
    that the expert changed with others over the number that it changed alone (RAM+), tensor by
    tensor.
    """
    import numpy as np

    parts, epsilon = chunk.parts, chunk.number("epsilon")
    changed = [np.abs(part) > epsilon for part in parts]
    alone = sum(mask.astype(np.int32) for mask in changed) == 1
    total, mass = np.zeros(len(parts[0])), np.zeros(len(parts[0]))
    for part, mask, weight, boost in zip(
        parts, changed, chunk.weights, chunk.measured, strict=True
    ):
        total += weight * mask * part.astype("float64") * np.where(alone, boost, 1.0)
        mass += weight * mask
    merged = total / np.where(mass > 0, mass, 1.0) * chunk.number("scale")
    return merged.astype(parts[0].dtype)


def _measure_ram(whole: WholeTensor) -> Any:
    """The factor of each expert's own changes."""
    import numpy as np

    sample = whole.read(0, 0)
    boost, limit = sample.number("boost"), sample.number("limit")
    epsilon = sample.number("epsilon")
    if not boost:
        return [1.0] * len(sample.parts)
    shared, alone = np.zeros(len(sample.parts)), np.zeros(len(sample.parts))
    for chunk in whole.chunks():
        changed = np.stack([np.abs(part) > epsilon for part in chunk.parts])
        count = changed.sum(axis=0)
        shared += (changed & (count > 1)).sum(axis=1)
        alone += (changed & (count == 1)).sum(axis=1)
    ratio = shared / np.maximum(alone, max(epsilon, 1e-30))
    return list(1 + boost * np.minimum(ratio, limit))


def nearswap(chunk: Chunk) -> Array:
    """Move each weight to the expert's by at most `t` (alchemonaut, 2024, QuartetAnemoi).

    A delta is taken whole where its magnitude is at most `t`, and scaled by `t / |delta|` where
    it is larger.
    """
    import numpy as np

    (part,) = chunk.parts
    return part * np.minimum(chunk.number("t") / np.maximum(np.abs(part), 1e-6), 1)


def arcee_fusion(chunk: Chunk) -> Array:
    """Take the most important changes of one expert (Arcee AI; as mergekit defines it).

    The importance of an entry is |delta| times the divergence of its row, KL of the softmax of
    the expert's row from that of the base's. Entries whose importance is at least the median plus
    1.5 times the distance between the quartiles, of the whole tensor, are taken.
    """
    (part,) = chunk.parts
    taken: Array = part * (_importance(chunk) >= chunk.measured[0])
    return taken


def _importance(chunk: Chunk) -> Any:
    """|delta| times the divergence of the row, float32."""
    import numpy as np

    assert chunk.base is not None
    (part,), base = chunk.parts, chunk.base.astype("float64")

    def softmax(rows: Any) -> Any:
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True) + 1e-8

    p = softmax((base + part).reshape(-1, chunk.width))
    q = softmax(base.reshape(-1, chunk.width))
    divergence = np.maximum((p * np.log(p / q)).sum(axis=1, keepdims=True), 0.0)
    found = np.abs(part).reshape(-1, chunk.width) * divergence
    return found.ravel().astype("float32")


def _measure_importance(whole: WholeTensor) -> Any:
    last = whole.elements - 1
    ranks = [whole.elements - int(share * last) for share in (0.25, 0.5, 0.75)]
    low, median, high = whole.quantile_magnitudes(_importance, ranks)
    return (median + 1.5 * (high - low),)


def nuslerp(chunk: Chunk) -> Array:
    """Along the arc between two tensors or two deltas, at t = the second's share of weight.

    As `slerp`, with the angle of the whole tensor or of each row or column, and interpolated
    linearly only where the cosine is 1 or -1 within float64's rounding.
    """
    import numpy as np

    first, second = chunk.parts
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    dots = chunk.measured
    norms = np.maximum(np.sqrt(dots[0]), 1e-7) * np.maximum(np.sqrt(dots[2]), 1e-7)
    cosine = np.clip(dots[1] / norms, -1, 1)
    flat = 1 - cosine**2 <= 1e-16
    angle = np.arccos(np.where(flat, 0.0, cosine))
    sine = np.where(flat, 1.0, np.sin(angle))
    shares = [
        np.where(flat, share, np.sin(share * angle) / sine)[_vectors(chunk)] for share in (1 - t, t)
    ]
    merged: Array = (shares[0] * first + shares[1] * second).astype(first.dtype)
    return merged


def _vectors(chunk: Chunk) -> Any:
    """The number of the vector, with an angle of its own, that each element belongs to."""
    import numpy as np

    position = np.arange(chunk.start, chunk.start + len(chunk.parts[0]))
    if chunk.parameters["angle"] == "row":
        return position // chunk.width
    if chunk.parameters["angle"] == "column" and chunk.shape:
        return position % max(1, math.prod(chunk.shape[1:]))
    return np.zeros_like(position)


def _measure_angles(whole: WholeTensor) -> Any:
    """Inner products `[3, vectors]`, float64: of the first with itself, of both, of the second."""
    import numpy as np

    sample = whole.read(0, 0)
    count = {
        "tensor": 1,
        "row": whole.elements // max(1, sample.width),
        "column": math.prod(sample.shape[1:]) if sample.shape else 1,
    }[str(sample.parameters["angle"])]
    found = np.zeros((3, count))
    for chunk in whole.chunks():
        a, b = (part.astype("float64") for part in chunk.parts)
        place = _vectors(chunk)
        products = (a * a, a * b, b * b)
        found += [np.bincount(place, product, minlength=count) for product in products]
    return found


def multislerp(chunk: Chunk) -> Array:
    """The direction of the mean unit tensor, at the mean norm (Goddard, 2025, Multi-SLERP).

    The tangent step of the publication, from the mean direction, is 0 for any weights: the mean
    of the units' tangent parts is the mean's own, which has none. Where the mean unit is 0 the
    tensors are averaged.
    """
    import numpy as np

    assert chunk.gram is not None
    gram, weights = chunk.gram, np.asarray(chunk.weights) / math.fsum(chunk.weights)
    norms = np.sqrt(np.diagonal(gram)) + 1e-8
    shares = weights / norms
    length = math.sqrt(max(0.0, float(shares @ gram @ shares)))
    if len(chunk.parts) == 1 or length < 1e-8:
        shares = weights
    else:
        shares = shares / length * float(weights @ np.sqrt(np.diagonal(gram)))
    return _weighted(chunk.parts, list(shares * chunk.number("scale")))


def karcher(chunk: Chunk) -> Array:
    """The Karcher mean of the tensors' directions, at their mean norm (Karcher, 1977; 2603.04972).

    Repeats: map the units to the tangent space of the mean by the sphere's logarithm, average,
    and map back by its exponential; until the step is below `tol` or `max_iter` times. All points
    are combinations of the tensors, so their inner products are enough.
    """
    import numpy as np

    assert chunk.gram is not None
    gram, tol = chunk.gram, chunk.number("tol")
    norms, weights = np.sqrt(np.diagonal(gram)), np.asarray(chunk.weights, dtype="float64")
    weights = weights / weights.sum()
    valid = norms > tol
    inverse = np.where(valid, 1 / np.where(valid, norms, 1.0), 0.0)
    units = gram * np.outer(inverse, inverse)

    def length(point: Any) -> float:
        return math.sqrt(max(0.0, float(point @ units @ point)))

    shares = np.where(valid, weights, 0.0)
    if not shares.any():
        return _weighted(chunk.parts, [0.0] * len(norms))
    shares = shares / shares.sum()
    mean = shares / length(shares) if length(shares) >= tol else np.eye(len(norms))[valid.argmax()]
    for _ in range(int(chunk.number("max_iter"))):
        cosines = np.clip(units @ mean, -1, 1)
        angles = np.arccos(cosines)
        steps = np.where(angles < tol, 0.0, shares * angles / np.maximum(np.sin(angles), 1e-300))
        tangent = steps - float(steps @ cosines) * mean
        step = length(tangent)
        if step < tol:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
        mean = mean / length(mean)
    return _weighted(chunk.parts, list(float(weights @ norms) * mean * inverse))


def _kept_rank(parameters: Mapping[str, Value], count: int) -> Sequence[int]:
    """The smallest magnitude kept: at least one entry, and nothing to measure if all are."""
    density = float(parameters["density"])
    return (max(1, int(density * count)),) if density < 1 else ()


def _band_ranks(parameters: Mapping[str, Value], count: int) -> Sequence[int]:
    """The smallest magnitude kept, and the smallest outlier."""
    kept = int(float(parameters["density"]) * count)
    dropped = min(int(float(parameters["outliers"]) * count), count - kept)
    return dropped + kept, dropped


METHODS: dict[str, ChunkMethod] = {
    "task_arithmetic": ChunkMethod(task_arithmetic),
    "ties": ChunkMethod(ties, ranks=_kept_rank, measure=_measure_l1),
    "dare_linear": ChunkMethod(dare_linear),
    "dare_ties": ChunkMethod(dare_ties),
    "breadcrumbs": ChunkMethod(breadcrumbs, ranks=_band_ranks, measure=_measure_l1),
    "fisher": ChunkMethod(fisher),
    "revert": ChunkMethod(revert, rows=True),
    "della": ChunkMethod(della, whole_rows=True),
    "della_linear": ChunkMethod(della_linear, whole_rows=True),
    "sce": ChunkMethod(sce, measure=_measure_sce),
    "ram": ChunkMethod(ram, measure=_measure_ram),
    "nearswap": ChunkMethod(nearswap),
    "arcee_fusion": ChunkMethod(
        arcee_fusion, measure=_measure_importance, whole_rows=True, sees_base=True
    ),
    "scale": ChunkMethod(scale),
    "slerp": ChunkMethod(slerp, gram=True),
    "nuslerp": ChunkMethod(nuslerp, measure=_measure_angles),
    "multislerp": ChunkMethod(multislerp, gram=True),
    "karcher": ChunkMethod(karcher, gram=True),
    "model_stock": ChunkMethod(model_stock, gram=True, measure=_measure_rows),
}
"""How each method of `compose.blend.METHODS` is computed."""


def _scaled(merged: Array, chunk: Chunk) -> Array:
    if chunk.number("scale") != 1:
        merged *= chunk.number("scale")
    return merged


def _weighted(parts: Sequence[Array], weights: Sequence[float]) -> Array:
    total = parts[0] * float(weights[0])
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        _add(total, part, float(weight))
    return total


def _add(total: Array, part: Array, weight: float) -> None:
    """Add `weight * part` to the total, rounding the sum and not the product.

    Float64 holds the product of two float32, so this is a fused multiply-add to one chance in
    2**29. Where the weight is a power of two the product is exact as it is.
    """
    import numpy as np

    single = float(np.float32(weight))
    if part.dtype != np.float32 or total.dtype != np.float32 or abs(math.frexp(single)[0]) == 0.5:
        total += part if weight == 1 else part * weight
        return
    wide = np.multiply(part, single, dtype=np.float64)
    wide += total
    total[...] = wide


def _masked(mask: Array, part: Array) -> Array:
    """The part where the mask is true, and 0 elsewhere.

    Multiplied, because selecting is several times slower; and in two steps, because a ufunc that
    converts as it multiplies is slower than both.
    """
    kept = mask.astype(part.dtype)
    kept *= part
    return kept


def _elect_and_merge(parts: Sequence[Array], chunk: Chunk) -> Array:
    """Per entry, the weighted mean (or sum) of the parts whose sign has the larger total."""
    import numpy as np

    elected = _weighted(parts, chunk.weights)
    up, down = elected > 0, elected < 0
    total = np.zeros_like(elected)
    plain = len(parts) < 256 and all(weight == 1 for weight in chunk.weights)
    share = np.zeros(len(total), np.uint8 if plain else total.dtype)
    for part, weight in zip(parts, chunk.weights, strict=True):
        agrees = ((part > 0) & up) | ((part < 0) & down)
        share += agrees if plain else np.multiply(agrees, weight, dtype=share.dtype)
        _add(total, _masked(agrees, part), weight)
    if chunk.parameters["disjoint"] == "mean":
        # Where nothing agrees the total is 0 too.
        share += share == 0
        total /= share.astype(total.dtype, copy=False)
    return _scaled(total, chunk)


def _dropped(chunk: Chunk) -> list[Array]:
    density = chunk.number("density")
    found = []
    for i, part in enumerate(chunk.parts):
        kept = _masked(_mask(chunk, i, density), part)
        kept /= density
        found.append(kept)
    return found


def _mask(chunk: Chunk, expert: int, density: float) -> Array:
    """True with probability `density`, drawn for the chunk's positions whatever its bounds."""
    import numpy as np

    # In whole numbers: the largest uint64 has no float of its own.
    kept: Array = _draws(chunk, expert) <= np.uint64(max(0, int(density * 2**64) - 1))
    return kept


def _draws(chunk: Chunk, expert: int) -> Array:
    """Random uint64, one per element, by seed, tensor name, expert and position alone."""
    import numpy as np

    text = f"{chunk.parameters['seed']}/{chunk.name}/{expert}".encode()
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    # One step of the counter gives four draws; a chunk may begin between two steps.
    stream.advance(chunk.start // 4)
    skip = chunk.start % 4
    return stream.random_raw(skip + len(chunk.parts[expert]))[skip:]
