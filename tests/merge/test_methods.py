"""Every merge method against a plain float64 reference written from its paper.

The references see whole tensors and sort; the methods see chunks and never sort.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from effort import mostly_slow
from merging import elect_and_average, keep_first, keep_largest

from layerswap.compose.blend import METHODS as SPECS
from layerswap.deltas.measure import Rows
from layerswap.merge import thresholds
from layerswap.merge.methods import METHODS, Chunk, WholeTensor, aligned, kept_rows
from layerswap.merge.thresholds import Stream, magnitude_thresholds

SIZE = 1003
SHAPE = (17, 59)
BASE = torch.randn(SIZE, generator=torch.Generator().manual_seed(99)) * 0.02


def deltas(count, seed=0, scale=1e-3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) * scale * (i + 1) for i in range(count)]


def merged(method, parts, weights=None, *, chunk=97, name="w", **parameters):
    """What the method makes of whole tensors, chunk by chunk, measured as the engine does."""
    values = {key: p.default for key, p in SPECS[method].parameters.items()} | parameters
    weights = weights or [1.0] * len(parts)

    def chunks():
        for start in range(0, len(parts[0]), chunk):
            yield [part[start : start + chunk].numpy().copy() for part in parts]

    ranks = METHODS[method].ranks(values, len(parts[0]))
    stream = Stream(len(parts[0]), chunks, lambda a, b: [part[a:b].numpy() for part in parts])
    found = magnitude_thresholds([stream], len(parts), ranks) if ranks else ()
    stacked = torch.stack(parts).double()
    gram = (stacked @ stacked.T).numpy() if METHODS[method].gram else None
    fishers = fishers_of(parts) if SPECS[method].fisher else []
    kept = kept_elements(parts[0], values) if METHODS[method].rows else None
    base = (
        torch.zeros(SIZE) if METHODS[method].rows else BASE if METHODS[method].sees_base else None
    )

    def cut(vector, start, stop):
        return None if vector is None else np.asarray(vector)[start:stop].copy()

    def read(start, stop, measured=None):
        return Chunk(
            [cut(part, start, stop) for part in parts],
            weights,
            values,
            found,
            gram,
            measured=measured,
            name=name,
            shape=SHAPE,
            start=start,
            fishers=[cut(fisher, start, stop) for fisher in fishers],
            base=cut(base, start, stop),
            kept=cut(kept, start, stop),
        )

    align = METHODS[method].align(SHAPE)
    measure = METHODS[method].measure
    measured = measure(WholeTensor(SIZE, read, chunk, align)) if measure else None
    results = []
    for start in range(0, SIZE, chunk):
        stop = min(start + chunk, SIZE)
        first, last = aligned(start, stop, align)
        seen = read(first, min(last, SIZE), measured)
        before = [part.copy() for part in seen.parts]
        results.append(METHODS[method].combine(seen)[start - first : stop - first])
        equal = (np.array_equal(a, b) for a, b in zip(before, seen.parts, strict=True))
        assert all(equal), "parts changed"
    return torch.from_numpy(np.concatenate(results))


def kept_elements(part, parameters):
    """Which elements a method of rows keeps, `part` being a matrix beside a base of zeros."""
    rows = Rows.of(SHAPE, parameters["axis"])
    mav = part.view(SHAPE).abs().double().mean(dim=0 if parameters["axis"] == "input" else 1)
    return rows.spread(kept_rows(mav.numpy(), parameters), 0, SIZE)


def fishers_of(parts):
    """A diagonal Fisher for each part: uneven, and 0 here and there."""
    return [torch.relu(part * 3e-4 + part.roll(5) * 1e-4) for part in parts]


def close(result, reference):
    room = 1e-6 * np.abs(reference).max()
    np.testing.assert_allclose(result.double().numpy(), reference, rtol=2e-6, atol=room)


def arrays(parts):
    return [part.double().numpy() for part in parts]


def test_task_arithmetic():
    a, b = parts = deltas(2)
    reference = 0.7 * (0.3 * arrays([a])[0] + 2.0 * arrays([b])[0])
    close(merged("task_arithmetic", parts, [0.3, 2.0], scale=0.7), reference)


@pytest.mark.parametrize("density", [0.001, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 2.0, 0.5]])
def test_ties(density, weights):
    parts = deltas(3)
    trimmed = [keep_largest(x, density) for x in arrays(parts)]
    reference = 0.9 * elect_and_average(trimmed, weights)
    close(merged("ties", parts, weights, density=density, scale=0.9), reference)


def test_ties_can_add_what_agrees_instead_of_averaging_it():
    parts, weights = deltas(3), [1.0, 2.0, 0.5]
    trimmed = [keep_largest(x, 0.3) for x in arrays(parts)]
    reference = elect_and_average(trimmed, weights, "sum")
    close(merged("ties", parts, weights, density=0.3, disjoint="sum"), reference)


def test_breadcrumbs_drop_fewer_outliers_without_room():
    parts = deltas(1)
    kept = int(0.9 * SIZE)
    reference = arrays(parts)[0] - keep_first(arrays(parts)[0], SIZE - kept)
    close(merged("breadcrumbs", parts, density=0.9, outliers=0.3), reference)


def test_breadcrumbs():
    parts = deltas(2)
    reference = 0.0
    for x in arrays(parts):
        outliers = int(0.1 * SIZE)
        band = keep_first(x, outliers + int(0.6 * SIZE)) - keep_first(x, outliers)
        # The published mask drops entries at or above the upper threshold, by rank.
        reference = reference + band
    result = merged("breadcrumbs", parts, density=0.6, outliers=0.1)
    different = ~np.isclose(result.double().numpy(), reference, rtol=2e-6, atol=1e-12)
    assert different.sum() == 0


def test_dare_draws_by_seed_name_expert_and_position():
    parts = deltas(2)
    reference = np.zeros(SIZE)
    for expert, x in enumerate(arrays(parts)):
        key = np.frombuffer(hashlib.sha256(f"7/w/{expert}".encode()).digest()[:16], np.uint64)
        draws = np.random.Philox(key=key).random_raw(SIZE)
        reference += np.where(draws / 2.0**64 < 0.3, x, 0.0) / 0.3
    close(merged("dare_linear", parts, density=0.3, seed=7), reference)
    other_seed = merged("dare_linear", parts, density=0.3, seed=8)
    other_name = merged("dare_linear", parts, density=0.3, seed=7, name="v")
    for other in (other_seed, other_name):
        assert not np.allclose(other.double().numpy(), reference)


def test_dare_keeps_the_expected_share_and_sum():
    part = torch.ones(200_000)
    values = {"density": 0.1, "scale": 1.0, "seed": 0}
    result = METHODS["dare_linear"].combine(Chunk([part.numpy()], [1.0], values, name="w"))
    result = torch.from_numpy(result)
    kept = float((result != 0).double().mean())
    assert abs(kept - 0.1) < 5 * math.sqrt(0.1 * 0.9 / 200_000)
    assert torch.all((result == 0) | torch.isclose(result, torch.tensor(10.0)))


def test_dare_ties():
    parts = deltas(3)
    dropped = []
    for expert, x in enumerate(arrays(parts)):
        key = np.frombuffer(hashlib.sha256(f"0/w/{expert}".encode()).digest()[:16], np.uint64)
        draws = np.random.Philox(key=key).random_raw(SIZE)
        dropped.append(np.where(draws / 2.0**64 < 0.4, x, 0.0) / 0.4)
    close(merged("dare_ties", parts, density=0.4), elect_and_average(dropped, [1.0] * 3))
    reference = elect_and_average(dropped, [1.0, 0.5, 2.0], "sum")
    close(merged("dare_ties", parts, [1.0, 0.5, 2.0], density=0.4, disjoint="sum"), reference)


@pytest.mark.parametrize("t", [0.0, 0.25, 0.5, 1.0])
def test_slerp(t):
    a, b = deltas(2)
    b = b + 0.3 * a
    x, y = arrays([a, b])
    angle = math.acos(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))
    reference = (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)
    close(merged("slerp", [a, b], [1 - t, t]), reference)


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [0.5, 2.0, 0.0]])
def test_fisher(weights):
    parts = deltas(3)
    fishers = arrays(fishers_of(parts))
    x = arrays(parts)
    shares = [w * np.maximum(f, 1e-20) for w, f in zip(weights, fishers, strict=True)]
    reference = sum(s * a for s, a in zip(shares, x, strict=True)) / sum(shares)
    close(merged("fisher", parts, weights), reference)
    nothing = sum(f > 0 for f in fishers) == 0
    assert 20 < nothing.sum() < SIZE / 2
    average = np.average(x, axis=0, weights=weights)
    np.testing.assert_allclose(reference[nothing], average[nothing], rtol=1e-12)


def test_a_high_floor_makes_the_fisher_average_a_plain_one():
    parts = deltas(2)
    close(merged("fisher", parts, [1.0, 3.0], floor=1.0), np.average(arrays(parts), 0, [1, 3]))


def test_a_fisher_may_be_tiny():
    parts = deltas(2)
    fishers = [np.full(SIZE, value, np.float32) for value in (1e-18, 3e-18)]
    values = {"floor": 1e-20, "normalise": "none"}
    pieces = [part.numpy() for part in parts]
    result = METHODS["fisher"].combine(Chunk(pieces, [1.0, 1.0], values, fishers=fishers))
    close(torch.from_numpy(result), np.average(arrays(parts), 0, [1, 3]))


def test_slerp_of_nearly_parallel_tensors_is_linear():
    a = deltas(1)[0]
    b = a * 1.5 + deltas(1, seed=3)[0] * 1e-3
    x, y = arrays([a, b])
    close(merged("slerp", [a, b], [0.75, 0.25]), 0.75 * x + 0.25 * y)


def test_model_stock():
    shared = deltas(1, seed=9)[0]
    parts = [part + shared for part in deltas(3)]
    arrays64 = arrays(parts)
    cosines = [
        x @ y / (np.linalg.norm(x) * np.linalg.norm(y))
        for i, x in enumerate(arrays64)
        for j, y in enumerate(arrays64)
        if i != j
    ]
    cosine = float(np.mean(cosines))
    ratio = 3 * cosine / (1 + 2 * cosine)
    close(merged("model_stock", parts), ratio * np.mean(arrays64, axis=0))


def draws_of(expert, seed=0):
    key = np.frombuffer(hashlib.sha256(f"{seed}/w/{expert}".encode()).digest()[:16], np.uint64)
    return np.random.Philox(key=key).random_raw(SIZE) / 2.0**64


def magprune(parts, density, epsilon):
    """MagPrune by rank in each row, every kept entry divided by its own probability."""
    found = []
    for expert, x in enumerate(parts):
        rows = np.abs(x).reshape(SHAPE)
        rank = np.array([[(row < value).sum() for value in row] for row in rows]).ravel()
        probability = density - epsilon + rank / (SHAPE[1] - 1) * 2 * epsilon
        found.append(np.where(draws_of(expert) < probability, x / probability, 0.0))
    return found


def test_della():
    parts, weights = deltas(3), [1.0, 0.5, 2.0]
    dropped = magprune(arrays(parts), 0.4, 0.2)
    settings = {"density": 0.4, "epsilon": 0.2}
    close(merged("della", parts, weights, **settings), elect_and_average(dropped, weights))
    total = 0.7 * sum(w * x for w, x in zip(weights, dropped, strict=True))
    close(merged("della_linear", parts, weights, scale=0.7, **settings), total)


def test_della_without_rescaling_keeps_entries_as_they_are():
    part = deltas(1)[0]
    found = merged("della_linear", [part], density=0.5, rescale="none")
    assert torch.all((found == 0) | (found == part))
    assert 0.4 < float((found != 0).double().mean()) < 0.6


@pytest.mark.parametrize("density", [0.001, 0.3, 1.0])
def test_sce(density):
    parts = deltas(3)
    stacked = np.stack(arrays(parts))
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
    stacked = np.stack(arrays(parts))
    changed = np.abs(stacked) > np.float32(epsilon)
    count = changed.sum(axis=0)
    factors = []
    for mask in changed:
        shared, alone = (mask & (count > 1)).sum(), (mask & (count == 1)).sum()
        factors.append(1 + boost * min(max(shared / max(alone, epsilon), 0), 0.2))
    reference = np.zeros(SIZE)
    for i in range(SIZE):
        values = [x for x, mask in zip(stacked[:, i], changed[:, i], strict=True) if mask]
        if len(values) > 1:
            reference[i] = np.mean(values)
        elif values:
            reference[i] = values[0] * factors[int(changed[:, i].argmax())]
    close(merged("ram", parts, epsilon=epsilon, boost=boost), reference)


def test_nearswap():
    part = deltas(1)[0]
    x = arrays([part])[0]
    reference = np.where(np.abs(x) <= 5e-4, x, np.sign(x) * 5e-4)
    close(merged("nearswap", [part], t=5e-4), reference)


def test_arcee_fusion():
    part = deltas(1, scale=1e-2)[0]
    base = arrays([BASE])[0].reshape(SHAPE)
    x = arrays([part])[0].reshape(SHAPE)

    def softmax(rows):
        return np.exp(rows) / np.exp(rows).sum(axis=1, keepdims=True) + 1e-8

    p, q = softmax(base + x), softmax(base)
    importance = (np.abs(x) * (p * np.log(p / q)).sum(axis=1, keepdims=True)).ravel()
    low, median, high = (np.sort(importance)[int(s * (SIZE - 1))] for s in (0.25, 0.5, 0.75))
    kept = importance >= median + 1.5 * (high - low)
    assert 10 < kept.sum() < SIZE / 2
    close(merged("arcee_fusion", [part]), np.where(kept, x.ravel(), 0))


@pytest.mark.parametrize("t", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("angle", ["tensor", "row", "column"])
def test_nuslerp(angle, t):
    a, b = deltas(2)
    b = b + 0.3 * a
    x, y = (array.reshape(SHAPE) for array in arrays([a, b]))
    axis = {"tensor": None, "row": 1, "column": 0}[angle]
    dot = (x * y).sum(axis=axis, keepdims=True)
    norms = np.sqrt((x**2).sum(axis=axis, keepdims=True) * (y**2).sum(axis=axis, keepdims=True))
    theta = np.arccos(dot / norms)
    reference = (np.sin((1 - t) * theta) * x + np.sin(t * theta) * y) / np.sin(theta)
    close(merged("nuslerp", [a, b], [1 - t, t], angle=angle), reference.ravel())


def test_multislerp():
    """The publication's steps, the tangent step too."""
    parts, weights = deltas(3), np.array([0.2, 0.5, 0.3])
    x = np.stack(arrays(parts))
    norms = np.linalg.norm(x, axis=1)
    units = x / (norms + 1e-8)[:, None]
    mean = weights @ units
    mean = mean / np.linalg.norm(mean)
    tangent = weights @ (units - (units @ mean)[:, None] * mean)
    length = np.linalg.norm(tangent) + 1e-8
    reference = (mean * math.cos(length) + tangent * math.sin(length) / length) * (weights @ norms)
    close(merged("multislerp", parts, list(weights)), reference)
    close(merged("multislerp", parts, list(2 * weights), scale=2.0), 2 * reference)


