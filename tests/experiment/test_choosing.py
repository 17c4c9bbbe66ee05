"""Conditions print and store themselves; choosing, splitting and comparing follow the protocol."""

import json

import numpy as np
import pytest
from merging import recipe_plan

import layerswap as ls
from layerswap.compose.presets import Zones
from layerswap.evaluation.statistics import mean_interval, paired_difference
from layerswap.experiment.compare import Compared, choose, split_documents
from layerswap.experiment.conditions import (
    BASE,
    CHOSEN,
    DEFAULT,
    FLATTERED,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
    contenders,
    methods,
    ties,
)
from layerswap.lab.assets import shipped

NAMES = {
    DEFAULT: "swap, default",
    CHOSEN: "swap, chosen on development",
    FLATTERED: "swap, best (flattered)",
    Condition("swap", zones=Zones(5, 2)): "swap 5,2,0,0",
    Condition("swap", zones=Zones(5, 2), outside="task"): "swap 5,2,0,0, outside task",
    Condition("swap", regime="LoRA"): "swap, LoRA",
    Condition("partition", "C"): "partition C",
    Condition("partition", "C", regime="LoRA"): "partition C, LoRA",
    ties(0.2): "TIES, density 0.2",
    Condition("task expert", "reverted C"): "task expert, reverted C",
    Condition("task expert", regime="partial C, LoRA"): "task expert, partial C, LoRA",
    Condition("swap of partial SFT", "C"): "swap of partial SFT, C",
    Condition("joint", regime="LoRA"): "joint training, LoRA",
    Condition("swap", "multilingual soup", pair="0-1"): "0-1: swap, multilingual soup",
    BASE: "base",
}


@pytest.mark.parametrize(("condition", "name"), NAMES.items(), ids=NAMES.values())
def test_conditions_print_themselves_and_survive_json(condition, name):
    assert str(condition) == name
    assert Condition.from_dict(json.loads(json.dumps(condition.to_dict()))) == condition


def test_methods_of_a_study():
    found = dict(methods(("soup", "ties", "reverted"), densities=(0.5,), partitions=("C",),
                         outside="task"))  # fmt: skip
    assert [str(one) for one in found] == [
        "swap, default", "partition C", "soup", "TIES, density 0.5", "task expert, reverted C",
        "language expert, reverted C",
    ]  # fmt: skip
    reverted = found[Condition("task expert", "reverted C")]["partition"]
    assert reverted == {"name": "C", "outside": "task", "task": "task", "language": "base"}


def test_contenders_of_a_plan():
    lab = shipped()
    task, language = lab.task_experts[0], lab.language_experts["furo"][0]
    without = contenders(ls.swap(task=task, language=language, outside="task", bottom=2, top=0))
    assert list(without) == [TASK_EXPERT, LANGUAGE_EXPERT, SOUP, DEFAULT]
    assert {len(plan.composition.experts) for plan in without.values()} == {1, 2}
    assert without[DEFAULT].recipe.swap.outside == "task"
    sources = {"base": lab.base, "experts": {"math": task, "furo": language}}
    plan = recipe_plan(sources, swap={"task": "math", "language": "furo"})
    found = contenders(plan, densities=(0.2, 0.5))
    assert [str(one) for one in found] == [
        "base", "task expert", "language expert", "soup", "TIES, density 0.2",
        "TIES, density 0.5", "swap, default",
    ]  # fmt: skip
    merge = {"method": "ties", "experts": ["math", "furo"], "density": 0.5}
    by_hand = recipe_plan(sources, merge=merge)
    assert found[ties(0.5)].composition == by_hand.composition
    assert found[BASE].composition.experts == ("base",)


def test_a_split_is_seeded_and_has_documents_on_both_sides():
    development, test = split_documents(100, 0.3, seed=4)
    assert (len(development), len(test)) == (30, 70)
    assert sorted([*development, *test]) == list(range(100))
    assert (development == split_documents(100, 0.3, seed=4).development).all()
    assert (development != split_documents(100, 0.3, seed=5).development).any()
    assert [len(part) for part in split_documents(2, 0.01)] == [1, 1]
    assert [len(part) for part in split_documents(2, 0.99)] == [1, 1]
    limited = split_documents(100, 0.5, limit=10)
    assert len(limited.development) == len(limited.test) == 5


def test_of_equals_the_one_nearest_to_the_task_expert_is_chosen():
    grid = [Condition("swap", zones=Zones(*sizes)) for sizes in ((3, 1), (1, 1, 1), (2, 0), (1, 1))]
    shares = dict(zip(grid, (0.5, 0.5, 0.5, 0.5), strict=True))
    assert choose(shares) == grid[2]
    assert choose({one: np.array([share]) for one, share in shares.items()}) == grid[2]
    assert choose({**shares, grid[0]: 0.6}) == grid[0]
    assert choose(shares, of_equals="first") == grid[0]


def test_a_result_compares_with_the_selected_condition():
    rng = np.random.default_rng(1)
    scores = {one: rng.integers(0, 2, 40).astype(float) for one in (CHOSEN, DEFAULT, SOUP)}
    for selected in (CHOSEN, DEFAULT):
        result = Compared(scores=scores, selected=selected)
        assert result.differences == {
            one: paired_difference(scores[selected], scores[one]) for one in scores
            if one != selected
        }  # fmt: skip
    assert result.intervals[SOUP] == mean_interval(scores[SOUP])
    assert result.intervals is result.intervals
    assert result.against(SOUP) == {
        one: paired_difference(scores[one], scores[SOUP]) for one in (CHOSEN, DEFAULT)
    }
    assert result.against(SOUP)[CHOSEN] is result.against(SOUP)[CHOSEN]
    facts = json.loads(json.dumps(result.records()))
    assert [row["condition"] for row in facts] == [str(one) for one in scores]
    assert facts[1]["selected_minus"] is None
    assert Compared(scores={SOUP: scores[SOUP]}).differences == {}
