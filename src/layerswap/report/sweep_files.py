"""A board on disk: every score, the summary, the best recipe, and the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layerswap.compose import Zones
from layerswap.errors import EvaluationError
from layerswap.report.charts import draw_heat_map
from layerswap.report.page import Report, Section, write_report
from layerswap.report.tables import Table
from layerswap.search.evaluator import BEST, SweepTested
from layerswap.search.grid import GridResult
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
    _write(found, folder, found.best_recipe(), facts, page)
    return facts


def _write(
    judged: SweepTested, folder: Path, recipe: dict[str, Any], facts: dict[str, Any], page: Report
) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import yaml

    rows = [asdict(row) for row in judged.rows]
    types = [("split", pa.string()), ("composition", pa.string()), ("task", pa.string()),
             ("metric", pa.string()), ("filter", pa.string()), ("document", pa.int64()),
             ("score", pa.float64())]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(types)), folder / SCORES)
    (folder / SUMMARY).write_text(json.dumps(facts, indent=2) + "\n", "utf-8")
    (folder / RECIPE).write_text(yaml.safe_dump(recipe, sort_keys=False), "utf-8")
    write_report(folder / PAGE, page)


def summary(board: GridResult) -> dict[str, Any]:
    """The board as plain data."""
    race = board.race
    return {
        **_compared(board, board.chosen_by, len(board.grid)),
        "development": [{**asdict(zones), "mean": score} for zones, score in board.grid.items()],
        "best": asdict(board.best),
        "default": asdict(board.default),
        "layer_from_language_is_worth": board.sensitivity(),
        "race": None if race is None else {**asdict(race), "saved": race.saved},
    }


def summary_of_search(found: SearchResult) -> dict[str, Any]:
    """What a search found as plain data."""
    return {
        **_compared(found, found.chosen_by, len(found.trials)),
        "trials": [asdict(trial) for trial in found.trials],
        "best": asdict(found.best),
        "choices_are_worth": found.worth(),
        "layers_run": found.evaluated,
        "layers_one_by_one": found.alone,
    }


def _compared(judged: SweepTested, chosen_by: str, tried: int) -> dict[str, Any]:
    names = ("task", "metric", "filter")
    return {
        "layerswap_version": __version__,
        "chosen_by": chosen_by,
        "compared_by": judged.measure and dict(zip(names, judged.measure, strict=True)),
        "compositions_tried": tried,
        "test": {name: asdict(interval) for name, interval in judged.intervals().items()},
        "best_minus": {name: asdict(value) for name, value in judged.differences().items()},
    }


def tell(board: GridResult) -> Report:
    """The report of a sweep."""
    worth = [[str(layer), value] for layer, value in enumerate(board.sensitivity())]
    notes = [str(board.race)] if board.race else []
    return Report(
        title=f"{len(board.grid)} compositions, chosen by {board.chosen_by}",
        lead=_lead(board, str(board.best)),
        sections=[
            *_contest(board, len(board.grid)),
            *_maps(board),
            Section(
                "What each layer's source is worth",
                "Mean score of the compositions that take the layer from the language expert, "
                "minus that of those that take it from the task expert (development split).",
                table=Table(("layer", "difference"), list(reversed(worth)), unit=""),
            ),
        ],
        colophon="; ".join([f"layerswap {__version__}", *notes])
        + f"; {board.counts.distinct} layers run per batch instead of {board.counts.naive}.",
    )


def tell_search(found: SearchResult) -> Report:
    """The report of a search."""
    worth = found.worth()
    names = list(dict.fromkeys(choice for by in worth.values() for choice in by))
    rows = [[key, *(by.get(name) for name in names)] for key, by in worth.items()]
    best = ", ".join(f"{key} {choice}" for key, choice in found.best.choices.items())
    ranked = sorted(found.trials, key=lambda trial: (-trial.score, trial.number))[:TOP]
    return Report(
        title=f"{len(found.trials)} compositions searched, chosen by {found.chosen_by}",
        lead=_lead(found, f"number {found.best.number}"),
        sections=[
            *_contest(found, len(found.trials)),
            Section(f"The best composition: {found.best.score:.3f}", best),
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
        ],
        colophon=f"layerswap {__version__}; {found.evaluated} layers run per batch of documents "
        f"instead of {found.alone}.",
    )


def _lead(judged: SweepTested, best: str) -> str:
    if judged.measure is None:
        return f"The best is {best}. No task was given to compare it on."
    one = judged.intervals()[BEST]
    return (
        f"The best is {best}; on {one.n} documents that it was not chosen on, "
        f"{' '.join(judged.measure[:2])} is {one.mean:.3f} [{one.low:.3f}, {one.high:.3f}]."
    )


def _contest(judged: SweepTested, tried: int) -> list[Section]:
    """The contenders on the test split, where there is a task."""
    if judged.measure is None:
        return []
    metric = judged.measure[1]
    rows: list[list[Any]] = [[name, value] for name, value in judged.intervals().items()]
    differences: list[list[Any]] = [[name, v] for name, v in judged.differences().items()]
    return [
        Section(
            "On the test split",
            "Means with 95% bootstrap intervals.",
            table=Table(("model", metric), rows, unit=""),
        ),
        Section(
            "The best composition against each other",
            "Paired differences over the same documents: clear of zero means significant.",
            table=Table(("best minus", "difference"), differences, unit=""),
            note=f"The best of {tried} was chosen on other documents than these.",
        ),
    ]


def _maps(board: GridResult) -> list[Section]:
    """A heat map over bottom and top for each choice of transitions."""
    kinds = dict.fromkeys((z.bottom_transition, z.top_transition) for z in board.grid)
    found = []
    for low, high in kinds:
        values = {
            (zones.bottom, zones.top): score
            for zones, score in board.grid.items()
            if (zones.bottom_transition, zones.top_transition) == (low, high)
        }
        found.append(
            Section(
                "The grid" if len(kinds) == 1 else f"The grid, transitions {low} and {high}",
                "Layers from the language expert at the bottom and at the top, against the mean "
                "score on the development split.",
                figure=draw_heat_map(
                    values,
                    row_label="bottom layers",
                    column_label="top layers",
                    best=_cell(board.best, low, high),
                    default=_cell(board.default, low, high),
                    unit="",
                ),
            )
        )
    return found


def _cell(zones: Zones, low: int, high: int) -> tuple[int, int] | None:
    same = (zones.bottom_transition, zones.top_transition) == (low, high)
    return (zones.bottom, zones.top) if same else None
