"""Two experts with random weights for the sweep benchmarks."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import layerswap as ls


def make_plan(folder: Path, options: argparse.Namespace) -> ls.Plan:
    """A swap of two Llamas of the asked size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 3,
        num_hidden_layers=options.layers,
        num_attention_heads=max(1, options.hidden // 64),
        num_key_value_heads=max(1, options.hidden // 128),
        vocab_size=options.vocabulary,
        max_position_embeddings=4096,
        dtype=options.dtype,
    )
    step = getattr(options, "similar", 0.0)
    for seed, name in enumerate(("task", "language")):
        torch.manual_seed(0 if step else seed)
        with torch.device(options.device), torch.no_grad():
            model = LlamaForCausalLM(config)
            if step and seed:
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * step)
        model.to(getattr(torch, options.dtype)).save_pretrained(folder / name)
        del model
    return ls.swap(task=folder / "task", language=folder / "language", bottom=1, top=1)
