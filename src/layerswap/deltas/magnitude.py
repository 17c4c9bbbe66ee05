"""Magnitude-adjusted weights of experts: 1 / mean MAV (paper 1, section 5.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.read import READ_DTYPES
from layerswap.deltas.measure import check_shapes
from layerswap.errors import CheckpointError
from layerswap.methods.rows import Rows

CHUNK_ELEMENTS = 1 << 22
"""Elements read at a time."""
Soup = Sequence[tuple[Checkpoint, float]]
"""An expert: one checkpoint of weight 1, or a soup of several."""


def magnitude_weights(
    base: Checkpoint, experts: Mapping[str, Soup], skip: frozenset[str] = frozenset()
) -> dict[str, float]:
    """`magnitude_weight` of several experts, normalised to sum to 1."""
    weights = {name: magnitude_weight(base, parts, skip) for name, parts in experts.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}


def magnitude_weight(base: Checkpoint, parts: Soup, skip: frozenset[str] = frozenset()) -> float:
    """The weight of an expert in a magnitude-adjusted blend.

    The mean is over all rows of all deltas of the expert, each row counting once. A row is an
    input feature: for a `[out, in]` weight the MAV is the mean of |delta| over `out`, a vector of
    length `in`. Conv1D layouts are transposed, a stack of matrices is taken matrix by matrix, and
    a vector is one row.

    Args:
        base: the checkpoint that the expert was fine-tuned from.
        parts: the expert.
        skip: names of tensors to leave out (a stored copy of tied embeddings).

    Raises:
        CheckpointError: a tensor differs in shape from the base's or holds NaN or infinity, or
            nothing changed at all.
    """
    total, rows = 0.0, 0
    for name, info in base.tensors.items():
        stored = name not in skip and all(name in expert.tensors for expert, _ in parts)
        if info.dtype not in READ_DTYPES or not stored:
            continue
        count = Rows.of(info.shape, transposed=base.transposes(name)).count
        total += mean_absolute_delta(base, parts, name) * count
        rows += count
    if total == 0:
        raise CheckpointError(f"{parts[0][0].identity}: no tensor differs from {base.identity}")
    return rows / total


def mean_absolute_delta(base: Checkpoint, parts: Soup, name: str) -> float:
    """Mean of |blend - base| over all elements of one tensor, in float32, summed in float64."""
    import numpy as np

    info = base.tensors[name]
    check_shapes(info, [expert for expert, _ in parts])
    total = 0.0
    for start in range(0, info.elements, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, info.elements)
        delta = -base.elements(name, start, stop).astype(np.float32)
        for expert, weight in parts:
            part = expert.elements(name, start, stop).astype(np.float32, copy=False)
            delta += part if weight == 1 else part * weight
        with np.errstate(all="ignore"):
            total += float(np.abs(delta, out=delta).sum(dtype=np.float64))
    if not math.isfinite(total):
        stored = [expert.tensors[name] for expert, _ in parts]
        files = " or ".join(str(tensor.file) for tensor in (info, *stored))
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return total / max(1, info.elements)
