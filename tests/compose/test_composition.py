"""Compositions: every place has a blend; copies, nesting, JSON, determinism and purity."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.composition import Composition, all_places
from layerswap.compose.presets import soup, swap
from layerswap.ground.errors import RecipeError

BLENDS = st.dictionaries(st.sampled_from("abcd"), st.floats(1e-3, 1e3), min_size=1).map(Blend.of)


@st.composite
def compositions(draw):
    layers = draw(st.integers(1, 3))
    return Composition(layers, {place: draw(BLENDS) for place in all_places(layers)})


def test_refuses_missing_and_unknown_places():
    blends = dict(swap(2).blends)
    blends[Place(2, "mlp")] = blends.pop(Place(1, "mlp"))
    assert refused(RecipeError, Composition, 2, blends) == (
        "places that are missing, or not of 2 layers: 1 mlp, 2 mlp"
    )
    with pytest.raises(RecipeError, match=r"^a model has at least 1 layer, not 0$"):
        Composition.build(0, lambda place: Blend.of("a"))


def test_is_immutable_and_does_not_share_its_dict():
    blends = dict(soup(1, ["a"]).blends)
    composition = Composition(1, blends)
    blends.clear()
    assert composition[Place(0, "mlp")] == Blend.of("a")
    with pytest.raises(TypeError):
        composition.blends[Place(0, "mlp")] = Blend.of("b")


def test_replace_and_hash():
    plan = swap(8)
    other = plan.replace({Place(3, "mlp"): Blend.of("x")})
    assert other != plan
    assert [p for p in all_places(8) if other[p] != plan[p]] == [Place(3, "mlp")]
    assert hash(plan) == hash(swap(8))
    assert plan == swap(8)


@given(compositions(), BLENDS)
def test_rename_flattens_to_float_arithmetic(composition, inner):
    flat = composition.rename({"a": inner})
    for place, blend in composition.blends.items():
        outer = dict(blend.weights)
        share = outer.pop("a", 0.0)
        for name in "abcd":
            expected = outer.get(name, 0.0) + share * dict(inner.weights).get(name, 0.0)
            result = dict(flat[place].weights).get(name, 0.0)
            assert math.isclose(result, expected, rel_tol=1e-12, abs_tol=1e-15)
