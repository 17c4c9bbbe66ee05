"""A board on disk: every score, the summary, the best recipe, and the page."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layerswap import __version__
from layerswap.compose import Zones
from layerswap.errors import EvaluationError
from layerswap.evaluate.board import BEST, Board
from layerswap.report.heat_map import heat_map_svg
from layerswap.report.page import Report, Section, Table, write_report

ANSWERS = "answers.sqlite"
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


def write_board(board: Board, folder: Path) -> None:
    """Write `scores.parquet`, `board.json`, `best.yaml` and `report.html` into a folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    import yaml

    pq.write_table(pa.Table.from_pylist([asdict(row) for row in board.rows]), folder / SCORES)
    (folder / SUMMARY).write_text(json.dumps(summary(board), indent=2) + "\n", "utf-8")
    (folder / RECIPE).write_text(yaml.safe_dump(board.best_recipe(), sort_keys=False), "utf-8")
    write_report(folder / PAGE, tell(board))


def summary(board: Board) -> dict[str, Any]:
    """The board as plain data."""
    return {
        "layerswap_version": __version__,
        "chosen_by": dict(zip(("task", "metric", "filter"), board.measure, strict=True)),
        "compositions_tried": len(board.grid),
        "development": [{**asdict(zones), "mean": score} for zones, score in board.grid.items()],
        "best": asdict(board.best),
        "default": asdict(board.default),
        "test": {name: asdict(interval) for name, interval in board.intervals().items()},
        "best_minus": {name: asdict(value) for name, value in board.differences().items()},
        "layer_from_language_is_worth": board.sensitivity(),
    }


def tell(board: Board) -> Report:
    """The report of a sweep."""
    task, metric, _ = board.measure
    intervals = board.intervals()
    best = intervals[BEST]
    rows: list[list[Any]] = [[name, value] for name, value in intervals.items()]
    differences: list[list[Any]] = [[name, v] for name, v in board.differences().items()]
    worth = [[str(layer), value] for layer, value in enumerate(board.sensitivity())]
    return Report(
        title=f"{len(board.grid)} compositions on {task}",
        lead=f"The best on the development split is {board.best}; on {best.n} other documents its "
        f"{metric} is {best.mean:.3f} [{best.low:.3f}, {best.high:.3f}].",
        sections=[
            Section(
                "On the test split",
                "Means with 95% bootstrap intervals.",
                table=Table(("model", metric), rows, unit=""),
            ),
            Section(
                "The best composition against each other",
                "Paired differences over the same documents: clear of zero means significant.",
                table=Table(("best minus", "difference"), differences, unit=""),
                note=f"The best of {len(board.grid)} was chosen on other documents than these.",
            ),
            *_maps(board),
            Section(
                "What each layer's source is worth",
                "Mean score of the compositions that take the layer from the language expert, "
                "minus that of those that take it from the task expert (development split).",
                table=Table(("layer", "difference"), list(reversed(worth)), unit=""),
            ),
        ],
        colophon=f"layerswap {__version__}; {board.counts.distinct} layers run per batch "
        f"instead of {board.counts.naive}.",
    )


def _maps(board: Board) -> list[Section]:
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
                figure_svg=heat_map_svg(
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
