"""Tiny transformers models as GGUF files, converted as llama.cpp's `convert_hf_to_gguf.py` does.

Written after that script, family by family, and not after layerswap's reader: llama.cpp itself
says whether it is right (`tests/merge/test_gguf_engine.py`).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf_files import TOKENS, add_vocabulary, close, encoded
from merging import save_expert
from safetensors.torch import load_file

ROWS = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GATED = {**ROWS, "num_key_value_heads": 2}
WIDE = {**GATED, "head_dim": 16}
WINDOW = {**WIDE, "sliding_window": 32, "query_pre_attn_scalar": 16}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 64, "norm_topk_prob": True, "mlp_only_layers": []}  # fmt: skip
OLD = {"vocab_size": len(TOKENS), "hidden_size": 64, "n_head": 4, "n_layer": 3,
       "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "llama", {**GATED, "tie_word_embeddings": False}),
    "llama-tied": ("LlamaConfig", "llama", {**GATED, "tie_word_embeddings": True}),
    "mistral": ("MistralConfig", "llama", {**WIDE, "sliding_window": None}),
    "mixtral": ("MixtralConfig", "llama", {**GATED, **MIXTURE}),
    "granite": ("GraniteConfig", "granite", {**GATED, "logits_scaling": 2.0}),
    "qwen2": ("Qwen2Config", "qwen2", GATED),
    "qwen3": ("Qwen3Config", "qwen3", {**WIDE, "head_dim": 128}),
    "qwen3_moe": ("Qwen3MoeConfig", "qwen3moe", {**WIDE, **MIXTURE, "head_dim": 128,
                                               "moe_intermediate_size": 768}),
    "gemma2": ("Gemma2Config", "gemma2", WINDOW),
    "gemma3": ("Gemma3TextConfig", "gemma3", WINDOW),
    "phi3": ("Phi3Config", "phi3", GATED),
    "falcon": ("FalconConfig", "falcon", {
        **ROWS, "multi_query": True, "new_decoder_architecture": False, "alibi": False,
        "parallel_attn": True, "bias": False, "ffn_hidden_size": 256, "intermediate_size": 256}),
    "falcon-groups": ("FalconConfig", "falcon", {
        **ROWS, "num_kv_heads": 2, "new_decoder_architecture": True, "alibi": False, "bias": False,
        "ffn_hidden_size": 256, "intermediate_size": 256}),
    "cohere": ("CohereConfig", "command-r", {**GATED, "logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", "cohere2", {**WIDE, "logit_scale": 0.3, "sliding_window": 32}),
    "olmo2": ("Olmo2Config", "olmo2", GATED),
    "starcoder2": ("Starcoder2Config", "starcoder2", {**GATED, "use_bias": True,
                                                      "sliding_window": None}),
    "gpt_neox": ("GPTNeoXConfig", "gptneox", {**ROWS, "hidden_act": "gelu"}),
    "bloom": ("BloomConfig", "bloom", OLD),
    "stablelm": ("StableLmConfig", "stablelm", GATED),
    "nemotron": ("NemotronConfig", "nemotron", {**GATED, "head_dim": 16}),
}  # fmt: skip


def save_model(folder: Path, family: str, seed: int = 0) -> Path:
    """A model with random weights, norms and biases included, in float32."""
    import transformers

    name, _, settings = FAMILIES[family]
    return save_expert(folder, getattr(transformers, name)(**settings), seed)


def convert(folder: Path, path: Path, family: str, kind: str = "F32") -> Path:
    """A checkpoint as a GGUF file, its matrices in one type."""
    import transformers

    architecture = FAMILIES[family][1]
    config = transformers.AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, config, architecture)
    add_vocabulary(writer, TOKENS)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    stacks: dict[str, dict[int, np.ndarray]] = {}
    found: dict[str, np.ndarray] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = _changed(name, tensor.numpy(), config, architecture)
        expert = re.search(r"\.experts\.(\d+)\.", name)
        plain = re.sub(r"\.experts\.\d+\.", ".experts.", name)
        plain = plain.removeprefix("transformer.") if architecture == "bloom" else plain
        new = names.get_name(plain, (".weight", ".bias"))
        assert new is not None, name
        if expert:
            stacks.setdefault(new, {})[int(expert[1])] = values
        else:
            found[new] = values
    for new, experts in stacks.items():
        found[new] = np.stack([experts[number] for number in sorted(experts)])
    for new, values in found.items():
        own = kind if values.ndim > 1 and "ffn_gate_inp" not in new else "F32"
        data = encoded(np.ascontiguousarray(values, np.float32), own)
        writer.add_tensor(new, data, raw_dtype=gguf.GGMLQuantizationType[own])
    close(writer)
    return path


def _changed(name: str, values: np.ndarray, config: Any, architecture: str) -> np.ndarray:
    """The values of a tensor as the script writes them."""
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if architecture in ("llama", "granite") and name.endswith(("q_proj.weight", "k_proj.weight")):
        count = heads if "q_proj" in name else groups
        split = values.reshape(count, 2, values.shape[0] // count // 2, *values.shape[1:])
        return split.swapaxes(1, 2).reshape(values.shape)
    if architecture in ("gemma2", "gemma3", "nemotron") and name.endswith("norm.weight"):
        return values + 1
    if "query_key_value" in name and architecture in ("gptneox", "bloom"):
        parts = values.reshape(heads, 3, -1, *values.shape[1:])
        return np.concatenate([parts[:, i].reshape(-1, *values.shape[1:]) for i in range(3)])
    if "query_key_value" in name and architecture == "falcon":
        size = config.hidden_size // heads
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
        parts = values.reshape(groups, heads // groups + 2, size, -1)
        cut = parts[:, :-2], parts[:, [-2]], parts[:, [-1]]
        return np.concatenate([part.reshape(-1, values.shape[1]) for part in cut])
    return values


def _add_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if architecture == "falcon":
        groups = config.num_kv_heads if config.new_decoder_architecture else 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    flat = rope.get("full_attention", rope)
    inner = next(
        (v for k in ("ffn_hidden_size", "intermediate_size") if (v := getattr(config, k, None))),
        4 * config.hidden_size,
    )
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_vocab_size(config.vocab_size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    for key in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if isinstance(getattr(config, key, None), float):
            writer.add_layer_norm_eps(getattr(config, key))
            break
    if "rope_theta" in flat:
        writer.add_rope_freq_base(flat["rope_theta"])
    rotated = int(size * flat.get("partial_rotary_factor", 1.0))
    if architecture not in ("bloom",):
        writer.add_rope_dimension_count(rotated)
    if architecture in ("qwen3", "qwen3moe", "gemma2", "gemma3", "cohere2", "llama"):
        writer.add_key_length(size)
        writer.add_value_length(size)
    if getattr(config, "logit_scale", None):
        writer.add_logit_scale(config.logit_scale)
    if architecture == "granite":
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
    experts = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    if experts and architecture in ("llama", "qwen3moe"):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        if architecture == "qwen3moe":
            writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("gemma2", "gemma3", "cohere2"):
        writer.add_sliding_window(config.sliding_window)
    if architecture in ("gptneox", "stablelm"):
        writer.add_parallel_residual(bool(getattr(config, "use_parallel_residual", False)))
