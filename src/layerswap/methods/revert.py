"""Reverting: puts the rows of an expert that changed little back to the base."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from layerswap.methods.method import (
    ONE,
    Array,
    Chunk,
    Parameter,
    TensorView,
    WholeTensor,
    merge_method,
)
from layerswap.methods.rows import Axis, Rows


def rows_of(tensor: TensorView) -> Rows:
    """The rows of a tensor along the parameter `axis`."""
    axis: Axis = "output" if tensor.parameters["axis"] == "output" else "input"
    return Rows.of(tensor.shape, axis, transposed=tensor.transposed)


def row_means(whole: WholeTensor) -> Array:
    """The mean absolute value of every row of the delta, float64."""
    import numpy as np

    rows = rows_of(whole)
    sums = np.zeros(rows.count)
    for chunk in whole.chunks(rows.width):
        part, base = chunk.parts[0], chunk.base
        assert base is not None
        delta: Any = np.subtract(part, base, out=np.empty_like(part), casting="same_kind")
        rows.add(sums, chunk.start, np.abs(delta, out=delta))
    return sums / rows.length


def floor(tensors: Sequence[WholeTensor], threads: int = 1) -> float:
    """Find the smallest row mean to keep when all tensors are ranked together.

    It lies between the means of two rows, so that no rounding moves a row across. Rows of equal
    means are kept or reverted together.
    """
    import numpy as np

    with ThreadPoolExecutor(threads) as pool:
        means = np.sort(np.concatenate(list(pool.map(row_means, tensors))))[::-1]
    count = round(tensors[0].number("keep") * len(means))
    if count in (0, len(means)):
        return 0.0 if count else math.inf
    return float(means[count - 1] + means[count]) / 2


def kept_rows(whole: WholeTensor) -> Any:
    """True for each row that keeps the expert's weights; of equal row means the first are kept."""
    import numpy as np

    means, threshold = row_means(whole), whole.number("threshold")
    if whole.parameters["scope"] == "model":
        return means >= max(whole.model, threshold)
    count = round(whole.number("keep") * len(means))
    kept = np.zeros(len(means), bool)
    kept[np.argsort(-means, kind="stable")[:count]] = True
    return kept & (means >= threshold)


@merge_method(
    "Bandarkar et al., 2025 (2410.01335), section 3.3",
    parameters={
        "keep": Parameter(1.0, high=1.0),
        "threshold": Parameter(0.0),
        "axis": Parameter("input", choices=("input", "output")),
        "scope": Parameter("tensor", choices=("tensor", "model")),
    },
    experts=ONE,
    selects=True,
    measure=kept_rows,
    measure_model=floor,
)
def revert(chunk: Chunk) -> Array:
    """Keep the rows that changed most, and take the base's weights for the others.

    A row is kept if the mean absolute value of its delta is at least `threshold`, and among the
    `keep` share of largest means of its tensor (of all tensors, with `scope: model`). Weights are
    copied: nothing is subtracted and added again.
    """
    import numpy as np

    assert chunk.base is not None
    stop = chunk.start + len(chunk.parts[0])
    kept = rows_of(chunk).spread(chunk.measured, chunk.start, stop)
    return np.where(kept, chunk.parts[0], chunk.base)
