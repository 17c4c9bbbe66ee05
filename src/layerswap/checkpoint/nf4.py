"""Weights as 4-bit NormalFloat gives them back: the base of QLoRA (Dettmers et al., 2023).

As in bitsandbytes: 64 elements in row-major order share a scale, their largest magnitude, and each
element is the nearest of 16 numbers times the scale. Double quantisation stores the scales, less
their mean, in 8 bits with one scale for 256 of them. These 8 bits are the nearest number here; the
search of bitsandbytes may end at its neighbour.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

NUMBERS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1] (appendix E of the paper)."""
BLOCK, SCALES = 64, 256
"""Elements with one scale, and scales with one scale of their own."""


def block_scales(values: Floats) -> Floats:
    """Return the largest magnitude of each block of a vector; the last block may be shorter."""
    import numpy as np

    if not len(values):
        return np.empty(0, np.float32)
    largest: Floats = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), BLOCK))
    return largest


def double_quantised(scales: Floats) -> Floats:
    """Return the scales of a whole tensor as 8 bits give them back."""
    import numpy as np

    mean = scales.mean(dtype=np.float32)
    found: Floats = _nearest(scales - mean, dynamic_numbers(), SCALES) + mean
    return found


def given_back(values: Floats, scales: Floats) -> Floats:
    """Return a vector of whole blocks as 4 bits give it back, with these scales of its blocks.

    The quantiser divides by the exact largest magnitudes, also if `scales` are rounded.
    """
    import numpy as np

    numbers = np.array(NUMBERS, np.float32)
    positions = _positions(values, block_scales(values), numbers, BLOCK)
    found: Floats = numbers[positions] * np.repeat(scales, BLOCK)[: len(values)]
    return found


@cache
def dynamic_numbers() -> Floats:
    """Return the 256 numbers of 8-bit dynamic quantisation, ascending (Dettmers et al., 2022)."""
    import numpy as np

    parts: list[Floats] = [np.array([0, 1], np.float32)]
    for power in range(7):
        edges = np.linspace(0.1, 1, 2**power + 1, dtype=np.float32)
        means = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (power - 6)
        parts += [means.astype(np.float32), -means.astype(np.float32)]
    return np.sort(np.concatenate(parts).astype(np.float32))


def _nearest(values: Floats, numbers: Floats, length: int) -> Floats:
    """Round each element to the nearest number times the largest magnitude of its block."""
    import numpy as np

    largest = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), length))
    positions = _positions(values, largest, numbers, length)
    found: Floats = numbers[positions] * np.repeat(largest, length)[: len(values)]
    return found


def _positions(
    values: Floats, largest: Floats, numbers: Floats, length: int
) -> npt.NDArray[np.int64]:
    import numpy as np

    between = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=largest > 0)
    found: npt.NDArray[np.int64] = np.searchsorted(
        between, values * np.repeat(inverse, length)[: len(values)]
    )
    return found
