"""`layerswap.sweep`: many compositions evaluated from Python, with their report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from html import escape
from pathlib import Path
from typing import Any

from layerswap._types import Advance, Log, PathLike
from layerswap.compose import Recipe, read_recipe
from layerswap.compose.yaml_file import validate
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge.planner import Plan, make_plan
from layerswap.report.page import write_report
from layerswap.report.sweep_files import lead, tell
from layerswap.search.conditions import Condition, contenders
from layerswap.search.grid import GridResult, sweep_plans
from layerswap.search.spec import SweepSettings

Composed = Plan | Recipe | PathLike
"""A composition of checkpoints: a plan, a recipe, or the path of a recipe file."""


class ReportedSweep(GridResult):
    """The result of `layerswap.sweep`, which shows itself in a notebook and writes its report."""

    def report(self, path: PathLike) -> Path:
        """Write the report as one HTML page; returns its path."""
        return write_report(Path(path).expanduser(), tell(self))

    def _repr_html_(self) -> str:
        rows = [
            (str(one), str(interval), str(self.differences.get(one, "")))
            for one, interval in self.intervals.items()
        ]
        cells = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows
        )
        measure = " ".join(self.measure or ("no task",))
        return (
            f"<p>{len(self.development)} compositions, chosen by {escape(self.chosen_by)}. "
            f"{escape(lead(self))}</p><table><thead><tr><th>model</th>"
            f"<th>{escape(measure)}, test documents</th><th>chosen minus it</th></tr></thead>"
            f"<tbody>{cells}</tbody></table>"
        )


def sweep(
    plans: Composed | Sequence[Composed],
    tasks: str | Sequence[str] = (),
    *,
    include: PathLike | Sequence[PathLike] = (),
    choose_by: str | Mapping[str, str] | None = None,
    answers: PathLike | None = None,
    allow_code: bool = False,
    log: Log = lambda line: None,
    progress: Advance | None = None,
    **settings: Any,
) -> ReportedSweep:
    """Evaluate compositions of the same experts, choose the best, and compare it with baselines.

    The best is chosen on the development documents of the tasks. It is reported on the test
    documents, beside the default swap, the soup, both experts and, where the recipe names it,
    the base. This is `layerswap sweep` from Python.

    Args:
        plans: compositions, one or several; `Plan.grid` makes many.
        tasks: lm-eval tasks, one or several.
        include: folders with further task YAMLs, one or several.
        choose_by: the metric to choose by, or a mapping of `task`, `metric` and `filter`.
        answers: an SQLite file that keeps answers, so that none is computed twice.
        allow_code: let tasks run code that a model wrote.
        log: called with what the sweep costs.
        progress: called with the number of compositions just evaluated.
        settings: further keys of a sweep file: `development` (share of documents to choose on),
            `limit`, `num_fewshot`, `batch_size`, `seed`, `device`, `dtype`, `ties`, `halving`,
            `item_response`, `answer_language`, `without_labels`.

    Returns:
        The result: `.best` is the chosen plan, `.intervals` and `.differences` are on the test
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
    data = {"tasks": _listed(tasks), "include": [str(one) for one in _listed(include)],
            "choose_by": metric, **settings}  # fmt: skip
    spec = validate(SweepSettings, data, where="sweep", expected="settings by name")
    candidates = _named([_plan(one) for one in _listed(plans)])
    start = next(iter(candidates.values()))
    swaps = start.recipe.swap is not None
    result = sweep_plans(
        spec,
        candidates,
        contenders(start, densities=spec.ties) if swaps else {},
        store=None if answers is None else AnswerStore(Path(answers).expanduser()),
        allow_code=allow_code,
        log=log,
        progress=progress,
    )
    return ReportedSweep(**{one.name: getattr(result, one.name) for one in fields(result)})


def _listed(given: Any) -> list[Any]:
    many = isinstance(given, Sequence) and not isinstance(given, str)
    return list(given) if many else [given]


def _plan(given: Composed) -> Plan:
    if isinstance(given, Plan):
        return given
    return make_plan(given if isinstance(given, Recipe) else read_recipe(Path(given)))


def _named(plans: Sequence[Plan]) -> dict[Condition, Plan]:
    """Conditions of plans: swaps by their zones, and by what is outside where they differ by it.

    Raises:
        EvaluationError: there are no plans.
    """
    if not plans:
        raise EvaluationError("there is no composition to evaluate; give at least one")
    outsides = {plan.recipe.swap.outside for plan in plans if plan.recipe.swap}
    named: dict[Condition, Plan] = {}
    for number, plan in enumerate(plans):
        swap = plan.recipe.swap
        one = Condition("composition", str(number))
        if swap is not None:
            outside = swap.outside if len(outsides) > 1 else ""
            one = Condition("swap", zones=swap.zones(plan.composition.layers), outside=outside)
        if one in named:
            if plan.composition == named[one].composition:
                continue
            one = Condition(one.method, f"number {number}", one.zones, one.outside)
        named[one] = plan
    return named
