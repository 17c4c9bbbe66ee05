"""Thresholds of magnitude are exact, whatever the sample, the buckets and the chunks."""

import math

import pytest
import torch
from effort import sampled

from layerswap.methods import thresholds
from layerswap.methods.thresholds import Stream, magnitude_thresholds


@pytest.mark.slow
@pytest.mark.parametrize("buckets", sampled([2, 64, thresholds.BUCKETS], 2, 64))
@pytest.mark.parametrize("margin", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("size", [1, 2, 1000, 20_000])
def test_thresholds_are_exact(size, margin, buckets, monkeypatch):
    monkeypatch.setattr(thresholds, "BUCKETS", buckets)
    monkeypatch.setattr(thresholds, "MARGIN", margin)
    monkeypatch.setattr(thresholds, "SAMPLE", 4096)
    monkeypatch.setattr(thresholds, "HELD", 100)
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, generator=generator)
    x *= 10.0 ** torch.randint(-30, 30, (size,), generator=generator)
    x[::3] = x[0]
    # A sample of the beginning alone misleads the search, and must not change its result.
    misleading = x.sort().values
    ranks = [int(share * size) for share in (0.0, 0.1, 0.25, 0.5, 0.999, 1.0)]
    for values, threads in ((x, 1), (misleading, 3)):
        streams = [
            Stream(
                len(piece),
                lambda piece=piece: ([part.numpy()] for part in piece.split(701)),
                lambda start, stop, piece=piece: [piece[:1].repeat(stop - start).numpy()],
            )
            for piece in values.split(6000)
        ]
        result = magnitude_thresholds(streams, 1, ranks, threads)[0]
        ordered = x.abs().sort(descending=True).values
        for rank, threshold in zip(ranks, result, strict=True):
            assert threshold == (float(ordered[rank - 1]) if rank else math.inf)


def test_a_fair_sample_needs_one_pass():
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    passes = []

    def chunks():
        passes.append(1)
        yield from ([part.numpy()] for part in x.split(1 << 18))

    stream = Stream(len(x), chunks, lambda start, stop: [x[start:stop].numpy()])
    (result,) = magnitude_thresholds([stream], 1, (600_000,))
    assert result[0] == float(x.abs().sort(descending=True).values[600_000 - 1])
    assert len(passes) == 1
