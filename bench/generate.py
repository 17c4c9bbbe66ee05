"""Generating with many compositions together, against one by one, side by side in one run.

    python bench/generate.py                   # 24 compositions of 16 layers on this machine's CPU
    python bench/generate.py --hidden 2048 --layers 32 --device cuda --dtype bfloat16

Makes two experts in a temporary folder: random ones, or, with `--similar`, one random model and
one a small step from it, whose compositions often write the same. Every round generates greedily
in two ways in turn: the sweep, and `generate` of transformers with one composition after the
other, all prompts as one batch. Loading is not counted. Prints the medians' ratio and the share of
tokens, up to the first that differs, and of texts that agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from layerswap.evaluate.limits import left_padded
from layerswap.evaluate.sweep_engine import Sweep
from sweep_data import make_plan


def one_by_one(sweep: Sweep, prompts: list[list[int]], count: int) -> list[list[list[int]]]:
    ids, mask = left_padded(prompts, 0, sweep.virtual.device)
    found = []
    for member in range(len(sweep)):
        model = sweep.model(member)
        model.generation_config.eos_token_id = None
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        found.append(out[:, ids.shape[1] :].tolist())
    return found


def agreement(ours: list, theirs: list) -> str:
    same = total = texts = 0
    pairs = [
        (g.tokens, t) for a, b in zip(ours, theirs, strict=True) for g, t in zip(a, b, strict=True)
    ]
    for tokens, others in pairs:
        equal = [a == b for a, b in zip(tokens, others, strict=True)]
        prefix = equal.index(False) if False in equal else len(equal)
        same, total, texts = same + prefix, total + len(equal), texts + (prefix == len(equal))
    return f"{same / total:.2%} of tokens and {texts / len(pairs):.2%} of texts agree"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--vocabulary", type=int, default=8000)
    parser.add_argument("--bottom", type=int, default=6, help="bottom sizes, from 0 (6)")
    parser.add_argument("--top", type=int, default=4, help="top sizes, from 0 (4)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a prompt (48)")
    parser.add_argument("--new", type=int, default=48, help="tokens to generate (48)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--similar", type=float, default=0.0, help="distance of the experts")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="torch threads; torch's choice if not given")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    lengths = rng.integers(options.tokens // 2, options.tokens + 1, options.prompts)
    prompts = [rng.integers(3, options.vocabulary, n).tolist() for n in lengths]
    times: dict[str, list[float]] = {"sweep": [], "one by one": []}
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), options)
        grid = plan.grid(bottom=range(options.bottom), top=range(options.top))
        sweep = Sweep(grid, device=options.device)
        sweep.generate(prompts[:1], max_new_tokens=2)  # the check, and the blends
        for number in range(options.rounds):
            start = time.perf_counter()
            ours = sweep.generate(prompts, max_new_tokens=options.new, eos=[])
            middle = time.perf_counter()
            theirs = one_by_one(sweep, prompts, options.new)
            times["sweep"].append(middle - start)
            times["one by one"].append(time.perf_counter() - middle)
            print(f"round {number + 1} of {options.rounds}", flush=True)
    together, alone = (statistics.median(values) for values in times.values())
    print(
        f"{len(sweep)} compositions of {options.layers} layers, width {options.hidden}, "
        f"{options.prompts} prompts, {options.new} tokens: sweep {together:.2f} s, one by one "
        f"{alone:.2f} s, {alone / together:.1f} times as fast; {agreement(ours, theirs)}"
    )


if __name__ == "__main__":
    main()
