"""What of the lab's task experts can go back to the base before the task suffers.

    python -m research.reverting          # a few minutes; prints Markdown

Mean over the three shipped task experts, 1,000 questions of the test split each, in the source
language: the experiments of the first paper's section 3.3, by magnitude and by place.
"""

from __future__ import annotations

from typing import Any

import torch

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.engine import Sweep
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.scoring import questions, sweep_correct
from layerswap.merge import revert

QUESTIONS = 1000
KEPT = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.3, 0.1, 0.0)
PLACES: dict[str, dict[str, Any]] = {
    "first and last layer": {"layers": [0, 7]},
    "first two and last two layers": {"layers": ["0-1", "6-7"]},
    "middle four layers": {"layers": ["2-5"]},
    "outside the layers": {"layers": ["outside"]},
    "all attention": {"roles": ["attention"]},
    "all mlp": {"roles": ["mlp"]},
    "all but the task's part of partition A": {"partition": "A", "part": "task"},
    "all but the task's part of partition C": {"partition": "C", "part": "task"},
    "all but the task's part of partition Z": {"partition": "Z", "part": "task"},
}


def mean_score(lab: Lab, tokenizer: Any, **settings: Any) -> float:
    asked = questions("task_source", lab.languages[0], "test", QUESTIONS, world=lab.world)
    plans = [revert(lab.base, expert, **settings) for expert in lab.task_experts]
    # Each alone: a plan that reverts by rows is not a composition that others share layers with.
    scores = [
        sweep_correct(Sweep([plan], dtype="float32"), tokenizer, asked).mean() for plan in plans
    ]
    return float(sum(scores) / len(scores))


def main() -> None:
    torch.set_num_threads(1)
    lab = shipped()
    tokenizer = load_tokenizer(lab.base)
    print("| rows kept | ranked in each tensor | ranked over the model |\n|---|---|---|")
    for keep in KEPT:
        each, together = (
            mean_score(lab, tokenizer, keep=keep, scope=scope) for scope in ("tensor", "model")
        )
        print(f"| {keep:.0%} | {each:.1%} | {together:.1%} |", flush=True)
    print("\n| back at the base | score |\n|---|---|")
    for name, settings in PLACES.items():
        print(f"| {name} | {mean_score(lab, tokenizer, **settings):.1%} |", flush=True)


if __name__ == "__main__":
    main()
