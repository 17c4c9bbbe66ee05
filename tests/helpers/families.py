"""Families of transformers, as tiny as they go: language models, mixtures, multimodal models."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

LAYERS = 2

IDS = {"bos_token_id": 1, "eos_token_id": 2}
HALF = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
TEXT = IDS | HALF | {
    "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
GPT = IDS | {"vocab_size": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
FALCON = IDS | HALF
FAIRSEQ = {"vocab_size": 64, "ffn_dim": 48, "max_position_embeddings": 64}
OPT = FAIRSEQ | HALF
MOE = TEXT | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
SHARED = TEXT | {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}  # fmt: skip
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
GEMMA_4 = TEXT | PER_LAYER
GEMMA_4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA_3N = PER_LAYER | {
    "laurel_rank": 4, "altup_num_inputs": 2, "num_kv_shared_layers": 1,
    "layer_types": ["full_attention"] * LAYERS, "activation_sparsity_pattern": [0.0] * LAYERS,
}  # fmt: skip
# Three layers, where the decoders have two: a mix-up of the stacks would show.
IMAGE = {"hidden_size": 32, "intermediate_size": 48, "patch_size": 14}
VISION = IMAGE | {"num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28}
QWEN_VISION = IMAGE | {"depth": 3, "out_hidden_size": 32, "num_heads": 4}
MLLAMA_VISION = IMAGE | {
    "num_hidden_layers": 3, "num_global_layers": 1, "attention_heads": 4, "image_size": 28,
    "vision_output_dim": 64, "intermediate_layers_indices": [1],
}  # fmt: skip
LLAMA_4 = MOE | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
LLAMA_4_VISION = VISION | {
    "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
}  # fmt: skip
MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8,
    "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_dt_rank": 4,
}  # fmt: skip
STATE = TEXT | {"state_size": 8}
HYBRID = TEXT | MAMBA
SECOND_OF_TWO = {"layer_types": ["conv", "full_attention"]}


class Family(NamedTuple):
    """`linear`: role of bare Linear modules. `outside`: roles that no module class reveals."""

    model_type: str
    config: dict[str, Any]
    linear: str | None = None
    outside: dict[str, str] = {}  # never written


def _wrapped(model_type: str, text: dict, vision: dict, **more: Any) -> Family:
    return Family(model_type, {"text_config": text, "vision_config": vision} | more)


PLAIN = (
    "llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text vaultgemma cohere "
    "cohere2 phi3 phi olmo olmo2 olmo3 gpt_neox starcoder2 glm glm4 granite smollm3 stablelm "
    "nemotron exaone4 apertus ernie4_5 seed_oss helium arcee hunyuan_v1_dense bitnet persimmon "
    "jais2 nanochat cwm hyperclovax diffllama doge"
)
EXPERTS = (
    "mixtral qwen2_moe qwen3_moe olmoe granitemoe gpt_oss phimoe minimax_m2 flex_olmo mellum "
    "cohere2_moe exaone_moe afmoe"
)
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
CLIP = VISION | {"model_type": "clip_vision_model"}
GEMMA_OTHER = {"per_layer_model_projection": "other", "per_layer_projection_norm": "other"}
FAMILIES: dict[str, Family] = {
    **{name: Family(name, TEXT) for name in PLAIN.split()},
    **{name: Family(name, MOE) for name in EXPERTS.split()},
    "llama-biases": Family("llama", TEXT | {"attention_bias": True, "mlp_bias": True}),
    "llama-tied": Family("llama", TEXT | {"tie_word_embeddings": True}),
    "cohere-qk-norm": Family("cohere", TEXT | {"use_qk_norm": True}),
    "phi-qk-norm": Family("phi", TEXT | {"qk_layernorm": True}),
    "stablelm-qk-norm": Family("stablelm", TEXT | {"qk_layernorm": True, "use_qkv_bias": True}),
    "neox-sequential": Family("gpt_neox", TEXT | {"use_parallel_residual": False}),
    "hunyuan_v1_moe": Family("hunyuan_v1_moe", MOE | {"moe_topk": [2, 2]}),
    "granitemoeshared": Family("granitemoeshared", MOE | {"shared_intermediate_size": 16}),
    "ernie4_5_moe": Family(
        "ernie4_5_moe",
        TEXT
        | {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
        | {"moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "deepseek_v2": Family("deepseek_v2", SHARED | LATENT),
    "deepseek_v3": Family("deepseek_v3", SHARED | LATENT),
    "glm4_moe": Family("glm4_moe", SHARED),
    "dots1": Family("dots1", SHARED),
    "minicpm3": Family("minicpm3", TEXT | LATENT),
    "qwen3_next": Family("qwen3_next", MOE | LINEAR),
    "qwen3_5_text": Family("qwen3_5_text", TEXT | LINEAR),
    "llama4_text": Family("llama4_text", LLAMA_4),
    "gpt2": Family("gpt2", GPT),
    "gptj": Family("gptj", GPT | {"rotary_dim": 4}),
    "codegen": Family("codegen", GPT | {"rotary_dim": 4}),
    "gpt_bigcode": Family("gpt_bigcode", GPT),
    "gpt_neo": Family(
        "gpt_neo",
        IDS
        | {"vocab_size": 64, "hidden_size": 32, "num_layers": LAYERS, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 64},
    ),
    "falcon": Family("falcon", FALCON),
    "falcon-new-decoder": Family(
        "falcon", FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon-11b": Family(
        "falcon",
        FALCON
        | {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1},
    ),
    "falcon-alibi": Family(
        "falcon",
        FALCON | {"alibi": True, "multi_query": False, "bias": True, "parallel_attn": False},
    ),
    "bloom": Family("bloom", {"vocab_size": 64, "hidden_size": 32, "n_layer": LAYERS, "n_head": 4}),
    "mpt": Family("mpt", {"vocab_size": 64, "d_model": 32, "n_layers": LAYERS, "n_heads": 4}),
    "xglm": Family(
        "xglm", FAIRSEQ | {"d_model": 32, "num_layers": LAYERS, "attention_heads": 4}, "mlp"
    ),
    "biogpt": Family("biogpt", TEXT, "mlp"),
    # OPT registers its final norm before its layers.
    "opt": Family("opt", OPT, "mlp", {"final_layer_norm": "final_norm"}),
    "opt-350m": Family(
        "opt",
        OPT | {"word_embed_proj_dim": 16, "do_layer_norm_before": False},
        "mlp",
        {"project_in": "embedding", "project_out": "head"},
    ),
    "gemma3n_text": Family(
        "gemma3n_text",
        TEXT | GEMMA_3N,
        "other",
        GEMMA_OTHER | {"altup_projections": "other", "altup_unembed_projections": "other"},
    ),
    "gemma4_text": Family("gemma4_text", GEMMA_4, "other", GEMMA_OTHER),
    "gemma4_text-moe": Family("gemma4_text", MOE | GEMMA_4 | GEMMA_4_MOE, "other", GEMMA_OTHER),
    "mamba": Family("mamba", STATE),
    "mamba2": Family("mamba2", STATE | {"num_heads": 4, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": Family("falcon_mamba", STATE),
    "jamba": Family(
        "jamba",
        HYBRID
        | {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}
        | {"expert_layer_period": 2, "expert_layer_offset": 1},
    ),
    "bamba": Family("bamba", HYBRID | {"attn_layer_indices": [1]}),
    "falcon_h1": Family("falcon_h1", HYBRID | {"mamba_d_ssm": 64}),
    "granitemoehybrid": Family(
        "granitemoehybrid",
        HYBRID
        | {"num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}
        | {"layer_types": ["mamba", "attention"]},
    ),
    "lfm2": Family("lfm2", TEXT | SECOND_OF_TWO, outside={"embedding_norm": "final_norm"}),
    "lfm2_moe": Family(
        "lfm2_moe",
        MOE | SECOND_OF_TWO | {"num_dense_layers": 1},
        outside={"embedding_norm": "final_norm"},
    ),
    "recurrent_gemma": Family(
        "recurrent_gemma",
        TEXT
        | {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 8},
    ),
    "nemotron_h": Family(
        "nemotron_h",
        HYBRID
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"n_routed_experts": 4, "moe_intermediate_size": 16}
        | {"layers_block_type": ["mamba", "moe"]},
    ),
    "nemotron_h-dense": Family(
        "nemotron_h",
        HYBRID
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"layers_block_type": ["mlp", "attention"]},
    ),
    "gemma3": _wrapped("gemma3", TEXT, VISION, mm_tokens_per_image=4, image_token_index=62),
    "llava": _wrapped("llava", TEXT | {"model_type": "llama"}, CLIP),
    "llava_next": _wrapped("llava_next", TEXT | {"model_type": "mistral"}, CLIP),
    "paligemma": _wrapped("paligemma", TEXT | {"model_type": "gemma"}, SIGLIP),
    "aya_vision": _wrapped("aya_vision", TEXT | {"model_type": "cohere2"}, SIGLIP),
    "mistral3": _wrapped(
        "mistral3",
        TEXT | {"model_type": "mistral"},
        VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "internvl": _wrapped(
        "internvl",
        TEXT | {"model_type": "qwen2"},
        VISION | {"image_size": [28, 28], "patch_size": [14, 14]},
    ),
    "idefics3": _wrapped("idefics3", TEXT | {"model_type": "llama"}, VISION, scale_factor=1),
    "smolvlm": _wrapped("smolvlm", TEXT | {"model_type": "llama"}, VISION, scale_factor=1),
    "mllama": _wrapped("mllama", TEXT | {"cross_attention_layers": [1]}, MLLAMA_VISION),
    "qwen2_vl": _wrapped("qwen2_vl", TEXT, QWEN_VISION | {"embed_dim": 32}),
    "qwen2_5_vl": _wrapped("qwen2_5_vl", TEXT, QWEN_VISION),
    "qwen3_vl": _wrapped("qwen3_vl", TEXT, QWEN_VISION | {"deepstack_visual_indexes": [1]}),
    "qwen3_5": _wrapped("qwen3_5", TEXT | LINEAR, QWEN_VISION),
    "gemma4": _wrapped(
        "gemma4",
        GEMMA_4,
        VISION | {"num_key_value_heads": 4, "head_dim": 8},
        audio_config=None,
    )._replace(linear="other", outside=GEMMA_OTHER),
    "llama4": _wrapped("llama4", LLAMA_4, LLAMA_4_VISION),
}


def config_of(name: str) -> Any:
    family = FAMILIES[name]
    if family.model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family.model_type}")
    return AutoConfig.for_model(family.model_type, **family.config)


def model_of(name: str) -> Any:
    """A model of a family, with random weights."""
    multimodal = "text_config" in FAMILIES[name].config
    auto = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
    return auto.from_config(config_of(name))
