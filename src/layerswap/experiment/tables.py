"""Tables that compare models: a row for each model, with its scores and paired differences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from layerswap.evaluation.languages import language_name
from layerswap.evaluation.statistics import Balanced, Interval, mean_interval
from layerswap.experiment.conditions import CHOSEN, FLATTERED
from layerswap.ground.errors import LayerswapError
from layerswap.report.tables import (
    STAR,
    Count,
    Difference,
    Number,
    Share,
    Table,
    best_cells,
    unit_of,
)
from layerswap.report.tables import score as score_words

if TYPE_CHECKING:
    from layerswap.experiment.compare import TestResult
    from layerswap.experiment.runs import ComparedModels, LanguageMean, ScoreCell
    from layerswap.experiment.sweeps import SweepResult
    from layerswap.report.tables import Cell

BALANCED = {"balanced accuracy": "balanced_accuracy", "macro-F1": "macro_f1"}
"""Headings and fields of the measures in which every label has the same weight."""
HONEST = f"{FLATTERED}: chosen by the documents that it is evaluated on."
ModelT = TypeVar("ModelT")


def models_table(
    scores: Mapping[str, Mapping[ModelT, Cell]],
    minus: Mapping[str, Mapping[ModelT, Interval | None]] | None = None,
    *,
    caption: str,
    first: str = "model",
    selected: ModelT | None = None,
    unit: str = "%",
    bold: bool = True,
) -> Table:
    """Tabulate models.

    Args:
        scores: by heading and model, a cell; a model that a column lacks has a dash.
        minus: by heading and model, a paired difference; a model without one has an empty cell.
        caption: a sentence. Another one follows if the flattered swap is among the models.
        first: heading of the models.
        selected: the model to highlight.
        unit: of scores and differences.
        bold: emphasise the best score of each column, except the flattered one.
    """
    models: list[ModelT] = list(dict.fromkeys(model for by in scores.values() for model in by))
    rows: list[list[Any]] = [
        [str(model), *(by.get(model) for by in scores.values()),
         *(Difference(by.get(model), unit) for by in (minus or {}).values())]
        for model in models
    ]  # fmt: skip
    flattered = [i for i, model in enumerate(models) if model == FLATTERED]
    return Table(
        [first, *scores, *(minus or {})], rows, f"{caption} {HONEST}" if flattered else caption,
        unit=unit, bold=best_cells(rows, flattered) if bold else (),
        highlight=models.index(selected) if selected in models else None,
    )  # fmt: skip


def by_label(
    balanced: Mapping[ModelT, Balanced | None], heading: str
) -> dict[str, dict[ModelT, Interval]]:
    """Return the columns of the balanced measures; `heading` is such as `{}, %`."""
    return {
        heading.format(name): {
            model: getattr(both, field) for model, both in balanced.items() if both is not None
        }
        for name, field in BALANCED.items()
    }


def results_table(board: SweepResult) -> Table:
    """Tabulate all models of a sweep on the test split, with the selected one minus each."""
    task, metric, name = board.measure
    unit = unit_of(metric)
    return models_table(
        {f"{metric}, {unit}" if unit else metric: board.intervals},
        {"selected minus it": board.differences}, unit=unit, selected=board.selected,
        caption=f"{task}, {name}: {board.intervals[CHOSEN].n} test documents; 95% bootstrap "
        f"intervals, paired differences. {STAR} >: selected.",
    )  # fmt: skip


def balanced_table(board: SweepResult) -> Table | None:
    """Tabulate a sweep's balanced measures on the test split; None if the task has no labels."""
    if not board.classified:
        return None
    return models_table(
        by_label({model: answers.balanced for model, answers in board.classified.items()}, "{}, %"),
        by_label(board.balanced_differences, "selected minus it, {}"),
        caption="Every label has the same weight: mean recall and mean F1 over labels, with 95% "
        f"bootstrap intervals and paired differences. {STAR} Nothing is chosen by them.",
    )


def labels_table(result: TestResult) -> Table | None:
    """Tabulate a linear classifier by its number of labels; None if the task has no labels."""
    if result.labelled is None:
        return None
    rows: list[list[Any]] = [
        [f"{size:,}", mean_interval(answers.right), answers.balanced.balanced_accuracy]
        for size, answers in result.labelled.curve.items()
    ]
    return Table(
        ["labels", "accuracy, %", "balanced accuracy, %"], rows,
        "A linear classifier on character n-grams, by its number of labels; the mean over five "
        "draws of labels, with 95% bootstrap intervals over documents.",
    )  # fmt: skip


