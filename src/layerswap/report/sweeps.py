"""`layerswap.sweep`, and the files of a sweep: scores, summary, the best recipe and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from html import escape
from pathlib import Path
from typing import Any

from layerswap._types import Advance, Log, PathLike
from layerswap.compose import Recipe, Zones, read_recipe
from layerswap.compose.yaml_file import validate
from layerswap.errors import EvaluationError
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.merge import Plan, make_plan
from layerswap.report.drawing import draw_heat_map
from layerswap.report.page import Report, Section, write_report
from layerswap.report.tables import Table, difference_words, interval_words, score
from layerswap.search.conditions import Condition, contenders
from layerswap.search.evaluator import SweepResult
from layerswap.search.grid import GridResult, sweep_plans
from layerswap.search.spec import SweepSettings
from layerswap.search.tpe import SearchResult
from layerswap.versions import __version__

ANSWERS = "answers.sqlite"
STUDY = "study.sqlite"
TOP = 20
"""Trials that the report of a search lists."""
SCORES, SUMMARY, RECIPE, PAGE = "scores.parquet", "board.json", "best.yaml", "report.html"


def prepare_folder(out: Path) -> Path:
    """The folder of a sweep, made where there is none.

    Raises:
        EvaluationError: it holds something else than a sweep, or cannot be made.
    """
    folder = out.expanduser().absolute()
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / ANSWERS).is_file():
            raise EvaluationError(f"{folder}: is no sweep's folder; choose another output")
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def write_result(found: GridResult | SearchResult, folder: Path) -> dict[str, Any]:
    """Write `scores.parquet`, `board.json`, `best.yaml` and `report.html` into a folder.

    Returns:
        The content of `board.json`; for a search it lists every trial.
    """
    if isinstance(found, GridResult):
        facts, page = summary(found), tell(found)
    else:
        facts, page = summary_of_search(found), tell_search(found)
    _write(found, folder, facts, page)
    return facts


def _write(result: SweepResult, folder: Path, facts: dict[str, Any], page: Report) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import yaml

    texts = ("composition", "method", "variant", "outside", "regime", "pair", "split", "task",
             "metric", "filter")  # fmt: skip
    counts = (*vars(Zones(0, 0)), "document")
    types = dict.fromkeys(texts, pa.string()) | dict.fromkeys(counts, pa.int64())
    schema = pa.schema({**types, "score": pa.float64()})
    rows = [row.to_dict() for row in result.rows]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), folder / SCORES)
    (folder / SUMMARY).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    (folder / RECIPE).write_text(yaml.safe_dump(result.best_recipe, sort_keys=False), "utf-8")
    write_report(folder / PAGE, page)


def summary(board: GridResult) -> dict[str, Any]:
    """The board as plain data."""
    race = board.race
    return {
        **_compared(board),
        "default": asdict(board.default),
        "layer_from_language_is_worth": board.sensitivity,
        "race": None if race is None else {**asdict(race), "saved": race.saved},
    }


def summary_of_search(found: SearchResult) -> dict[str, Any]:
    """What a search found as plain data."""
    return {
        **_compared(found),
        "trials": [asdict(trial) for trial in found.trials],
        "best_trial": asdict(found.best_trial),
        "choices_are_worth": found.worth,
        "layers_run": found.evaluated,
        "layers_one_by_one": found.naive,
    }


def _compared(result: SweepResult) -> dict[str, Any]:
    names, screening = ("task", "metric", "filter"), result.screening
    return {
        "layerswap_version": __version__,
        "chosen_by": result.chosen_by,
        "compared_by": result.measure and dict(zip(names, result.measure, strict=True)),
        "compositions_tried": len(result.development),
        "development": [
            {**one.to_dict(), "mean": score} for one, score in result.development.items()
        ],
        **({} if screening is None else
           {"item_response": {**asdict(screening), "saved": screening.saved}}),
        **({"objectives": [
            {**one.to_dict(), **both._asdict()} for one, both in result.objectives.items()
        ]} if result.objectives else {}),
        **result.to_dict(),
    }  # fmt: skip


def tell(board: GridResult) -> Report:
    """The report of a sweep."""
    worth = [[str(layer), value] for layer, value in enumerate(board.sensitivity)]
    notes = [str(one) for one in (board.race, board.screening) if one]
    return Report(
        title=f"{len(board.development)} compositions, chosen by {board.chosen_by}",
        lead=lead(board),
        sections=[
            *_contest(board, len(board.development)),
            *_front(board),
            *_maps(board),
            Section(
                "What each layer's source is worth",
                "Mean score of the compositions that take the layer from the language expert, "
                "minus that of those that take it from the task expert (development split).",
                table=Table(("layer", "difference"), list(reversed(worth)), unit=""),
            ),
            _models(board.best_recipe),
        ],
        colophon="; ".join([f"layerswap {__version__}", *notes])
        + f"; {board.counts.distinct} layers run per batch instead of {board.counts.naive}.",
    )


def tell_search(found: SearchResult) -> Report:
    """The report of a search."""
    worth = found.worth
    names = list(dict.fromkeys(choice for by in worth.values() for choice in by))
    rows = [[key, *(by.get(name) for name in names)] for key, by in worth.items()]
    best = ", ".join(f"{key} {choice}" for key, choice in found.best_trial.choices.items())
    ranked = sorted(found.trials, key=lambda trial: (-trial.score, trial.number))[:TOP]
    screened = found.screening is not None
    return Report(
        title=f"{len(found.trials)} compositions searched, chosen by {found.chosen_by}",
        lead=lead(found),
        sections=[
            *_contest(found, len(found.trials)),
            *_front(found),
            Section(f"The best composition: {score(found.best_trial.score, '')}", best),
            Section(
                "What each choice is worth",
                "Mean score of the trials that made it (development split). A search tries good "
                "choices more often, and together with other good ones.",
                table=Table(("place", *names), list(reversed(rows)), unit=""),
            ),
            Section(
                "The best trials",
                table=Table(
                    ("number", "score", "choices"),
                    [[str(t.number), t.score, " ".join(t.choices.values())] for t in ranked],
                    unit="",
                ),
            ),
            _models(found.best_recipe),
        ],
        colophon="; ".join([f"layerswap {__version__}", *([str(found.screening)] * screened)])
        + f"; {found.evaluated} layers run per batch of documents instead of {found.naive}.",
    )


def results_table(judged: SweepResult) -> Table | None:
    """Everything that was compared on the test split, and its distance to the chosen composition.

    None without a task.
    """
    if judged.measure is None:
        return None
    task, metric, name = judged.measure
    rows: list[list[Any]] = [
        [str(one), value, difference_words(judged.differences.get(one), "")]
        for one, value in judged.intervals.items()
    ]
    caption = (
        f"{task}, {name}: {judged.intervals[judged.reference].n} test documents; 95% bootstrap "
        "intervals, paired differences; *: significant"
    )
    return Table(["model", metric, "chosen minus it"], rows, caption, unit="")


def lead(judged: GridResult | SearchResult) -> str:
    """The result in two sentences: the best composition, and its score on the test documents."""
    best = _zones_in_words(judged.chosen)
    if isinstance(judged, SearchResult):
        best = f"number {judged.best_trial.number}"
    if judged.measure is None:
        return f"The best is {best}. No task was given to compare it on."
    one = judged.intervals[judged.suggested]
    of = f"On {one.n} documents that it was not chosen on, {' '.join(judged.measure[:2])} is "
    if judged.suggested == judged.reference:
        return f"The best is {best}. {of}{interval_words(one, '')}."
    chosen = interval_words(judged.intervals[judged.reference], "")
    return (
        f"The best is the {judged.suggested}. {of}{interval_words(one, '')}. What was chosen "
        f"on the development documents, {best}, reaches {chosen} on them."
    )


def _contest(judged: SweepResult, tried: int) -> list[Section]:
    """The conditions on the test split, where there is a task."""
    table = results_table(judged)
    note = f"The best of {tried} was chosen on other documents than these."
    return [Section("On the test split", table=table, note=note)] if table else []


def _front(judged: SweepResult) -> list[Section]:
    """The compositions that no other beats in score and in the language of the answers."""
    front = {one: both for one, both in judged.objectives.items() if both.front}
    if not front:
        return []
    rows: list[list[Any]] = [
        [str(one), both.score, both.language]
        for one, both in sorted(front.items(), key=lambda item: -item[1].score)
    ]
    return [
        Section(
            "Score and language",
            f"{len(front)} of {len(judged.objectives)} compositions are on the Pareto front: no "
            "other is better in one of the two and as good in the other (development split).",
            table=Table(["composition", "score", "answers in the language"], rows, unit=""),
        )
    ]


def _models(recipe: Mapping[str, Any]) -> Section:
    """The checkpoints of a recipe, and the command that merges it."""
    sources = {**recipe["experts"], **({"base": recipe["base"]} if "base" in recipe else {})}
    rows = [
        [name, one if isinstance(one, str) else json.dumps(one)] for name, one in sources.items()
    ]
    return Section(
        "Models",
        f"This command writes the best composition: layerswap merge {RECIPE} --out merged",
        table=Table(["name", "source"], rows),
    )


def _maps(board: GridResult) -> list[Section]:
    """A heat map over bottom and top for each choice of transitions and of the outside."""
    maps: dict[tuple[int, int, str], dict[tuple[int, int], float]] = {}
    for one, value in board.development.items():
        if one.zones is not None:
            maps.setdefault(_map_of(one), {})[one.zones.bottom, one.zones.top] = value
    limits = min(board.development.values()), max(board.development.values())
    chosen = board.chosen
    default = Condition("swap", zones=board.default, outside=chosen.outside if chosen else "")
    found = []
    for key, values in maps.items():
        low, high, outside = key
        kind = [f"transitions {low} and {high}"] if len({k[:2] for k in maps}) > 1 else []
        kind += [f"outside {outside}"] if outside else []
        found.append(
            Section(
                ", ".join(["The grid", *kind]),
                "Layers from the language expert at the bottom and at the top, against the mean "
                "score on the development split.",
                figure=draw_heat_map(
                    values,
                    row_label="bottom layers",
                    column_label="top layers",
                    best=_cell(chosen, key),
                    default=_cell(default, key),
                    unit="",
                    limits=limits,
                ),
            )
        )
    return found


def _map_of(one: Condition) -> tuple[int, int, str]:
    assert one.zones is not None, "only zones have a place on a map"
    return one.zones.bottom_transition, one.zones.top_transition, one.outside


def _cell(one: Condition | None, key: tuple[int, int, str]) -> tuple[int, int] | None:
    if one is None or one.zones is None or _map_of(one) != key:
        return None
    return one.zones.bottom, one.zones.top


def _zones_in_words(one: Condition | None) -> str:
    """A chosen composition in words, such as `bottom 5, top 2, outside task`."""
    if one is None or one.zones is None:
        return str(one)
    return f"{one.zones}, outside {one.outside}" if one.outside else str(one.zones)


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
