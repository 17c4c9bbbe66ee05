"""Synthetic Llama-shaped checkpoints for benchmarks: a base and two experts of it.

    python bench/checkpoints.py FOLDER --gb 2

Writes `base`, `task` and `language`: bfloat16 shards of 1 GB, `config.json` and a tiny tokenizer.
Size is set by the number of layers. The experts' deltas are normal with a standard deviation of
1e-4, as small as fine-tuning leaves them, so most of them vanish in bfloat16, as they do there.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HIDDEN, INNER, KEYS, VOCAB = 2048, 5632, 256, 32_000
SHARD_BYTES = 10**9
DELTA = 1e-4
EXPERTS = ("base", "task", "language")
PROJECTIONS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
OUTSIDE_PARAMETERS = 2 * VOCAB * HIDDEN + HIDDEN
LAYER_PARAMETERS = sum(rows * columns for rows, columns in PROJECTIONS.values()) + 2 * HIDDEN
Shape = tuple[int, ...]


def layers_for(gigabytes: float) -> int:
    """The number of layers that comes closest to the size in bfloat16."""
    return max(3, round((gigabytes * 1e9 / 2 - OUTSIDE_PARAMETERS) / LAYER_PARAMETERS))


def shapes(layers: int) -> dict[str, Shape]:
    found: dict[str, Shape] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        found |= {f"{prefix}{name}.weight": shape for name, shape in PROJECTIONS.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{prefix}{norm}.weight"] = (HIDDEN,)
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def shards(found: dict[str, Shape]) -> list[list[str]]:
    """Names file by file, as full as `SHARD_BYTES` allows."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, shape in found.items():
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        if groups[-1] and size + nbytes > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += nbytes
    return groups


def write_checkpoints(folder: Path, layers: int, names: Sequence[str] = EXPERTS) -> None:
    import torch
    from safetensors.torch import save_file

    found = shapes(layers)
    groups = shards(found)
    for expert in names:
        (folder / expert).mkdir(parents=True)
        write_documents(folder / expert, layers)
    weight_map = {}
    draws = torch.Generator().manual_seed(0)
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map |= dict.fromkeys(group, file)
        tensors: dict[str, dict[str, torch.Tensor]] = {expert: {} for expert in names}
        for name in group:
            mean = 1.0 if name.endswith("norm.weight") else 0.0
            base = torch.randn(found[name], generator=draws).mul_(0.02).add_(mean).bfloat16()
            for expert in names:
                delta = torch.randn(found[name], generator=draws).mul_(DELTA)
                tensors[expert][name] = base if expert == "base" else delta.add_(base).bfloat16()
        for expert in names:
            save_file(tensors[expert], folder / expert / file, metadata={"format": "pt"})
    total = 2 * (layers * LAYER_PARAMETERS + OUTSIDE_PARAMETERS)
    index = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
    for expert in names:
        (folder / expert / "model.safetensors.index.json").write_text(index)


def make_checkpoints(folder: Path, gigabytes: float, *more: str) -> Path:
    """Write them in a process of its own: a child's peak is never below its parent's."""
    command = [sys.executable, __file__, str(folder), "--gb", str(gigabytes), *more]
    subprocess.run(command, check=True)
    return folder


def write_documents(folder: Path, layers: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(folder)
    words = {word: i for i, word in enumerate(("<unk>", "<s>", "</s>", "one", "two", "three"))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--experts-alone", action="store_true", help="no base")
    options = parser.parse_args()
    names = EXPERTS[1:] if options.experts_alone else EXPERTS
    write_checkpoints(options.folder, layers_for(options.gb), names)


if __name__ == "__main__":
    main()
