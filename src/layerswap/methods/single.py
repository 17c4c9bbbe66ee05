"""The changes of one expert, bounded or selected: NearSwap and Arcee Fusion."""

from __future__ import annotations

from typing import Any

from layerswap.methods import steps
from layerswap.methods.method import ONE, Array, Chunk, Parameter, WholeTensor, merge_method


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


def importance(chunk: Chunk) -> Any:
    """|delta| times the divergence of the entry's row, float32.

    The divergence is KL(expert || base) of the softmax of each row.
    """
    import numpy as np

    assert chunk.base is not None
    (part,), base = chunk.parts, chunk.base.astype("float64")

    def softmax(rows: Any) -> Any:
        powers = np.exp(rows - rows.max(axis=1, keepdims=True))
        return powers / powers.sum(axis=1, keepdims=True) + 1e-8

    p = softmax((base + part).reshape(-1, chunk.width))
    q = softmax(base.reshape(-1, chunk.width))
    divergence = np.maximum((p * np.log(p / q)).sum(axis=1, keepdims=True), 0.0)
    scores = np.abs(part).reshape(-1, chunk.width) * divergence
    return scores.ravel().astype("float32")


def measure(whole: WholeTensor) -> float:
    """The smallest importance to take: median + 1.5 times the distance between the quartiles."""
    last = whole.elements - 1
    ranks = [whole.elements - int(share * last) for share in (0.25, 0.5, 0.75)]
    low, median, high = steps.score_quantiles(whole, importance, ranks)
    return median + 1.5 * (high - low)


@merge_method(
    "Arcee AI, 2025 (as mergekit defines it)",
    experts=ONE,
    whole_rows=True,
    measure=measure,
)
def arcee_fusion(chunk: Chunk) -> Array:
    """Take the entries of the delta whose importance is unusually large in the tensor."""
    (part,) = chunk.parts
    taken: Array = part * (importance(chunk) >= chunk.measured)
    return taken
