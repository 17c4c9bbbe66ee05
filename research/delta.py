"""The cost of bfloat16 for the lab's experts, and the linearity of one pair per language.

    python -m research.delta [LAB]    # a few minutes; prints Markdown

The first table compares the default swap of the lab's experts with that of rounded ones. The
package has one pair of experts; LAB is a folder of `python -m research.lab build` with three.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.deltas.atlas import measure_delta
from layerswap.engine import Sweep
from layerswap.evaluation.examples import Tokens
from layerswap.evaluation.linearity import additivity, connectivity
from layerswap.lab.assets import Lab, open_lab, shipped
from layerswap.lab.quickstart import DEVELOPMENT_QUESTIONS
from layerswap.lab.scoring import sweep_correct
from layerswap.merge.api import swap
from layerswap.merge.plan import Plan
from research.lab.scoring import questions
from research.lab.train import encode


def score(plan: Plan, lab: Lab, language: str) -> float:
    asked = questions("task_target", language, "development", DEVELOPMENT_QUESTIONS)
    tokenizer = load_tokenizer(lab.base)
    return float(sweep_correct(Sweep([plan], dtype="float32"), tokenizer, asked).mean())


def rounded(folder: Path, out: Path) -> Path:
    out.mkdir()
    for file in folder.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t.bfloat16() for n, t in tensors.items()}, out / "model.safetensors")
    return out


def cost_of_bfloat16(lab: Lab, language: str, pair: int) -> str:
    task, other = lab.task_experts[pair], lab.language_experts[language][pair]
    atlas = measure_delta(lab.base, {"task": task, "language": other})
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small = [rounded(one, folder / str(i)) for i, one in enumerate((task, other))]
        plans = [
            swap(task=a, language=b, bottom=1, top=1, dtype="float32")
            for a, b in ((task, other), tuple(small))
        ]
        before, after = (score(plan, lab, language) for plan in plans)
    return (
        f"| {language} | {pair + 1} | {atlas.lost('task'):.1%} | {atlas.lost('language'):.1%} | "
        f"{before:.1%} | {after:.1%} |"
    )


def linearity(lab: Lab, language: str) -> str:
    task, other = lab.task_experts[0], lab.language_experts[language][0]
    tokenizer = load_tokenizer(lab.base)
    asked = questions("task_target", language, "development", 200)
    rows = [row["input_ids"] for row in encode(tokenizer, asked)]
    starts = [len(tokenizer(example.prompt).input_ids) for example in asked]
    texts = [
        Tokens(tuple(row), range(start, len(row))) for row, start in zip(rows, starts, strict=True)
    ]
    line = connectivity(task, other, texts, batch_size=64)
    sums = additivity(lab.base, task, other, texts)
    worst = max(range(len(line.layers)), key=lambda i: line.layers[i].barrier)
    return (
        f"| {language} | {line.whole.losses[0]:.3f} | {line.whole.losses[-1]:.3f} | "
        f"{line.whole.barrier:+.3f} | {line.layers[worst].barrier:+.3f} (layer {worst}) | "
        f"{sums.layers[0]:.1%} | {sums.layers[-1]:.1%} | {sums.logits:.1%} |"
    )


def main() -> None:
    torch.set_num_threads(2)
    lab = open_lab(Path(sys.argv[1])) if sys.argv[1:] else shipped()
    pairs = range(len(lab.task_experts))
    print("| language | pair | lost, task | lost, language | swap | swap of rounded experts |")
    print("|---|---|---|---|---|---|")
    for language in lab.languages:
        for pair in pairs:
            print(cost_of_bfloat16(lab, language, pair), flush=True)
    print("\n| language | loss, task | loss, language | barrier | worst layer | "
          "first layer | last layer | logits |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|")
    for language in lab.languages:
        print(linearity(lab, language), flush=True)


if __name__ == "__main__":
    main()
