"""The main job on the lab, as a small study: from two experts to a merged model, with a report.

The steps are a study's: a quickstart that is cut short goes on where it was, and one that is
finished is only shown again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from layerswap._types import Log
from layerswap.checkpoint import fingerprint, refuse_target
from layerswap.checkpoint.commit import write_json
from layerswap.compose import Zones, default_zones
from layerswap.deltas.atlas import Atlas, measure_delta
from layerswap.errors import RecipeError, StudyError
from layerswap.evaluation.statistics import Interval, mean_interval
from layerswap.lab.assets import Lab, shipped
from layerswap.lab.build import read_record
from layerswap.lab.contenders import answer_all, contenders, in_memory
from layerswap.lab.results import (
    Outcome,
    best_of,
    read_answers,
    read_grid,
    write_answers,
    write_grid,
)
from layerswap.lab.scoring import MEASURES, LabMeasure, correct, load, questions, score_model
from layerswap.lab.tasks import LabSplit
from layerswap.merge import Plan, swap
from layerswap.study.journal import INDEX, RECORD, StepRecord, StudyJournal, read_journal
from layerswap.study.runner import Context, Work, run_graph
from layerswap.study.steps import Graph, Step
from layerswap.versions import __version__

RESULTS, REPORT, MERGED = "results.json", "report.html", "merged"
GRID, ANSWERS = "grid.json", "answers.json"
BOTTOMS, TOPS = range(5), range(3)
"""The grid of zones that is tried, in layers."""
DEVELOPMENT_QUESTIONS = 500
TEST_QUESTIONS = 1000

Bar = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Opens a progress bar from a label and a total; gives the function that advances it."""


def run(
    out: str | os.PathLike[str],
    *,
    language: str | None = None,
    overwrite: bool = False,
    log: Log,
    progress: Bar,
) -> tuple[Path, Outcome]:
    """Take the lab's experts, try the grid, write the best swap, score, and report.

    The composition is chosen on the development split and judged on the test split.

    Args:
        out: the study's folder; `results.json`, `report.html` and `merged/` are put into it. What
            is done in it is not done again.
        language: a scarce language of the lab; the farthest from the source when None.
        overwrite: begin anew in the folder of an earlier run.
        log: prints a line for the user.
        progress: opens a progress bar.

    Returns:
        The folder, and what was measured.

    Raises:
        LayerswapError: the folder holds something else, or the lab has no such language.
    """
    target = Path(out).expanduser().absolute()
    lab = shipped()
    graph = quickstart_graph(lab, pick_language(lab, language))
    _refuse_other(target, graph, overwrite=overwrite)
    if overwrite:
        shutil.rmtree(target, ignore_errors=True)
    run_graph(graph, target, works(progress)).check()
    journal = StudyJournal(target, graph)
    folders = {step.name: journal.folder(step.name) for step in graph}
    outcome = _outcome(graph["report"], folders)
    log(
        f"The composition that answers most development problems in {outcome.language}:\n\n"
        f"{_best_plan(graph['report'], folders)}\n"
    )
    for name in (RESULTS, REPORT):
        shutil.copy2(folders["report"] / name, target / name)
    shutil.rmtree(target / MERGED, ignore_errors=True)
    shutil.copytree(folders["merge"] / MERGED, target / MERGED)
    return target, outcome


