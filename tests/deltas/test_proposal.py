"""Proposals: on the published maps, on made-up profiles, and as a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from layerswap.compose import Zones, read_recipe
from layerswap.deltas import measure_delta, suggest, suggest_from
from layerswap.deltas.suggestion import score, write_proposal
from layerswap.errors import LayerswapError
from layerswap.lab.assets import shipped

PUBLISHED = json.loads((Path(__file__).parent.parent / "data" / "published_maps.json").read_text())


def profile(expert: str, columns: slice = slice(None)) -> list[float]:
    layers = PUBLISHED[expert]["layers"]
    rows = [layers[str(layer)][columns] for layer in range(32)]
    return [sum(row) / len(row) for row in rows]


def test_the_published_maps_lead_into_the_papers_ranges():
    found = suggest_from(profile("math_1"), profile("swh_1"))
    zones = found.zones
    assert 3 <= zones.bottom <= 5
    assert 0 <= zones.top <= 2
    assert 0 <= zones.bottom_transition <= 2
    assert 0 <= zones.top_transition <= 2
    assert found.ranked[0][0] == zones
    scores = [value for _, value in found.ranked]
    assert scores == sorted(scores, reverse=True)
    evidence = found.evidence
    assert sum(layer.task for layer in evidence) == pytest.approx(1)
    assert evidence[0].excess > 0.05
    assert evidence[26].excess < 0


def test_an_expert_that_changed_nothing_is_refused():
    lab = shipped()
    atlas = measure_delta(lab.base, {"task": lab.base, "language": lab.task_experts[0]})
    with pytest.raises(LayerswapError, match="task has the weights of its base"):
        suggest(atlas, "task", "language")


@pytest.mark.parametrize("left_out", range(7))
def test_no_single_matrix_decides(left_out):
    """Without any one of the seven matrices, the bottom moves by a layer at most."""
    kept = [column for column in range(7) if column != left_out]
    task, language = (
        [sum(row) / 6 for row in zip(*(profile(e, slice(c, c + 1)) for c in kept), strict=True)]
        for e in ("math_1", "swh_1")
    )
    zones = suggest_from(task, language).zones
    assert 2 <= zones.bottom <= 4
    assert zones.top <= 2


@pytest.mark.slow
def test_small_noise_does_not_move_it():
    """Layers that neither expert changed must not count: shares of a thousandth are noise."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        task, language = (
            np.clip(np.array(profile(e)) + rng.normal(0, 0.003, 32), 0, 1)
            for e in ("math_1", "swh_1")
        )
        zones = suggest_from(list(task), list(language)).zones
        assert 2 <= zones.bottom <= 5
        assert zones.top <= 2


@pytest.mark.parametrize("raised", [0.005, 0.01, 0.02, 0.05])
def test_a_lead_of_hundredths_in_the_lower_half_is_no_reason_to_take_it(raised):
    """A language expert that changed the lower half a little more than the published one."""
    language = [v + raised * (2 <= layer < 16) for layer, v in enumerate(profile("swh_1"))]
    zones = suggest_from(profile("math_1"), language).zones
    assert 3 <= zones.bottom <= 5
    assert zones.top <= 2


@pytest.mark.parametrize("power", [0.5, 0.7, 1.5])
def test_another_threshold_does_not_take_half_of_the_depth(power):
    """Fractions above a lower or a higher threshold bend the profile of an expert."""
    language = [value**power for value in profile("swh_1")]
    zones = suggest_from(profile("math_1"), language).zones
    assert 3 <= zones.bottom <= 5
    assert zones.top <= 2


