"""Merges whose layers are repeated, dropped or moved."""

import json

import pytest
import torch
from merging import recipe_plan, tensors_of

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.views import restack, restacked_config
from layerswap.ground.errors import MergeError
from layerswap.merge.verification import verify


def plan_of(experts, *slices, method="passthrough", **more):
    """A plan of slices, each with its sources as (model, first layer, layer after the last)."""
    parts = [
        {
            "sources": [
                {"model": name, "layer_range": [first, stop]} for name, first, stop in sources
            ]
        }
        for sources in slices
    ]
    base = {"base": str(experts["base"])} if "base_model" in more else {}
    recipe = {"merge_method": method, "slices": parts, **more}
    named = {"a": str(experts["task"]), "b": str(experts["language"])}
    return recipe_plan({"experts": named, "mergekit": recipe, **base})


def test_every_layer_is_the_one_it_is_taken_from(experts, tmp_path):
    plan = plan_of(experts, [("b", 0, 1)], [("a", 1, 3)], [("a", 1, 2)], [("b", 2, 4)])
    result = tensors_of(plan.save(tmp_path / "out"))
    sources = {"a": tensors_of(experts["task"]), "b": tensors_of(experts["language"])}
    for layer, (source, taken) in enumerate(zip("baaabb", (0, 1, 2, 1, 2, 3), strict=True)):
        inside = [name for name in result if name.startswith(f"model.layers.{layer}.")]
        assert len(inside) == 9
        for name in inside:
            old = name.replace(f"layers.{layer}.", f"layers.{taken}.")
            assert torch.equal(result[name], sources[source][old]), name
    assert torch.equal(result["lm_head.weight"], sources["b"]["lm_head.weight"])
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["num_hidden_layers"] == 6


def test_the_model_has_the_new_depth_and_its_record_makes_it_again(experts, tmp_path):
    from transformers import AutoModelForCausalLM

    names = ("a", "b", "base")
    first, again = ([(name, *layers) for name in names] for layers in ((0, 2), (1, 3)))
    plan = plan_of(experts, first, again, method="task_arithmetic", base_model="base",
                   parameters={"weight": 0.4})  # fmt: skip
    out = plan.save(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert len(model.model.layers) == model.config.num_hidden_layers == 4
    loaded = plan.load().state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors_of(out).items())
    assert verify(out).passed


def test_a_virtual_model_has_the_new_depth(experts):
    from layerswap.engine.virtual import VirtualModel

    plan = plan_of(experts, [("a", 0, 4)], [("b", 2, 4)])
    result, expected = VirtualModel([plan]).switch(0).state_dict(), plan.load().state_dict()
    assert all(torch.equal(tensor, result[name]) for name, tensor in expected.items())


def test_missing_layers_are_refused(experts):
    with pytest.raises(MergeError, match="no layer 7; it has 4 layers"):
        restack(open_checkpoint(experts["task"]), [0, 7])


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
