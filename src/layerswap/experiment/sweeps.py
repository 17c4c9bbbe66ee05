"""`layerswap.sweep`: candidates are scored on development documents, one is selected and tested."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from layerswap.compose.recipe import Recipe, read_recipe
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.evaluation.statistics import mean_interval
from layerswap.experiment.answers import Answer, under
from layerswap.experiment.baselines import answers_of_baselines, baselines_of
from layerswap.experiment.compare import NOT_SAVED, Choice, InEnglish, choose
from layerswap.experiment.conditions import CHOSEN, DEFAULT, Condition, contenders, grid_plans
from layerswap.experiment.evaluator import DEVELOPMENT, TEST, Evaluator
from layerswap.experiment.spec import SweepSettings, SweepSpec
from layerswap.experiment.sweep_page import SweepResult
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import Advance, Log, PathLike, listed
from layerswap.ground.yaml_file import validate
from layerswap.merge.api import make_plan
from layerswap.merge.plan import Plan

Composed = Plan | Recipe | PathLike
"""A composition of checkpoints: a plan, a recipe, or the path of a recipe file."""


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
) -> SweepResult:
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
            `limit`, `num_fewshot`, `batch_size`, `seed`, `device`, `dtype`, `ties`, `english`.

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
        every = {**others, **candidates}
        documents = Evaluator(spec, every, store=store, log=log, progress=progress)
        return run_experiment(documents, candidates, others, log=log)


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


def run_sweep(
    spec: SweepSpec, recipe: Recipe, *, log: Log = lambda line: None, **settings: Any
) -> SweepResult:
    """Evaluates the grid of a file; settings are those of `Evaluator`."""
    start = make_plan(recipe)
    others = contenders(start, densities=spec.ties)
    candidates = grid_plans(spec.grid, start, log)
    documents = Evaluator(spec, {**others, **candidates}, log=log, **settings)
    return run_experiment(documents, candidates, others, log=log)


def run_experiment(
    documents: Evaluator,
    candidates: Mapping[Condition, Plan],
    others: Mapping[Condition, Plan],
    *,
    recorded: Sequence[Answer] = (),
    log: Log = lambda line: None,
) -> SweepResult:
    """Scores models on the development split, selects one, and tests all on the test split.

    See `best_of_all`. `recorded` are test answers of further models. The default swap is one of the
    `others` unless the candidates are no swaps, and competes with the candidates.
    """
    plans = {**others, **candidates}
    numbers = [documents.members[candidate] for candidate in candidates]
    counts = documents.sweep.counts(numbers)
    log(
        f"{len(candidates)} compositions: {counts.distinct} layers to run per batch instead of "
        f"{counts.naive} ({counts.ratio:.1f} times fewer)"
    )
    default = _default(candidates, others)
    rivals = [rival for rival in others if rival.method not in NOT_SAVED and rival != DEFAULT]
    asked = dict.fromkeys([*candidates, *([default] if default else []), *rivals])
    taught = documents.rows(DEVELOPMENT, [*asked])
    measure = documents.measure(taught)
    known = under(taught, measure)
    scores = {model: np.array([row.score for row in by]) for model, by in known.items()}
    chosen = choose({model: scores[model] for model in candidates})
    named = {CHOSEN: chosen, **({DEFAULT: default} if default else {}), **{o: o for o in rivals}}
    choice = Choice(
        candidates={model: scores[model] for model in candidates},
        competed={"": {name: scores[model] for name, model in named.items()}},
        reported={"": named}, count=len(scores[chosen]),
        labels=frozenset(row.label for row in known[chosen] if row.label),
    )  # fmt: skip
    rows = [
        replace(row, condition=CHOSEN, model=str(CHOSEN)) if row.condition == chosen else row
        for row in documents.rows(TEST, [chosen, *others])
    ]
    tested = under(rows, measure)[CHOSEN]
    free = baselines_of(known[chosen], tested)
    rows += [*answers_of_baselines(tested, free), *recorded]
    answered = documents.in_english()
    there = [row for row in answered if (row.metric, row.filter) == measure[1:]]
    if answered and not there:
        has = ", ".join(sorted({f"{row.metric} ({row.filter})" for row in answered}))
        log(f"english: no score by {measure[1]} ({measure[2]}), as in the language; it has {has}")
    return SweepResult.of(
        under(rows, measure), selected=choice.selected, choice=choice, labelled=free.labelled,
        task=measure[0], measure=measure, models={**others, CHOSEN: plans[chosen]},
        rows=[*taught, *rows], layers_run=counts, english=_in_english(there, tested),
    )  # fmt: skip


def _in_english(there: Sequence[Answer], tested: Sequence[Answer]) -> InEnglish | None:
    """Average the scores of the English test; `parallel` if both tests have equal right answers."""
    if not there:
        return None
    own, same = ([row.label or row.target for row in rows] for rows in (tested, there))
    return InEnglish(mean_interval(np.array([row.score for row in there])), own == same)


def _default(
    candidates: Mapping[Condition, Plan], others: Mapping[Condition, Plan]
) -> Condition | None:
    """Returns the candidate that is the default swap, else `DEFAULT`, or None without one."""
    if DEFAULT not in others:
        return None
    wanted = others[DEFAULT].composition
    return next((name for name, plan in candidates.items() if plan.composition == wanted), DEFAULT)
