"""Magnitudes by rank are exact, whatever the chunks, the tensors and the threads."""

from __future__ import annotations

import math

import numpy as np
import pytest

from layerswap.methods.method import Chunk, WholeTensor
from layerswap.methods.steps import magnitudes


def tensor(values, step):
    view = {"weights": (1.0,), "parameters": {}, "name": "x", "transposed": False}

    def read(start, stop):
        return Chunk(**view, shape=(len(values),), start=start, parts=[values[start:stop]])

    return WholeTensor(
        **view, shape=(len(values),), elements=len(values), read=read, step=step, align=1
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 1000, 20_000])
def test_magnitudes_by_rank_are_exact(size, threads):
    draws = np.random.RandomState(size)
    x = (draws.standard_normal(size) * 10.0 ** draws.randint(-30, 30, size)).astype(np.float32)
    x[::3] = x[0]
    ranks = [int(share * size) for share in (0.0, 0.1, 0.25, 0.5, 0.999, 1.0)]
    pieces = [tensor(part, 701) for part in np.array_split(x, 4) if len(part)]
    ordered = np.sort(np.abs(x))[::-1]
    expected = [float(ordered[rank - 1]) if rank else math.inf for rank in ranks]
    assert list(magnitudes(pieces, ranks, threads)[0]) == expected
