"""Regret at equal cost of the ways to spare scores on the lab's grids, whose truth is known.

    python -m research.screening
    python -m research.screening search

For every scarce language and seed, 30 compositions are scored on 250 development and 500 test
problems. Then each way chooses on the development problems, in 20 orders of them: item-response
screening, successive halving, the same number of random problems for all, and all problems. The
regret is the best test score minus that of the choice.

With `search`, all 256 choices of one expert for each of the eight layers are scored, and each way
scores the 100 trials of a TPE search over them, in 4 orders.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from layerswap.compose import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.engine.sweep import Sweep
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.quickstart import BOTTOMS, TOPS
from layerswap.lab.scoring import load
from layerswap.lab.tasks import LabSplit, examples
from layerswap.merge import Plan, make_plan
from layerswap.search.grid import race
from layerswap.search.item_response import Estimator, screen
from layerswap.search.spec import SearchSpec
from layerswap.search.tpe import OUTSIDE, Choices, Search, with_choices_plan

if TYPE_CHECKING:
    import numpy.typing as npt

    Matrix = npt.NDArray[np.float64]

DEVELOPMENT, TEST, BATCH, ORDERS = 250, 500, 64, 20
LAYERS, TRIALS, SEARCHES = 8, 100, 4


def start_of(lab: Lab, language: str, pair: int, **zones: int) -> Plan:
    """A swap of a pair of experts."""
    experts = {"task": str(lab.task_experts[pair]),
               "language": str(lab.language_experts[language][pair])}  # fmt: skip
    return make_plan(check_recipe({"experts": experts, "swap": zones}, where="lab"))


def grid(lab: Lab, language: str, pair: int) -> list[Plan]:
    """The compositions of the quickstart's grid, with and without a blended layer."""
    zones = zone_grid(LAYERS, bottom=BOTTOMS, top=TOPS, bottom_transition=(0, 1))
    return [start_of(lab, language, pair, **vars(one)) for one in zones]


def matrices(lab: Lab, language: str, plans: Sequence[Plan]) -> tuple[Matrix, Matrix]:
    """Right answers of all compositions, `(compositions, problems)`, on both splits."""
    _, tokenizer = load(lab.base)
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
            development, test = matrices(lab, language, grid(lab, language, pair))
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
    show(found)


def show(found: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    """Print the mean regret and cost, and the worst regret, of every way."""
    for name, both in found.items():
        regret, cost = np.mean(both, axis=0)
        worst = max(one for one, _ in both)
        sys.stdout.write(f"{name}: regret {regret:.4f}, worst {worst:.3f}, cost {cost:.1%}\n")


def searches() -> None:
    """Print the mean regret and cost of a search by every way to score its trials."""
    lab = shipped()
    found: dict[str, list[tuple[float, float]]] = {}
    for language in lab.languages:
        for pair in range(len(lab.task_experts)):
            start = start_of(lab, language, pair)
            takes = list(itertools.product(("task", "language"), repeat=LAYERS))
            choices = [{OUTSIDE: "blend", **dict(zip(map(str, range(LAYERS)), one, strict=True))}
                       for one in takes]  # fmt: skip
            plans = [with_choices_plan(start, one) for one in choices]
            development, test = matrices(lab, language, plans)
            truth = test.mean(axis=1)
            for order in range(SEARCHES):
                right = development[:, np.random.default_rng(order).permutation(DEVELOPMENT)]
                tried = {}
                for name, way in (
                    ("all problems", Tried(right)),
                    ("item response", Tried(right, anchors=40, finalists=3)),
                    ("random problems", Tried(right, first=RANDOM)),
                    ("random problems, then the best 9", Tried(right, first=THEN, finalists=9)),
                    ("all problems, fewer trials", Tried(right, trials=FEWER)),
                ):
                    tried[name] = way.search(start, takes, order)
                for name, (choice, cost) in tried.items():
                    found.setdefault(name, []).append((truth.max() - truth[choice], cost))
            sys.stdout.write(f"{language} {pair + 1}: best {truth.max():.3f}, mean "
                             f"{truth.mean():.3f}\n")  # fmt: skip
            sys.stdout.flush()
    show(found)


RANDOM, THEN, FEWER = 59, 40, 24
"""Random problems, and trials, that cost about as many scores as item response at its defaults."""


@dataclass(frozen=True)
class Tried:
    """A way to score the trials of a search.

    Attributes:
        right: right answers, `(compositions, problems)`.
        anchors: problems of an item-response estimate; none where 0.
        first: problems that all trials are scored on otherwise.
        finalists: trials that are scored on all problems at the end.
        trials: how many there are.
    """

    right: Matrix
    anchors: int = 0
    first: int = DEVELOPMENT
    finalists: int = 0
    trials: int = TRIALS

    def search(self, start: Plan, takes: Sequence[tuple[str, ...]], seed: int) -> Choice:
        """The choice of a search, and its scores by those of 100 trials on all problems."""
        position = {take: i for i, take in enumerate(takes)}
        estimator = Estimator(
            lambda members, places: self.right[np.ix_(list(members), list(places))],
            DEVELOPMENT, calibration=6, anchors=self.anchors or 1, seed=seed,
        )  # fmt: skip
        seen: list[int] = []

        def score(batch: Mapping[int, Choices]) -> dict[int, float]:
            members = {number: position[tuple(one[str(layer)] for layer in range(LAYERS))]
                       for number, one in batch.items()}  # fmt: skip
            seen.extend(members.values())
            if self.anchors:
                return dict(zip(members, estimator(list(members.values())), strict=True))
            return {n: float(self.right[i, : self.first].mean()) for n, i in members.items()}

        Search(SearchSpec(trials=self.trials, seed=seed), start).run(score, None)
        tried = list(dict.fromkeys(seen))
        whole = DEVELOPMENT * TRIALS
        if self.anchors:
            went = estimator.finish(tried, self.finalists)
            best = max(went.survivors, key=lambda i: went.estimates[i])
            return tried[best], sum(went.examples) / whole
        ranked = sorted(tried, key=lambda i: -self.right[i, : self.first].mean())
        last = ranked[: self.finalists]
        paid = len(tried) * self.first + len(last) * (DEVELOPMENT - self.first)
        return max(last or ranked[:1], key=lambda i: self.right[i].mean()), paid / whole


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
    (searches if sys.argv[1:] == ["search"] else main)()
