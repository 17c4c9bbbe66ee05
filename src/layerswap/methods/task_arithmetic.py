"""Task arithmetic: adds weighted deltas to the base."""

from __future__ import annotations

from layerswap.methods import mergekit, steps
from layerswap.methods.method import SCALE, Array, Chunk, merge_method


@merge_method("Ilharco et al., 2023 (2212.04089), section 2", parameters={"scale": SCALE})
def task_arithmetic(chunk: Chunk) -> Array:
    """`scale * sum_i w_i delta_i`."""
    return steps.add_scaled(chunk, chunk.parts)


SPELLINGS = (mergekit.delta_sum("task_arithmetic", "task_arithmetic", signed=True),)
