"""Names of stored tensors against transformers' own mapping, and the names that wrappers add."""

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tests.helpers.effort import sampled
from tests.helpers.merging import refusal

from layerswap.checkpoint.names import canonical, predicting, renaming, unloaded, unwrapped
from layerswap.ground.errors import CheckpointError

TEXT = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
}  # fmt: skip
CLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
QWEN = {"depth": 1, "patch_size": 14, "num_heads": 2}
FAMILIES = {
    "gemma3": lambda: tf.Gemma3ForConditionalGeneration(
        tf.Gemma3Config(
            text_config={**TEXT, "head_dim": 8}, vision_config=CLIP, mm_tokens_per_image=4
        )
    ),
    "llava": lambda: tf.LlavaForConditionalGeneration(
        tf.LlavaConfig(
            text_config={**TEXT, "model_type": "llama"},
            vision_config={**CLIP, "model_type": "clip_vision_model"},
        )
    ),
    "mistral3": lambda: tf.Mistral3ForConditionalGeneration(
        tf.Mistral3Config(
            text_config={**TEXT, "model_type": "mistral", "head_dim": 8},
            vision_config={**CLIP, "model_type": "pixtral", "head_dim": 8},
        )
    ),
    "internvl": lambda: tf.InternVLForConditionalGeneration(
        tf.InternVLConfig(
            text_config={**TEXT, "model_type": "qwen2"},
            vision_config={**CLIP, "image_size": [28, 28], "patch_size": [14, 14]},
        )
    ),
    "qwen2_vl": lambda: tf.Qwen2VLForConditionalGeneration(
        tf.Qwen2VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={**QWEN, "embed_dim": 16, "hidden_size": 16},
        )
    ),
    "qwen2_5_vl": lambda: tf.Qwen2_5_VLForConditionalGeneration(
        tf.Qwen2_5_VLConfig(
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={
                **QWEN, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 16,
            },
        )
    ),
    "paligemma": lambda: tf.PaliGemmaForConditionalGeneration(
        tf.PaliGemmaConfig(
            text_config={**TEXT, "model_type": "gemma", "head_dim": 8},
            vision_config={**CLIP, "model_type": "siglip_vision_model"},
            projection_dim=16,
        )
    ),
    "gpt_neox": lambda: tf.GPTNeoXForCausalLM(
        tf.GPTNeoXConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                         intermediate_size=24)
    ),
    "gpt2": lambda: tf.GPT2LMHeadModel(
        tf.GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    ),
    "nemotron_h": lambda: tf.NemotronHForCausalLM(
        tf.NemotronHConfig(vocab_size=32, hidden_size=16, intermediate_size=24, head_dim=8,
                           num_attention_heads=2, num_key_value_heads=1, mamba_num_heads=4,
                           mamba_head_dim=8, ssm_state_size=8, n_groups=1,
                           layers_block_type=["mamba", "attention", "mlp"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", sampled(FAMILIES, "gpt2"))
def test_stored_names_and_names_in_memory_agree(family, tmp_path):
    """Equal values prove which tensor is which."""
    torch.manual_seed(0)
    model = FAMILIES[family]()
    with torch.no_grad():
        for parameter in model.parameters():  # norms would all be ones
            parameter.normal_(0, 0.02)
    model.save_pretrained(tmp_path)
    stored, memory = load_file(tmp_path / "model.safetensors"), model.state_dict()
    cores = {canonical(name): tensor for name, tensor in memory.items()}
    assert len(cores) == len(memory)
    for name, tensor in stored.items():
        assert torch.equal(tensor, cores[canonical(name)]), name
    new = renaming(list(stored), list(memory))
    assert {new.get(name, name) for name in stored} <= set(memory)


def test_transformers_ignores_what_counts_as_ignored(tmp_path):
    config = tf.Glm4MoeConfig(
        **TEXT, head_dim=8, moe_intermediate_size=8, n_routed_experts=2, num_experts_per_tok=1,
        first_k_dense_replace=1, num_nextn_predict_layers=1,
    )  # fmt: skip
    model = tf.Glm4MoeForCausalLM(config)
    extra = ["model.layers.2.eh_proj.weight", "model.layers.2.self_attn.q_proj.weight",
             "mtp.fc.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"]  # fmt: skip
    names = [*model.state_dict(), *extra]
    assert predicting(names, 2) == set(extra[:3])
    gguf = ["blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", "blk.1.attn_q.weight"]
    assert predicting(gguf, 2) == set(gguf[:2])
    for config in ({}, {"num_kv_shared_layers": 1}):  # without a number of layers
        assert unloaded(names, config) == {extra[3]}
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), **{n: torch.ones(2) for n in extra}}, file, {"format": "pt"})
    _, loading = tf.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]


def test_a_layer_behind_the_last_is_a_mistake_if_it_does_not_predict():
    assert not predicting(["model.layers.2.mlp.up_proj.weight"], 2)


NAMES = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
WRAPPED = (
    "_orig_mod.{}", "module.{}", "base_model.model.{}", "module._orig_mod.{}", "model.{}",
    "_forward_module.model.{}",
)  # fmt: skip


@pytest.mark.parametrize("form", WRAPPED)
def test_wrappers_are_left_out(form):
    found = unwrapped([form.format(name) for name in NAMES])
    assert list(found.values()) == NAMES


@pytest.mark.parametrize("name", ["module.norm.weight", "model.language_model.norm.weight"])
def test_a_prefix_of_some_names_is_no_wrapper(name):
    assert [*unwrapped([*NAMES, name]).values()] == [*NAMES, name]


def test_one_tensor_under_two_names_is_refused():
    with pytest.raises(CheckpointError, match="twice, with and without the words"):
        unwrapped(["model.norm.weight", "model._orig_mod.norm.weight"])


def test_an_unmerged_adapter_is_refused():
    names = [
        "model.layers.0.q_proj.base_layer.weight",
        "model.layers.0.q_proj.lora_A.default.weight",
    ]
    assert refusal(unwrapped, names) == (
        "holds an adapter that is not merged ('model.layers.0.q_proj.base_layer.weight'); merge it "
        "with PEFT's merge_and_unload and save the model again"
    )


def test_names_without_one_counterpart_stay():
    assert renaming(["h.0.ln_1.weight"], ["transformer.h.0.ln_1.weight"]) == {
        "h.0.ln_1.weight": "transformer.h.0.ln_1.weight"
    }
    assert not renaming(["a.weight"], ["b.weight"])
    assert not renaming(["norm.weight"], ["model.norm.weight", "decoder.norm.weight"])
