"""Two experts with random weights, and ways that are timed in turn, for the sweep benchmarks."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import layerswap as ls
from layerswap.checkpoint.loading import load_tokenizer


def lab_plan() -> ls.Plan:
    """A swap of two trained experts of the lab that ships with the package."""
    from layerswap.lab.assets import shipped

    lab = shipped()
    language = lab.language_experts[lab.languages[0]][0]
    return ls.swap(task=lab.task_experts[0], language=language, bottom=1, top=1)


def lab_prompts(count: int) -> list[list[int]]:
    """Problems of the lab in its scarce language, as the task expert was asked them."""
    from layerswap.lab.assets import shipped
    from layerswap.lab.questions import questions

    lab = shipped()
    tokenizer = load_tokenizer(lab.base)
    asked = questions("problem", lab.languages[0], "development")[:count]
    return [tokenizer(question.prompt)["input_ids"] for question in asked]


def add_model_options(
    parser: argparse.ArgumentParser, hidden: int, *, layers: int = 16, vocabulary: int = 8000,
    device: str = "cpu", dtype: str = "float32",
) -> None:  # fmt: skip
    """What `make_plan` reads, with a bench's own defaults."""
    parser.add_argument("--model", type=Path, help="a real model, instead of random weights")
    parser.add_argument("--hidden", type=int, default=hidden)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--vocabulary", type=int, default=vocabulary)
    parser.add_argument("--device", default=device)
    parser.add_argument("--dtype", default=dtype)


def make_plan(folder: Path, options: argparse.Namespace) -> ls.Plan:
    """A swap of two Llamas of the asked size, or of two that are near a real model."""
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    if options.model is not None:
        for seed, name in enumerate(("task", "language")):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_pretrained(
                options.model, dtype=getattr(torch, options.dtype)
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 1e-3 * parameter.std())
            model.save_pretrained(folder / name)
            load_tokenizer(options.model).save_pretrained(folder / name)
            del model
        return ls.swap(task=folder / "task", language=folder / "language", bottom=1, top=1)
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
    for seed, name in enumerate(("task", "language")):
        torch.manual_seed(seed)
        with torch.device(options.device):
            model = LlamaForCausalLM(config)
        model.to(getattr(torch, options.dtype)).save_pretrained(folder / name)
        del model
    return ls.swap(task=folder / "task", language=folder / "language", bottom=1, top=1)


def in_turn(
    ways: Mapping[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, tuple[float, float]]:
    """Take each way in turn, round after round.

    Returns:
        By way, the median seconds of the clock, and of this process on the CPU: these are steadier
        on a shared machine.
    """
    clocks = (time.perf_counter, time.process_time)
    seconds: dict[str, list[list[float]]] = {name: [] for name in ways}
    for number in range(options.rounds):
        for name, work in ways.items():
            start = [clock() for clock in clocks]
            work()
            if options.device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds[name].append([clock() - at for clock, at in zip(clocks, start, strict=True)])
        print(f"round {number + 1} of {options.rounds}", flush=True)
    return {
        name: (statistics.median(wall), statistics.median(busy))
        for name, times in seconds.items()
        for wall, busy in [zip(*times, strict=True)]
    }
