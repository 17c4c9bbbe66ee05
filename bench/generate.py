"""Generating with many compositions together, against one by one, side by side in one run.

    python bench/generate.py                   # 24 compositions of 16 layers on this machine's CPU
    python bench/generate.py --hidden 2048 --layers 32 --device cuda --dtype bfloat16
    python bench/generate.py --lab --prompts 16 --dtype bfloat16

Makes two experts with random weights in a temporary folder; with `--lab` they are trained ones, of
the lab that ships with the package, and answer its problems until they end. Every round generates
greedily in two ways in turn: the sweep, and `generate` of transformers with one composition after
the other, all prompts as one batch. Loading is not counted. Prints the median ratio and the
share of tokens, up to the first that differs, and of texts that agree.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from layerswap.engine.rows import pad_with_mask
from layerswap.engine.sweep import Sweep
from sweep_data import add_model_options, lab_plan, lab_prompts, make_plan


def one_by_one(sweep: Sweep, prompts: list[list[int]], count: int, ends: list[int]) -> list:
    ids, mask = (part.to(sweep.device) for part in pad_with_mask(prompts, left=True))
    found = []
    for member in range(len(sweep)):
        model = sweep.switch(member)
        model.generation_config.eos_token_id = ends or None
        model.generation_config.pad_token_id = 0
        out = model.generate(ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
        found.append(out[:, ids.shape[1] :].tolist())
    return found


def agreement(ours: list, theirs: list) -> str:
    """How much is equal up to the first token that differs; theirs may go on with padding."""
    same = total = texts = 0
    answers = [(g.tokens, t) for a, b in zip(ours, theirs, strict=True) for g, t in zip(a, b)]  # noqa: B905
    for tokens, others in answers:
        equal = [a == b for a, b in zip(tokens, others, strict=False)]
        prefix = equal.index(False) if False in equal else len(equal)
        same, total, texts = same + prefix, total + len(tokens), texts + (prefix == len(tokens))
    return f"{same / total:.2%} of tokens and {texts / len(answers):.2%} of texts agree"


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, 512)
    parser.add_argument("--bottom", type=int, default=6, help="bottom sizes, from 0 (6)")
    parser.add_argument("--top", type=int, default=4, help="top sizes, from 0 (4)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a prompt (48)")
    parser.add_argument("--new", type=int, default=48, help="tokens to generate (48)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lab", action="store_true", help="the lab's experts and problems")
    parser.add_argument("--threads", type=int, help="torch threads; torch's choice if not given")
    return parser.parse_args()


def main() -> None:
    options = read_options()
    if options.threads:
        torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    lengths = rng.integers(options.tokens // 2, options.tokens + 1, options.prompts)
    prompts = [rng.integers(3, options.vocabulary, n).tolist() for n in lengths]
    clocks = (time.perf_counter, time.process_time)
    ratios: list[list[float]] = []
    if options.lab:
        prompts = lab_prompts(options.prompts)
    with tempfile.TemporaryDirectory() as folder:
        plan = lab_plan() if options.lab else make_plan(Path(folder), options)
        grid = plan.grid(bottom=range(options.bottom), top=range(options.top))
        sweep = Sweep(grid, device=options.device, dtype=options.dtype)
        sweep.generate(prompts[:1], max_new_tokens=2)  # the check, and the blends
        ends = [2] if options.lab else []
        for number in range(options.rounds):
            start = [clock() for clock in clocks]
            ours = sweep.generate(prompts, max_new_tokens=options.new, eos=ends)
            middle = [clock() for clock in clocks]
            theirs = one_by_one(sweep, prompts, options.new, ends)
            end = [clock() for clock in clocks]
            both = zip(start, middle, end, strict=True)
            ratios.append([(c - b) / (b - a) for a, b, c in both] + [middle[0] - start[0]])
            print(f"round {number + 1} of {options.rounds}", flush=True)
    clock, busy, seconds = map(statistics.median, zip(*ratios, strict=True))
    print(
        f"{len(sweep)} compositions of {sweep.plans[0].composition.layers} layers, "
        f"{options.prompts} prompts, up to {options.new} tokens, {options.dtype}: the sweep takes "
        f"{seconds:.2f} s and is {clock:.1f} times as fast as one by one ({busy:.1f} by the "
        f"seconds of the CPU); {agreement(ours, theirs)}"
    )


if __name__ == "__main__":
    main()
