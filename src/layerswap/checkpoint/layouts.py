"""The words of the tensor names we have checked, one small table per part of a name.

A name such as `model.layers.3.self_attn.q_proj.weight` is read from left to right:

    wrappers   stack    layer   owner       inside
    model      layers   3       self_attn   q_proj.weight

`OWNERS` says which role the owner has, and `INSIDE` lists every word that may follow it.
Outside the layers there is no stack and no index, and `OUTSIDE` gives the role of the owner.

To add a family: place the names of a real checkpoint, look at the words reported as unknown, put
each in the row it belongs to, and add the family to `tests/checkpoint/test_places.py`, which checks
the answer against the modules of the transformers model. A word that nobody has checked stays
unknown on purpose: `q_proj.weight_scale`, say, must not be averaged as if it were a weight.
"""

from __future__ import annotations

from collections.abc import Mapping


def _words(*rows: str) -> frozenset[str]:
    return frozenset(word for row in rows for word in row.split())


# Modules that only hold the text decoder. `encoder` is not here: its layers are not the decoder's.
WRAPPERS = _words("model transformer language_model text_model decoder gpt_neox biogpt backbone")

# The list of layers: most families; GPT-2, Falcon and BLOOM; MPT; GGUF.
STACKS = _words("layers h blocks blk")

# Directly inside a layer: role -> the modules and parameters with that role.
OWNERS: Mapping[str, frozenset[str]] = {
    "attention": _words(
        "self_attn self_attention attn attention",
        "cross_attn",  # Llama 3.2 Vision
        # What mixes tokens in place of attention: Qwen3-Next and Qwen3.5; state-space layers of
        # Jamba, Bamba, Falcon-H1 and Granite 4; LFM2; RecurrentGemma.
        "linear_attn mamba conv temporal_block",
        "mixer",  # Mamba; Nemotron-H, where it can be an mlp
        "attn_q attn_k attn_v attn_qkv attn_output attn_q_norm attn_k_norm attn_sinks",  # GGUF
        "attn_q_a attn_q_b attn_q_a_norm attn_kv_a_mqa attn_kv_a_norm attn_kv_b attn_k_b attn_v_b",
        "attn_sub_norm attn_rot_embd",
    ),
    "mlp": _words(
        "mlp feed_forward ffn block_sparse_moe",
        "fc1 fc2",  # OPT, XGLM, BioGPT: no module around them
        "shared_mlp",  # GraniteMoeShared
        "router experts",  # Gemma 4 with experts
        "mlp_block mixer",  # RecurrentGemma; Nemotron-H
        "ffn_gate ffn_up ffn_down ffn_gate_inp ffn_sub_norm exp_probs_b",  # GGUF
        "ffn_gate_exps ffn_up_exps ffn_down_exps ffn_gate_up_exps ffn_gate_inp_shexp",
        "ffn_gate_shexp ffn_up_shexp ffn_down_shexp",
    ),
    "norm": _words(
        "input_layernorm post_attention_layernorm",
        "pre_feedforward_layernorm post_feedforward_layernorm",  # Gemma 2 and later, OLMo2
        "post_feedforward_layernorm_1 post_feedforward_layernorm_2 pre_feedforward_layernorm_2",
        "pre_mlp_layernorm post_mlp_layernorm post_self_attn_layernorm",  # Afmoe, GLM-4
        "self_attn_layer_norm final_layer_norm",  # OPT, XGLM, BioGPT: final in the layer
        "ln_1 ln_2",  # GPT-2 and its kin
        "ln_attn ln_mlp",  # Falcon, new decoder
        "norm_1 norm_2",  # MPT
        "post_norm1 post_norm2",  # HyperCLOVA X
        "attention_norm ffn_norm",  # Meta
        "attention_layernorm feedforward_layernorm",  # Apertus
        "post_per_layer_input_norm",  # Gemma 3n, Gemma 4
        "norm pre_ff_layernorm operator_norm",  # Mamba; Jamba and its kin; LFM2
        "temporal_pre_norm channel_pre_norm",  # RecurrentGemma
        "attn_norm attn_norm_2 post_attention_norm post_ffw_norm",  # GGUF
    ),
    "other": _words(
        "layer_scalar per_layer_input_gate per_layer_projection altup laurel",  # Gemma 3n, 4
        "cross_attn_attn_gate cross_attn_mlp_gate",  # Llama 3.2 Vision
        "input_residual post_attention_residual",  # Doge
    ),
}

# In an mlp, what chooses the experts and weighs them; its places have the role `router`.
ROUTERS = _words(
    "router gate wg shared_expert_gate",
    "e_score_correction_bias expert_bias moe_statics",  # how loads are balanced
    "ffn_gate_inp ffn_gate_inp_shexp exp_probs_b",  # GGUF
)

