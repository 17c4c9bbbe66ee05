"""DELLA: drops entries at random, small ones with a higher probability, and rescales the rest."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from layerswap.methods import mergekit, steps
from layerswap.methods.method import (
    DISJOINT,
    SCALE,
    SEED,
    Array,
    Chunk,
    Parameter,
    Value,
    density,
    merge_method,
)

PAPER = "Deep et al., 2024 (2406.11617)"
PARAMETERS = {
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


def rule(values: Mapping[str, Any]) -> str | None:
    """Probabilities lie between 0 and 1."""
    share, epsilon = values["density"], values["epsilon"]
    if share < 1 and not epsilon < min(share, 1 - share):
        return f"density {share:g} with epsilon {epsilon:g} leaves the range from 0 to 1"
    return None


@merge_method(PAPER, parameters={**PARAMETERS, "disjoint": DISJOINT}, whole_rows=True, rule=rule)
def della(chunk: Chunk) -> Array:
    """Drop by rank and rescale, then elect signs and merge as TIES."""
    return steps.elect_and_merge(chunk, prune(chunk))


@merge_method(PAPER, parameters=PARAMETERS, whole_rows=True, rule=rule)
def della_linear(chunk: Chunk) -> Array:
    """Drop by rank and rescale, then add as task arithmetic."""
    return steps.add_scaled(chunk, prune(chunk))


def _settings(model: mergekit.Model, shared: mergekit.Shared) -> dict[str, Value]:
    rescale = "entry" if shared["rescale"] else "none"
    return {"density": model.density, "epsilon": model.values["epsilon"], "rescale": rescale}


_SPARSE = mergekit.Sparse(
    "della_linear", _settings, {"epsilon": PARAMETERS["epsilon"]}, rescale=True, random=True
)
SPELLINGS = (
    mergekit.delta_sum("della", "della", _SPARSE, elects=True, normalize=True),
    mergekit.delta_sum("della_linear", "della_linear", _SPARSE),
)