@pytest.mark.parametrize(
    "zones", [Zones(0, 0), Zones(3, 0), Zones(5, 2), Zones(3, 1, 2, 1), Zones(0, 4, 0, 2)]
)
def test_the_score_is_the_formula(zones):
    t, g = (np.array(profile(e)) / sum(profile(e)) for e in ("math_1", "swh_1"))
    w = np.zeros(32)
    w[: zones.bottom + zones.bottom_transition] = 0.5
    w[: zones.bottom] = 1
    w[32 - zones.top - zones.top_transition :] = 0.5
    w[32 - zones.top :] = 1
    excess = g - t
    price = excess[excess > 0].mean() / 2
    seam = np.abs(np.diff(w)) * (t + g)[:-1] / 4 + np.abs(np.diff(w)) * (t + g)[1:] / 4
    found = suggest_from(profile("math_1"), profile("swh_1"), candidates=[zones])
    prior = (max(0, 3 - zones.bottom) + max(0, zones.bottom - 5) + max(0, zones.top - 2)) / 64
    expected = (w * (excess - price)).sum() - seam.sum() - prior
    assert found.ranked[0][1] == pytest.approx(expected, abs=1e-12)


def test_the_proposal_is_the_best_of_all_swaps():
    rng = np.random.default_rng(1)
    for _ in range(20):
        task, language = rng.dirichlet(np.ones(7)), rng.dirichlet(np.ones(7))
        found = suggest_from(list(task), list(language))
        every = [Zones(b, u) for b in range(7) for u in range(7 - b)]
        best = max(score(zones, found.evidence) for zones in every)
        assert score(found.zones, found.evidence) == pytest.approx(best, abs=1e-11)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_size_of_the_changes_does_not_matter(scale):
    language = [scale * value for value in profile("swh_1")]
    assert suggest_from(profile("math_1"), language).zones == (
        suggest_from(profile("math_1"), profile("swh_1")).zones
    )


def made(layers: int, bottom: int, top: int) -> tuple[list[float], list[float]]:
    outer = [i < bottom or i >= layers - top for i in range(layers)]
    return [0.1 if out else 1.0 for out in outer], [1.0 if out else 0.1 for out in outer]


@pytest.mark.parametrize(
    ("layers", "bottom", "top"), [(8, 1, 1), (8, 3, 2), (16, 2, 0), (32, 6, 4), (80, 12, 5)]
)
def test_zones_that_are_there_are_found(layers, bottom, top):
    found = suggest_from(*made(layers, bottom, top)).zones
    assert abs(found.bottom - bottom) <= 1
    assert abs(found.top - top) <= 1


def test_a_layer_that_the_task_left_alone_costs_nothing():
    task, language = [0, 0, 1, 1, 1, 1, 1, 0], [0.22, 0.2, 0, 0, 0, 0, 0, 0.58]
    assert suggest_from(task, language).zones == Zones(0, 1)
    assert suggest_from(task, language, untouched={0, 1, 7}).zones == Zones(2, 1)


def test_the_shipped_experts_parts_are_found():
    lab = shipped()
    for language, experts in lab.language_experts.items():
        pair = {"task": lab.task_experts[0], language: experts[0]}
        assert suggest(measure_delta(lab.base, pair), "task", language).zones == Zones(2, 1)


def test_nothing_is_taken_where_the_task_leads_everywhere():
    assert suggest_from([1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 0.0]).zones.top == 0


def test_a_middle_is_left_where_the_language_leads_everywhere():
    task = [0.0] * 7 + [1.0]
    zones = suggest_from(task, [1.0] * 7 + [0.0]).zones
    assert sum(vars(zones).values()) < 8


def test_no_change_at_all_is_no_evidence():
    found = suggest_from([0.0] * 8, [0.0] * 8)
    assert all(layer.excess == 0 for layer in found.evidence)
    assert found.zones == Zones(0, 0)


def test_experts_of_different_depth_are_refused():
    with pytest.raises(LayerswapError, match="8 layers of one expert, 7 of the other"):
        suggest_from([1.0] * 8, [1.0] * 7)


def test_given_candidates_are_ranked():
    candidates = [Zones(9, 9), Zones(3, 1), Zones(4, 1)]
    ranked = suggest_from(profile("math_1"), profile("swh_1"), candidates=candidates).ranked
    assert [zones for zones, _ in ranked] == [Zones(3, 1), Zones(4, 1), Zones(9, 9)]


def test_a_proposal_is_a_recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    write_proposal(path, Zones(3, 1, 0, 1), base="b", task="t", language="l")
    recipe = read_recipe(path)
    assert recipe.swap is not None
    assert recipe.swap.zones(32) == Zones(3, 1, 0, 1)
