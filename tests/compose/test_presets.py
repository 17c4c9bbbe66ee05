"""Swaps against a literal transcription of Algorithm 1, partitions against the paper's words."""

from functools import partial
from itertools import product

import pytest
from refusals import refused

from layerswap.checkpoint.places import Place
from layerswap.compose.blend import Blend
from layerswap.compose.presets import Zones, default_zones, instruct, partition, swap, zone_grid
from layerswap.ground.errors import RecipeError


def algorithm_1(layers, b, u, t_b, t_u, *, joined_by):
    """Lines 2 to 8 of the paper's Algorithm 1, joined in line 5 by `or` (as printed) or `and`."""
    taken = []
    for l in range(layers):  # noqa: E741 - the paper's letter
        if l < b or l > layers - 1 - u:
            taken.append("language")
        elif joined_by([l > b - 1 + t_b, l < layers - u - t_u]):
            taken.append("task")
        else:
            taken.append("blend")
    return taken


def taken(composition):
    """What the mlp of each layer takes; raises where a layer's roles differ."""
    result = []
    for layer in range(composition.layers):
        blends = {composition[Place(layer, r)] for r in ("attention", "mlp", "norm", "other")}
        (blend,) = blends
        result.append(str(blend) if blend.verbatim else "blend")
    return result


def zones_up_to(largest):
    for layers in range(1, largest + 1):
        for sizes in product(range(layers + 1), repeat=4):
            yield layers, sizes


def test_erratum_as_printed_no_transition_layer_ever_exists():
    fits = 0
    for layers, sizes in zones_up_to(8):
        if sum(sizes) <= layers:
            fits += 1
            assert "blend" not in algorithm_1(layers, *sizes, joined_by=any)
    assert fits == 1286  # C(L+4, 4) for L from 1 to 8, summed


def test_erratum_with_and_algorithm_1_is_our_swap():
    blended = 0
    for layers, sizes in zones_up_to(8):
        if sum(sizes) <= layers:
            expected = algorithm_1(layers, *sizes, joined_by=all)
            assert taken(swap(layers, zones=Zones(*sizes))) == expected
            blended += expected.count("blend")
            assert expected.count("blend") == sizes[2] + sizes[3]
    assert blended > 0


@pytest.mark.parametrize(
    ("layers", "bottom", "top"),
    [(2, 1, 1), (8, 1, 1), (16, 3, 1), (24, 4, 2), (28, 4, 2), (32, 5, 2), (36, 6, 2), (80, 13, 5)],
)
def test_defaults_scale_rounded_half_up(layers, bottom, top):
    assert default_zones(layers) == Zones(bottom, top)
    assert taken(swap(layers)).count("language") == bottom + top


def test_zone_grid_leaves_out_what_does_not_fit():
    grid = list(zone_grid(4, bottom=[1, 4], top=[0, 1], bottom_transition=[0, 3]))
    assert grid == [Zones(1, 0, 0), Zones(1, 0, 3), Zones(1, 1, 0), Zones(4, 0, 0)]
    paper = zone_grid(32, bottom=[3, 4, 5], top=[0, 1, 2], bottom_transition=[0, 1, 2])
    assert len(list(paper)) == 27


def literal(name, layer, role, layers, bottoms, tops):
    """Section 3.3 in its own words: who is allocated the `role` of a layer."""
    b, t = bottoms, tops
    outer = layer in [*range(layers)][:b] or layer in [*range(layers)][-t:]
    if name == "A":  # all attention; mlp in the first six and last two
        return "language" if role == "attention" or outer else "task"
    if name in "BC":
        return "language" if outer else "task"
    return "task" if outer else "language"


@pytest.mark.parametrize("name", "ABCZ")
@pytest.mark.parametrize(
    ("layers", "a_counts", "b_counts"),
    [(8, (2, 1), (2, 1)), (16, (3, 1), (4, 2)), (28, (5, 2), (7, 4)), (32, (6, 2), (8, 4)),
     (36, (6, 2), (8, 4))],
)  # fmt: skip
def test_partitions(name, layers, a_counts, b_counts):
    counts = a_counts if name in "AC" else b_counts
    composition = partition(name, layers)
    for layer, role in product(range(layers), ("attention", "mlp", "norm", "other")):
        expected = literal(name, layer, role, layers, *counts)
        assert composition[Place(layer, role)] == Blend.of(expected), (layer, role)
    inner = "language" if name == "Z" else "task"
    assert composition[Place(None, "embedding")] == Blend.of(inner)
    assert partition(name, layers, outside="language")[Place(None, "head")] == Blend.of("language")


def test_a_chat_vector_by_layer():
    result = instruct(6, weight=0.8, zones=Zones(1, 0, 1, 1), outside="language")
    shares = []
    for layer in range(6):
        (member,) = result[Place(layer, "mlp")].members
        weights = {} if isinstance(member, str) else {str(b): w for b, w in member.inputs}
        assert isinstance(member, str) or (member.base, weights["language"]) == (
            Blend.of("base"),
            1,
        )
        shares.append(weights.get("instruct", 0.0))
    assert shares == pytest.approx([0, 0.4, 0.8, 0.8, 0.8, 0.4])
    assert result[Place(None, "embedding")] == result[Place(None, "head")] == Blend.of("language")


@pytest.mark.parametrize(
    ("preset", "message"),
    [
        (partial(swap, 8, zones=Zones(5, 2, 1, 1)), "zones overlap: bottom 5 + top 2 + "
         "bottom_transition 1 + top_transition 1 = 9, but there are 8 layers"),
        (partial(swap, 8, zones=Zones(9, 0)), "zones overlap: bottom 9 = 9, but there are 8 "
         "layers"),
        (partial(swap, 8, zones=Zones(-1, 0)), "bottom is -1; write a number of layers from 0"),
        (partial(swap, 8, zones=Zones(1, 1, 0, -2)), "top_transition is -2; write a number of "
         "layers from 0"),
        (partial(partition, "D", 32), "no partition 'D'; there are A, B, C, Z"),
        (partial(partition, "B", 1), "zones overlap: bottom 1 + top 1 = 2, but there are 1 layers"),
        (partial(instruct, 4, zones=Zones(3, 2)), "zones overlap: bottom 3 + top 2 = 5, but there "
         "are 4 layers"),
    ],
)  # fmt: skip
def test_illegal_presets(preset, message):
    assert refused(RecipeError, preset) == message
