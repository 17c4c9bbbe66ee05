"""The quickstart: from the lab's two experts to a merged model with a report, as a small study.

An interrupted quickstart resumes, and a finished one is only shown again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from layerswap._types import Advance, Bars, Log
from layerswap.checkpoint import fingerprint, refuse_target
from layerswap.checkpoint.commit import write_json
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.compose import zone_grid
from layerswap.compose.recipe import check_recipe
from layerswap.deltas.atlas import Atlas, measure_delta
from layerswap.engine.sweep import Sweep
from layerswap.errors import StudyError
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.report import (
    Outcome,
    ShownProblem,
    default_of_grid,
    quickstart_report,
    read_answers,
    read_grid,
    selected_of_grid,
    write_answers,
    write_grid,
)
from layerswap.lab.scoring import MEASURES, questions, sweep_correct, sweep_written
from layerswap.merge import Plan, make_plan, soup
from layerswap.report import write_report
from layerswap.search.conditions import CHOSEN, JOINT, Condition, contenders, swapped
from layerswap.search.documents import Answered, Split
from layerswap.search.protocol import Values, choose
from layerswap.study.journal import INDEX, RECORD, StepRecord, StudyJournal, read_journal
from layerswap.study.runner import Context, StepFunction, run_graph
from layerswap.study.steps import Graph, Step
from layerswap.versions import __version__

RESULTS, REPORT, MERGED = "results.json", "report.html", "merged"
GRID, ANSWERS = "grid.json", "answers.json"
BOTTOMS, TOPS = range(5), range(3)
"""The grid of zones, in layers."""
DENSITIES = (0.2, 0.5)
"""Of TIES: as published, and milder."""
DEVELOPMENT_QUESTIONS = 500
TEST_QUESTIONS = 1000
SHOWN = 100
"""Test problems whose answers are in the report."""


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
    `results.json`, `report.html` and `merged/` are written into `out`, a study's folder. Finished
    steps are not run again.
    """
    target = Path(out).expanduser().absolute()
    lab = shipped()
    graph = quickstart_graph(lab, lab.scarce(language))
    _refuse_other(target, graph, overwrite=overwrite)
    if overwrite:
        shutil.rmtree(target, ignore_errors=True)
    run_graph(graph, target, step_functions(progress)).check()
    journal = StudyJournal(target, graph)
    folders = {step.name: journal.folder(step.name) for step in graph}
    outcome = _outcome(graph["report"], folders)
    log(f"The composition selected on development problems in {outcome.language}:")
    for line in f"\n{_selected_plan(graph['report'], folders)}\n".splitlines():
        log(line)
    for name in (RESULTS, REPORT):
        shutil.copy2(folders["report"] / name, target / name)
    shutil.rmtree(target / MERGED, ignore_errors=True)
    shutil.copytree(folders["merge"] / MERGED, target / MERGED)
    return target, outcome


def quickstart_graph(lab: Lab, language: str) -> Graph:
    """Plan a quickstart: evaluate the grid, merge, test, measure the change, report."""
    models = {
        "base": lab.base,
        "task": lab.task_experts[0],
        "language": lab.language_experts[language][0],
        "joint": lab.joint_models[language],
    }
    inputs = {name: fingerprint(model / "model.safetensors") for name, model in models.items()}
    shared = {"language": language, "layerswap": __version__}
    zones = {"bottoms": list(BOTTOMS), "tops": list(TOPS), "n": DEVELOPMENT_QUESTIONS}
    tests = {"densities": list(DENSITIES), "n": TEST_QUESTIONS}
    return Graph([
        Step("grid", "grid", {**shared, **zones}, inputs=inputs),
        Step("merge", "merge", shared, ("grid",), inputs),
        Step("test", "test", {**shared, **tests}, ("grid",), inputs),
        Step("change", "change", shared, (), inputs),
        Step("report", "report", shared, ("grid", "merge", "test", "change"), inputs),
    ])  # fmt: skip


def _refuse_other(target: Path, graph: Graph, *, overwrite: bool) -> None:
    """Refuse a folder that holds anything but a quickstart, another study above all."""
    if target.is_dir() and not any(target.iterdir()):
        return
    refuse_target(target, marker=INDEX, overwrite=True)
    if (target / INDEX).is_file():
        there = read_journal(target).graph
        if {step.kind for step in there} != {step.kind for step in graph}:
            raise StudyError(f"{target}: holds another study; choose another output")
        language = there["grid"].settings["language"]
        if language != graph["grid"].settings["language"] and not overwrite:
            raise StudyError(
                f"{target}: holds a quickstart in {language}; choose another output or pass "
                "--overwrite"
            )


