"""Sums of deltas made sparse: by magnitude (TIES, Breadcrumbs) or at random (DARE, DELLA)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerswap.methods import steps
from layerswap.methods.method import (
    DISJOINT,
    RESCALE_L1,
    SCALE,
    SEED,
    Array,
    Chunk,
    Parameter,
    WholeTensor,
    density,
    merge_method,
)


def ties_bounds(tensors: Sequence[WholeTensor], threads: int = 1) -> steps.Bounds | None:
    """Per expert the smallest magnitude kept, of at least one entry; None if all are kept."""
    share = tensors[0].number("density")
    count = sum(tensor.elements for tensor in tensors)
    return steps.magnitudes(tensors, [max(1, int(share * count))], threads) if share < 1 else None


def measure_ties(whole: WholeTensor) -> steps.Trim:
    """The magnitudes to keep of one tensor, ranked in it or in the whole model."""
    of_model = whole.parameters["scope"] == "model"
    return steps.measure_trim(whole, whole.model if of_model else ties_bounds([whole]))


def ties_rule(values: Mapping[str, Any]) -> str | None:
    """Refuse `rescale: l1` over the whole model, since its norms are per tensor."""
    if values["rescale"] == "l1" and values["scope"] == "model":
        return "rescale: l1 works tensor by tensor; set `scope: tensor`"
    return None


@merge_method(
    "Yadav et al., 2023 (2306.01708), Algorithm 1",
    parameters={
        "density": density(0.2),
        "scale": SCALE,
        "scope": Parameter("model", choices=("model", "tensor")),
        "disjoint": DISJOINT,
        "rescale": RESCALE_L1,
    },
    measure=measure_ties,
    measure_model=ties_bounds,
    rule=ties_rule,
)
def ties(chunk: Chunk) -> Array:
    """Keep the `density` largest entries of each delta, elect signs, and merge what agrees.

    The paper ranks the entries of the whole model (`scope: model`); mergekit ranks tensor by
    tensor. With `rescale: l1` the sparse delta keeps the whole delta's sum of magnitudes.
    """
    return steps.elect_and_merge(chunk, steps.trim(chunk))


def measure_breadcrumbs(whole: WholeTensor) -> steps.Trim:
    """The smallest magnitude kept, and the smallest outlier."""
    kept = int(whole.number("density") * whole.elements)
    dropped = min(int(whole.number("outliers") * whole.elements), whole.elements - kept)
    return steps.measure_trim(whole, steps.magnitudes([whole], [dropped + kept, dropped]))


@merge_method(
    "Davari and Belilovsky, 2024 (2312.06795), equations 1 and 2",
    parameters={
        "density": density(0.9),
        "outliers": Parameter(0.01, high=1.0),
        "scale": SCALE,
        "rescale": RESCALE_L1,
    },
    measure=measure_breadcrumbs,
)
def breadcrumbs(chunk: Chunk) -> Array:
    """Drop the `outliers` share of largest magnitudes, keep `density` below them, and add.

    Ranks tensor by tensor. If both shares sum to more than 1, fewer outliers are dropped.
    """
    return steps.add_scaled(chunk, steps.trim(chunk))


DARE_PAPER = "Yu et al., 2024 (2311.03099), equations 1 and 2"
DARE_PARAMETERS = {"density": density(0.5), "scale": SCALE, "seed": SEED}


def drop(chunk: Chunk) -> list[Array]:
    """Drop each entry with probability 1 - `density` and divide the rest by `density`.

    The draw depends on seed, tensor name, expert and position alone.
    """
    import numpy as np

    share = chunk.number("density")
    # In whole numbers: the largest uint64 has no float of its own.
    limit = np.uint64(max(0, int(share * 2**64) - 1))
    sparse = []
    for expert, part in enumerate(chunk.parts):
        kept = steps.mask(part, steps.random_draws(chunk, expert) <= limit)
        kept /= share
        sparse.append(kept)
    return sparse


@merge_method(DARE_PAPER, parameters=DARE_PARAMETERS)
def dare_linear(chunk: Chunk) -> Array:
    """Drop and rescale, then add as task arithmetic."""
    return steps.add_scaled(chunk, drop(chunk))


@merge_method(DARE_PAPER, parameters={**DARE_PARAMETERS, "disjoint": DISJOINT})
def dare_ties(chunk: Chunk) -> Array:
    """Drop and rescale, then elect signs and merge as TIES."""
    return steps.elect_and_merge(chunk, drop(chunk))


DELLA_PAPER = "Deep et al., 2024 (2406.11617)"
DELLA_PARAMETERS = {
    "density": density(0.5),
    "epsilon": Parameter(0.15, high=0.5),
    "rescale": Parameter("entry", choices=("entry", "none")),
    "scale": SCALE,
    "seed": SEED,
}


def prune(chunk: Chunk) -> list[Array]:
    """MagPrune: keep an entry with a probability that rises with its rank in its row.

    Along each row of the last axis the probability rises from `density - epsilon` to
    `density + epsilon` (the paper's window is twice this epsilon). An entry that is kept is
    divided by its probability.
    """
    import numpy as np

    share, epsilon, sparse = chunk.number("density"), chunk.number("epsilon"), []
    if share >= 1:
        return list(chunk.parts)
    for expert, part in enumerate(chunk.parts):
        rows = np.abs(part).reshape(-1, chunk.width)
        order = np.argsort(rows, axis=1, kind="stable")
        ranks = np.empty_like(order)
        np.put_along_axis(ranks, order, np.arange(chunk.width)[None], axis=1)
        rank = ranks.ravel() / (chunk.width - 1) if chunk.width > 1 else np.full(len(part), 0.5)
        probability = (share - epsilon) + rank * 2 * epsilon
        limits = (probability * 2.0**64).astype(np.uint64)
        kept = part * (steps.random_draws(chunk, expert) < limits)
        if chunk.parameters["rescale"] == "entry":
            kept = (kept / probability).astype(part.dtype)
        sparse.append(kept)
    return sparse


def della_rule(values: Mapping[str, Any]) -> str | None:
    """Probabilities lie between 0 and 1."""
    share, epsilon = values["density"], values["epsilon"]
    if share < 1 and not epsilon < min(share, 1 - share):
        return f"density {share:g} with epsilon {epsilon:g} leaves the range from 0 to 1"
    return None


@merge_method(
    DELLA_PAPER,
    parameters={**DELLA_PARAMETERS, "disjoint": DISJOINT},
    whole_rows=True,
    rule=della_rule,
)
def della(chunk: Chunk) -> Array:
    """Drop by rank and rescale, then elect signs and merge as TIES."""
    return steps.elect_and_merge(chunk, prune(chunk))


@merge_method(DELLA_PAPER, parameters=DELLA_PARAMETERS, whole_rows=True, rule=della_rule)
def della_linear(chunk: Chunk) -> Array:
    """Drop by rank and rescale, then add as task arithmetic."""
    return steps.add_scaled(chunk, prune(chunk))
