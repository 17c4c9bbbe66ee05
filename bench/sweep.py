"""Scoring many compositions together, against one by one, side by side in one run.

    python bench/sweep.py                      # 36 compositions of 16 layers on this machine's CPU
    python bench/sweep.py --hidden 2048 --layers 32 --device cuda --dtype bfloat16

Makes two experts with random weights in a temporary folder. Every round scores the same requests
in three ways in turn: the sweep; the same engine with one composition at a time, which differs in
nothing but what is shared; and transformers' own forward pass over whole sequences, which is what
lm-eval does with a loaded model. Loading is not counted. The ideal is the ratio of layer
evaluations; times are medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from layerswap.engine.rows import pad
from layerswap.engine.sweep import Sweep
from sweep_data import add_model_options, make_plan


def requests_for(options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Multiple choice: four continuations of a few tokens after each context."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(options.questions):
        context = rng.integers(3, options.vocabulary, options.tokens).tolist()
        for _ in range(4):
            found.append((context, rng.integers(3, options.vocabulary, 4).tolist()))
    return found


def own_forward(sweep: Sweep, requests: list, batch_size: int) -> None:
    """What a loop over loaded models does: whole logits of padded batches."""
    ordered = sorted(requests, key=lambda r: len(r[0]) + len(r[1]), reverse=True)
    for member in range(len(sweep)):
        model = sweep.switch(member)
        for start in range(0, len(ordered), batch_size):
            rows = [[*a, *b][:-1] for a, b in ordered[start : start + batch_size]]
            ids = pad(rows)
            with torch.inference_mode():
                logits = model(ids.to(sweep.device), use_cache=False).logits
                logits.float().log_softmax(-1).argmax(-1).cpu()


def timed(work: Callable[[], object], device: str) -> tuple[float, float]:
    """Seconds on the clock, and of this process on the CPU: steadier on a shared machine."""
    start, busy = time.perf_counter(), time.process_time()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - start, time.process_time() - busy


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, 256)
    parser.add_argument("--bottom", type=int, default=6, help="bottom sizes, from 0 (6)")
    parser.add_argument("--top", type=int, default=6, help="top sizes, from 0 (6)")
    parser.add_argument("--questions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a context (48)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="torch threads; torch's choice if not given")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    requests = requests_for(options)
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), options)
        grid = plan.grid(bottom=range(options.bottom), top=range(options.top))
        sweep = Sweep(grid, device=options.device)

        def together() -> None:
            sweep.loglikelihood(requests, batch_size=options.batch_size)

        def one_by_one() -> None:
            for member in range(len(sweep)):
                sweep.loglikelihood(requests, batch_size=options.batch_size, members=[member])

        ways = {
            "sweep": together,
            "one by one": one_by_one,
            "transformers one by one": lambda: own_forward(sweep, requests, options.batch_size),
        }
        sweep.loglikelihood(requests[:4])  # the check of exactness, and the blends
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for number in range(options.rounds):
            for name, work in ways.items():
                seconds[name].append(timed(work, options.device))
            print(f"round {number + 1} of {options.rounds}", flush=True)
    counts = sweep.counts()
    print(f"{len(sweep)} compositions of {options.layers} layers, width {options.hidden}: {counts}")
    for which, clock in enumerate(("clock", "CPU")):
        medians = {n: statistics.median(v[which] for v in values) for n, values in seconds.items()}
        for name, value in medians.items():
            ratio = value / medians["sweep"]
            share = f", {ratio / counts.ratio:.0%} of the ideal" if name != "sweep" else ""
            print(f"{clock}: {name} {value:.2f} s, {ratio:.2f} times the sweep{share}")


if __name__ == "__main__":
    main()
