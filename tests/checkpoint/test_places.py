"""Places against the modules of real transformers models, and against names found on disk.

The oracle never looks at a tensor's name: it walks the model and takes the role from the class of
the module that owns the tensor. Files on disk have other names than memory has, so every tensor is
filled with a number of its own before it is saved, and the number found on disk says whose it is.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from layerswap.checkpoint import layouts
from layerswap.checkpoint.places import (
    ROLES,
    Pattern,
    Place,
    alias,
    count_layers,
    place,
    place_tensors,
)
from layerswap.errors import CheckpointError, RecipeError

LAYERS = 2

# ---------------------------------------------------------------- families, as tiny as they go

IDS = {"bos_token_id": 1, "eos_token_id": 2}
TEXT = IDS | {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GPT = IDS | {"vocab_size": 64, "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
FALCON = IDS | {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
}
FAIRSEQ = {"vocab_size": 64, "ffn_dim": 48, "max_position_embeddings": 64}
OPT = FAIRSEQ | {"hidden_size": 32, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
MOE = TEXT | {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
SHARED = TEXT | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
PER_LAYER = {"vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8}
GEMMA_4 = TEXT | PER_LAYER
GEMMA_4_MOE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
GEMMA_3N = PER_LAYER | {
    "laurel_rank": 4,
    "altup_num_inputs": 2,
    "num_kv_shared_layers": 1,
    "layer_types": ["full_attention"] * LAYERS,
    "activation_sparsity_pattern": [0.0] * LAYERS,
}
# Three layers, where the decoders have two: a mix-up of the stacks would show.
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "num_heads": 4,
    "patch_size": 14,
}
MLLAMA_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_global_layers": 1,
    "attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [1],
}
LLAMA_4 = MOE | {"intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
LLAMA_4_VISION = VISION | {
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}


class Family(NamedTuple):
    """`linear`: role of bare Linear modules in a layer. `outside`: what no module class can say."""

    model_type: str
    config: dict[str, Any]
    linear: str | None = None
    outside: dict[str, str] = {}  # noqa: RUF012  # never written


def _wrapped(model_type: str, text: dict, vision: dict, **more: Any) -> Family:
    return Family(model_type, {"text_config": text, "vision_config": vision} | more)


PLAIN = (
    "llama mistral ministral ministral3 qwen2 qwen3 gemma gemma2 gemma3_text vaultgemma cohere "
    "cohere2 phi3 phi olmo olmo2 olmo3 gpt_neox starcoder2 glm glm4 granite smollm3 stablelm "
    "nemotron exaone4 apertus ernie4_5 seed_oss helium arcee hunyuan_v1_dense bitnet persimmon "
    "jais2 nanochat cwm hyperclovax diffllama doge"
).split()
EXPERTS = (
    "mixtral qwen2_moe qwen3_moe olmoe granitemoe gpt_oss phimoe minimax_m2 flex_olmo mellum "
    "cohere2_moe exaone_moe afmoe"
).split()
SIGLIP = VISION | {"model_type": "siglip_vision_model"}
CLIP = VISION | {"model_type": "clip_vision_model"}
GEMMA_OTHER = {"per_layer_model_projection": "other", "per_layer_projection_norm": "other"}
FAMILIES: dict[str, Family] = {
    **{name: Family(name, TEXT) for name in PLAIN},
    **{name: Family(name, MOE) for name in EXPERTS},
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
    "opt": Family("opt", OPT, "mlp"),
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
    "llama4": _wrapped("llama4", LLAMA_4, LLAMA_4_VISION),
}

# ---------------------------------------------------------------- the oracle


def _layer_role(child: nn.Module, family: Family) -> str:
    name = type(child).__name__
    if "Attention" in name or name.endswith("GatedDeltaNet"):
        return "attention"
    if "Norm" in name:
        return "norm"
    if any(word in name for word in ("MLP", "Mlp", "MoE", "Moe", "FeedForward", "Experts")):
        return "mlp"
    if name.endswith("Router"):
        return "mlp"
    if any(word in name for word in ("AltUp", "Laurel")):
        return "other"
    assert isinstance(child, nn.Linear), name
    assert family.linear is not None
    return family.linear


def _decoder_role(decoder: nn.Module, child_name: str, child: nn.Module, family: Family) -> str:
    if child_name in family.outside:
        return family.outside[child_name]
    if isinstance(child, nn.Embedding):
        return "embedding"
    assert "Norm" in type(child).__name__, child_name
    order = [name for name, _ in decoder.named_children()]
    stack = next(n for n, c in decoder.named_children() if _is_stack(c))
    return "embedding" if order.index(child_name) < order.index(stack) else "final_norm"


def _is_stack(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == LAYERS


def _oracle(model: nn.Module, family: Family) -> dict[str, Place]:
    """The place of every name of the state dict, from the modules that own the tensors."""
    candidates = [m for m in model.modules() if any(_is_stack(c) for c in m.children())]
    shared = model.get_input_embeddings()
    [decoder] = [m for m in candidates if any(c is shared for c in m.children())]
    [stack] = [c for c in decoder.children() if _is_stack(c)]
    head = model.get_output_embeddings()
    roles: dict[int, Place] = {}  # id of a module -> place of what it owns
    for module in model.modules():
        roles[id(module)] = Place(None, "other")
    for name, child in decoder.named_children():
        if child is stack or not list(child.state_dict()):
            continue
        role = _decoder_role(decoder, name, child, family)
        roles.update((id(module), Place(None, role)) for module in child.modules())
    for index, layer in enumerate(stack):
        roles[id(layer)] = Place(index, "other")
        for child in layer.children():
            if not list(child.state_dict()):
                continue
            place_ = Place(index, _layer_role(child, family))
            roles.update((id(module), place_) for module in child.modules())
    roles[id(head)] = Place(None, "head")
    return {
        name: roles[id(model.get_submodule(name.rpartition(".")[0]))] for name in model.state_dict()
    }


class Built(NamedTuple):
    memory: dict[str, Place]  # names in memory -> place
    disk: dict[str, set[Place]]  # names on disk -> the places of the tensor (two if it is tied)


@functools.cache
def _build(name: str) -> Built:
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **family.config)
    auto = AutoModelForImageTextToText if "text_config" in family.config else AutoModelForCausalLM
    torch.set_num_threads(1)
    model = auto.from_config(config)
    memory = _oracle(model, family)
    owners: dict[int, set[Place]] = {}
    numbers: dict[int, int] = {}
    with torch.no_grad():
        for key, tensor in model.state_dict(keep_vars=True).items():
            number = numbers.setdefault(id(tensor), len(numbers))
            owners.setdefault(number, set()).add(memory[key])
            tensor.fill_(number)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        stored = load_file(Path(folder, "model.safetensors"))
    found = {key: tensor.unique().tolist() for key, tensor in stored.items()}
    assert all(len(values) == 1 for values in found.values()), found
    assert {int(value) for [value] in found.values()} == set(owners)  # nothing was lost
    return Built(memory, {key: owners[int(value)] for key, [value] in found.items()})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_tensor_of_a_family_has_the_place_of_its_module(name):
    built = _build(name)
    memory = place_tensors(built.memory, layers=LAYERS)
    assert memory == built.memory
    disk = place_tensors(built.disk, layers=LAYERS)
    assert disk.keys() == built.disk.keys()
    assert {key: disk[key] for key in disk if disk[key] not in built.disk[key]} == {}
    assert count_layers(memory) == count_layers(disk) == LAYERS
    assert {"attention", "mlp", "embedding"} <= {where.role for where in disk.values()}
