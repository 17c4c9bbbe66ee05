"""Sweeps of scoring and generating on one GPU, in at most ten minutes, as one Markdown table.

    python bench/gpu.py                                   # two experts of Llama 3.1 8B's shape
    python bench/gpu.py --layers 8 --out table.md         # a quarter of them, for a smaller GPU
    python bench/gpu.py --device cpu --dtype float32 --hidden 64 --layers 4 --vocabulary 500
    python bench/gpu.py --device cpu --dtype float32 --model smollm2 --text prompts.txt --grids 24

Two experts with random weights answer random prompts, or two that differ a little from a real model
answer the beginnings of a text's paragraphs. Ways: `together` (this engine), `vllm` (started once
per written checkpoint, where vLLM is installed), and `one by one` (transformers, one composition
after the other). The last two do some of them, multiplied. Last, training: tokens per second of
`layerswap train` and of a bare loop (`train_speed.py`) on a model of the same width with
`--train-layers` layers. A row that would begin after `--minutes` says so. The table begins with the
name of the hardware.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from layerswap import Plan
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.engine.sweep import Sweep
from layerswap.lab.assets import shipped
from sweep import one_by_one
from sweep_data import add_model_options, make_plan

GRIDS = {24: (range(6), range(4)), 81: (range(9), range(9))}


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser, 4096, layers=32, vocabulary=128_256, device="cuda", dtype="bfloat16")
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of a prompt (60)")
    parser.add_argument("--new", type=int, default=40, help="tokens to generate (40)")
    parser.add_argument("--sample", type=int, default=3, help="compositions of one by one (3)")
    parser.add_argument("--text", type=Path, help="text whose paragraphs the prompts begin")
    parser.add_argument("--grids", type=int, nargs="+", default=list(GRIDS), choices=list(GRIDS))
    parser.add_argument("--train-layers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--folder", type=Path, help="where the experts go; a temporary folder")
    parser.add_argument("--out", type=Path, help="file of the table; standard output")
    return parser.parse_args()


class Report:
    """Rows of the table; prints each as it comes.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.began = options, time.perf_counter()
        shape = f"experts of {options.layers} layers, width {options.hidden}"
        if options.model is not None:
            shape = f"two experts near {options.model.name}"
        self.lines = [f"{hardware(options.device)}; torch {torch.__version__}; {shape}, "
                      f"{options.dtype}", "",
                      "| what | way | compositions | seconds | per second |",
                      "|---|---|--:|--:|--:|"]  # fmt: skip

    def row(
        self, what: str, way: str, count: int, work: Callable[[], float], *, times: float = 1
    ) -> None:
        """Time one way.

        Args:
            what: the work.
            way: of doing it.
            count: compositions.
            work: does it; returns how many rows or tokens there were, for all compositions.
            times: the part that is done stands for this many.
        """
        if time.perf_counter() - self.began > 60 * self.options.minutes:
            self.add(f"| {what} | {way} | {count} | not begun in time | |")
            return
        begin = time.perf_counter()
        done = work()
        if self.options.device.startswith("cuda"):
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - begin) * times
        self.add(f"| {what} | {way} | {count} | {seconds:.1f} | {done * times / seconds:,.0f} |")

    def add(self, line: str) -> None:
        """Add a line as it is."""
        self.lines.append(line)
        print(line, flush=True)
        if self.options.out:
            self.options.out.write_text("\n".join(self.lines) + "\n")


def hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measure(report: Report, folder: Path) -> None:
    options = report.options
    plan = make_plan(folder, options)
    prompts = make_prompts(options)
    requests = [(prompt[:-1], prompt[-1:]) for prompt in prompts]
    grids = {
        count: list(plan.grid(bottom=bottom, top=top))
        for count, (bottom, top) in GRIDS.items()
        if count in options.grids
    }

    for plans in grids.values():
        sweep = Sweep(plans, device=options.device, dtype=options.dtype)
        sweep.generate(prompts[:1], max_new_tokens=2)  # the opening check, and the blends
        size = sweep.fit_batch_size(options.tokens)
        some = list(range(min(options.sample, len(plans))))
        share = len(plans) / len(some)

        def score(members: list[int] | None, sweep: Sweep = sweep, size: int = size) -> float:
            sweep.loglikelihood(requests, members=members, batch_size=size)
            return len(requests) * len(sweep.choose(members))

        def score_alone(some: list[int] = some, score: Callable = score) -> float:
            return sum(score([member]) for member in some)

        def write(sweep: Sweep = sweep) -> float:
            found = sweep.generate(prompts, max_new_tokens=options.new, eos=[])
            return sum(len(text.tokens) for texts in found for text in texts)

        def write_alone(sweep: Sweep = sweep, some: list[int] = some) -> float:
            few = Sweep([sweep.plans[one] for one in some], device=options.device,
                        dtype=options.dtype)  # fmt: skip
            written = one_by_one(few, prompts, options.new, [])
            return sum(len(text) for texts in written for text in texts)

        report.row("scoring, rows", "together", len(plans), lambda: score(None))
        report.row("scoring, rows", "one by one", len(plans), score_alone, times=share)
        report.row("generating, tokens", "together", len(plans), write)
        report.row("generating, tokens", "one by one", len(plans), write_alone, times=share)
        del sweep
        if options.device.startswith("cuda"):
            torch.cuda.empty_cache()
    if find_spec("vllm") is None:
        report.add("| generating, tokens | vllm | | vLLM is not installed | |")
        return
    first = next(iter(grids.values()))
    restart = Restart(options, folder, prompts)
    share = len(first) / options.sample

    def restarted() -> float:
        return sum(restart(plan) for plan in first[: options.sample])

    report.row("generating, tokens", "vllm", len(first), restarted, times=share)


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Prompts of as many tokens as asked for: random ones, or the beginnings of paragraphs."""
    if options.text is None:
        rng = np.random.default_rng(0)
        drawn: list[list[int]] = rng.integers(
            3, options.vocabulary, (options.prompts, options.tokens)
        ).tolist()
        return drawn
    tokenizer = load_tokenizer(options.model)
    lines = options.text.read_text("utf-8").splitlines()
    rows = [ids for ids in tokenizer(lines).input_ids if len(ids) >= options.tokens]
    if len(rows) < options.prompts:
        sys.exit(f"{options.text}: {len(rows)} paragraphs of {options.tokens} tokens or more")
    return [row[: options.tokens] for row in rows[: options.prompts]]


class Restart:
    """Writes a composition, and starts vLLM on it in a process of its own."""

    def __init__(self, options: argparse.Namespace, folder: Path, prompts: list) -> None:
        self.options, self.out, self.asked = options, folder / "merged", folder / "prompts.json"
        self.asked.write_text(json.dumps(prompts))

    def __call__(self, plan: Plan) -> float:
        """How many tokens were written."""
        options = self.options
        plan.save(self.out, overwrite=True)
        bound = options.tokens + options.new + 8
        code = (
            "import json, sys; from vllm import LLM, SamplingParams\n"
            f"llm = LLM({str(self.out)!r}, dtype={options.dtype!r}, enforce_eager=True, "
            f"max_model_len={bound}, skip_tokenizer_init=True)\n"
            f"how = SamplingParams(temperature=0, max_tokens={options.new}, ignore_eos=True, "
            "detokenize=False)\n"
            f"rows = json.load(open({str(self.asked)!r}))\n"
            "found = llm.generate([{'prompt_token_ids': row} for row in rows], how)\n"
            "print('tokens', sum(len(one.outputs[0].token_ids) for one in found))\n"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        return float(done.stdout.rpartition("tokens ")[2])


def train(report: Report, folder: Path) -> None:
    """Tokens per second of training, by `train_speed.py` on a shallower model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    options = report.options
    if options.model is not None:
        return
    shape = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.train_layers, vocab_size=options.vocabulary,
        num_attention_heads=max(1, options.hidden // 128),
        num_key_value_heads=max(1, options.hidden // 512),
    )  # fmt: skip
    model = LlamaForCausalLM(shape).to(getattr(torch, options.dtype))
    model.save_pretrained(folder / "train")
    del model
    # Ids are drawn, so any tokenizer does.
    load_tokenizer(shipped().base).save_pretrained(folder / "train")
    script = Path(__file__).with_name("train_speed.py")
    command = [sys.executable, str(script), str(folder / "train"), "--steps", "4", "--device",
               options.device, "--vocabulary", str(min(30_000, options.vocabulary))]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    for line in ["", *done.stdout.splitlines(), *done.stderr.splitlines()[-1:]]:
        report.add(line)


def main() -> None:
    options = read_options()
    report = Report(options)
    print("\n".join(report.lines), flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure(report, Path(folder))
        train(report, Path(folder))


if __name__ == "__main__":
    main()
