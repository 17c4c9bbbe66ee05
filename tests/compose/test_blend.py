"""Blends: weights that sum to 1, and nesting against plain float arithmetic."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from layerswap.compose.blend import Blend
from layerswap.ground.errors import RecipeError

NAMES = st.sampled_from("abcdef")
WEIGHTS = st.dictionaries(NAMES, st.floats(1e-6, 1e6), min_size=1)


def test_one_expert_is_verbatim_whatever_its_weight():
    assert Blend.of("a") == Blend.of({"a": 7}) == Blend.of({"a": 7, "b": 0})
    assert Blend.of("a").verbatim
    assert not Blend.of({"a": 1, "b": 1}).verbatim
    assert str(Blend.of("a")) == "a"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": -1.0}, "weight of 'a' is -1.0; it must be finite and not negative"),
        ({"a": math.nan}, "weight of 'a' is nan; it must be finite and not negative"),
        ({"a": math.inf}, "weight of 'a' is inf; it must be finite and not negative"),
        ({"a": 0.0}, "weights {'a': 0.0} must have a positive, finite sum"),
        ({}, "weights {} must have a positive, finite sum"),
        (
            {"a": 1e308, "b": 1e308},
            "weights {'a': 1e+308, 'b': 1e+308} must have a positive, finite sum",
        ),
    ],
)
def test_refuses_weights_that_cannot_be_normalised(weights, message):
    assert refused(RecipeError, Blend.of, weights) == message


def test_a_share_that_underflows_is_left_out():
    assert Blend.of({"a": 1e-320, "b": 1e300}) == Blend.of("b")


@given(WEIGHTS)
def test_weights_are_normalised(weights):
    blend = Blend.of(weights)
    assert math.isclose(math.fsum(w for _, w in blend.weights), 1, rel_tol=1e-15)
    total = math.fsum(weights.values())
    assert dict(blend.weights) == pytest.approx({e: w / total for e, w in weights.items()})


@given(WEIGHTS)
def test_normalising_twice_changes_no_bit(weights):
    blend = Blend.of(weights)
    assert Blend.of(dict(blend.weights)) == blend


@given(st.dictionaries(WEIGHTS.map(Blend.of), st.floats(1e-3, 1e3), min_size=1))
def test_nesting_is_the_weighted_average_of_the_parts(parts):
    values = {name: float(i * i - 3) for i, name in enumerate("abcdef")}

    def value(blend):
        return math.fsum(w * values[e] for e, w in blend.weights)

    expected = math.fsum(w * value(b) for b, w in parts.items()) / math.fsum(parts.values())
    assert value(Blend.nested(parts)) == pytest.approx(expected, rel=1e-9, abs=1e-9)
