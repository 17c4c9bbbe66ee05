"""Many compositions together against other ways, side by side in one run.

    python bench/sweep.py                      # score with 36 compositions of 16 layers on the CPU
    python bench/sweep.py generate --lab --prompts 16 --dtype bfloat16
    python bench/sweep.py prefix --model gemma-3-270m         # two experts near a real model
    python bench/sweep.py CASE --hidden 2048 --layers 32 --device cuda --dtype bfloat16

Two experts have random weights; with `--lab` they are trained ones, of the lab that ships with the
package, and answer its problems until they end. Every round takes each way in turn. Loading is not
counted, and times are medians over the rounds.

`score`: the sweep; the same engine with one composition at a time, which differs in nothing but
what is shared; and transformers' own forward pass over whole sequences, which is what lm-eval does
with a loaded model. The ideal is the ratio of layer evaluations.
`generate`: the sweep, and `generate` of transformers with one composition after the other, all
prompts as one batch, greedily. Prints the share of tokens, up to the first that differs, and of
texts that agree.
`prefix`: prompts of `--examples` tokens that all begin with, and a question of 10 to 50 tokens with
two answers of one token: whole rows, the examples read once, and the questions alone (zero-shot,
the floor); with `--new` it continues the prompts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from layerswap.engine.rows import pad, pad_with_mask
from layerswap.engine.sweep import Sweep
from sweep_data import add_model_options, in_turn, lab_plan, lab_prompts, make_plan

Tokens = list[int]
Request = tuple[Tokens, Tokens]
DEFAULTS = {
    "score": {"hidden": 256, "bottom": 6, "top": 6, "prompts": 4, "rounds": 5, "new": 0},
    "generate": {"hidden": 512, "bottom": 6, "top": 4, "prompts": 4, "rounds": 3, "new": 48},
    "prefix": {"hidden": 512, "bottom": 1, "top": 0, "prompts": 64, "rounds": 3, "new": 0},
}


def draw(options: argparse.Namespace, count: int) -> Tokens:
    tokens: Tokens = options.rng.integers(10, options.vocabulary, count).tolist()
    return tokens


def score(sweep: Sweep, options: argparse.Namespace) -> None:
    """Multiple choice: four continuations of a few tokens after each context."""
    contexts = [draw(options, options.tokens) for _ in range(options.prompts)]
    requests = [(context, draw(options, 4)) for context in contexts for _ in range(4)]
    size = options.batch_size

    def alone() -> None:
        for member in range(len(sweep)):
            sweep.loglikelihood(requests, batch_size=size, members=[member])

    sweep.loglikelihood(requests[:4])  # the check of exactness, and the blends
    times = in_turn(
        {
            "sweep": lambda: sweep.loglikelihood(requests, batch_size=size),
            "one by one": alone,
            "transformers one by one": lambda: own_forward(sweep, requests, size),
        },
        options,
    )
    counts = sweep.counts()
    print(counts)
    for which, clock in enumerate(("clock", "CPU")):
        for name, seconds in times.items():
            ratio = seconds[which] / times["sweep"][which]
            share = f", {ratio / counts.ratio:.0%} of the ideal" if name != "sweep" else ""
            print(f"{clock}: {name} {seconds[which]:.2f} s, {ratio:.2f} times the sweep{share}")


def own_forward(sweep: Sweep, requests: list[Request], batch_size: int) -> None:
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


def generate(sweep: Sweep, options: argparse.Namespace) -> None:
    lengths = options.rng.integers(options.tokens // 2, options.tokens + 1, options.prompts)
    prompts = [draw(options, n) for n in lengths]
    if options.lab:
        prompts = lab_prompts(options.prompts)
    ends = [2] if options.lab else []
    sweep.generate(prompts[:1], max_new_tokens=2)  # the check, and the blends
    found = {}

    def together() -> None:
        found["ours"] = sweep.generate(prompts, max_new_tokens=options.new, eos=ends)

    def alone() -> None:
        found["theirs"] = one_by_one(sweep, prompts, options.new, ends)

    (ours, busy), (theirs, their_busy) = in_turn(
        {"the sweep": together, "one by one": alone}, options
    ).values()
    print(
        f"up to {options.new} tokens, {options.dtype}: the sweep takes {ours:.2f} s and is "
        f"{theirs / ours:.1f} times as fast as one by one ({their_busy / busy:.1f} by the seconds "
        f"of the CPU); {agreement(found['ours'], found['theirs'])}"
    )


def one_by_one(sweep: Sweep, prompts: list[Tokens], count: int, ends: Tokens) -> list:
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


def prefix(sweep: Sweep, options: argparse.Namespace) -> None:
    examples = draw(options, options.examples)
    questions = [draw(options, int(options.rng.integers(10, 51))) for _ in range(options.prompts)]
    answers = [[token] for token in draw(options, 2)]
    few, zero = (
        [([*start, *question], answer) for question in questions for answer in answers]
        for start in (examples, [])
    )
    found = {}

    def answer(way: str, requests: list[Request], *, share: bool) -> None:
        settings = {"batch_size": options.batch_size, "share_prefixes": share}
        if options.new:
            prompts = [context for context, _ in requests[:: len(answers)]]
            settings |= {"max_new_tokens": options.new, "eos": []}
            found[way] = sweep.generate(prompts, **settings)
        else:
            found[way] = sweep.loglikelihood(requests, **settings).logprob

    ways = {
        "whole rows": lambda: answer("whole rows", few, share=False),
        "examples once": lambda: answer("examples once", few, share=True),
        "zero-shot": lambda: answer("zero-shot", zero, share=False),
    }
    for way in ways.values():
        way()  # checks, and reads the weights
    times = in_turn(ways, options)
    print(f"{options.examples} + 10 to 50 tokens")
    print("| way | seconds | against whole rows |\n|---|--:|--:|")
    for way, (seconds, _) in times.items():
        print(f"| {way} | {seconds:.2f} | {times['whole rows'][0] / seconds:.1f} times |")
    whole, shared = found["whole rows"], found["examples once"]
    if options.new:
        same = np.mean([one == two for a, b in zip(whole, shared, strict=True)
                        for one, two in zip(a, b, strict=True)])  # fmt: skip
        print(f"{same:.1%} of texts are equal")
    else:
        print(f"largest difference of a log-probability: {np.abs(whole - shared).max():.2g}")


CASES = {"score": score, "generate": generate, "prefix": prefix}


def read_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=CASES, help="what to measure (score)")
    add_model_options(parser, 256)
    parser.add_argument("--bottom", type=int, help="bottom sizes, from 0")
    parser.add_argument("--top", type=int, help="top sizes, from 0")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of a prompt (48)")
    parser.add_argument("--new", type=int, help="tokens to generate")
    parser.add_argument("--examples", type=int, default=240, help="prefix: their tokens (240)")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--lab", action="store_true", help="the lab's experts and problems")
    parser.add_argument("--threads", type=int, help="torch threads; torch's choice if not given")
    if not set(arguments) & {*CASES, "-h", "--help"}:
        arguments = ["score", *arguments]
    case = next((word for word in arguments if word in CASES), "score")
    parser.set_defaults(**DEFAULTS[case])
    return parser.parse_args(arguments)


def main() -> None:
    options = read_options(sys.argv[1:])
    options.rng = np.random.default_rng(0)
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        plan = lab_plan() if options.lab else make_plan(Path(folder), options)
        top = [1] if options.case == "prefix" else range(options.top)
        grid = plan.grid(bottom=range(options.bottom), top=top)
        sweep = Sweep(grid, device=options.device, dtype=options.dtype)
        layers = sweep.plans[0].composition.layers
        print(f"{len(sweep)} compositions of {layers} layers, {options.prompts} prompts")
        CASES[options.case](sweep, options)


if __name__ == "__main__":
    main()
