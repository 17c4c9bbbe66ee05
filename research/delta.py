"""What the delta room says of the lab's experts, against what a sweep finds.

    python -m research.delta          # a few minutes; prints Markdown

For every pair of shipped experts: the rank of `suggest`'s proposal among the 20 compositions of
the quickstart's grid, by score on the development split; what saving the deltas in bfloat16
costs; and the linearity of one pair per language.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose import Zones
from layerswap.deltas import measure_delta, suggest
from layerswap.engine import Sweep
from layerswap.evaluation.examples import Tokens
from layerswap.evaluation.linearity import additivity, connectivity
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import DEVELOPMENT_QUESTIONS, lab_plan, try_grid
from layerswap.lab.scoring import questions, sweep_correct
from layerswap.lab.train import encode
from layerswap.merge import Plan, swap
from layerswap.search.conditions import swapped


def score(plan: Plan, lab: Lab, language: str) -> float:
    asked = questions(
        "task_target", language, "development", DEVELOPMENT_QUESTIONS, world=lab.world
    )
    tokenizer = load_tokenizer(lab.base)
    return float(sweep_correct(Sweep([plan], dtype="float32"), tokenizer, asked).mean())


def rank_of_proposal(lab: Lab, language: str, pair: int) -> str:
    task, other = lab.task_experts[pair], lab.language_experts[language][pair]
    plan = lab_plan(lab, language, pair)
    scores = {one.zones: share for one, share in try_grid(lab, language, pair).items() if one.zones}
    proposal = suggest(
        measure_delta(lab.base, {"task": task, "language": other}), "task", "language"
    ).zones
    found = scores.get(proposal) or score(swapped(plan, proposal), lab, language)
    rank = 1 + sum(value > found for value in scores.values())
    best = max(scores, key=scores.__getitem__)
    return (
        f"| {language} | {pair + 1} | {proposal} | {found:.1%} | {rank} of {len(scores)} | "
        f"{best} | {scores[best]:.1%} | {scores[Zones(1, 1)]:.1%} |"
    )


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
    asked = questions("task_target", language, "development", 200, world=lab.world)
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
        f"{min(sums.alone):.1%} to {max(sums.alone):.1%} | {sums.layers[0]:.1%} | "
        f"{sums.layers[-1]:.1%} | {sums.logits:.1%} |"
    )


def main() -> None:
    torch.set_num_threads(2)
    lab = shipped()
    pairs = range(len(lab.task_experts))
    print("| language | pair | proposal | score | rank | best of the grid | score | default |")
    print("|---|---|---|---|---|---|---|---|")
    for language in lab.languages:
        for pair in pairs:
            print(rank_of_proposal(lab, language, pair), flush=True)
    print("\n| language | pair | lost, task | lost, language | swap | swap of rounded experts |")
    print("|---|---|---|---|---|---|")
    for language in lab.languages:
        for pair in pairs:
            print(cost_of_bfloat16(lab, language, pair), flush=True)
    print("\n| language | loss, task | loss, language | barrier | worst layer | each alone | "
          "first layer | last layer | logits |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|")
    for language in lab.languages:
        print(linearity(lab, language), flush=True)


if __name__ == "__main__":
    main()
