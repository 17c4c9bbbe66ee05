"""NearSwap: moves each weight towards the expert's by a bounded step."""

from __future__ import annotations

from layerswap.methods import mergekit
from layerswap.methods.method import ONE, Array, Chunk, Parameter, merge_method


@merge_method(
    "alchemonaut, 2024 (QuartetAnemoi-70B)",
    parameters={"t": Parameter(1e-4, high=1e6)},
    experts=ONE,
)
def nearswap(chunk: Chunk) -> Array:
    """Take a delta whole if its magnitude is at most `t`, and scaled to `t` if it is larger."""
    import numpy as np

    (part,) = chunk.parts
    return part * np.minimum(chunk.number("t") / np.maximum(np.abs(part), 1e-6), 1)


_T = {"t": mergekit.T}
SPELLINGS = (
    mergekit.renamed("nearswap", "nearswap", {"t": "t"}, _T, required=("t",), sources=(2, 2)),
)