# Modules that several layers share (Zamba, Zamba2): stored in one layer, but not of that layer.
SHARED = _words("shared_transf shared_transformer")

# Below an owner: role -> the words that may follow, besides numbers (experts, per-head norms).
_LEAVES = "weight bias"
INSIDE: Mapping[str, frozenset[str]] = {
    "attention": _words(
        _LEAVES,
        "q_proj k_proj v_proj qkv_proj o_proj out_proj gate_proj dense query_key_value",
        "c_attn c_proj attention",  # GPT-2; GPT-Neo has attn.attention
        "Wqkv",  # MPT
        "wq wk wv wo",  # Meta
        "q_norm k_norm q_layernorm k_layernorm query_layernorm key_layernorm norms attn_sub_norm",
        "q_a_proj q_a_layernorm q_b_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj",  # DeepSeek
        "rotary_emb inv_freq masked_bias causal_mask",  # buffers in old checkpoints
        "sinks",  # gpt-oss
        "A A_log dt_proj dt_bias norm conv1d",  # Doge, Qwen3-Next
        "in_proj_qkvz in_proj_ba in_proj_qkv in_proj_z in_proj_a in_proj_b",  # Qwen3-Next, Qwen3.5
        "lambda_q1 lambda_k1 lambda_q2 lambda_k2",  # DiffLlama
        "D in_proj x_proj dt_layernorm b_layernorm c_layernorm",  # state-space layers
        "conv conv_1d linear_x linear_y linear_out rg_lru recurrent_param",  # LFM2, RecurrentGemma
        "input_gate_weight input_gate_bias recurrent_gate_weight recurrent_gate_bias",
    ),
    "mlp": _words(
        _LEAVES,
        "gate_proj up_proj down_proj gate_up_proj gate_up_proj_bias down_proj_bias",
        "c_fc c_proj fc1 fc2 fc_in fc_out dense_h_to_4h dense_4h_to_h",
        "w1 w2 w3",  # Meta, Mixtral
        *ROUTERS,
        "experts layer input_linear output_linear",
        "shared_expert shared_experts shared_mlp",
        "scale per_expert_scale proj",  # the router of Gemma 4
        "act_fn alpha_n alpha_p beta eps",  # Apertus
        "ffn_sub_norm",  # BitNet
    ),
    "norm": _words(_LEAVES),
    "other": _words(
        _LEAVES,
        "correct_output_scale correction_coefs prediction_coefs modality_router router_norm",
        "linear_left linear_right post_laurel_norm",
    ),
}

# Outside the layers: role -> modules and parameters.
OUTSIDE: Mapping[str, frozenset[str]] = {
    "embedding": _words(
        "embed_tokens wte wpe word_embeddings embed_in embed_positions embeddings",
        "tok_embeddings",  # Meta
        "word_embeddings_layernorm",  # BLOOM: part of what a token's vector is
        "project_in",  # OPT: the second factor of a factorised embedding
        "token_embd token_embd_norm position_embd",  # GGUF
        "embed_tokens_per_layer",  # Gemma 3n, Gemma 4
    ),
    "head": _words(
        "lm_head embed_out output_projection",
        "output",  # Meta, GGUF
        "project_out",  # OPT: the first factor of a factorised head
    ),
    "final_norm": _words(
        "norm ln_f norm_f final_layernorm final_layer_norm layer_norm",
        "final_norm embedding_norm",  # RecurrentGemma; LFM2, whose name misleads
        "output_norm",  # GGUF
    ),
    "other": _words(
        "vision_tower vision_model visual audio_tower",
        "multi_modal_projector connector embed_vision embed_audio image_newline",
        "rope rotary_emb",  # buffers
        "rope_freqs rope_factors_long rope_factors_short",  # GGUF
        "per_layer_model_projection per_layer_projection_norm",  # Gemma 3n, Gemma 4
        "altup_projections altup_unembed_projections",  # Gemma 3n
    ),
}

# `weights` is XGLM's sinusoidal position table in old checkpoints.
OUTSIDE_LEAVES = _words(_LEAVES, "weights")

# The papers' names (Llama's as Meta wrote them): role -> last module of the name -> name.
ALIASES: Mapping[str, Mapping[str, str]] = {
    "attention": {
        **{"q_proj": "wq", "k_proj": "wk", "v_proj": "wv"},
        **{"o_proj": "wo", "out_proj": "wo", "dense": "wo", "c_proj": "wo"},
        **{"wq": "wq", "wk": "wk", "wv": "wv", "wo": "wo"},
    },
    "mlp": {
        **{"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"},
        **{"c_fc": "w1", "fc1": "w1", "fc_in": "w1", "dense_h_to_4h": "w1"},
        **{"c_proj": "w2", "fc2": "w2", "fc_out": "w2", "dense_4h_to_h": "w2"},
        **{"w1": "w1", "w2": "w2", "w3": "w3"},
    },
}
