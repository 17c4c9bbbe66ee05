"""How much fine-tuning changed a model, in one number: the mean MAV of its delta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from layerswap.checkpoint import Checkpoint
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.delta.rows import Rows
from layerswap.errors import CheckpointError

CHUNK_ELEMENTS = 1 << 22


def magnitude_weight(
    base: Checkpoint,
    parts: Sequence[tuple[Checkpoint, float]],
    skip: frozenset[str] = frozenset(),
) -> float:
    """The weight of an expert in a magnitude-adjusted blend: 1 / mean MAV (paper 1, section 5.1).

    The mean is over all rows of all deltas of the expert, each row counting once. A row is an
    input feature: for a `[out, in]` weight the MAV is the mean of |delta| over `out`, a vector
    of length `in`; Conv1D layouts are transposed; a stack of matrices is taken matrix by matrix;
    a vector is one row.

    Args:
        base: the checkpoint the expert was fine-tuned from.
        parts: the expert, as one checkpoint of weight 1, or a soup of several.
        skip: names of tensors to leave out (a stored copy of tied embeddings).

    Raises:
        CheckpointError: a tensor differs in shape from the base's or holds NaN or infinity, or
            nothing changed at all.
    """
    total, rows = 0.0, 0
    for name, info in base.tensors.items():
        stored = name not in skip and all(name in expert.tensors for expert, _ in parts)
        if info.dtype not in FLOAT_DTYPES or not stored:
            continue
        count = Rows.of(info.shape, transposed=base.transposes(name)).count
        total += mean_absolute_delta(base, parts, name) * count
        rows += count
    if total == 0:
        raise CheckpointError(f"{parts[0][0].identity}: no tensor differs from {base.identity}")
    return rows / total


def mean_absolute_delta(
    base: Checkpoint, inputs: Sequence[tuple[Checkpoint, float]], name: str
) -> float:
    """Mean of |blend - base| over all elements of one tensor, in float32, summed in float64.

    Raises:
        CheckpointError: a shape differs from the base's, or the delta holds NaN or infinity.
    """
    info = base.tensors[name]
    stored = [expert.tensors[name] for expert, _ in inputs]
    for other in stored:
        if other.shape != info.shape:
            raise CheckpointError(
                f"{other.file}: {name!r} has shape {list(other.shape)}, "
                f"the base has {list(info.shape)}"
            )
    total = 0.0
    for start in range(0, info.elements, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, info.elements)
        delta = -base.elements(name, start, stop).float()
        for expert, weight in inputs:
            delta.add_(expert.elements(name, start, stop).float(), alpha=weight)
        # NumPy's sum, because the rounding of torch's depends on the number of threads.
        total += float(delta.abs_().numpy().sum(dtype="float64"))
    if not math.isfinite(total):
        files = " or ".join(str(tensor.file) for tensor in (info, *stored))
        raise CheckpointError(f"tensor {name!r} holds NaN or infinity in {files}")
    return total / max(1, info.elements)


def magnitude_weights(
    base: Checkpoint,
    experts: Mapping[str, Sequence[tuple[Checkpoint, float]]],
    skip: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """`magnitude_weight` of several experts, normalised to sum to 1."""
    weights = {name: magnitude_weight(base, parts, skip) for name, parts in experts.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
