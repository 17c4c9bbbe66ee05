"""Configurations of published checkpoints (2024 to 2026), and their files without data."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from layerswap.checkpoint import header_bytes
from layerswap.checkpoint.header import byte_length

SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
LLAMA3 = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
SIGLIP = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16, "image_size": 896, "patch_size": 14, "vision_use_head": False,
}  # fmt: skip
PIXTRAL = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "image_size": 1540, "patch_size": 14,
}  # fmt: skip
QWEN_VL = {"out_hidden_size": 3584}
MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
MLA = {
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8,
    "topk_group": 4,
}  # fmt: skip
NEXT = {
    "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "head_dim": 256,
    "shared_expert_intermediate_size": 512,
}  # fmt: skip

# Mixtures of hundreds of experts are cut to a few layers, as the others are alike.
# name: model type, sizes in the order of SIZES, further settings, quantisation
TEXT: dict[str, tuple[str, tuple[int, ...], dict[str, Any], str | None]] = {
    "Llama-3.1-8B": ("llama", (128256, 4096, 14336, 32, 32, 8), {**UNTIED, **LLAMA3}, None),
    "Llama-3.3-70B": ("llama", (128256, 8192, 28672, 80, 64, 8), {**UNTIED, **LLAMA3}, None),
    "SmolLM2-135M": ("llama", (49152, 576, 1536, 30, 9, 3), TIED, None),
    "Llama-3.1-8B-w4a16": ("llama", (128256, 4096, 14336, 32, 32, 8), UNTIED, "compressed-tensors"),
    "SmolLM3-3B": ("smollm3", (128256, 2048, 11008, 36, 16, 4), TIED, None),
    "Qwen1.5-1.8B": ("qwen2", (151936, 2048, 5504, 24, 16, 16), UNTIED, None),
    "Qwen2.5-0.5B": ("qwen2", (151936, 896, 4864, 24, 14, 2), TIED, None),
    "Qwen2.5-7B-AWQ": ("qwen2", (152064, 3584, 18944, 28, 28, 4), UNTIED, "awq"),
    "Qwen2.5-7B-GPTQ": ("qwen2", (152064, 3584, 18944, 28, 28, 4), UNTIED, "gptq"),
    "Qwen3-4B": ("qwen3", (151936, 2560, 9728, 36, 32, 8), {**TIED, "head_dim": 128}, None),
    "Qwen3-8B": ("qwen3", (151936, 4096, 12288, 36, 32, 8), {**UNTIED, "head_dim": 128}, None),
    "Qwen3-8B-FP8": ("qwen3", (151936, 4096, 12288, 36, 32, 8), {**UNTIED, "head_dim": 128}, "fp8"),
    "Qwen3-30B-A3B": ("qwen3_moe", (151936, 2048, 6144, 8, 32, 4), {**UNTIED, **MOE}, None),
    "Qwen3-Next-80B": ("qwen3_next", (151936, 2048, 5120, 4, 16, 2), {**UNTIED, **NEXT}, None),
    "gemma-2-2b": ("gemma2", (256000, 2304, 9216, 26, 8, 4), {**TIED, "head_dim": 256}, None),
    "gemma-2-9b": ("gemma2", (256000, 3584, 14336, 42, 16, 8), {**TIED, "head_dim": 256}, None),
    "gemma-3-270m": ("gemma3_text", (262144, 640, 2048, 18, 4, 1), {**TIED, "head_dim": 256}, None),
    "gemma-3-1b": ("gemma3_text", (262144, 1152, 6912, 26, 4, 1), {**TIED, "head_dim": 256}, None),
    "gemma-3-4b-text": (
        "gemma3_text", (262208, 2560, 10240, 34, 8, 4), {**TIED, "head_dim": 256}, None,
    ),
    "Mistral-7B-v0.3": ("mistral", (32768, 4096, 14336, 32, 32, 8), UNTIED, None),
    "Nemo-12B": ("mistral", (131072, 5120, 14336, 40, 32, 8), {**UNTIED, "head_dim": 128}, None),
    "Mixtral-8x22B": ("mixtral", (32768, 6144, 16384, 56, 48, 8), UNTIED, None),
    "Phi-3.5-mini": ("phi3", (32064, 3072, 8192, 32, 32, 32), {**UNTIED, "pad_token_id": 2}, None),
    "DeepSeek-V3": ("deepseek_v3", (129280, 7168, 18432, 5, 128, 128), {**UNTIED, **MLA}, "fp8"),
    "gpt-oss-20b": (
        "gpt_oss", (201088, 2880, 2880, 24, 64, 8),
        {**UNTIED, "head_dim": 64, "num_local_experts": 32, "num_experts_per_tok": 4}, "mxfp4",
    ),
    "GLM-4.5-Air": (
        "glm4_moe", (151552, 4096, 10944, 8, 96, 8),
        {**UNTIED, "head_dim": 128, "n_routed_experts": 128, "num_experts_per_tok": 8,
         "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "attention_bias": True}, None,
    ),
    "OLMo-2-7B": ("olmo2", (100352, 4096, 11008, 32, 32, 32), UNTIED, None),
    "aya-expanse-8b": ("cohere", (256000, 4096, 14336, 32, 32, 8), TIED, None),
    "command-r7b": ("cohere2", (256000, 4096, 14336, 32, 32, 8), TIED, None),
    "granite-3.3-2b": ("granite", (49159, 2048, 8192, 40, 32, 8), TIED, None),
    "Apertus-8B": ("apertus", (131072, 4096, 21504, 32, 32, 8), UNTIED, None),
    "stablelm-2-1.6b": ("stablelm", (100352, 2048, 5632, 24, 32, 32), UNTIED, None),
}  # fmt: skip
SEEING: dict[str, tuple[str, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "gemma-3-4b": ("gemma3", (262208, 2560, 10240, 34, 8, 4), {"head_dim": 256}, SIGLIP),
    "Mistral-Small-3.1": ("mistral3", (131072, 5120, 32768, 40, 32, 8), {"head_dim": 128}, PIXTRAL),
    "Qwen2.5-VL-7B": ("qwen2_5_vl", (152064, 3584, 18944, 28, 28, 4), {}, QWEN_VL),
}  # fmt: skip
NAMES = (*TEXT, *SEEING)
QUANTISED = {name: entry[3] for name, entry in TEXT.items() if entry[3]}
LORA_TARGETS = ("q_proj", "k_proj", "o_proj", "qkv_proj", "up_proj", "down_proj", "q_b_proj")


def model_of(name: str) -> Any:
    """The model of a name, without data."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    kind, sizes, more, *_ = TEXT.get(name) or SEEING[name]
    settings = {**dict(zip(SIZES, sizes, strict=True)), **more}
    auto: Any = AutoModelForCausalLM
    if name in SEEING:
        text = dict(settings)
        if kind == "mistral3":
            text["model_type"] = "mistral"
        settings = {"text_config": text, "vision_config": SEEING[name][3]}
        auto = AutoModelForImageTextToText
    with torch.device("meta"):
        return auto.from_config(CONFIG_MAPPING[kind](**settings), dtype=torch.bfloat16)


