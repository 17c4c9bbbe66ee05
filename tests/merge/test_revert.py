"""Reverting part of an expert to the base, against masks computed directly."""

from __future__ import annotations

import pytest
import torch
from merging import (
    change_tensors,
    check_equal,
    copied,
    half,
    layer_of,
    raw,
    recipe_plan,
    refusal,
    save_adapter,
    save_expert,
    tensors_of,
    tiny_llama,
)

import layerswap as ls
from layerswap.compose.presets import partition


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A base, and an expert near it; both bfloat16, so that deltas do not add back exactly."""
    root = tmp_path_factory.mktemp("revert")
    base = save_expert(root / "base", tiny_llama(), 0, dtype=torch.bfloat16)
    expert = save_expert(root / "expert", tiny_llama(), 1, dtype=torch.bfloat16)
    return base, expert


def mavs(base: torch.Tensor, expert: torch.Tensor, axis: str) -> torch.Tensor:
    delta = (expert.double() - base.double()).abs()
    if delta.dim() < 2:
        return delta.mean().reshape(1)
    return delta.mean(dim=0 if axis == "input" else 1)


def masked(base, expert, kept, axis):
    if base.dim() < 2:
        return expert if kept[0] else base
    return torch.where(kept[None, :] if axis == "input" else kept[:, None], expert, base)


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 1.0])
def test_the_rows_that_changed_most_are_kept(pair, tmp_path, keep, axis):
    start, end = map(tensors_of, pair)
    plan = ls.revert(*pair, keep=keep, axis=axis)
    for name, result in tensors_of(plan.save(tmp_path / "out")).items():
        mav = mavs(start[name], end[name], axis)
        kept = torch.zeros(len(mav), dtype=torch.bool)
        kept[mav.argsort(descending=True, stable=True)[: round(keep * len(mav))]] = True
        check_equal(result, masked(start[name], end[name], kept, axis), name)


@pytest.mark.parametrize("axis", ["input", "output"])
def test_a_threshold_keeps_what_reaches_it(pair, tmp_path, axis):
    start, end = map(tensors_of, pair)
    threshold = 0.054
    plan = ls.revert(*pair, threshold=threshold, axis=axis)
    some = 0
    for name, result in tensors_of(plan.save(tmp_path / "out", threads=3)).items():
        kept = mavs(start[name], end[name], axis) >= threshold
        some += int(0 < kept.sum() < len(kept))
        check_equal(result, masked(start[name], end[name], kept, axis), name)
    assert some > 10, "the case tells nothing"


def largest_of_the_model(start, end, keep, axis="input"):
    """What is left of an expert when the `keep` share of all its rows is kept."""
    every = torch.cat([mavs(start[n], end[n], axis) for n in start])
    count = round(keep * len(every))
    floor = every.sort(descending=True).values[count - 1] if count else float("inf")
    return {n: masked(start[n], end[n], mavs(start[n], end[n], axis) >= floor, axis) for n in start}


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("keep", [0.02, 0.2, 0.3, 0.9])
def test_the_rows_of_the_whole_model_can_be_ranked_together(pair, tmp_path, keep, axis):
    expected = largest_of_the_model(*map(tensors_of, pair), keep, axis)
    plan = ls.revert(*pair, keep=keep, scope="model", axis=axis)
    for name, result in tensors_of(plan.save(tmp_path / "out", threads=3)).items():
        check_equal(result, expected[name], name)


def test_a_negative_zero_of_the_expert_stays_one(pair, tmp_path):
    """A kept entry is the expert's own, and no sum: base + 0 would be the base's zero."""
    name = "model.layers.2.mlp.up_proj.weight"
    spoilt = [copied(folder, tmp_path / folder.name) for folder in pair]
    for folder, zero in zip(spoilt, (0.0, -0.0), strict=True):
        tensor = tensors_of(folder)[name]
        tensor[0] = zero
        change_tensors(folder, {name: tensor})
    result = tensors_of(ls.revert(*spoilt, keep=1.0).save(tmp_path / "out"))
    assert raw(result[name]) == raw(tensors_of(spoilt[1])[name])


def test_layers_and_roles_go_back(pair, tmp_path):
    start, end = map(tensors_of, pair)
    plan = ls.revert(*pair, layers=["0-1", "outside"], roles=["attention", "embedding"])
    for name, result in tensors_of(plan.save(tmp_path / "out")).items():
        back = "embed" in name or ("self_attn" in name and layer_of(name) in (0, 1))
        check_equal(result, (start if back else end)[name], name)


@pytest.mark.parametrize("part", ["task", "language"])
@pytest.mark.parametrize("name", ["A", "B", "C", "Z"])
def test_a_part_of_a_partition_is_kept(pair, tmp_path, name, part):
    start, end = map(tensors_of, pair)
    plan = ls.revert(*pair, partition=name, part=part)
    places = plan.experts["expert"].places
    sides = {"task": "base", "language": "base", part: "expert"}
    whose = partition(name, 4, task=sides["task"], language=sides["language"])
    for tensor, result in tensors_of(plan.save(tmp_path / "out")).items():
        taken = whose[places[tensor]].experts[0]
        check_equal(result, (end if taken == "expert" else start)[tensor], tensor)


def test_conv1d_rows_are_input_features(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=16, vocab_size=20)
    base = save_expert(tmp_path / "base", config, 0)
    expert = save_expert(tmp_path / "expert", config, 1)
    start, end = tensors_of(base), tensors_of(expert)
    result = tensors_of(ls.revert(base, expert, keep=0.25).save(tmp_path / "out"))
    name = next(n for n in start if n.endswith("h.0.mlp.c_fc.weight"))
    mav = (end[name] - start[name]).abs().mean(dim=1)
    kept = torch.zeros(8, dtype=torch.bool)
    kept[mav.argsort(descending=True)[:2]] = True
    check_equal(result[name], torch.where(kept[:, None], end[name], start[name]))


def test_an_adapter_is_reverted_over_its_base(tmp_path):
    base = save_expert(tmp_path / "base", tiny_llama(), 0)
    save_adapter(tmp_path / "lora", base, 1, r=2, target_modules=["q_proj", "up_proj"])
    result = tensors_of(ls.revert(base, tmp_path / "lora", layers=["0-2"]).save(tmp_path / "out"))
    start = tensors_of(base)
    changed = {name for name in start if not torch.equal(result[name], start[name])}
    assert changed == {
        "model.layers.3.self_attn.q_proj.weight", "model.layers.3.mlp.up_proj.weight"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "choose one way to revert"),
        ({"keep": 0.5, "layers": ["1"]}, "choose one way to revert"),
        ({"keep": 0.5, "threshold": 0.1}, "choose one way to revert"),
        ({"partition": "A"}, "`partition` needs the part that the expert keeps"),
        ({"keep": 0.5, "part": "task"}, "`part` needs `partition`; give the name of a partition"),
        ({"partition": "Q", "part": "task"}, "revert: partition.name: "),
        ({"keep": 1.5}, "1.5 is not a number from 0 to 1"),
        ({"threshold": -1.0}, "-1.0 is not a number from 0"),
        ({"layers": ["9"]}, "9 is not inside 0-3"),
        ({"keep": 0.5, "axis": "row"}, "'row' is not one of input, output"),
    ],
)
def test_mistakes(pair, settings, message):
    assert message in refusal(ls.revert, *pair, **settings)


def test_a_soup_of_the_reverted_is_written_as_any_other(pair, tmp_path):
    """Ranked over the whole model, inside a recipe, and below a blend."""
    base, expert = pair
    other = save_expert(tmp_path / "other", tiny_llama(), 2, dtype=torch.bfloat16)
    merge = {"method": "revert", "experts": ["math"], "keep": 0.2, "scope": "model"}
    experts = {"math": expert, "sparse": {"merge": merge}, "swahili": other}
    plan = recipe_plan(base=base, experts=experts, soup={"experts": ["sparse", "swahili"]})
    result = tensors_of(plan.save(tmp_path / "out"))
    sparse = largest_of_the_model(tensors_of(base), tensors_of(expert), 0.2)
    for name, tensor in tensors_of(other).items():
        check_equal(result[name], half(sparse[name], tensor), name)
