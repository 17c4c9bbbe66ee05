"""Scoring few-shot prompts with their examples read once, against whole rows, in one run.

    python bench/prefix.py                            # random Llamas of 16 layers, on the CPU
    python bench/prefix.py --model gemma-3-270m       # two experts near a real model

Prompts are random tokens: `--examples` that all begin with, and a question of 10 to 50 tokens with
two answers of one token. Every round scores them in three ways in turn: whole rows, the examples
read once, and the questions alone (zero-shot, the floor); with `--write` it continues the prompts
in these ways. Prints median seconds, ratios, and how far the results differ.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from layerswap.engine.sweep import Sweep
from sweep_data import add_model_options, make_plan


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, 512)
    parser.add_argument("--bottom", type=int, default=1, help="bottom sizes, from 0 (1)")
    parser.add_argument("--examples", type=int, default=240, help="tokens of the examples (240)")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--write", type=int, default=0, help="generate as many tokens instead")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    """Score in every way, in turn."""
    options = read_options()
    draw = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return draw.integers(10, options.vocabulary, count).tolist()

    examples = tokens(options.examples)
    questions = [tokens(int(draw.integers(10, 51))) for _ in range(options.prompts)]
    answers = [[token] for token in tokens(2)]
    few, zero = (
        [([*start, *question], answer) for question in questions for answer in answers]
        for start in (examples, [])
    )
    ways = {"whole rows": (few, False), "examples once": (few, True), "zero-shot": (zero, False)}
    with tempfile.TemporaryDirectory() as folder:
        plan = make_plan(Path(folder), options)
        sweep = Sweep(plan.grid(bottom=range(options.bottom), top=[1]), device=options.device)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        found = {}
        for number in range(options.rounds + 1):
            for way, (requests, share) in ways.items():
                start = time.perf_counter()
                settings = {"batch_size": options.batch, "share_prefixes": share}
                if options.write:
                    prompts = [context for context, _ in requests[:: len(answers)]]
                    settings |= {"max_new_tokens": options.write, "eos": []}
                    found[way] = sweep.generate(prompts, **settings)
                else:
                    found[way] = sweep.loglikelihood(requests, **settings).logprob
                if number:  # the first round checks, and reads the weights
                    seconds[way].append(time.perf_counter() - start)
    middle = {way: statistics.median(times) for way, times in seconds.items()}
    print(f"{len(sweep)} compositions, {options.prompts} prompts, {options.examples} + 10 to 50")
    print("| way | seconds | against whole rows |\n|---|--:|--:|")
    for way, time_taken in middle.items():
        print(f"| {way} | {time_taken:.2f} | {middle['whole rows'] / time_taken:.1f} times |")
    whole, shared = found["whole rows"], found["examples once"]
    if options.write:
        same = np.mean([one == two for a, b in zip(whole, shared, strict=True)
                        for one, two in zip(a, b, strict=True)])  # fmt: skip
        print(f"{same:.1%} of texts are equal")
    else:
        print(f"largest difference of a log-probability: {np.abs(whole - shared).max():.2g}")


if __name__ == "__main__":
    main()