def evaluation_table(scores: Iterable[Mapping[str, Any]]) -> Table:
    """Tabulate the scores of models on tasks, with intervals if each document has a score."""
    rows: list[list[Any]] = []
    for row in scores:
        unit, score = unit_of(row["metric"]), row["score"]
        shown: Any = Number(score, text=score_words(score, unit))
        if "n" in row:
            shown = Share(Interval(score, row["low"], row["high"], row["n"]), unit)
        rows.append([row["model"], row["task"], row["metric"], row.get("n", ""), shown])
    columns = ["model", "task", "metric", "n", "score"]
    return Table(columns, rows, "with 95% bootstrap intervals over n documents; shares in %")


def comparison_tables(compared: ComparedModels) -> list[Table]:
    """Tabulate each benchmark: documents, scores, and differences to the first model.

    A benchmark of several languages has a second table with the differences in each of them.
    """
    tables: list[Table] = []
    means = {(mean.benchmark, mean.metric): mean for mean in compared.means}
    for key in dict.fromkeys((benchmark, metric) for benchmark, _, metric in compared.rows):
        lines = {row[1]: cells for row, cells in zip(compared.rows, compared.cells, strict=True)
                 if (row[0], row[2]) == key}  # fmt: skip
        tables += _of_benchmark(compared.models, key, lines, means.get(key))
    legend = f"{STAR[:-1]}; **: also p < .05 after Holm's correction for all comparisons."
    tables[-1] = replace(tables[-1], caption=f"{tables[-1].caption}. {legend}")
    return [*tables, *_balanced_tables(compared)]


def _balanced_tables(compared: ComparedModels) -> Iterator[Table]:
    """Tabulate the balanced measures of every row that is a classification."""
    for (benchmark, language, _), cells in zip(compared.rows, compared.cells, strict=True):
        known = {model: cell for model, cell in zip(compared.models, cells, strict=True)
                 if cell and cell.balanced}  # fmt: skip
        if known:
            where = ", ".join(filter(None, [benchmark, _spoken(language)]))
            yield models_table(
                by_label({model: cell.balanced for model, cell in known.items()}, "{}"),
                by_label({model: cell.balanced_against for model, cell in known.items()},
                         f"{{}} minus {compared.models[0]}"), bold=False,
                caption=f"{where}: mean recall and mean F1 over labels, %, with 95% intervals",
            )  # fmt: skip


def _of_benchmark(
    models: Sequence[str],
    key: tuple[str, str],
    lines: Mapping[str, Sequence[ScoreCell | None]],
    mean: LanguageMean | None,
) -> Iterator[Table]:
    unit = unit_of(key[1])
    names = [_spoken(code) for code in lines]
    rows: list[list[Any]] = []
    differences: list[list[Any]] = []
    for i, (model, cells) in enumerate(zip(models, zip(*lines.values(), strict=True), strict=True)):
        rows.append([model, _documents(cells), *(cell and cell.score for cell in cells)])
        differences.append([model, *(_gap(cell, unit) for cell in cells)])
        if mean is not None:
            rows[-1].append(mean.scores[i])
            differences[-1].append(Difference(mean.against[i], unit))
    bold = {(i, k + 2) for k, cells in enumerate(lines.values()) for i, cell in enumerate(cells)
            if cell is not None and cell.best}  # fmt: skip
    benchmark, metric = key[0].replace("_", " "), key[1].replace("_", " ")
    what, minus = f"{metric}, {unit}" if unit else metric, f"minus {models[0]}"
    words = "with 95% bootstrap intervals"
    if mean is None:
        rows = [[*row, gap] for row, (_, gap) in zip(rows, differences, strict=True)]
        where = ", ".join(filter(None, [benchmark, names[0]]))
        yield Table(["model", "n", names[0] or benchmark, minus], rows,
                    f"{where}: {what}, {words} over n documents", bold=bold, unit=unit)  # fmt: skip
        return
    scores = [*names, "mean"]
    caption = f"{benchmark}: {what}, {words} over n documents"
    yield Table(["model", "n", *scores], rows, caption, bold=bold, unit=unit)
    caption = f"{benchmark}: {what}, {minus}: paired differences {words}"
    yield Table(["model", *scores], differences, caption, unit=unit)


def _spoken(code: str) -> str:
    """Return the name of a language, or its code if it has no name, as the lab's languages."""
    try:
        return language_name(code) if code else ""
    except LayerswapError:
        return code


def _documents(cells: Sequence[ScoreCell | None]) -> Count:
    """Number of compared documents, and the model's total if larger."""
    common = sum(cell.score.n for cell in cells if cell is not None)
    whole = sum(cell.documents for cell in cells if cell is not None)
    return Count(common, whole)


def _gap(cell: ScoreCell | None, unit: str) -> Difference:
    if cell is None or cell.against is None:
        return Difference(None)
    return Difference(cell.against.difference, unit, corrected=cell.significant)
