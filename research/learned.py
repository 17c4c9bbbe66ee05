"""What learned coefficients and the preset for reasoners bring on the lab.

    python -m research.learned

For every scarce language and seed: coefficients are learned from 8 problems in the source language
(for the task expert) and 8 stories in the scarce one (for the language expert), without answers,
and the merge is scored on 500 test problems beside the default swap, the soup, the sum of both
deltas, and the swap of 2605.26735. Beside them stand the swaps of the quickstart's grid that the
label-free signals of `research.signals` choose, by the same 500 problems.
"""

from __future__ import annotations

import sys
from typing import Any

from layerswap.compose import default_zones
from layerswap.compose.presets import reasoning_zones
from layerswap.compose.recipe import check_recipe
from layerswap.engine.sweep import Sweep
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.scoring import load
from layerswap.lab.tasks import examples
from layerswap.merge import Plan, make_plan
from layerswap.search.coefficients import LearningSettings, learn_coefficients
from research.signals import study

PROMPTS, TRUTH, BATCH = 8, 500, 64
SETTINGS = {
    "learned": LearningSettings(),
}


def recipe_of(sources: dict[str, str], **method: Any) -> Plan:
    experts = {name: sources[name] for name in ("task", "language")}
    return make_plan(
        check_recipe({"base": sources["base"], "experts": experts, **method}, where="lab")
    )


def try_pair(lab: Lab, language: str, pair: int) -> dict[str, float]:
    """The share of test problems answered right, by merge."""
    sources = {
        "task": str(lab.task_experts[pair]),
        "language": str(lab.language_experts[language][pair]),
        "base": str(lab.base),
    }
    _, tokenizer = load(lab.base)

    def asked(of: str, skill: Any) -> list[list[int]]:
        found = examples(lab.world, of, skill, "development", PROMPTS, seed=pair)
        return [list(tokenizer(one.prompt).input_ids) for one in found]

    prompts = {
        "task": asked(lab.world.source.name, "problem"),
        "language": asked(language, "comprehension"),
    }
    plans: dict[str, Plan] = {}
    start = recipe_of(sources, swap={})
    layers = start.composition.layers
    both = {"task": 1, "language": 1}
    plans["default"] = recipe_of(sources, swap=vars(default_zones(layers)))
    plans["default, outside: language"] = recipe_of(
        sources, swap={**vars(default_zones(layers)), "outside": "language"}
    )
    plans["preset reasoning"] = recipe_of(sources, swap={"preset": "reasoning"})
    assert plans["preset reasoning"].recipe.swap.zones(layers) == reasoning_zones(layers)  # type: ignore[union-attr]
    plans["soup"] = recipe_of(sources, soup={"experts": ["task", "language"]})
    plans["both deltas"] = recipe_of(
        sources, merge={"method": "task_arithmetic", "experts": both, "scale": 1}
    )
    plans["task expert"] = recipe_of(sources, soup={"experts": ["task"]})
    experts: Any = {name: sources[name] for name in ("task", "language")}
    for name, settings in SETTINGS.items():
        learned = learn_coefficients(sources["base"], experts, prompts, settings=settings)
        plans[name] = make_plan(check_recipe(learned.recipe(), where=name))
        if name == "learned":
            sys.stdout.write(f"{language} {pair + 1}: {learned.losses[0]:.4f} to "
                             f"{learned.losses[-1]:.4f}\n{plans[name]}\n")  # fmt: skip
    test = examples(lab.world, language, "problem", "test", TRUTH, seed=0)
    requests = [
        (list(tokenizer(one.prompt).input_ids),
         [*tokenizer(one.completion, add_special_tokens=False).input_ids, tokenizer.eos_token_id])
        for one in test
    ]  # fmt: skip
    sweep = Sweep(list(plans.values()), dtype="float32")
    shares = sweep.loglikelihood(requests, batch_size=BATCH).greedy.mean(axis=1)
    return dict(zip(plans, map(float, shares), strict=True))


SIGNALS = ("agreement", "closeness, all layers", "consensus", "confidence", "fluency")


def chosen_by_signals(lab: Lab, language: str, pair: int) -> dict[str, float]:
    """The share of test problems that the choice of each signal answers right."""
    found = study(lab, language, pair)
    chosen = {name: found.truth[int(found.signals[name].argmax())] for name in SIGNALS}
    return {
        **{f"grid, by {name}": float(value) for name, value in chosen.items()},
        "grid, mean": float(found.truth.mean()),
        "grid, best": float(found.truth.max()),
    }


def main() -> None:
    """Print a line for every pair, and the means."""
    lab = shipped()
    everything: dict[str, list[float]] = {}
    for language in lab.languages:
        for pair in range(len(lab.task_experts)):
            found = try_pair(lab, language, pair) | chosen_by_signals(lab, language, pair)
            line = "; ".join(f"{name} {value:.3f}" for name, value in found.items())
            sys.stdout.write(f"{language} {pair + 1}: {line}\n")
            sys.stdout.flush()
            for name, value in found.items():
                everything.setdefault(f"{language}: {name}", []).append(value)
    for name, values in everything.items():
        sys.stdout.write(f"{name}: {sum(values) / len(values):.3f}\n")


if __name__ == "__main__":
    main()
