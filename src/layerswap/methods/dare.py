"""DARE: drops entries of each delta at random and rescales the rest."""

from __future__ import annotations

from layerswap.methods import mergekit, steps
from layerswap.methods.method import (
    DISJOINT,
    SCALE,
    SEED,
    Array,
    Chunk,
    density,
    merge_method,
)

PAPER = "Yu et al., 2024 (2311.03099), equations 1 and 2"
PARAMETERS = {"density": density(0.5), "scale": SCALE, "seed": SEED}


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


@merge_method(PAPER, parameters=PARAMETERS)
def dare_linear(chunk: Chunk) -> Array:
    """Drop and rescale, then add as task arithmetic."""
    return steps.add_scaled(chunk, drop(chunk))


@merge_method(PAPER, parameters={**PARAMETERS, "disjoint": DISJOINT})
def dare_ties(chunk: Chunk) -> Array:
    """Drop and rescale, then elect signs and merge as TIES."""
    return steps.elect_and_merge(chunk, drop(chunk))


_SPARSE = mergekit.Sparse(
    "dare_linear", lambda model, shared: {"density": model.density}, rescale=True, random=True,
    undivided=True,
)  # fmt: skip
SPELLINGS = (
    mergekit.delta_sum("dare_linear", "dare_linear", _SPARSE, signed=True),
    mergekit.delta_sum("dare_ties", "dare_ties", _SPARSE, elects=True),
)