def quickstart_graph(lab: Lab, language: str) -> Graph:
    """The steps of a quickstart: try the grid, write the best, judge, tell."""
    models = {
        "base": lab.base,
        "task": lab.task_experts[0],
        "language": lab.language_experts[language][0],
    }
    inputs = {name: fingerprint(model / "model.safetensors") for name, model in models.items()}
    told = {"language": language, "layerswap": __version__}
    zones = {"bottoms": list(BOTTOMS), "tops": list(TOPS), "n": DEVELOPMENT_QUESTIONS}
    return Graph([
        Step("grid", "grid", {**told, **zones}, inputs=inputs),
        Step("merge", "merge", told, ("grid",), inputs),
        Step("judge", "judge", {**told, "n": TEST_QUESTIONS}, ("merge",), inputs),
        Step("change", "change", told, (), inputs),
        Step("report", "report", told, ("grid", "merge", "judge", "change"), inputs),
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


def works(progress: Bar) -> Mapping[str, Work]:
    """What does each step, with a bar where it takes a while."""

    def try_all(context: Context) -> None:
        language, lab = context.step.settings["language"], shipped()
        with progress("trying compositions", len(BOTTOMS) * len(TOPS)) as advance:
            grid = try_grid(_plan(lab, language), lab, language, advance)
        write_grid(context.folder / GRID, grid)

    def merge(context: Context) -> None:
        _best_plan(context.step, context.inputs).save(context.folder / MERGED, overwrite=True)

    def judge(context: Context) -> None:
        language, lab = context.step.settings["language"], shipped()
        merged = context.inputs["merge"] / MERGED
        models = contenders(lab, language, _plan(lab, language), merged)
        with progress("scoring on the test split", len(models) * len(MEASURES)) as advance:
            answered = answer_all(models, lab, language, context.step.settings["n"], advance)
        write_answers(context.folder / ANSWERS, *answered)

    def change(context: Context) -> None:
        lab = shipped()
        expert = lab.language_experts[context.step.settings["language"]][0]
        experts = {"task expert": lab.task_experts[0], "language expert": expert}
        measure_delta(lab.base, experts).save(context.folder)

    def report(context: Context) -> None:
        from layerswap.lab.report import write_story

        outcome = _outcome(context.step, context.inputs)
        write_json(context.folder / RESULTS, outcome.results())
        write_story(context.folder / REPORT, outcome)

    return {"grid": try_all, "merge": merge, "judge": judge, "change": change, "report": report}


def _outcome(step: Step, folders: Mapping[str, Path]) -> Outcome:
    """What the steps have measured, from their folders."""
    lab, grid = shipped(), read_grid(folders["grid"] / GRID)
    composition = _best_plan(step, folders).composition
    answers, examples = read_answers(folders["judge"] / ANSWERS)
    entries = [
        StepRecord(**json.loads((folders[name] / RECORD).read_text("utf-8"))) for name in step.needs
    ]
    return Outcome(
        step.settings["language"], lab.world.source.name, DEVELOPMENT_QUESTIONS, grid,
        best_of(grid), default_zones(composition.layers), composition, answers, examples,
        Atlas.load(folders["change"]), entries,
    )  # fmt: skip


def _best_plan(step: Step, folders: Mapping[str, Path]) -> Plan:
    best = best_of(read_grid(folders["grid"] / GRID))
    plan = _plan(shipped(), step.settings["language"])
    return plan.grid(bottom=[best.bottom], top=[best.top])[0]


def _plan(lab: Lab, language: str) -> Plan:
    return swap(task=lab.task_experts[0], language=lab.language_experts[language][0])


def score_folders(
    models: Sequence[Path], *, language: str | None, split: LabSplit, n: int, progress: Bar
) -> dict[str, dict[LabMeasure, Interval]]:
    """Scores of checkpoint folders, or of whole labs, on the lab's questions, by folder name.

    Raises:
        LayerswapError: a folder holds no checkpoint, or the lab has no such language.
    """
    lab = shipped()
    chosen = pick_language(lab, language)
    scores: dict[str, dict[LabMeasure, Interval]] = {}
    folders = [found for folder in models for found in _checkpoints(folder)]
    names = {folder.name for folder in folders}
    with progress("scoring", len(folders)) as advance:
        for folder in folders:
            model, tokenizer = load(folder)
            answers = score_model(model, tokenizer, chosen, split, n, world=lab.world)
            name = folder.name if len(names) == len(folders) else str(folder)
            scores[name] = {m: mean_interval(right) for m, right in answers.items()}
            advance(1)
    return scores


def _checkpoints(folder: Path) -> list[Path]:
    """The folder itself, or the models of the lab that it holds."""
    if not (folder / RECORD).is_file():
        return [folder]
    return [folder / name for name in read_record(folder)["models"]]


def pick_language(lab: Lab, language: str | None) -> str:
    """A scarce language of the lab; the farthest from the source language when None.

    Raises:
        RecipeError: the lab has no such language.
    """
    if language is None:
        return lab.languages[-1]
    if language not in lab.languages:
        raise RecipeError(
            f"no target language {language!r} in the lab; it has {', '.join(lab.languages)}"
        )
    return language


def try_grid(
    plan: Plan, lab: Lab, language: str, advance: Callable[[int], None]
) -> dict[Zones, float]:
    """The share of development problems that each composition of the grid answers right."""
    asked = questions(
        "task_target", language, "development", DEVELOPMENT_QUESTIONS, world=lab.world
    )
    _, tokenizer = load(lab.base)
    shares = {}
    for candidate in plan.grid(bottom=BOTTOMS, top=TOPS):
        assert candidate.recipe.swap is not None
        zones = candidate.recipe.swap.zones(plan.composition.layers)
        shares[zones] = float(correct(in_memory(candidate), tokenizer, asked).mean())
        advance(1)
    return shares
