"""The quickstart: from the lab's two experts to a merged model with a report."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import get_args

import numpy as np

from layerswap.checkpoint import atomic_folder
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.deltas.atlas import measure_delta
from layerswap.engine.sweep import Sweep
from layerswap.ground.commit import write_json
from layerswap.ground.types import Advance, Bars, Log
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.report import (
    Grid,
    Outcome,
    Right,
    ShownProblem,
    default_of_grid,
    quickstart_report,
    selected_of_grid,
)
from layerswap.lab.scoring import (
    MEASURES,
    SHOWN,
    TEST_QUESTIONS,
    questions,
    sweep_correct,
    sweep_written,
)
from layerswap.merge import Plan, make_plan
from layerswap.report import write_report
from layerswap.search.conditions import CHOSEN, JOINT, Condition, contenders, swapped
from layerswap.search.documents import Answered, Split
from layerswap.search.protocol import choose

RESULTS, REPORT, MERGED = "results.json", "report.html", "merged"
BOTTOMS, TOPS = range(5), range(3)
"""The grid of zones, in layers."""
DENSITIES = (0.2, 0.5)
"""Of TIES: as published, and milder."""
DEVELOPMENT_QUESTIONS = 500


def run(
    out: str | os.PathLike[str],
    *,
    language: str | None = None,
    overwrite: bool = False,
    log: Log,
    progress: Bars,
) -> tuple[Path, Outcome]:
    """Evaluate a grid of compositions of the lab's experts, merge one of them, test it, and report.

    The development split decides which composition is merged. The test split is for the report.
    Writes `results.json`, `report.html` and `merged/` into `out`.
    """
    target = Path(out).expanduser().absolute()
    lab = shipped()
    language = lab.scarce(language)
    start = lab_plan(lab, language)
    with atomic_folder(target, marker=RESULTS, overwrite=overwrite) as folder:
        began = time.monotonic()
        with progress("trying compositions", DEVELOPMENT_QUESTIONS, "questions") as advance:
            grid = score_grid(lab, language, progress=advance)
        selected = _swap(start, selected_of_grid(grid, start.composition.layers))
        log(f"The composition selected on development problems in {language}:")
        for line in f"\n{selected}\n".splitlines():
            log(line)
        selected.save(folder / MERGED)
        total = len(MEASURES) * TEST_QUESTIONS
        with progress("scoring on the test split", total, "questions") as advance:
            answers, examples = _test(lab, language, _swap(start, choose(grid)), advance)
        experts = {
            "task expert": lab.task_experts[0],
            "language expert": lab.language_experts[language][0],
        }
        outcome = Outcome(
            language=language,
            source=lab.world.source.name,
            grid=grid,
            composition=selected.composition,
            answers=answers,
            examples=examples,
            change=measure_delta(lab.base, experts),
            seconds=time.monotonic() - began,
        )
        write_json(folder / RESULTS, outcome.results())
        write_report(folder / REPORT, quickstart_report(outcome))
    return target, outcome


def _test(
    lab: Lab, language: str, chosen: Plan, advance: Advance
) -> tuple[Right, list[ShownProblem]]:
    """Test the chosen composition and its contenders; return their answers.

    The joint model is not in the package. Its answers were recorded when the lab was built.
    """
    joint = lab.record["models"][f"joint-{language}"]
    plans = {**contenders(lab_plan(lab, language), densities=DENSITIES), CHOSEN: chosen}
    sweep, tokenizer = Sweep(list(plans.values()), dtype="float32"), load_tokenizer(lab.base)
    answers: Right = {}
    for measure in MEASURES:
        asked = questions(measure, language, "test", TEST_QUESTIONS, world=lab.world)
        right = sweep_correct(sweep, tokenizer, asked, progress=advance).astype(np.float64)
        recorded = np.array([*joint["test"][measure][: len(asked)]], dtype=np.float64)
        answers[measure] = {**dict(zip(plans, right, strict=True)), JOINT: recorded}
    first = questions("task_target", language, "test", SHOWN, world=lab.world)
    texts = dict(zip(map(str, plans), sweep_written(sweep, tokenizer, first), strict=True))
    texts[str(JOINT)] = joint["written"].split("\n")
    shown = [
        ShownProblem(one.prompt, one.completion.strip(), {name: texts[name][i] for name in texts})
        for i, one in enumerate(first)
    ]
    return answers, shown


def _swap(start: Plan, composition: Condition) -> Plan:
    assert composition.zones is not None, "the grid is of zones"
    return swapped(start, composition.zones)


def lab_plan(lab: Lab, language: str, pair: int = 0) -> Plan:
    """Plan the default swap of a pair of the lab's experts, with their base."""
    experts = {"task": str(lab.task_experts[pair]),
               "language": str(lab.language_experts[language][pair])}  # fmt: skip
    recipe = {"base": str(lab.base), "experts": experts, "swap": {}}
    return make_plan(check_recipe(recipe, where="lab"))


def lab_documents(lab: Lab, language: str, problems: int = 200) -> Answered:
    """Draw the problems in the scarce language, by split, that a page scores on."""
    return Answered(f"problems in {language}", {
        split: [(one.prompt, one.completion) for one in
                questions("task_target", language, split, problems, world=lab.world)]
        for split in get_args(Split)
    })  # fmt: skip


def score_grid(lab: Lab, language: str, pair: int = 0, *, progress: Advance | None = None) -> Grid:
    """Score the development problems (1 or 0), by composition of the grid and the default swap."""
    asked = questions(
        "task_target", language, "development", DEVELOPMENT_QUESTIONS, world=lab.world
    )
    plan = lab_plan(lab, language, pair)
    layers = plan.composition.layers
    zones = zone_grid(layers, bottom=BOTTOMS, top=TOPS)
    compositions = dict.fromkeys(
        [*(Condition("swap", zones=one) for one in zones), default_of_grid(layers)]
    )
    sweep = Sweep([_swap(plan, one) for one in compositions], dtype="float32")
    right = sweep_correct(sweep, load_tokenizer(lab.base), asked, progress=progress)
    return dict(zip(compositions, right.astype(np.float64), strict=True))
