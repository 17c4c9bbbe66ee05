"""4-bit NormalFloat rounding of weights, as QLoRA rounds its base (Dettmers et al., 2023).

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
"""The 16 values of NF4: quantiles of the normal distribution in [-1, 1] (paper, appendix E)."""
BLOCK, SCALES = 64, 256
"""Elements per scale, and scales per scale of the double quantisation."""


def block_scales(values: Floats, length: int = BLOCK) -> Floats:
    """Return the largest magnitude in each block of a vector; the last block may be shorter."""
    import numpy as np

    if not len(values):
        return np.empty(0, np.float32)
    largest: Floats = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), length))
    return largest


def double_quantised(scales: Floats) -> Floats:
    """Round the scales of a whole tensor to 8 bits."""
    import numpy as np

    mean = scales.mean(dtype=np.float32)
    rest = scales - mean
    rounded = _rounded(rest, block_scales(rest, SCALES), dynamic_numbers(), SCALES)
    restored: Floats = rounded + mean
    return restored


def given_back(values: Floats, scales: Floats) -> Floats:
    """Round a vector of whole blocks to 4 bits, with the given scale of each block.

    The quantiser divides by the exact largest magnitudes, also if `scales` are rounded.
    """
    import numpy as np

    return _rounded(values, scales, np.array(NUMBERS, np.float32), BLOCK)


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


def _rounded(values: Floats, scales: Floats, numbers: Floats, length: int) -> Floats:
    """Round each element, over the largest magnitude in its block, to the nearest number.

    Returns the numbers times the scales of the blocks.
    """
    import numpy as np

    largest = block_scales(values, length)
    between = ((numbers[:-1].astype(np.float64) + numbers[1:]) / 2).astype(np.float32)
    inverse = np.divide(1, largest, out=np.zeros_like(largest), where=largest > 0)
    positions = np.searchsorted(between, values * np.repeat(inverse, length)[: len(values)])
    rounded: Floats = numbers[positions] * np.repeat(scales, length)[: len(values)]
    return rounded