def test_multislerp_of_opposites_is_linear():
    part = deltas(1)[0]
    close(merged("multislerp", [part, -part], [0.5, 0.5]), np.zeros(SIZE))


@pytest.mark.parametrize("steps", [1, 10])
def test_karcher(steps):
    parts = [part + deltas(1, seed=9)[0] for part in deltas(3)]
    x = np.stack(arrays(parts))
    norms = np.linalg.norm(x, axis=1)
    units = x / norms[:, None]
    mean = units.mean(axis=0)
    mean = mean / np.linalg.norm(mean)
    for _ in range(steps):
        angles = [math.acos(np.clip(unit @ mean, -1, 1)) for unit in units]
        logs = [
            angle / math.sin(angle) * (unit - (unit @ mean) * mean)
            for unit, angle in zip(units, angles, strict=True)
        ]
        tangent = np.mean(logs, axis=0)
        step = np.linalg.norm(tangent)
        if step < 1e-5:
            break
        mean = math.cos(step) * mean + math.sin(step) / step * tangent
    close(merged("karcher", parts, max_iter=steps), norms.mean() * mean)


# The battery: what must hold of every method, so that a new one gets it for its entry.

ALL = sorted(METHODS)
DELTAS = [name for name in ALL if SPECS[name].base]
RANDOM = {"dare_linear", "dare_ties", "della", "della_linear"}
SELECTING = {"arcee_fusion"}
"""Methods that always leave something out."""