def step_functions(progress: Bars) -> Mapping[str, StepFunction]:
    """Return the function of every step, with a progress bar for the long ones."""

    def grid(context: Context) -> None:
        language = context.step.settings["language"]
        with progress("trying compositions", DEVELOPMENT_QUESTIONS, "questions") as advance:
            scores = score_grid(shipped(), language, progress=advance)
        write_grid(context.folder / GRID, scores)

    def merge(context: Context) -> None:
        _selected_plan(context.step, context.inputs).save(context.folder / MERGED, overwrite=True)

    def test(context: Context) -> None:
        total = len(MEASURES) * TEST_QUESTIONS
        with progress("scoring on the test split", total, "questions") as advance:
            _test(context, advance)

    def change(context: Context) -> None:
        lab = shipped()
        expert = lab.language_experts[context.step.settings["language"]][0]
        experts = {"task expert": lab.task_experts[0], "language expert": expert}
        measure_delta(lab.base, experts).save(context.folder)

    def report(context: Context) -> None:
        outcome = _outcome(context.step, context.inputs)
        write_json(context.folder / RESULTS, outcome.results())
        write_report(context.folder / REPORT, quickstart_report(outcome))

    return {"grid": grid, "merge": merge, "test": test, "change": change, "report": report}


def _test(context: Context, advance: Advance) -> None:
    """Test the chosen composition and its contenders, and write their answers."""
    lab, settings = shipped(), context.step.settings
    joint = soup({"joint": lab.joint_models[settings["language"]]})
    start = lab_plan(lab, settings["language"])
    chosen = _swap(start, choose(read_grid(context.inputs["grid"] / GRID)))
    plans = {**contenders(start, densities=settings["densities"]), CHOSEN: chosen, JOINT: joint}
    sweep, tokenizer = Sweep(list(plans.values()), dtype="float32"), load_tokenizer(lab.base)
    asked = {
        measure: questions(measure, settings["language"], "test", settings["n"], world=lab.world)
        for measure in MEASURES
    }
    answers = {
        measure: dict(zip(plans, sweep_correct(sweep, tokenizer, rows, progress=advance),
                          strict=True))
        for measure, rows in asked.items()
    }  # fmt: skip
    first = asked["task_target"][:SHOWN]
    texts = dict(zip(map(str, plans), sweep_written(sweep, tokenizer, first), strict=True))
    shown = [
        ShownProblem(one.prompt, one.completion.strip(), {name: texts[name][i] for name in texts})
        for i, one in enumerate(first)
    ]
    write_answers(context.folder / ANSWERS, answers, shown)


def _outcome(step: Step, folders: Mapping[str, Path]) -> Outcome:
    """Read the measurements in the folders of the steps."""
    answers, examples = read_answers(folders["test"] / ANSWERS)
    records = [json.loads((folders[name] / RECORD).read_text("utf-8")) for name in step.needs]
    return Outcome(
        language=step.settings["language"],
        source=shipped().world.source.name,
        grid=read_grid(folders["grid"] / GRID),
        composition=_selected_plan(step, folders).composition,
        answers=answers,
        examples=examples,
        change=Atlas.load(folders["change"]),
        entries=[StepRecord(**record) for record in records],
    )


def _selected_plan(step: Step, folders: Mapping[str, Path]) -> Plan:
    """Plan the composition that is merged."""
    start = lab_plan(shipped(), step.settings["language"])
    grid = read_grid(folders["grid"] / GRID)
    return _swap(start, selected_of_grid(grid, start.composition.layers))


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
    """Problems of each split in the scarce language, on which a page scores compositions."""
    return Answered(f"problems in {language}", {
        split: [(one.prompt, one.completion) for one in
                questions("task_target", language, split, problems, world=lab.world)]
        for split in get_args(Split)
    })  # fmt: skip


def score_grid(
    lab: Lab, language: str, pair: int = 0, *, progress: Advance | None = None
) -> dict[Condition, Values]:
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
