"""Tiny experts of every family that the sweep engines are tested on."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import merging
import torch
from effort import sampled

import layerswap as ls

SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4}
GATED = {
    **SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {**GATED, "head_dim": 8, "sliding_window": 6}
OLD = {"vocab_size": 60, "n_layer": 5, "n_head": 4}
NEOX = {**SMALL, "intermediate_size": 48, "max_position_embeddings": 128}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {**GATED, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2Config", {**GATED, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {**GATED, "head_dim": 8}),
    "mistral": ("MistralConfig", {**GATED, "head_dim": 8, "sliding_window": 6}),
    "gemma2": ("Gemma2Config", {**WINDOW, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3TextConfig", {**WINDOW, "query_pre_attn_scalar": 8}),
    "cohere2": ("Cohere2Config", {**WINDOW, "logit_scale": 0.3}),
    "phi3": ("Phi3Config", GATED),
    "gpt_neox": ("GPTNeoXConfig", NEOX),
    "gpt2": ("GPT2Config", {**OLD, "n_embd": 32, "n_positions": 128}),
    "bloom": ("BloomConfig", {**OLD, "hidden_size": 32}),
    "olmo2": ("Olmo2Config", GATED),
}
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "opt": ("OPTConfig", {**SMALL, "ffn_dim": 48, "max_position_embeddings": 128,
                          "word_embed_proj_dim": 32}),
    "falcon": ("FalconConfig", {**SMALL, "alibi": True}),
    "mixtral": ("MixtralConfig", {**GATED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma4": ("Gemma4TextConfig", {**WINDOW, "global_head_dim": 8, "vocab_size": 60,
                                    "vocab_size_per_layer_input": 60}),
    "gpt_bigcode": ("GPTBigCodeConfig", {**OLD, "n_embd": 32, "n_positions": 128}),
    "granite": ("GraniteConfig", {**GATED, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
}  # fmt: skip
save_expert = partial(merging.save_expert, noise=0.1)
EVERY = sampled([*FAMILIES, *MORE], "llama", "gemma3", "gpt2", "mixtral")
"""Families to test: most of them are slow."""


def config_of(family: str, **changes: Any) -> Any:
    import transformers

    name, settings = {**FAMILIES, **MORE}[family]
    return getattr(transformers, name)(**{**settings, **changes})


def swap_of(
    root: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any
) -> ls.Plan:
    """A swap of two experts of a family, bottom 1, top 1."""
    config = config_of(family, **changes)
    task = save_expert(root / "task", config, 1, dtype)
    language = save_expert(root / "language", config, 2, dtype)
    return ls.swap(task=task, language=language, bottom=1, top=1)


def grid_of(plan: ls.Plan) -> list[ls.Plan]:
    """A grid with transitions and, in places, other blends for attention than for the rest."""
    plans = plan.grid(bottom=range(3), top=range(2), top_transition=range(2))
    layers = plan.composition.layers
    mixed = ls.Composition.build(
        layers,
        lambda place: ls.Blend.of(
            {"task": 1.0, "language": 3.0} if place.role == "mlp" and place.layer == 2
            else "language" if place.role in ("attention", "head", "embedding") else "task"
        ),
    )  # fmt: skip
    return [*plans, merging.composed(plan, mixed)]


def same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """True if two tensors agree in dtype, shape and every bit, negative zeros included."""
    same = (found.dtype, found.shape) == (expected.dtype, expected.shape)
    return same and merging.raw(found.cpu()) == merging.raw(expected.cpu())
