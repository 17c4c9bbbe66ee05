"""Measure training: `layerswap train` against a bare PyTorch loop, tokens per second and memory.

    python bench/train_speed.py MODEL [--steps 6] [--batch 4] [--prompt 96] [--completion 4]
        [--bf16]

Three ways train the same random rows of the model's vocabulary with AdamW, each in a process of its
own: a bare loop over the model's own loss with full logits, TRL's SFTTrainer, and the trainer of
`layerswap train`. Two kinds of rows: prompts with a short completion (loss on the completion) and
texts (loss on all tokens). Wall time is the median step; CPU seconds do not depend on what else the
machine does. Prints one Markdown table.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WAYS = ("bare loop", "TRL", "layerswap train")


def main() -> None:
    """Run every way on every kind of rows, each in its own process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=96)
    parser.add_argument("--completion", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=30_000, help="ids to draw (30,000)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bf16", action="store_true", help="products in bfloat16 (autocast)")
    parser.add_argument("--frozen", action="store_true", help="the embedding does not train")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--kind", choices=("completion", "text"))
    options = parser.parse_args()
    if options.way:
        print(json.dumps(measure(options)))
        return
    print("| rows | way | tokens/s | tokens per CPU second | peak memory (GB) |")
    print("|---|---|--:|--:|--:|")
    for kind in ("completion", "text"):
        for way in WAYS:
            command = [sys.executable, *sys.argv, "--way", way, "--kind", kind]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found = json.loads(done.stdout.splitlines()[-1])
            print(
                f"| {kind} | {way} | {found['wall']:.0f} | {found['cpu']:.0f} "
                f"| {found['peak']:.1f} |", flush=True,
            )  # fmt: skip


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of wall time and of CPU time, and the peak memory in GB."""
    rows = make_rows(options)
    clock = Clock(options.device)
    if options.way == "bare loop":
        bare_loop(options, rows, clock)
    else:
        with_trainer(options, rows, clock)
    tokens = options.batch * (options.prompt + options.completion)
    wall, cpu = (statistics.median(times[1:]) for times in zip(*clock.steps, strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"wall": tokens / wall, "cpu": tokens / cpu, "peak": peak}


class Clock:
    """Wall and CPU seconds of each step.

    Args:
        device: whose work a step waits for.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps: list[tuple[float, float]] = []
        self.last = (time.perf_counter(), time.process_time())

    def tick(self) -> None:
        """End a step."""
        if self.device.startswith("cuda"):
            import torch

            torch.cuda.synchronize()
        now = (time.perf_counter(), time.process_time())
        self.steps.append((now[0] - self.last[0], now[1] - self.last[1]))
        self.last = now


def make_rows(options: argparse.Namespace) -> list[dict[str, list[int]]]:
    """Rows of random tokens, as `input_ids` and `completion_mask`."""
    draw = random.Random(0)
    length = options.prompt + options.completion
    learnt = options.completion if options.kind == "completion" else length
    return [
        {
            "input_ids": [draw.randrange(10, options.vocabulary) for _ in range(length)],
            "completion_mask": [0] * (length - learnt) + [1] * learnt,
        }
        for _ in range(options.steps * options.batch)
    ]


def bare_loop(options: argparse.Namespace, rows: list[dict[str, list[int]]], clock: Clock) -> None:
    """Train with the model's own loss and AdamW, nothing else."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    model.to(options.device)
    freeze(model, options)
    trained = [one for one in model.parameters() if one.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
    clock.tick()
    clock.steps.clear()
    for start in range(0, len(rows), options.batch):
        part = rows[start : start + options.batch]
        ids = torch.tensor([row["input_ids"] for row in part]).to(options.device)
        mask = torch.tensor([row["completion_mask"] for row in part]).bool().to(options.device)
        labels = ids.masked_fill(~mask, -100)
        with torch.autocast(options.device, torch.bfloat16, enabled=options.bf16):
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.tick()


def freeze(model: Any, options: argparse.Namespace) -> None:
    """Take the embedding, and a head that is tied to it, out of training."""
    model.get_input_embeddings().weight.requires_grad_(not options.frozen)


def with_trainer(
    options: argparse.Namespace, rows: list[dict[str, list[int]]], clock: Clock
) -> None:
    """Train with TRL's trainer, or with ours."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Ticking(TrainerCallback):  # type: ignore[misc]
        """Ticks the clock."""

        def on_train_begin(self, *args: object, **kwargs: object) -> None:
            clock.tick()
            clock.steps.clear()

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            clock.tick()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    freeze(model, options)
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, per_device_train_batch_size=options.batch, learning_rate=1e-6, max_length=None,
            use_cpu=options.device == "cpu", bf16=options.bf16, activation_checkpointing=False,
            save_strategy="no", report_to="none", logging_steps=1000, disable_tqdm=True,
            dataloader_pin_memory=False, completion_only_loss=True,
        )  # fmt: skip
        given = {
            "model": model, "args": config, "callbacks": [Ticking()],
            "processing_class": AutoTokenizer.from_pretrained(options.model),
        }  # fmt: skip
        data = Dataset.from_list(rows)
        if options.way == "TRL":
            trainer = SFTTrainer(train_dataset=data, **given)
        else:
            from layerswap.training.expert.sft import ExpertTrainer

            trainer = ExpertTrainer(train_sets=[data], **given)
        trainer.train()


if __name__ == "__main__":
    main()