def experts_for(method, count=3):
    low, high = SPECS[method].experts
    return int(min(max(count, low), high))


def full(method):
    """Parameters under which the method drops nothing."""
    names = SPECS[method].parameters
    values = {"density": 1.0, "outliers": 0.0, "epsilon": 0.0, "t": 1e6}
    return {key: value for key, value in values.items() if key in names}


def test_every_method_of_a_recipe_is_computed_and_nothing_else():
    assert METHODS.keys() == SPECS.keys()


@pytest.mark.parametrize("method", [m for m in ALL if m not in SELECTING])
def test_equal_inputs_give_themselves_back(method):
    x = deltas(1)[0]
    count = experts_for(method)
    weights = [1 / count] * count
    close(merged(method, [x] * count, weights, **full(method)), arrays([x])[0])


@pytest.mark.parametrize(
    "method", [m for m in ALL if SPECS[m].experts[0] == 1 and m not in SELECTING]
)
def test_one_expert_at_weight_one_gives_itself_back(method):
    x = deltas(1)[0]
    assert torch.equal(merged(method, [x], [1.0], **full(method)), x)


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("keep", [0.0, 0.3, 1.0])
def test_revert(keep, axis):
    x = deltas(1)[0]
    table = arrays([x])[0].reshape(SHAPE)
    mav = np.abs(table).mean(axis=0 if axis == "input" else 1)
    rows = np.argsort(-mav)[round(keep * len(mav)) :]
    reverted = table.T.copy() if axis == "input" else table.copy()
    reverted[rows] = 0
    reference = (reverted.T if axis == "input" else reverted).ravel()
    found = merged("revert", [x], keep=keep, axis=axis)
    assert np.array_equal(found.double().numpy(), reference)


