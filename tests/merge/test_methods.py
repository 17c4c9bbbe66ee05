"""Every merge method against a plain float64 reference written from its paper.

The references see whole tensors and sort; the methods see chunks and never sort.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from merging import elect_and_average, keep_first, keep_largest

from layerswap.compose.blend import METHODS as SPECS
from layerswap.deltas.measure import Rows
from layerswap.merge import thresholds
from layerswap.merge.methods import METHODS, Chunk, kept_rows
from layerswap.merge.thresholds import Stream, magnitude_thresholds

SIZE = 1003
SHAPE = (17, 59)


def deltas(count, seed=0, scale=1e-3):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, generator=generator) * scale * (i + 1) for i in range(count)]


def merged(method, parts, weights=None, *, chunk=97, name="w", **parameters):
    """What the method makes of whole tensors, chunk by chunk, measured as the engine does."""
    values = {key: p.default for key, p in SPECS[method].parameters.items()} | parameters
    weights = weights or [1.0] * len(parts)

    def chunks():
        for start in range(0, len(parts[0]), chunk):
            yield [part[start : start + chunk].clone() for part in parts]

    ranks = METHODS[method].ranks(values, len(parts[0]))
    stream = Stream(len(parts[0]), chunks, lambda a, b: [part[a:b] for part in parts])
    found = magnitude_thresholds([stream], len(parts), ranks) if ranks else ()
    stacked = torch.stack(parts).double()
    gram = stacked @ stacked.T if METHODS[method].gram else None
    fishers = fishers_of(parts) if SPECS[method].fisher else []
    kept = kept_elements(parts[0], values) if METHODS[method].rows else None
    results, start = [], 0
    for pieces in chunks():
        before = [piece.clone() for piece in pieces]
        results.append(
            METHODS[method].combine(
                Chunk(
                    pieces,
                    weights,
                    values,
                    found,
                    gram,
                    name=name,
                    start=start,
                    fishers=[fisher[start : start + len(pieces[0])] for fisher in fishers],
                    base=None if kept is None else torch.zeros(len(pieces[0])),
                    kept=None if kept is None else kept[start : start + len(pieces[0])],
                )
            )
        )
        assert all(torch.equal(a, b) for a, b in zip(before, pieces, strict=True)), "parts changed"
        start += len(pieces[0])
    return torch.cat(results)


def kept_elements(part, parameters):
    """Which elements a method of rows keeps, `part` being a matrix beside a base of zeros."""
    rows = Rows.of(SHAPE, parameters["axis"])
    mav = part.view(SHAPE).abs().double().mean(dim=0 if parameters["axis"] == "input" else 1)
    return rows.spread(kept_rows(mav, parameters), 0, SIZE)


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
    result = METHODS["dare_linear"].combine(Chunk([part], [1.0], values, name="w"))
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
    fishers = [torch.full((SIZE,), 1e-18), torch.full((SIZE,), 3e-18)]
    values = {"floor": 1e-20, "normalise": "none"}
    result = METHODS["fisher"].combine(Chunk(parts, [1.0, 1.0], values, fishers=fishers))
    close(result, np.average(arrays(parts), 0, [1, 3]))


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


# The battery: what must hold of every method, so that a new one gets it for its entry.

ALL = sorted(METHODS)
DELTAS = [name for name in ALL if SPECS[name].base]
RANDOM = {"dare_linear", "dare_ties"}


def experts_for(method, count=3):
    low, high = SPECS[method].experts
    return int(min(max(count, low), high))


def full(method):
    """Parameters under which the method drops nothing."""
    names = SPECS[method].parameters
    return {key: value for key, value in {"density": 1.0, "outliers": 0.0}.items() if key in names}


def test_every_method_of_a_recipe_is_computed_and_nothing_else():
    assert METHODS.keys() == SPECS.keys()


@pytest.mark.parametrize("method", ALL)
def test_equal_inputs_give_themselves_back(method):
    x = deltas(1)[0]
    count = experts_for(method)
    weights = [1 / count] * count
    close(merged(method, [x] * count, weights, **full(method)), arrays([x])[0])


@pytest.mark.parametrize("method", [m for m in ALL if SPECS[m].experts[0] == 1])
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


@pytest.mark.parametrize("buckets", [2, 64, thresholds.BUCKETS])
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
                lambda piece=piece: ([part] for part in piece.split(701)),
                lambda start, stop, piece=piece: [piece[:1].repeat(stop - start)],
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
        yield from ([part] for part in x.split(1 << 18))

    stream = Stream(len(x), chunks, lambda start, stop: [x[start:stop]])
    (found,) = magnitude_thresholds([stream], 1, (600_000,))
    assert found[0] == float(x.abs().sort(descending=True).values[600_000 - 1])
    assert len(passes) == 1
