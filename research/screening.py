"""Regret at equal cost of the ways to spare scores on the lab's grids, whose truth is known.

    python -m research.screening

For every scarce language and seed, 30 compositions are scored on 250 development and 500 test
problems. Then each way chooses on the development problems, in 20 orders of them: item-response
screening, successive halving, the same number of random problems for all, and all problems. The
regret is the best test score minus that of the choice.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.compose import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.engine.sweep import Sweep
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import BOTTOMS, TOPS
from layerswap.lab.scoring import load
from layerswap.lab.tasks import LabSplit, examples
from layerswap.merge import make_plan
from layerswap.search.halving import race
from layerswap.search.item_response import screen

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

DEVELOPMENT, TEST, BATCH, ORDERS = 250, 500, 64, 20


def matrices(lab: Lab, language: str, pair: int) -> tuple[Matrix, Matrix]:
    """Right answers of all compositions, `(compositions, problems)`, on both splits."""
    _, tokenizer = load(lab.base)
    experts = {"task": str(lab.task_experts[pair]),
               "language": str(lab.language_experts[language][pair])}  # fmt: skip
    plans = [
        make_plan(check_recipe(
            {"experts": experts, "swap": vars(zones)}, where="lab"
        ))
        for zones in zone_grid(8, bottom=BOTTOMS, top=TOPS, bottom_transition=(0, 1))
    ]  # fmt: skip
    sweep = Sweep(plans, dtype="float32")

    def right(split: LabSplit, count: int) -> Matrix:
        asked = examples(lab.world, language, "problem", split, count, seed=0)
        requests = [
            (list(tokenizer(one.prompt).input_ids),
             [*tokenizer(one.completion, add_special_tokens=False).input_ids,
              tokenizer.eos_token_id])
            for one in asked
        ]  # fmt: skip
        return sweep.loglikelihood(requests, batch_size=BATCH).greedy.astype(np.float64)

    return right("development", DEVELOPMENT), right("test", TEST)


Choice = tuple[int, float]
"""The composition chosen, and the scores computed per composition and problem."""


def screened(right: Matrix, anchors: int, calibration: int, finalists: int, seed: int) -> Choice:
    def score(members: Sequence[int], places: Sequence[int]) -> Any:
        return right[np.ix_(list(members), list(places))]

    went = screen(score, range(len(right)), right.shape[1], calibration=calibration,
                  anchors=anchors, finalists=finalists, seed=seed)  # fmt: skip
    return max(went.survivors, key=lambda i: went.estimates[i]), 1 - went.saved


def raced(right: Matrix) -> Choice:
    went = race(lambda members, n: right[list(members), :n], range(len(right)), right.shape[1])
    return max(went.survivors, key=lambda i: went.means[i]), 1 - went.saved


def sampled(right: Matrix, share: float) -> Choice:
    count = max(1, round(share * right.shape[1]))
    return int(right[:, :count].mean(axis=1).argmax()), count / right.shape[1]


def main() -> None:
    """Print the mean regret and cost of every way, by language and over all pairs."""
    lab = shipped()
    found: dict[str, list[tuple[float, float]]] = {}
    for language in lab.languages:
        for pair in range(len(lab.task_experts)):
            development, test = matrices(lab, language, pair)
            truth = test.mean(axis=1)
            sys.stdout.write(f"{language} {pair + 1}: best {truth.max():.3f}, mean "
                             f"{truth.mean():.3f}\n")  # fmt: skip
            sys.stdout.flush()
            for order in range(ORDERS):
                drawn = np.random.default_rng(order).permutation(DEVELOPMENT)
                right = development[:, drawn]
                ways: dict[str, Callable[[], Choice]] = {
                    "all problems": lambda right=right: sampled(right, 1.0),
                    "halving": lambda right=right: raced(right),
                }
                for anchors in (10, 20, 40, 80):
                    choice, cost = screened(right, anchors, 6, 3, order)
                    found.setdefault(f"item response, {anchors} anchors", []).append(
                        (truth.max() - truth[choice], cost)
                    )
                    for name, (picked, paid) in {
                        f"random problems for {anchors} anchors": sampled(right, cost),
                        f"random, then finalists, for {anchors} anchors": finals(right, cost, 9),
                    }.items():
                        found.setdefault(name, []).append((truth.max() - truth[picked], paid))
                for name, way in ways.items():
                    picked, paid = way()
                    found.setdefault(name, []).append((truth.max() - truth[picked], paid))
    for name, both in found.items():
        regret, cost = np.mean(both, axis=0)
        worst = max(one for one, _ in both)
        sys.stdout.write(f"{name}: regret {regret:.4f}, worst {worst:.3f}, cost {cost:.1%}\n")


def finals(right: Matrix, cost: float, finalists: int) -> Choice:
    """As many compositions on all problems, chosen by as many random problems as are left."""
    people, count = right.shape
    budget = cost * people * count
    first = max(1, int((budget - finalists * count) / (people - finalists)))
    order = np.argsort(-right[:, :first].mean(axis=1), kind="stable")[:finalists]
    best = max(order, key=lambda i: right[i].mean())
    paid = (first * (people - finalists) + finalists * count) / (people * count)
    return int(best), paid


if __name__ == "__main__":
    main()
