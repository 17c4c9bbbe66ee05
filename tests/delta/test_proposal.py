"""Proposals: on the published maps, on made-up profiles, and as a recipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerswap.compose import Zones, read_recipe
from layerswap.delta import suggest_from
from layerswap.delta.proposal import write_proposal

PUBLISHED = json.loads((Path(__file__).parent.parent / "data" / "published_maps.json").read_text())


def profile(expert: str, columns: slice = slice(None)) -> list[float]:
    layers = PUBLISHED[expert]["layers"]
    rows = [layers[str(layer)][columns] for layer in range(32)]
    return [sum(row) / len(row) for row in rows]


def test_the_published_maps_lead_into_the_papers_effective_ranges():
    found = suggest_from(profile("math_1"), profile("swh_1"))
    zones = found.zones
    assert 3 <= zones.bottom <= 5
    assert 0 <= zones.top <= 2
    assert 0 <= zones.bottom_transition <= 2
    assert 0 <= zones.top_transition <= 2
    assert found.ranked[0] == (zones, 0.0)
    assert [value for _, value in found.ranked] == sorted(value for _, value in found.ranked)
    evidence = found.evidence
    assert sum(layer.task for layer in evidence) == pytest.approx(1)
    assert evidence[0].lean > 0.5
    assert evidence[26].lean < 0


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


def test_nothing_is_taken_where_the_task_leads_everywhere():
    assert suggest_from([1.0, 1.0, 1.0, 9.0], [1.0, 1.0, 1.0, 0.0]).zones.top == 0


def test_a_middle_is_left_where_the_language_leads_everywhere():
    task = [0.0] * 7 + [1.0]
    zones = suggest_from(task, [1.0] * 7 + [0.0]).zones
    assert sum(vars(zones).values()) < 8


def test_no_change_at_all_is_no_evidence():
    found = suggest_from([0.0] * 8, [0.0] * 8)
    assert all(layer.lean == 0 for layer in found.evidence)
    found.zones.check(8)


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
