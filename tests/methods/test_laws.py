"""Laws that every merge method must obey; a new method gets these tests by being declared."""

from dataclasses import replace

import numpy as np
import pytest
from merged_vectors import SIZE, close, deltas, merged, wide

from layerswap.compose.mergekit_methods import SPELLINGS
from layerswap.methods import METHODS

ALL = sorted(METHODS)
DELTAS = [name for name in ALL if METHODS[name].deltas]
RANDOM = {"dare_linear", "dare_ties", "della", "della_linear"}
SELECTING = {"arcee_fusion"}
"""Methods that always leave something out."""
ZEROS = np.zeros(SIZE, np.float32)


def count_for(method, count=3):
    low, high = METHODS[method].experts
    return int(min(max(count, low), high))


def full(method):
    """Parameters under which the method drops nothing."""
    values = {"density": 1.0, "outliers": 0.0, "epsilon": 0.0, "t": 1e6}
    return {key: value for key, value in values.items() if key in METHODS[method].parameters}


@pytest.mark.parametrize("method", [m for m in ALL if m not in SELECTING])
def test_equal_inputs_give_themselves_back(method):
    (x,) = deltas(1)
    count = count_for(method)
    close(merged(method, [x] * count, [1 / count] * count, **full(method)), wide([x])[0])


@pytest.mark.parametrize(
    "method", [m for m in ALL if METHODS[m].experts[0] == 1 and m not in SELECTING]
)
def test_one_expert_at_weight_one_gives_itself_back(method):
    (x,) = deltas(1)
    assert np.array_equal(merged(method, [x], [1.0], **full(method)), x)


@pytest.mark.parametrize("method", DELTAS)
def test_no_change_stays_no_change(method):
    assert np.array_equal(merged(method, [ZEROS] * count_for(method)), ZEROS)


@pytest.mark.parametrize("method", ALL)
def test_a_method_does_not_change_its_inputs(method, monkeypatch):
    known = METHODS[method]

    def checked(chunk):
        before = [part.copy() for part in chunk.parts]
        result = known.combine(chunk)
        assert all(map(np.array_equal, before, chunk.parts))
        return result

    monkeypatch.setitem(METHODS, method, replace(known, combine=checked))
    merged(method, deltas(count_for(method)))


@pytest.mark.parametrize(
    "method", [m for m in ALL if m not in RANDOM and METHODS[m].experts[1] > 2]
)
def test_order_of_experts_does_not_matter(method):
    parts, weights = deltas(3), [1.0, 0.5, 2.0]
    there, back = merged(method, parts, weights), merged(method, parts[::-1], weights[::-1])
    np.testing.assert_allclose(there, back, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("method", [m for m in DELTAS if "scale" in METHODS[m].parameters])
def test_scale_is_linear(method):
    once, twice = (merged(method, deltas(3), scale=scale) for scale in (1.0, 2.0))
    np.testing.assert_allclose(twice, 2 * once, rtol=1e-6)


@pytest.mark.parametrize("method", ALL)
def test_a_method_names_its_paper(method):
    assert METHODS[method].paper


@pytest.mark.parametrize("name", SPELLINGS)
def test_required_parameters_of_a_spelling_are_declared(name):
    spelling = SPELLINGS[name]
    assert set(spelling.required) <= {*spelling.models, *spelling.shared}
