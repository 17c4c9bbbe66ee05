"""A third expert let into a composition, against the rule written from its definition."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerswap.checkpoint.places import Place
from layerswap.compose import Blend, Zones, read_recipe, soup, swap
from layerswap.deltas import measure_delta
from layerswap.deltas.suggestion import with_third, write_proposal
from layerswap.errors import RecipeError

LAYERS = 4
PARTS = {"attention": "self_attn", "mlp": "mlp"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """State dicts of a base and three experts, and the atlas of the experts."""
    root = tmp_path_factory.mktemp("models")
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=LAYERS,
        num_attention_heads=2,
    )  # fmt: skip
    torch.manual_seed(0)
    base = LlamaForCausalLM(config)
    base.save_pretrained(root / "base")
    found = {"base": base.state_dict()}
    for seed, name in enumerate(("task", "language", "third"), start=1):
        torch.manual_seed(seed)
        expert = LlamaForCausalLM(config)
        expert.load_state_dict(base.state_dict())
        with torch.no_grad():
            for parameter in expert.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.01 * float(torch.rand(())))
        expert.save_pretrained(root / name)
        found[name] = expert.state_dict()
    names = {name: str(root / name) for name in ("task", "language", "third")}
    return found, measure_delta(str(root / "base"), names), root


def shares(states, expert, by):
    """The share of each module in an expert's relative change, in float64."""
    relative = {}
    for name, tensor in states["base"].items():
        role = next((r for r, part in PARTS.items() if part in name), None)
        if role is None:
            continue
        place = Place(int(name.split(".")[2]), role)
        start = tensor.double()
        change = ((states[expert][name].double() - start).norm() / start.norm()).item()
        relative.setdefault(place, []).append(change)
    if by == "layer":
        total = {}
        for place, values in relative.items():
            total[place.layer] = total.get(place.layer, 0.0) + sum(values)
    else:
        total = {place: sum(v**2 for v in values) ** 0.5 for place, values in relative.items()}
    return {key: value / sum(total.values()) for key, value in total.items()}


@pytest.mark.parametrize("by", ["role", "layer"])
@pytest.mark.parametrize("threshold", [0.0, 0.01, 1.0])
def test_the_published_rule_for_two_experts(models, by, threshold):
    states, atlas, _ = models
    alone = soup(LAYERS, ["language"])
    found = with_third(alone, atlas, "third", threshold=threshold, share=0.3, by=by)
    third, language = (shares(states, name, by) for name in ("third", "language"))
    blend = Blend.of({"third": 0.3, "language": 0.7})
    taken = set()
    for key in third:
        gap = third[key] - language[key]
        expected = Blend.of("third" if gap > threshold else "language")
        if abs(gap) <= threshold:
            expected = blend
        place = key if by == "role" else Place(key, "norm")
        assert found[place] == expected, key
        taken.add(expected)
    assert (taken == {blend}) == (threshold == 1.0)
    assert found[Place(None, "embedding")] == found[Place(None, "head")] == blend
    if by == "role":
        assert found[Place(0, "norm")] == Blend.of("language")


def test_over_a_swap_and_as_a_recipe(models, tmp_path):
    _, atlas, root = models
    zones = Zones(1, 1)
    found = with_third(swap(LAYERS, zones=zones), atlas, "third", threshold=0.005)
    path = tmp_path / "recipe.yaml"
    sources = {name: str(root / name) for name in ("base", "task", "language")}
    write_proposal(path, zones, **sources, third=(str(root / "third"), found))
    assert read_recipe(path).resolve(LAYERS) == found
    assert "third" in found.experts


def test_what_is_refused(models):
    _, atlas, _ = models
    with pytest.raises(RecipeError, match="no expert 'safety' in the atlas; it has task"):
        with_third(soup(LAYERS, ["task"]), atlas, "safety")
    with pytest.raises(RecipeError, match="3 layers composed, 4 in the atlas"):
        with_third(soup(3, ["task"]), atlas, "third")