@pytest.mark.parametrize("method", DELTAS)
def test_no_change_stays_no_change(method):
    zeros = [torch.zeros(SIZE)] * experts_for(method)
    result = merged(method, zeros)
    assert torch.equal(result, torch.zeros(SIZE))


@pytest.mark.parametrize("method", ALL)
def test_chunks_do_not_show(method):
    parts = deltas(experts_for(method))
    whole = merged(method, parts, chunk=SIZE)
    for chunk in (1, 4, 7, 64, 500):
        assert torch.equal(merged(method, parts, chunk=chunk), whole)


@pytest.mark.parametrize("method", [m for m in ALL if m not in RANDOM and SPECS[m].experts[1] > 2])
def test_order_of_experts_does_not_matter(method):
    parts = deltas(3)
    weights = [1.0, 0.5, 2.0]
    there = merged(method, parts, weights)
    back = merged(method, parts[::-1], weights[::-1])
    torch.testing.assert_close(there, back, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", [m for m in DELTAS if "scale" in SPECS[m].parameters])
def test_scale_is_linear(method):
    parts = deltas(3)
    once, twice = merged(method, parts, scale=1.0), merged(method, parts, scale=2.0)
    torch.testing.assert_close(twice, 2 * once, rtol=1e-6, atol=0)


@pytest.mark.parametrize("buckets", mostly_slow([2, 64, thresholds.BUCKETS], 2, 64))
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
    # A sample that sees only the beginning misleads the search, and must not change its result.
    misled = x.sort().values
    ranks = [int(share * size) for share in (0.0, 0.1, 0.25, 0.5, 0.999, 1.0)]
    for values, threads in ((x, 1), (misled, 3)):
        streams = [
            Stream(
                len(piece),
                lambda piece=piece: ([part.numpy()] for part in piece.split(701)),
                lambda start, stop, piece=piece: [piece[:1].repeat(stop - start).numpy()],
            )
            for piece in values.split(6000)
        ]
        found = magnitude_thresholds(streams, 1, ranks, threads)[0]
        ordered = x.abs().sort(descending=True).values
        for rank, threshold in zip(ranks, found, strict=True):
            assert threshold == (float(ordered[rank - 1]) if rank else math.inf)


def test_thresholds_of_one_pass_where_the_sample_is_fair():
    x = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    passes = []

    def chunks():
        passes.append(1)
        yield from ([part.numpy()] for part in x.split(1 << 18))

    stream = Stream(len(x), chunks, lambda start, stop: [x[start:stop].numpy()])
    (found,) = magnitude_thresholds([stream], 1, (600_000,))
    assert found[0] == float(x.abs().sort(descending=True).values[600_000 - 1])
    assert len(passes) == 1


@pytest.mark.parametrize("method", ["ties", "breadcrumbs"])
def test_what_is_kept_has_the_magnitude_of_the_whole(method):
    settings = {"density": 0.3} | ({"scope": "tensor"} if method == "ties" else {"outliers": 0.1})
    for part in (*deltas(2), torch.zeros(SIZE)):
        kept = np.asarray(merged(method, [part], **settings), dtype=np.float64)
        found = np.asarray(merged(method, [part], **settings, rescale="l1"), dtype=np.float64)
        size, left = np.abs(part.double().numpy()).sum(), np.abs(kept).sum()
        np.testing.assert_allclose(found, kept * (size / left if size else 1), rtol=1e-6)
    settings["rescale"] = "l1"
    one, two = (merged(method, [part], **settings) for part in deltas(2))
    if method == "breadcrumbs":  # each delta is rescaled by itself
        close(merged(method, deltas(2), **settings), np.asarray(one) + np.asarray(two))


def test_model_stock_by_rows():
    parts = [part + deltas(1, seed=9)[0] for part in deltas(3)]
    arrays64 = np.stack([part.double().numpy().reshape(SHAPE) for part in parts])
    expected = []
    for row in range(SHAPE[0]):
        cosines = [
            a @ b / np.linalg.norm(a) / np.linalg.norm(b)
            for i, a in enumerate(arrays64[:, row])
            for b in arrays64[i + 1 :, row]
        ]
        cosine = max(np.mean(cosines), 0)
        expected.append(3 * cosine / (1 + 2 * cosine) * arrays64[:, row].mean(axis=0))
    close(merged("model_stock", parts, angle="row"), np.concatenate(expected))
