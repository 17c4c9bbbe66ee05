"""`layerswap.sweep`, and the files of a sweep: scores, summary, the best recipe and the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from layerswap.compose import Recipe, read_recipe
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.experiment.answers import ANSWERS_TABLE, write_answers
from layerswap.experiment.conditions import (
    CHOSEN,
    DEFAULT,
    LANGUAGE_EXPERT,
    TASK_EXPERT,
    Condition,
    contenders,
)
from layerswap.experiment.evaluator import TEST
from layerswap.experiment.sections import (
    grid_sections,
    score_sections,
    scored,
    side_by_side,
    surpassing,
)
from layerswap.experiment.spec import SweepSettings
from layerswap.experiment.sweeps import SweepResult, sweep_plans
from layerswap.experiment.tables import balanced_table, results_table
from layerswap.experiment.verdict import verdict_facts, verdict_in_words
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Advance, Log, PathLike, listed
from layerswap.ground.yaml_file import validate
from layerswap.merge import Plan, make_plan
from layerswap.report.page import Report, Section, write_report
from layerswap.report.stack import draw_stack
from layerswap.report.tables import Table, unit_of
from layerswap.versions import __version__

SUMMARY, RECIPE, PAGE = "board.json", "best.yaml", "report.html"
ABOVE = "above.yaml"
"""Recipe of the best model that clearly beats the selected model on the test documents."""


def write_result(board: SweepResult, folder: Path) -> dict[str, Any]:
    """Write the files of a sweep into a folder; return the content of `board.json`."""
    facts = summary(board)
    write_answers(folder / ANSWERS_TABLE, board.rows)
    (folder / SUMMARY).write_bytes((json.dumps(facts, indent=2) + "\n").encode())
    write_recipe(board.best, folder / RECIPE)
    write_above(board, folder)
    write_report(folder / PAGE, sweep_report(board, folder / RECIPE))
    return facts


def summary(board: SweepResult) -> dict[str, Any]:
    """The content of `board.json`."""
    names = ("task", "metric", "filter")
    facts: dict[str, Any] = {
        "layerswap_version": __version__,
        "chosen_by": board.chosen_by,
        "compared_by": dict(zip(names, board.measure, strict=True)),
        "compositions_tried": len(board.development),
        "development": [{**c.to_dict(), "mean": score} for c, score in board.development.items()],
        "development_lead": board.lead and asdict(board.lead),
        "competed": [{**c.to_dict(), "mean": score} for c, score in board.competed.items()],
        "verdict": verdict_facts(board),
        "above": [str(model) for model in board.above],
        "default": asdict(board.default),
        "screening": board.screening and asdict(board.screening),
        **board.to_dict(),
    }
    return facts


def sweep_report(board: SweepResult, recipe: Path | None = None) -> Report:
    """The report of a sweep, with the command that merges the recipe in a file."""
    swap = board.best.recipe.swap
    names = {swap.task: TASK_EXPERT, swap.language: LANGUAGE_EXPERT} if swap else {}
    notes = [f"layerswap {__version__}", *([str(board.screening)] if board.screening else [])]
    return Report(
        title=f"{len(board.development)} compositions, chosen by {board.chosen_by}",
        lead=lead(board, recipe and recipe.parent),
        figure=draw_stack(board.best.composition, {name: str(c) for name, c in names.items()}),
        sections=[
            *result_sections(board),
            _models(recipe_of(board.best), recipe),
        ],
        colophon="; ".join(notes)
        + f"; {board.counts.distinct} layers run per batch instead of {board.counts.naive}.",
    )


def result_sections(board: SweepResult) -> list[Section]:
    """The test documents, the compositions on the development documents, and the answers."""
    metric, chosen = board.measure[1], board.chosen
    default = Condition("swap", zones=board.default, outside=chosen.outside if chosen else "")
    tests = score_sections(
        "On the test split", board, results_table(board), balanced_table(board), measure=metric,
        unit=unit_of(metric), note="The selected model was selected on other documents than these.",
    )  # fmt: skip
    maps = grid_sections(
        "The grid",
        "Layers from the language expert at the bottom and at the top, against the mean score on "
        "the development split.",
        board.development, best=chosen, default=default, unit="",
    )  # fmt: skip
    return [*tests, *maps, *_answers(board)]


def lead(board: SweepResult, folder: Path | None = None) -> str:
    """The result in words: models above the selected one, then its name and its test score."""
    names = {CHOSEN: _zones_in_words(board.chosen), DEFAULT: "the default swap"}
    score = board.intervals[board.selected]
    selected = (
        f"The selected model is {names.get(board.selected, f'the {board.selected}')}, the best of "
        f"{len(board.development) + len(board.competed) - 1} on the development documents. On "
        f"{score.n} other documents, {' '.join(board.measure[:2])} is "
        f"{scored(score, unit_of(board.measure[1]))}."
    )
    road = verdict_in_words(board, unit_of(board.measure[1]))
    return " ".join(filter(None, [road, sweep_surpassing(board, folder), selected]))


def sweep_surpassing(board: SweepResult, folder: Path | None = None) -> str:
    """List the models above the selected one; with the folder of `write_above`, the command."""
    written = _written(board)
    command = ["layerswap", "merge", str(folder / ABOVE), "--out", "merged"] if folder else []
    return surpassing(
        {"": board}, unit=unit_of(board.measure[1]), written=written,
        command=command if written else (),
    )  # fmt: skip


def _written(board: SweepResult) -> Condition | None:
    """The best model above the selected one of which there is a recipe."""
    return next((model for model in board.above if model in board.models), None)


def write_above(board: SweepResult, folder: Path) -> None:
    """Write `above.yaml`; remove that of an earlier sweep in the folder."""
    (folder / ABOVE).unlink(missing_ok=True)
    if (above := _written(board)) is not None:
        write_recipe(board.models[above], folder / ABOVE)


def recipe_of(plan: Plan) -> dict[str, Any]:
    """Return the recipe of a plan, ready for `layerswap merge`."""
    return plan.recipe.model_dump(mode="json", exclude_defaults=True)


def write_recipe(plan: Plan, path: Path) -> None:
    """Write the recipe of a plan."""
    import yaml

    path.write_bytes(yaml.safe_dump(recipe_of(plan), sort_keys=False).encode())


def _models(recipe: Mapping[str, Any], file: Path | None) -> Section:
    """The checkpoints of a recipe, and the command that merges it."""
    sources = {**recipe["experts"], **({"base": recipe["base"]} if "base" in recipe else {})}
    plain = [given["source"] if isinstance(given, Mapping) and set(given) == {"source"} else given
             for given in sources.values()]  # fmt: skip
    rows = [[name, source if isinstance(source, str) else json.dumps(source)]
            for name, source in zip(sources, plain, strict=True)]  # fmt: skip
    text, command = 'In Python, `result.best.save("merged")` writes the best composition.', ""
    if file is not None:
        text = "This command writes the best composition:"
        command = shlex.join(["layerswap", "merge", str(file), "--out", "merged"])
    return Section("Models", text, command, table=Table(["name", "source"], rows))


def _answers(board: SweepResult) -> list[Section]:
    """The answers of the models to the test documents."""
    tested = [row for row in board.rows if row.split == TEST and row.measure == board.measure]
    others = [str(condition) for condition in board.intervals if condition != board.selected]
    models = {name: name for name in [str(board.selected), *others]}
    documents = sorted({(row.task, row.document) for row in tested if row.question})
    answers = side_by_side(models, tested, documents)
    text = "Answers to test documents, grouped by the first two models: which of them is right."
    return [Section("Answers side by side", text, answers=answers)] if answers else []


def _zones_in_words(chosen: Condition | None) -> str:
    """A chosen composition in words, such as `bottom 5, top 2, outside task`."""
    if chosen is None or chosen.zones is None:
        return str(chosen)
    return f"{chosen.zones}, outside {chosen.outside}" if chosen.outside else str(chosen.zones)


Composed = Plan | Recipe | PathLike
"""A composition of checkpoints: a plan, a recipe, or the path of a recipe file."""


class ReportedSweep(SweepResult):
    """The result of `layerswap.sweep`, which can write its report."""

    def report(self, path: PathLike) -> Path:
        """Write the report as one HTML page; returns its path."""
        return write_report(Path(path).expanduser(), sweep_report(self))

    def __repr__(self) -> str:
        return f"{lead(self)}\n{results_table(self)}"


def sweep(
    plans: Composed | Sequence[Composed],
    tasks: str | Sequence[str] = (),
    *,
    include: PathLike | Sequence[PathLike] = (),
    choose_by: str | Mapping[str, str] | None = None,
    answers: PathLike | None = None,
    log: Log = lambda line: None,
    progress: Advance | None = None,
    **settings: Any,
) -> ReportedSweep:
    """Evaluate compositions of the same experts, select one, and compare it with baselines.

    The model that is best on the development documents of the tasks is selected: a composition, the
    default swap, the soup, TIES or an expert. It is reported on the test documents, beside the
    others and, where the recipe names it, the base. This is `layerswap sweep` from Python.

    Args:
        plans: compositions, one or several; `Plan.grid` makes many.
        tasks: lm-eval tasks, one or several.
        include: folders with further task YAMLs, one or several.
        choose_by: the metric to choose by, or a mapping of `task`, `metric` and `filter`.
        answers: an SQLite file that keeps answers, so that none is computed twice.
        log: called with what the sweep costs.
        progress: called with the number of compositions just evaluated.
        settings: further keys of a sweep file: `development` (share of documents to choose on),
            `limit`, `num_fewshot`, `batch_size`, `seed`, `device`, `dtype`, `ties`, `screen`.

    Returns:
        The result: `.best` is the selected plan, `.intervals` and `.differences` are on the test
        documents, `.to_pandas()` has every score, `.report(path)` writes a page.

    Raises:
        LayerswapError: a setting is wrong, or experts or tasks cannot be loaded.

    Example:
        plan = ls.swap(task="math-expert", language="swahili-expert")
        board = ls.sweep(plan.grid(bottom=range(9), top=range(5)), tasks="mgsm_direct_sw")
        board.best.save("merged")
        board.report("report.html")
    """
    metric = {"metric": choose_by} if isinstance(choose_by, str) else dict(choose_by or {})
    data = {"tasks": listed(tasks), "include": list(map(str, listed(include))),
            "choose_by": metric, **settings}  # fmt: skip
    spec = validate(SweepSettings, data, where="sweep", expected="settings by name")
    candidates = _named(list(map(_plan, listed(plans))))
    start = next((plan for plan in candidates.values() if plan.recipe.swap is not None), None)
    path = None if answers is None else Path(answers).expanduser()
    others = {} if start is None else contenders(start, densities=spec.ties)
    with closing(AnswerStore(path)) as store:
        result = sweep_plans(spec, candidates, others, store=store, log=log, progress=progress)
    return ReportedSweep(**{f.name: getattr(result, f.name) for f in fields(result)})


def _plan(given: Composed) -> Plan:
    if isinstance(given, Plan):
        return given
    return make_plan(given if isinstance(given, Recipe) else read_recipe(Path(given)))


def _named(plans: Sequence[Plan]) -> dict[Condition, Plan]:
    """Conditions of plans: swaps by their zones, and by `outside` if it differs among them."""
    if not plans:
        raise EvaluationError("there is no composition to evaluate; give at least one")
    outsides = {plan.recipe.swap.outside for plan in plans if plan.recipe.swap}
    named: dict[Condition, Plan] = {}
    for number, plan in enumerate(plans):
        swap = plan.recipe.swap
        condition = Condition("composition", str(number))
        if swap is not None:
            outside = swap.outside if len(outsides) > 1 else ""
            condition = Condition(
                "swap", zones=swap.zones(plan.composition.layers), outside=outside
            )
        if condition in named:
            if plan.composition == named[condition].composition:
                continue
            condition = replace(condition, variant=f"number {number}")
        named[condition] = plan
    return named
