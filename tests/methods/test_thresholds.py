"""Thresholds of magnitude are exact, whatever the chunks and the threads."""

import math

import pytest
import torch

from layerswap.methods.thresholds import magnitude_thresholds


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("size", [1, 2, 1000, 20_000])
def test_thresholds_are_exact(size, threads):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    x *= 10.0 ** torch.randint(-30, 30, (size,), generator=generator)
    x[::3] = x[0]
    ranks = [int(share * size) for share in (0.0, 0.1, 0.25, 0.5, 0.999, 1.0)]
    streams = [
        lambda piece=piece: ([part.numpy(), 2 * part.numpy()] for part in piece.split(701))
        for piece in x.split(6000)
    ]
    first, second = magnitude_thresholds(streams, 2, ranks, threads)
    ordered = x.abs().sort(descending=True).values
    for rank, threshold, double in zip(ranks, first, second, strict=True):
        assert threshold == (float(ordered[rank - 1]) if rank else math.inf)
        assert double == 2 * threshold
