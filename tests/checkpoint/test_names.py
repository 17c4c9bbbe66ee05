"""Names that transformers ignores, and the names that wrappers add."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.helpers.families import model_of
from tests.helpers.merging import refusal
from transformers import AutoModelForCausalLM

from layerswap.checkpoint.names import predicting, renaming, unloaded, unwrapped
from layerswap.ground.errors import CheckpointError


def test_transformers_ignores_what_counts_as_ignored(tmp_path):
    model = model_of("glm4_moe")
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight",
             "mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq",
             "model.encoder.version"]  # fmt: skip
    names = [*model.state_dict(), *extra]
    assert predicting(names, 2) == set(extra[:3])
    gguf = ["blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", "blk.1.attn_q.weight"]
    assert predicting(gguf, 2) == set(gguf[:2])
    for config in ({}, {"num_kv_shared_layers": 1}):  # without a number of layers
        assert unloaded(names, config) == {*extra[3:]}
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **{n: torch.ones(2) for n in extra}}, file, {"format": "pt"})
    _, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]


def test_a_layer_behind_the_last_is_a_mistake_if_it_does_not_predict():
    assert not predicting(["model.layers.2.mlp.up_proj.weight"], 2)


NAMES = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
WRAPPED = (
    "_orig_mod.{}", "module.{}", "base_model.model.{}", "module._orig_mod.{}", "model.{}",
    "_forward_module.model.{}", "llm.{}", "model.base.{}", "encoder.{}",
)  # fmt: skip


@pytest.mark.parametrize("form", WRAPPED)
def test_wrappers_are_left_out(form):
    found = unwrapped([form.format(name) for name in NAMES], {})
    assert list(found.values()) == NAMES


@pytest.mark.parametrize("name", ["module.norm.weight", "model.language_model.norm.weight"])
def test_a_prefix_of_some_names_is_no_wrapper(name):
    assert [*unwrapped([*NAMES, name], {}).values()] == [*NAMES, name]


def test_one_tensor_under_two_names_is_refused():
    with pytest.raises(CheckpointError, match="twice, with and without the words"):
        unwrapped(["model.norm.weight", "model._orig_mod.norm.weight"], {})


@pytest.mark.parametrize("end", ["base_layer.weight", "modules_to_save.default.weight"])
def test_an_unmerged_adapter_is_refused(end):
    assert refusal(unwrapped, ["model.norm.weight", f"lm_head.{end}"], {}) == (
        f"holds an adapter that is not merged ('lm_head.{end}'); merge it with PEFT's "
        "merge_and_unload and save the model again"
    )


def test_names_with_one_counterpart_change():
    pairs = {
        "h.0.ln_1.weight": "transformer.h.0.ln_1.weight",
        "lm_head.decoder.bias": "lm_head.bias",
    }
    assert renaming(list(pairs), list(pairs.values())) == pairs
    assert not renaming(["a.weight"], ["b.weight"])
    assert not renaming(["norm.weight"], ["model.norm.weight", "decoder.norm.weight"])
