"""Small checkpoints and adapters made with NumPy alone: the same bytes on every machine.

Nothing here imports torch or transformers, so that a merge can be proven without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from layerswap.checkpoint import header_bytes

Arrays = Mapping[str, np.ndarray]

NAMES = {"F64": np.float64, "F32": np.float32, "F16": np.float16}
WIDTH, INNER, TOKENS, LAYERS = 64, 96, 4200, 3
"""The embedding has more elements than a chunk, so that chunks meet inside a tensor."""
MATRICES = {
    "self_attn.q_proj": (WIDTH, WIDTH), "self_attn.k_proj": (WIDTH // 2, WIDTH),
    "self_attn.v_proj": (WIDTH // 2, WIDTH), "self_attn.o_proj": (WIDTH, WIDTH),
    "mlp.gate_proj": (INNER, WIDTH), "mlp.up_proj": (INNER, WIDTH), "mlp.down_proj": (WIDTH, INNER),
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": LAYERS,
    "hidden_size": WIDTH, "intermediate_size": INNER, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False, "max_position_embeddings": 64,
}  # fmt: skip


def shapes(tokens: int = TOKENS) -> dict[str, tuple[int, ...]]:
    """Every tensor of the small Llama."""
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (tokens, WIDTH)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        found |= {f"{stem}.{name}.weight": shape for name, shape in MATRICES.items()}
        found[f"{stem}.input_layernorm.weight"] = (WIDTH,)
        found[f"{stem}.post_attention_layernorm.weight"] = (WIDTH,)
    return {**found, "model.norm.weight": (WIDTH,), "lm_head.weight": (tokens, WIDTH)}


def weights(seed: int, size: float, tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """Float64 weights; sums of uniform draws, so that no library's logarithm decides a bit."""
    draws = np.random.RandomState(seed)
    return {
        name: draws.uniform(-size, size, shape) + draws.uniform(-size, size, shape)
        for name, shape in shapes(tokens).items()
    }


def encoded(values: np.ndarray, dtype: str) -> bytes:
    """The little-endian bytes of float values in a safetensors dtype."""
    if dtype != "BF16":
        return np.ascontiguousarray(values, NAMES[dtype]).tobytes()
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()


def write_tensors(path: Path, tensors: Arrays, dtype: str | Mapping[str, str]) -> None:
    """A safetensors file of these values, in one dtype or one per name."""
    kinds = {name: dtype if isinstance(dtype, str) else dtype[name] for name in tensors}
    data = {name: encoded(values, kinds[name]) for name, values in tensors.items()}
    entries = [(name, kinds[name], tensors[name].shape, len(data[name])) for name in tensors]
    path.write_bytes(header_bytes(entries, {"format": "pt"}) + b"".join(data.values()))


def write_checkpoint(folder: Path, tensors: Arrays, dtype: str = "F32", **config: object) -> Path:
    """A checkpoint of one file."""
    folder.mkdir(parents=True)
    rows = len(tensors["model.embed_tokens.weight"])
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": rows, **config}))
    write_tensors(folder / "model.safetensors", tensors, dtype)
    return folder


def write_family(root: Path, dtype: str = "F32") -> dict[str, Path]:
    """A base and three experts of it, whose deltas are a hundredth of the weights."""
    base = weights(0, 0.05)
    found = {"base": write_checkpoint(root / "base", base, dtype)}
    for seed, name in enumerate(("task", "language", "third"), start=1):
        delta = weights(seed, 0.0005)
        expert = {key: base[key] + delta[key] for key in base}
        found[name] = write_checkpoint(root / name, expert, dtype)
    return found


def write_tokenizer(folder: Path, words: list[str]) -> Path:
    """A `tokenizer.json` in which every word is a token."""
    model = {"type": "WordLevel", "vocab": {w: i for i, w in enumerate(words)}, "unk_token": "w0"}
    data = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": None, "model": model,
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def write_adapter(folder: Path, base: Path, seed: int, rank: int, **config: object) -> Path:
    """A LoRA adapter of the attention and mlp matrices."""
    folder.mkdir(parents=True)
    draws = np.random.RandomState(seed)
    tensors = {}
    targets = ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    for layer in range(LAYERS):
        for name in targets:
            rows, columns = MATRICES[name]
            stem = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{stem}.lora_A.weight"] = draws.uniform(-0.1, 0.1, (rank, columns))
            tensors[f"{stem}.lora_B.weight"] = draws.uniform(-0.1, 0.1, (rows, rank))
    write_tensors(folder / "adapter_model.safetensors", tensors, "F32")
    settings = {
        "peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none",
        "base_model_name_or_path": str(base), "task_type": "CAUSAL_LM",
        "target_modules": [name.rpartition(".")[2] for name in targets],
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({**settings, **config}))
    return folder


def random_fisher(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Arrays:
    """A made-up diagonal Fisher: uneven, and 0 in places."""
    draws = np.random.RandomState(seed + 100)
    return {
        name: draws.uniform(0, 1, shape) ** 8
        * 10.0 ** (-seed - 5)
        * (draws.uniform(size=shape) > 0.2)
        for name, shape in shapes.items()
    }


def write_fisher(folder: Path, expert: Path, fisher: Arrays) -> Path:
    """The Fisher of an expert of one file."""
    from layerswap.checkpoint import fingerprint

    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "fisher.safetensors", fisher, "F32")
    digest = fingerprint(expert / "model.safetensors")
    record = {
        "checkpoint": {"fingerprints": {"model.safetensors": digest}},
        "norm": float(sum((values**2).sum() for values in fisher.values()) ** 0.5),
    }
    (folder / "fisher.json").write_text(json.dumps(record))
    return folder
