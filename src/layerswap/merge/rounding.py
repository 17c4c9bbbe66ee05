"""Measures how much of the deltas a merge loses by rounding its output to 16 bits.

Deltas of fine-tuning are near the step of bfloat16 at the size of usual weights, so half of the
training can round back to the base unnoticed. The loss is measured while the output is computed,
on a sample of the chunks of each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint.read import FLOAT_NAMES, narrowed, widened

if TYPE_CHECKING:
    from layerswap.checkpoint.read import Floats, Stored

SAMPLED = 16
"""One of this many chunks of a tensor is measured, always the first."""
NOTED = 0.1
"""Smallest error of the deltas, as a share of their norm, that a merge warns about."""
LOST_TO_DTYPE = "lost_to_dtype"
"""The key of `layerswap.json` for the measurement."""


class Rounding:
    """The loss of deltas by rounding, over the tensors that are computed from a base.

    Several threads add chunks in any order; the result does not depend on the order.
    """

    def __init__(self) -> None:
        self._chunks: list[tuple[int, int, float, float]] = []
        self._dtype = ""

    def add(self, values: Floats, rounded: Stored, base: Floats, dtype: str) -> None:
        """Measure one chunk.

        Args:
            values: the output before rounding.
            rounded: the output as it is stored.
            base: the base's elements.
            dtype: dtype of the output.
        """
        import numpy as np

        self._dtype = dtype
        delta = np.subtract(values, base)
        before = narrowed(base, dtype)
        # The delta that is left between two models of the output's dtype.
        error = np.subtract(widened(rounded, dtype), widened(before, dtype))
        error -= delta
        changed = int(np.count_nonzero(delta))
        lost = int(np.count_nonzero((delta != 0) & (rounded == before)))
        norm, wrong = (float(np.square(part, dtype=np.float64).sum()) for part in (delta, error))
        self._chunks.append((changed, lost, norm, wrong))

    def summary(self) -> dict[str, Any] | None:
        """The entry of `layerswap.json`; None if no delta was measured.

        `share` is the share of changed elements that equal the base again. `error` is the norm of
        the deltas' rounding error over the norm of the deltas.
        """
        changed, lost = (sum(chunk[i] for chunk in self._chunks) for i in (0, 1))
        norm, error = (math.fsum(chunk[i] for chunk in self._chunks) for i in (2, 3))
        if not changed or not math.isfinite(norm + error) or not norm:
            return None
        return {
            "dtype": next(n for n, short in FLOAT_NAMES.items() if short == self._dtype),
            "share": round(lost / changed, 4),
            "error": round(math.sqrt(error / norm), 4),
            "elements_measured": changed,
        }


def rounding_note(measured: Mapping[str, Any] | None) -> str | None:
    """A warning if rounding lost much of the deltas; else None."""
    if not measured or measured["error"] < NOTED:
        return None
    return (
        f"{measured['dtype']} loses {measured['share']:.0%} of the changed elements (rounding "
        f"error {measured['error']:.2f} of the deltas' norm); write float32 (--dtype float32)"
    )
