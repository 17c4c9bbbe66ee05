"""Methods that add weighted deltas, against plain float64 formulas that sort whole tensors."""

import numpy as np
import pytest
from merged_vectors import NAME, SHAPE, SIZE, close, deltas, draws_of, merged, wide
from merging import elect_and_average, keep_first, keep_largest

TENSOR = {"scope": "tensor"}


def test_task_arithmetic():
    a, b = parts = deltas(2)
    x, y = wide([a, b])
    close(merged("task_arithmetic", parts, [0.3, 2.0], scale=0.7), 0.7 * (0.3 * x + 2.0 * y))


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5]])
def test_ties(density, weights):
    parts = deltas(3)
    trimmed = [keep_largest(x, density) for x in wide(parts)]
    found = merged("ties", parts, weights, density=density, scale=0.9, **TENSOR)
    close(found, 0.9 * elect_and_average(trimmed, weights))


@pytest.mark.parametrize("method", ["ties", "dare_ties", "della", "sce"])
def test_deltas_that_cancel_elect_no_sign(method):
    """Deltas of a few steps of bfloat16 cancel often; rounding must not elect one of them."""
    x = (deltas(1)[0].view(np.uint32) & 0xFFFF0000).view(np.float32)
    for shares in ([1, -1], [3, -2, -1]):
        parts = [np.float32(share) * x for share in shares]
        settings = {"density": 1.0, **({"epsilon": 0.0} if method == "della" else {})}
        if method != "sce" or len(shares) == 2:  # SCE weighs experts by their squares
            found = merged(method, parts, [0.3] * len(parts), **settings)
            assert not np.count_nonzero(found)


def test_ties_can_add_what_agrees():
    parts, weights = deltas(3), [1.0, 2.0, 0.5]
    trimmed = [keep_largest(x, 0.3) for x in wide(parts)]
    found = merged("ties", parts, weights, density=0.3, disjoint="sum", **TENSOR)
    close(found, elect_and_average(trimmed, weights, "sum"))


@pytest.mark.parametrize(("density", "outliers"), [(0.6, 0.1), (0.9, 0.3)])
def test_breadcrumbs(density, outliers):
    parts = deltas(2)
    kept = int(density * SIZE)
    dropped = min(int(outliers * SIZE), SIZE - kept)  # fewer outliers if both exceed 1
    bands = [keep_first(x, dropped + kept) - keep_first(x, dropped) for x in wide(parts)]
    close(merged("breadcrumbs", parts, density=density, outliers=outliers), sum(bands))


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_l1_rescaling_restores_the_sum_of_magnitudes(method):
    settings = {"density": 0.3, **(TENSOR if method == "ties" else {"outliers": 0.1})}
    for part in (*deltas(2), np.zeros(SIZE, np.float32)):
        kept = merged(method, [part], **settings).astype(np.float64)
        found = merged(method, [part], **settings, rescale="l1")
        whole, left = np.abs(part.astype(np.float64)).sum(), np.abs(kept).sum()
        np.testing.assert_allclose(found, kept * (whole / left if whole else 1), rtol=1e-6)


def test_each_delta_is_rescaled_by_itself():
    settings = {"density": 0.3, "outliers": 0.1, "rescale": "l1"}
    one, two = (merged("breadcrumbs", [part], **settings) for part in deltas(2))
    close(merged("breadcrumbs", deltas(2), **settings), np.float64(one) + np.float64(two))


def drop(parts, density, seed=0):
    return [np.where(draws_of(i, seed) < density, x, 0.0) / density for i, x in enumerate(parts)]


def test_dare_draws_by_seed_name_expert_and_position():
    parts = deltas(2)
    reference = sum(drop(wide(parts), 0.3, seed=7))
    close(merged("dare_linear", parts, density=0.3, seed=7), reference)
    for other in ({"seed": 8}, {"seed": 7, "name": NAME.replace("up", "gate")}):
        assert not np.allclose(merged("dare_linear", parts, density=0.3, **other), reference)


def test_dare_keeps_the_expected_share():
    part = np.ones(200_000, np.float32)
    result = merged("dare_linear", [part], density=0.1, shape=(400, 500))
    kept = result != 0
    assert abs(kept.mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / 200_000)
    np.testing.assert_allclose(result[kept], 10)


@pytest.mark.parametrize(
    ("weights", "disjoint"), [([1.0, 1.0, 1.0], "mean"), ([1.0, 0.5, 2.0], "sum")]
)
def test_dare_ties(weights, disjoint):
    parts = deltas(3)
    reference = elect_and_average(drop(wide(parts), 0.4), weights, disjoint)
    close(merged("dare_ties", parts, weights, density=0.4, disjoint=disjoint), reference)


def magprune(parts, density, epsilon):
    """MagPrune by rank in each row; every kept entry is divided by its own probability."""
    pruned = []
    for expert, x in enumerate(parts):
        rows = np.abs(x).reshape(SHAPE)
        rank = np.array([[(row < value).sum() for value in row] for row in rows]).ravel()
        probability = density - epsilon + rank / (SHAPE[1] - 1) * 2 * epsilon
        pruned.append(np.where(draws_of(expert) < probability, x / probability, 0.0))
    return pruned


def test_della():
    parts, weights = deltas(3), [1.0, 0.5, 2.0]
    pruned = magprune(wide(parts), 0.4, 0.2)
    settings = {"density": 0.4, "epsilon": 0.2}
    close(merged("della", parts, weights, **settings), elect_and_average(pruned, weights))
    total = 0.7 * sum(w * x for w, x in zip(weights, pruned, strict=True))
    close(merged("della_linear", parts, weights, scale=0.7, **settings), total)


def test_della_without_rescaling_keeps_entries_unchanged():
    (part,) = deltas(1)
    found = merged("della_linear", [part], density=0.5, rescale="none")
    assert np.all((found == 0) | (found == part))
    assert 0.4 < (found != 0).mean() < 0.6


@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_sce(density):
    parts = deltas(3)
    stacked = np.stack(wide(parts))
    variance = stacked.var(axis=0).astype(np.float32)
    count = int(density * (variance > 0).sum())
    chosen = np.zeros(SIZE, dtype=bool)
    chosen[np.argsort(-variance, kind="stable")[:count]] = True
    stacked = stacked * chosen
    shares = (stacked**2).mean(axis=1)
    shares = shares / shares.sum() if shares.sum() else np.ones(3)
    agrees = np.sign(stacked) * np.sign(stacked.sum(axis=0)) > 0
    mass = (shares[:, None] * agrees).sum(axis=0)
    total = (shares[:, None] * agrees * stacked).sum(axis=0)
    close(merged("sce", parts, density=density), total / np.where(mass > 0, mass, 1))


@pytest.mark.parametrize("boost", [0.0, 0.1])
def test_ram(boost):
    parts, epsilon = deltas(3), 1e-3
    stacked = np.stack(wide(parts))
    changed = np.abs(stacked) > np.float32(epsilon)
    count = changed.sum(axis=0)
    factors = []
    for mask in changed:
        shared, alone = (mask & (count > 1)).sum(), (mask & (count == 1)).sum()
        factors.append(1 + boost * min(shared / max(alone, epsilon), 0.2))
    reference = np.zeros(SIZE)
    for i in range(SIZE):
        values = stacked[:, i][changed[:, i]]
        if len(values) > 1:
            reference[i] = np.mean(values)
        elif len(values):
            reference[i] = values[0] * factors[int(changed[:, i].argmax())]
    close(merged("ram", parts, epsilon=epsilon, boost=boost), reference)
