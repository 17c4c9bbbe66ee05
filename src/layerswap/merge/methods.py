"""The merge methods, each on one chunk of one tensor at a time.

A method is one function from deltas to a delta (or from weights to weights), and an entry in
`METHODS`. What a method must know of a whole tensor before it can work on a chunk, it asks for
in its entry; the caller measures it in passes over the same chunks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerswap.compose.blend import Value

if TYPE_CHECKING:
    import torch


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
        base: the base's weights, for a method that selects.
        kept: whether each element lies in a row that is kept, for a method that selects rows.
        name: the tensor's name.
        start: position of the chunk's first element in the tensor.
    """

    parts: Sequence[torch.Tensor]
    weights: Sequence[float]
    parameters: Mapping[str, Value]
    thresholds: Sequence[Sequence[float]] = ()
    gram: torch.Tensor | None = None
    fishers: Sequence[torch.Tensor] = ()
    base: torch.Tensor | None = None
    kept: torch.Tensor | None = None
    name: str = ""
    start: int = 0

    def number(self, parameter: str) -> float:
        """A numeric parameter."""
        return float(self.parameters[parameter])


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
    """

    combine: Callable[[Chunk], torch.Tensor]
    ranks: Callable[[Mapping[str, Value], int], Sequence[int]] = field(default=lambda p, n: ())
    gram: bool = False
    rows: bool = False


def task_arithmetic(chunk: Chunk) -> torch.Tensor:
    """Scaled sum of deltas: `scale * sum_i w_i tau_i` (Ilharco et al., 2023, section 2)."""
    return _weighted(chunk.parts, chunk.weights).mul_(chunk.number("scale"))


def ties(chunk: Chunk) -> torch.Tensor:
    """Trim, elect sign and merge (Yadav et al., 2023, Algorithm 1).

    Keeps the `density` largest entries of each delta, elects per entry the sign with the larger
    total, and averages the entries that agree with it, weighted (or adds them, with
    `disjoint: sum`); scaled by `scale`. The paper ranks the entries of the whole model
    (`scope: model`); mergekit ranks tensor by tensor.
    """
    # Masks are numbers, 1 and 0, because selecting is several times slower than multiplying.
    kept = (
        [
            part.abs().ge_(threshold).mul_(part)
            for part, (threshold,) in zip(chunk.parts, chunk.thresholds, strict=True)
        ]
        if chunk.thresholds
        else chunk.parts
    )
    return _elect_and_merge(kept, chunk)


def dare_linear(chunk: Chunk) -> torch.Tensor:
    """Drop and rescale, then add (Yu et al., 2024, equations 1 and 2, with task arithmetic).

    Each entry of a delta is dropped with probability 1 - `density`; the rest is divided by
    `density`. The draw depends on seed, tensor name, expert and position alone.
    """
    return _weighted(_dropped(chunk), chunk.weights).mul_(chunk.number("scale"))


def dare_ties(chunk: Chunk) -> torch.Tensor:
    """Drop and rescale (Yu et al., 2024), then elect signs and merge as TIES, untrimmed."""
    return _elect_and_merge(_dropped(chunk), chunk)


def breadcrumbs(chunk: Chunk) -> torch.Tensor:
    """Mask outliers and small values of each delta, then add (Davari & Belilovsky, 2024, eq. 1-2).

    Tensor by tensor, drops the `outliers` share of largest magnitudes and keeps the `density`
    share below them; where the two add up to more than 1, fewer outliers are dropped.
    """
    kept = []
    for part, (low, high) in zip(chunk.parts, chunk.thresholds, strict=True):
        magnitude = part.abs()
        kept.append(magnitude.ge(low).logical_and_(magnitude.lt(high)).mul(part))
    return _weighted(kept, chunk.weights).mul_(chunk.number("scale"))


def revert(chunk: Chunk) -> torch.Tensor:
    """Put rows that changed little back to the base (Bandarkar et al., 2025, section 3.3).

    A row is kept if its MAV is at least `threshold` and among the `keep` share of largest MAVs of
    its tensor (of all tensors, with `scope: model`). Both sides are taken as they are: nothing is
    subtracted and added again.
    """
    import torch

    assert chunk.base is not None
    assert chunk.kept is not None
    return torch.where(chunk.kept, chunk.parts[0], chunk.base)


def model_floor(mavs: Sequence[torch.Tensor], parameters: Mapping[str, Value]) -> float:
    """The MAV from which `revert` keeps the rows of a whole model, from those of its tensors.

    It lies between two rows, so that no rounding of a MAV moves a row across; equal MAVs go
    together.
    """
    import torch

    mav = torch.cat(list(mavs)).sort(descending=True).values
    count = round(float(parameters["keep"]) * len(mav))
    if count in (0, len(mav)):
        return 0.0 if count else float("inf")
    return float(mav[count - 1] + mav[count]) / 2


def kept_rows(
    mav: torch.Tensor, parameters: Mapping[str, Value], floor: float | None = None
) -> torch.Tensor:
    """Which rows `revert` keeps, from their MAVs; of equal MAVs the first.

    Args:
        mav: of every row of a tensor, float64.
        parameters: of the method.
        floor: what `model_floor` gave, where the rows of the whole model are ranked together.
    """
    import torch

    if floor is not None:
        return mav >= max(floor, float(parameters["threshold"]))
    count = round(float(parameters["keep"]) * len(mav))
    order = torch.argsort(mav, descending=True, stable=True)
    kept = torch.zeros(len(mav), dtype=torch.bool)
    kept[order[:count]] = True
    return kept & (mav >= float(parameters["threshold"]))


def slerp(chunk: Chunk) -> torch.Tensor:
    """Along the arc between two tensors (Shoemake, 1985), at t = the second's share of weight.

    `sin((1-t)w)/sin(w) a + sin(tw)/sin(w) b`, w the angle between the flattened tensors; nearly
    parallel tensors (cosine above 0.9995) are interpolated linearly.
    """
    assert chunk.gram is not None
    t = chunk.weights[1] / (chunk.weights[0] + chunk.weights[1])
    norms = chunk.gram.diagonal().sqrt()
    cosine = (chunk.gram[0, 1] / (norms[0] * norms[1])).nan_to_num(1.0).clamp(-1, 1)
    shares: tuple[float, ...] = (1 - t, t)
    if abs(float(cosine)) <= 0.9995:
        angle = cosine.arccos()
        shares = tuple(float((share * angle).sin() / angle.sin()) for share in shares)
    return _weighted(chunk.parts, shares)


def model_stock(chunk: Chunk) -> torch.Tensor:
    """Shrink the mean delta by the experts' agreement (Jang et al., 2024, equation 6).

    `t = N cos / (1 + (N-1) cos)`, with cos the mean cosine between two deltas of the tensor, and
    the merged delta is t times the mean delta.
    """
    import torch

    assert chunk.gram is not None
    count = len(chunk.parts)
    norms = chunk.gram.diagonal().sqrt()
    cosines = (chunk.gram / torch.outer(norms, norms)).nan_to_num(0.0)
    cosine = float(cosines.sum() - cosines.diagonal().sum()) / (count * (count - 1))
    cosine = max(cosine, 0.0)
    ratio = count * cosine / (1 + (count - 1) * cosine)
    return _weighted(chunk.parts, [1 / count] * count).mul_(ratio)


def fisher(chunk: Chunk) -> torch.Tensor:
    """Fisher-weighted average (Matena & Raffel, 2022: Fisher merging with diagonal Fishers).

    `sum_i w_i F_i theta_i / sum_i w_i F_i`, element by element, in float64. No F is below
    `floor`, so that where no expert's Fisher says anything the result is the plain weighted
    average. With `normalise: model` each F is divided by its Euclidean norm over the whole model,
    as the authors' code does by default (which raises to its floor only the first model's F).
    """
    import torch

    total, mass = (torch.zeros_like(chunk.parts[0], dtype=torch.float64) for _ in range(2))
    for part, precision, weight in zip(chunk.parts, chunk.fishers, chunk.weights, strict=True):
        share = precision.double().clamp_min(chunk.number("floor")).mul_(weight)
        mass.add_(share)
        total.add_(share.mul_(part))
    return total.div_(mass).to(chunk.parts[0].dtype)


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
    "ties": ChunkMethod(ties, ranks=_kept_rank),
    "dare_linear": ChunkMethod(dare_linear),
    "dare_ties": ChunkMethod(dare_ties),
    "breadcrumbs": ChunkMethod(breadcrumbs, ranks=_band_ranks),
    "fisher": ChunkMethod(fisher),
    "revert": ChunkMethod(revert, rows=True),
    "slerp": ChunkMethod(slerp, gram=True),
    "model_stock": ChunkMethod(model_stock, gram=True),
}
"""How each method of `compose.operation.METHODS` is computed."""


def _weighted(parts: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    total = parts[0] * weights[0]
    for part, weight in zip(parts[1:], weights[1:], strict=True):
        total.add_(part, alpha=weight)
    return total


def _elect_and_merge(parts: Sequence[torch.Tensor], chunk: Chunk) -> torch.Tensor:
    """Per entry, the weighted mean (or sum) of the parts whose sign has the larger total."""
    import torch

    sign = _weighted(parts, chunk.weights).sign_()
    total, share = torch.zeros_like(sign), torch.zeros_like(sign)
    for part, weight in zip(parts, chunk.weights, strict=True):
        agrees = part.sign().mul_(sign).gt_(0)
        share.add_(agrees, alpha=weight)
        total.add_(agrees.mul_(part), alpha=weight)
    if chunk.parameters["disjoint"] == "mean":
        # Where nothing agrees the total is 0 too.
        total.div_(share.add_(share.eq(0)))
    return total.mul_(chunk.number("scale"))


def _dropped(chunk: Chunk) -> list[torch.Tensor]:
    density = chunk.number("density")
    return [_mask(chunk, i, density).mul(part).div_(density) for i, part in enumerate(chunk.parts)]


def _mask(chunk: Chunk, expert: int, density: float) -> torch.Tensor:
    """True with probability `density`, drawn for the chunk's positions whatever its bounds."""
    import numpy as np
    import torch

    text = f"{chunk.parameters['seed']}/{chunk.name}/{expert}".encode()
    key = np.frombuffer(hashlib.sha256(text).digest()[:16], dtype=np.uint64)
    stream = np.random.Philox(key=key)
    # One step of the counter gives four draws; a chunk may begin between two steps.
    stream.advance(chunk.start // 4)
    skip = chunk.start % 4
    draws = stream.random_raw(skip + len(chunk.parts[expert]))[skip:]
    # In whole numbers: the largest uint64 has no float of its own.
    return torch.from_numpy(draws <= np.uint64(max(0, int(density * 2**64) - 1)))
