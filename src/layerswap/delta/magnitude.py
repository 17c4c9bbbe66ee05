"""How much fine-tuning changed a model, in one number: the mean MAV of its delta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerswap.checkpoint import Checkpoint, TensorInfo
from layerswap.checkpoint.read import FLOAT_DTYPES, open_file, read_elements
from layerswap.errors import CheckpointError

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 22
CONV1D_TYPES = ("gpt2", "openai-gpt", "decision_transformer", "imagegpt")
"""Model types whose matrices are stored [in, out] (transformers' Conv1D)."""


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
    conv1d = base.config.get("model_type") in CONV1D_TYPES
    for name, info in base.tensors.items():
        stored = name not in skip and all(name in expert.tensors for expert, _ in parts)
        if info.dtype not in FLOAT_DTYPES or not stored:
            continue
        inputs = [(expert.tensors[name], weight) for expert, weight in parts]
        # Embeddings and head are no Conv1D, even where the layers are.
        count = row_count(info.shape, conv1d and base.places[name].layer is not None)
        total += mean_absolute_delta(info, inputs) * count
        rows += count
    if total == 0:
        raise CheckpointError(f"{parts[0][0].identity}: no tensor differs from {base.identity}")
    return rows / total


def row_count(shape: tuple[int, ...], transposed: bool) -> int:
    """Rows (input features) of a tensor of this shape; see `magnitude_weight`."""
    if len(shape) < 2:
        return 1
    matrices = 1
    for size in shape[:-2]:
        matrices *= size
    return matrices * (shape[-2] if transposed else shape[-1])


def mean_absolute_delta(base: TensorInfo, inputs: Sequence[tuple[TensorInfo, float]]) -> float:
    """Mean of |blend - base| over all elements of one tensor, in float32, summed in float64.

    Raises:
        CheckpointError: a shape differs from the base's, or the delta holds NaN or infinity.
    """
    for info, _ in inputs:
        if info.shape != base.shape:
            raise CheckpointError(
                f"{info.file}: {info.name!r} has shape {list(info.shape)}, "
                f"the base has {list(base.shape)}"
            )
    total = 0.0
    for start in range(0, base.elements, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, base.elements)
        delta = -_chunk(base, start, stop)
        for info, weight in inputs:
            delta.add_(_chunk(info, start, stop), alpha=weight)
        # NumPy's sum, because the rounding of torch's depends on the number of threads.
        total += float(delta.abs_().numpy().sum(dtype="float64"))
    if not math.isfinite(total):
        files = " or ".join(str(info.file) for info in (base, *(info for info, _ in inputs)))
        raise CheckpointError(f"tensor {base.name!r} holds NaN or infinity in {files}")
    return total / max(1, base.elements)


def _chunk(info: TensorInfo, start: int, stop: int) -> torch.Tensor:
    with open_file(info.file) as handle:
        return read_elements(handle, info, start, stop).float()


def magnitude_weights(
    base: Checkpoint,
    experts: Mapping[str, Sequence[tuple[Checkpoint, float]]],
    skip: frozenset[str] = frozenset(),
) -> dict[str, float]:
    """`magnitude_weight` of several experts, normalised to sum to 1."""
    weights = {name: magnitude_weight(base, parts, skip) for name, parts in experts.items()}
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
