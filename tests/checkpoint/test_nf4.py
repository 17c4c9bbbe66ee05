"""4-bit NormalFloat, against its definition in float64 and bytes that bitsandbytes wrote."""

from hashlib import sha256

import numpy as np
import pytest
from scipy.stats import norm

from layerswap.checkpoint import nf4

OF_BITSANDBYTES = "9f6e3716cb3700c72ed40cb4c9a300e29018bc5a5b34544ca1a0e9ba475e2338"
"""Of `dequantize_4bit(*quantize_4bit(weights, quant_type="nf4"))`, version 0.50.2 on a CPU."""


def weights(rows=96, columns=250) -> np.ndarray:
    draws = np.random.RandomState(0)
    values = draws.uniform(-0.05, 0.05, (rows, columns)) + draws.uniform(-0.05, 0.05, columns)
    values[3] = 0
    return values.astype(np.float32)


def nearest(values, numbers, length):
    """In float64, by all distances; also says where two numbers are as near."""
    found, ties = np.empty_like(values), np.zeros(len(values), bool)
    for start in range(0, len(values), length):
        block = values[start : start + length]
        scale = np.abs(block).max()
        distances = np.abs(block[:, None] - numbers * scale)
        found[start : start + length] = numbers[distances.argmin(1)] * scale
        first, second = np.sort(distances, 1)[:, :2].T
        ties[start : start + length] = (second - first <= 1e-6 * scale) & (scale > 0)
    return found, ties


def test_the_numbers_are_the_quantiles_of_the_paper():
    """Appendix E of 2305.14314: halves of 8 and 9 quantiles, which share zero."""
    offset = 1 - (1 / 30 + 1 / 32) / 2
    above = norm.ppf(np.linspace(offset, 0.5, 9))[:-1]
    below = -norm.ppf(np.linspace(offset, 0.5, 8))[:-1]
    numbers = np.sort([*above, 0, *below]) / above.max()
    np.testing.assert_allclose(nf4.NUMBERS, numbers, rtol=0, atol=2e-7)


def test_weights_are_those_of_the_definition():
    values = weights().reshape(-1)
    found = nf4.given_back(values, nf4.block_scales(values))
    expected, ties = nearest(values.astype(np.float64), np.array(nf4.NUMBERS), 64)
    assert ties.mean() < 1e-3
    np.testing.assert_allclose(found[~ties], expected[~ties], rtol=2e-7, atol=0)


def test_weights_are_those_of_bitsandbytes():
    values = weights().reshape(-1)
    found = nf4.given_back(values, nf4.block_scales(values))
    assert sha256(found.tobytes()).hexdigest() == OF_BITSANDBYTES


def test_scales_in_8_bits_are_those_of_the_definition():
    scales = nf4.block_scales(weights().reshape(-1))
    found = nf4.double_quantised(scales)
    wide = scales.astype(np.float64)
    rest, ties = nearest(wide - wide.mean(), nf4.dynamic_numbers().astype(np.float64), 256)
    np.testing.assert_allclose(found[~ties], (rest + wide.mean())[~ties], rtol=1e-5)
    assert 0 < np.abs(found - scales).max() < 0.02 * scales.max()


def test_dynamic_numbers():
    """Seven powers of ten with 1 to 64 means of equal steps each, both signs, 0 and 1."""
    numbers = [0.0, 1.0]
    for power in range(7):
        width = 0.9 / 2**power
        means = [(0.1 + width * (i + 0.5)) * 10.0 ** (power - 6) for i in range(2**power)]
        numbers += [*means, *(-mean for mean in means)]
    np.testing.assert_allclose(nf4.dynamic_numbers(), sorted(numbers), rtol=1e-6)
    assert len(numbers) == 256


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65])
def test_short_vectors(size):
    values = weights().reshape(-1)[:size]
    found = nf4.given_back(values, nf4.block_scales(values))
    assert len(found) == size
    assert np.abs(found - values).max(initial=0) <= 0.16 * np.abs(values).max(initial=0)