def published(model: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of every stored tensor, under the names that transformers saves."""
    from transformers.core_model_loading import revert_weight_conversion

    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), name)
    state = model.state_dict()
    stored = revert_weight_conversion(model, {name: state[name] for name in seen.values()})
    return {name: ("BF16", tuple(tensor.shape)) for name, tensor in stored.items()}


def quantised(
    tensors: dict[str, tuple[str, tuple[int, ...]]], method: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors in the layout of a quantisation."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, (dtype, shape) in tensors.items():
        stem = name.removesuffix(".weight")
        if method == "mxfp4" and name.endswith((".gate_up_proj", ".down_proj")):
            experts, inside, outside = shape
            found[f"{name}_blocks"] = ("U8", (experts, outside, inside // 32, 16))
            found[f"{name}_scales"] = ("U8", (experts, outside, inside // 32))
        elif (
            method == "mxfp4"
            or not (stem.endswith("_proj") or "kv_a_proj" in stem)
            or (len(shape) != 2)
        ):
            found[name] = (dtype, shape)
        elif method == "fp8":
            rows, columns = shape
            found[name] = ("F8_E4M3", shape)
            found[f"{name}_scale_inv"] = ("F32", (-(-rows // 128), -(-columns // 128)))
        elif method == "compressed-tensors":
            rows, columns = shape
            found[f"{name}_packed"] = ("I32", (rows, columns // 8))
            found[f"{name}_scale"] = ("BF16", (rows, columns // 128))
            found[f"{name}_shape"] = ("I64", (2,))
        else:
            rows, columns = shape
            packed = (columns // 8, rows) if method == "gptq" else (columns, rows // 8)
            found[f"{stem}.qweight"] = ("I32", packed)
            found[f"{stem}.qzeros"] = ("I32", (columns // 128, rows // 8))
            found[f"{stem}.scales"] = ("F16", (columns // 128, rows))
            if method == "gptq":
                found[f"{stem}.g_idx"] = ("I32", (columns,))
    return found


def write_holes(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], mark: int = 0) -> None:
    """A safetensors file whose data take no disk; every tensor begins with a byte `mark`."""
    sizes = {name: byte_length(dtype, shape) for name, (dtype, shape) in tensors.items()}
    header = header_bytes([(n, *tensors[n], sizes[n]) for n in tensors], {"format": "pt"})
    with file.open("wb") as out:
        out.write(header)
        position = len(header)
        for name in tensors if mark else ():
            out.seek(position)
            out.write(bytes([mark]))
            position += sizes[name]
        out.truncate(len(header) + sum(sizes.values()))


def write_model(folder: Path, config: dict[str, Any], tensors: Any, mark: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_holes(folder / "model.safetensors", tensors, mark)
    return folder


def write_lora(
    folder: Path, base: Path, modules: Iterable[tuple[str, int, int]], mark: int
) -> Path:
    """An adapter of rank 8 over modules (path, outputs, inputs) with the names in memory."""
    folder.mkdir(parents=True)
    tensors = {}
    for path, rows, columns in modules:
        stem = f"base_model.model.{path}"
        tensors[f"{stem}.lora_A.weight"] = ("F32", (8, columns))
        tensors[f"{stem}.lora_B.weight"] = ("F32", (rows, 8))
    write_holes(folder / "adapter_model.safetensors", tensors, mark)
    settings = {
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none", "target_modules": "all",
        "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def linear_modules(model: Any) -> list[tuple[str, int, int]]:
    """The targets of a LoRA in the language model: path, outputs, inputs."""
    import torch

    return [
        (path, module.out_features, module.in_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        and path.endswith(LORA_TARGETS)
        and not any(word in path for word in ("vision", "visual"))
    ]
