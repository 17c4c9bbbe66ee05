"""Regret and cost of the two-stage rule on the lab, where every composition can be scored.

    python -m research.screening [LAB]    # minutes on two cores; prints Markdown

For every scarce language and pair of experts, 30 compositions of a grid are scored on 250
development and 500 test problems. Then the rule chooses on the development problems, in 20 orders
of them. The regret is the best test score minus that of the choice. The cost is the share of all
scores of the candidates. The package has one pair of experts; LAB is a folder of `python -m
research.lab build` with three.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose.presets import zone_grid
from layerswap.engine.sweep import Sweep
from layerswap.experiment.conditions import swapped
from layerswap.lab.assets import Lab, open_lab, shipped
from layerswap.lab.quickstart import BOTTOMS, TOPS, lab_plan
from layerswap.lab.scoring import sweep_correct
from layerswap.merge.plan import Plan
from research.lab.scoring import questions

if TYPE_CHECKING:
    import numpy.typing as npt

    Right = npt.NDArray[np.bool_]

DEVELOPMENT, TEST, ORDERS, LAYERS = 250, 500, 20, 8
FINALISTS = 9
FIRST = (20, 40, 60, 100, DEVELOPMENT)
"""Problems of the first stage; with all of them there is one stage."""


def right_answers(lab: Lab, language: str, plans: Sequence[Plan]) -> tuple[Right, Right]:
    """Right answers, `(compositions, problems)`, on the development and the test problems."""
    tokenizer, sweep = load_tokenizer(lab.base), Sweep(plans, dtype="float32")
    development = questions("task_target", language, "development", DEVELOPMENT)
    test = questions("task_target", language, "test", TEST)
    return sweep_correct(sweep, tokenizer, development), sweep_correct(sweep, tokenizer, test)


def two_stages(right: Right, first: int) -> tuple[int, float]:
    """The chosen composition, and the number of scores by that of one composition on all."""
    people, count = right.shape
    order = np.argsort(-right[:, :first].mean(axis=1), kind="stable")
    finalists = order[: FINALISTS if first < count else people]
    best = max(finalists, key=lambda i: right[i].mean())
    paid = people * first + len(finalists) * (count - first)
    return int(best), paid / count


def main() -> None:
    lab = open_lab(Path(sys.argv[1])) if sys.argv[1:] else shipped()
    found: dict[int, list[tuple[float, float]]] = {}
    for language in lab.languages:
        for pair in range(len(lab.task_experts)):
            start = lab_plan(lab, language, pair)
            zones = zone_grid(LAYERS, bottom=BOTTOMS, top=TOPS, bottom_transition=(0, 1))
            plans = [swapped(start, one) for one in zones]
            development, test = right_answers(lab, language, plans)
            truth = test.mean(axis=1)
            print(f"{language} {pair + 1}: best {truth.max():.3f}", file=sys.stderr)
            for order in range(ORDERS):
                rng = np.random.default_rng(order)
                right = development[:, rng.permutation(DEVELOPMENT)]
                for first in FIRST:
                    choice, cost = two_stages(right, first)
                    found.setdefault(first, []).append((truth.max() - truth[choice], cost))
    print("| problems of the first stage | cost | mean regret | largest |")
    print("|--:|--:|--:|--:|")
    for first, both in found.items():
        regret, cost = np.mean(both, axis=0)
        print(f"| {first} | {cost:.1f} | {regret:.3f} | {max(one for one, _ in both):.3f} |")


if __name__ == "__main__":
    main()
