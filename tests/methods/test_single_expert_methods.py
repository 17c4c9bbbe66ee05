"""Methods of one expert, and Fisher merging, against plain float64 formulas."""

import numpy as np
import pytest
from merged_vectors import SHAPE, SIZE, close, deltas, fishers_of, merged, wide


def test_scale():
    (part,) = deltas(1)
    close(merged("scale", [part], scale=-0.3), -0.3 * wide([part])[0])


def test_nearswap():
    (part,) = deltas(1)
    (x,) = wide([part])
    close(merged("nearswap", [part], t=5e-4), np.where(np.abs(x) <= 5e-4, x, np.sign(x) * 5e-4))


def test_arcee_fusion():
    base = deltas(1, seed=99, scale=0.02)[0]
    expert = base + deltas(1, scale=1e-2)[0]
    rows = base.astype(np.float64).reshape(SHAPE)
    x = (expert - base).astype(np.float64).reshape(SHAPE)

    def softmax(rows):
        return np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True) + 1e-8

    p, q = softmax(rows + x), softmax(rows)
    importance = (np.abs(x) * (p * np.log(p / q)).sum(axis=1, keepdims=True)).ravel()
    low, median, high = (np.sort(importance)[int(s * (SIZE - 1))] for s in (0.25, 0.5, 0.75))
    kept = importance >= median + 1.5 * (high - low)
    assert 10 < kept.sum() < SIZE / 2
    close(merged("arcee_fusion", [expert], base=base), rows.ravel() + np.where(kept, x.ravel(), 0))


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_revert(keep, axis):
    (part,) = deltas(1)
    table = wide([part])[0].reshape(SHAPE)
    mav = np.abs(table).mean(axis=0 if axis == "input" else 1)
    rows = np.argsort(-mav)[round(keep * len(mav)) :]
    reverted = table.T.copy() if axis == "input" else table.copy()
    reverted[rows] = 0
    reference = (reverted.T if axis == "input" else reverted).ravel()
    assert np.array_equal(merged("revert", [part], keep=keep, axis=axis), reference)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 2.0, 0.0]])
def test_fisher(weights):
    parts = deltas(3)
    fishers, x = wide(fishers_of(parts)), wide(parts)
    shares = [w * np.maximum(f, 1e-20) for w, f in zip(weights, fishers, strict=True)]
    reference = sum(s * a for s, a in zip(shares, x, strict=True)) / sum(shares)
    close(merged("fisher", parts, weights), reference)
    nothing = sum(f > 0 for f in fishers) == 0
    assert 20 < nothing.sum() < SIZE / 2
    average = np.average(x, axis=0, weights=weights)
    np.testing.assert_allclose(reference[nothing], average[nothing], rtol=1e-12)


@pytest.mark.parametrize(
    ("weights", "settings"),
    [
        ([1.0, 3.0], {"floor": 1.0}),  # a high floor makes the average a plain one
        ([1.0, 1.0], {"fishers": [np.full(SIZE, tiny) for tiny in (1e-18, 3e-18)]}),
    ],
)
def test_extreme_fishers(weights, settings):
    parts = deltas(2)
    close(merged("fisher", parts, weights, **settings), np.average(wide(parts), 0, [1, 3]))
