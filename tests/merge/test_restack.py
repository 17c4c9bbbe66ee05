"""Merges whose layers are repeated, dropped or moved."""

from __future__ import annotations

import json

import pytest
import torch
from merging import recipe_plan, save_expert, tensors_of, tiny_llama

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.views import restack, restacked_config
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.merge import verify


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    for seed, name in enumerate("abc"):
        save_expert(folder / name, tiny_llama(), seed)
    return folder


def plan_of(experts, **recipe):
    names = {name: str(experts / name) for name in "ab"}
    base = {"base": str(experts / "c")} if "merge" in recipe else {}
    return recipe_plan({"experts": names, **base, **recipe})


SWAP = {"task": "a", "language": "b", "bottom": 1, "top": 2, "outside": "task"}


def test_every_layer_is_the_one_it_is_taken_from(experts, tmp_path):
    plan = plan_of(experts, stack=["0-2", "1-3"], swap=SWAP)
    result = tensors_of(plan.save(tmp_path / "out"))
    sources = {name: tensors_of(experts / name) for name in "ab"}
    for layer, (source, taken) in enumerate(zip("baaabb", (0, 1, 2, 1, 2, 3), strict=True)):
        inside = [name for name in result if name.startswith(f"model.layers.{layer}.")]
        assert len(inside) == 9
        for name in inside:
            old = name.replace(f"layers.{layer}.", f"layers.{taken}.")
            assert torch.equal(result[name], sources[source][old]), name
    assert torch.equal(result["lm_head.weight"], sources["a"]["lm_head.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 6


def test_the_model_has_the_new_depth_and_its_record_makes_it_again(experts, tmp_path):
    from transformers import AutoModelForCausalLM

    recipe = {"method": "task_arithmetic", "experts": {"a": 0.5, "b": 0.3}}
    plan = plan_of(experts, stack=["0-1", "1-2", "0"], merge=recipe)
    out = plan.save(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(model.model.layers) == model.config.num_hidden_layers == 5
    loaded = plan.load().state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors_of(out).items())
    assert verify(out).passed


def test_a_virtual_model_has_the_new_depth(experts):
    from layerswap.engine.virtual import VirtualModel

    plans = plan_of(experts, stack=["0-3", "2-3"], swap=SWAP).grid(bottom=[0, 1], top=[0, 5])
    virtual = VirtualModel(plans)
    for i, plan in enumerate(plans):
        result, expected = virtual.switch(i).state_dict(), plan.load().state_dict()
        assert all(torch.equal(tensor, result[name]) for name, tensor in expected.items())


def test_missing_layers_are_refused(experts):
    with pytest.raises(RecipeError, match="layers: 2-4 is not inside 0-3"):
        plan_of(experts, stack=["2-4"], swap=SWAP)
    with pytest.raises(MergeError, match="no layer 7; it has 4 layers"):
        restack(open_checkpoint(experts / "a"), [0, 7])


def test_configurations_list_every_layer():
    config = {
        "num_hidden_layers": 4,
        "layer_types": [*"abab"],
        "mlp_only_layers": [1],
        "x": [1] * 4,
    }
    assert restacked_config(config, (0, 1, 1, 3), "m") == {
        "num_hidden_layers": 4, "layer_types": [*"abbb"], "mlp_only_layers": [1, 2], "x": [1] * 4,
    }  # fmt: skip
    inner = restacked_config({"text_config": {"num_hidden_layers": 4}}, (0,), "m")
    assert inner == {"text_config": {"num_hidden_layers": 1}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_kv_shared_layers": 2}, "m: its last layers share keys and values"),
        (
            {"sliding_window_pattern": 2},
            "m: moving layers changes the kind of layer 1 .`sliding_window_pattern`",
        ),
        (
            {"first_k_dense_replace": 1},
            "m: moving layers changes the kind of layer 1 .`first_k_dense_replace`",
        ),
    ],
)
def test_layers_of_changed_kind_are_refused(config, message):
    with pytest.raises(MergeError, match=message):
        restacked_config({"num_hidden_layers": 4, **config}, (0, 0, 1), "m")
