"""Tables of results for the terminal, one function per kind of result."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layerswap.evaluation.languages import language_name
from layerswap.evaluation.statistics import Interval
from layerswap.report.tables import (
    BALANCED,
    STAR,
    Count,
    Difference,
    Number,
    Share,
    Table,
    balanced_differences,
    best_cells,
    unit_of,
)
from layerswap.report.tables import score as score_words

if TYPE_CHECKING:
    from layerswap.evaluation.statistics import Predictor
    from layerswap.experiment.runs import LanguageMean, ScoreCell, SideBySide
    from layerswap.lab.scoring import LabMeasure
    from layerswap.study.estimate import StudyCosts
    from layerswap.study.journal import StepRecord
    from layerswap.study.on_slurm import JobState
    from layerswap.study.steps import Graph
    from layerswap.training.expert.select import FreezeOrRevert, Selection


def score_table(scores: Mapping[str, Mapping[LabMeasure, Interval]], language: str) -> Table:
    """Models down, the lab's measures across; the best are bold."""
    from layerswap.lab.scoring import measure_names

    rows: list[list[Any]] = [[name, *row.values()] for name, row in scores.items()]
    caption = "% right, with 95% bootstrap intervals"
    return Table(["model", *measure_names(language).values()], rows, caption, bold=best_cells(rows))


def evaluation_table(scores: Sequence[Mapping[str, Any]]) -> Table:
    """The scores of models on tasks, with intervals if each document has a score."""
    rows: list[list[Any]] = []
    for row in scores:
        unit, score = unit_of(row["metric"]), row["score"]
        shown: Any = Number(score, text=score_words(score, unit))
        if "n" in row:
            shown = Share(Interval(score, row["low"], row["high"], row["n"]), unit)
        rows.append([row["model"], row["task"], row["metric"], row.get("n", ""), shown])
    columns = ["model", "task", "metric", "n", "score"]
    return Table(columns, rows, "with 95% bootstrap intervals over n documents; shares in %")


def selection_table(selection: Selection) -> Table:
    """Checkpoints, the best first, with a mark on those to keep."""
    tasks = list(selection.ranked[0].scores)
    rows = [
        [candidate.folder, "keep" if candidate in selection.chosen else "",
         "" if candidate.loss is None else Number(candidate.loss, ".4f"),
         *(Number(candidate.scores[task], ".3f") for task in tasks)]
        for candidate in selection.ranked
    ]  # fmt: skip
    return Table(["checkpoint", "", "validation loss", *tasks], rows)


def predictor_table(predictors: Sequence[Predictor], merges: int) -> Table:
    """Rank correlations of signals with the scores of merges."""
    rows: list[list[Any]] = [
        [row.signal, row.spearman, row.p_spearman, row.kendall] for row in predictors
    ]
    caption = f"over {merges} merges, with 95% bootstrap intervals"
    return Table(["signal", "Spearman", "p", "Kendall"], rows, caption, unit="")


def plan_table(graph: Graph, costs: StudyCosts, done: Collection[str] = ()) -> Table:
    """The steps of a study, their needs, and their estimated cost; `done` names finished steps."""
    rows: list[list[Any]] = [
        [step.name, "done" if step.name in done else estimate(costs.steps[step.name].hours),
         estimate(costs.steps[step.name].memory_gb), estimate(costs.steps[step.name].disk_gb),
         ", ".join(step.needs)]
        for step in graph
    ]  # fmt: skip
    size, speed = costs.costs.size, costs.costs.speed
    hours = sum(costs.steps[step.name].hours for step in graph if step.name not in done)
    time = f"{amount(hours)} hours" if hours >= 1 else f"{amount(60 * hours)} minutes"
    more = ""
    if costs.passing_gb >= 0.05:
        more = f", {amount(costs.passing_gb)} GB more while it trains"
    before = f", {len(done)} of them done before; the others take" if done else ","
    takes = f"{before} about {time} {speed.name}"
    if len(done) == len(graph):
        takes = ", all of them done before"
    space = "disk in all" if done else "disk"
    caption = (
        f"{len(graph)} steps{takes}, {amount(costs.disk_gb)} GB of {space}{more}. The base has "
        f"{size.billions:.3g} billion parameters, by {size.known_by}. Memory is without "
        "activations."
    )
    return Table(["step", "hours", "memory, GB", "disk, GB", "needs"], rows, caption)


def estimate(value: float) -> Number:
    """A cell of `amount`."""
    return Number(value, text=amount(value))


def amount(value: float) -> str:
    """An estimate with two digits: `0.014`, `1.3`, `250`, `11,000`."""
    if value < 0.0005:
        return "0"
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def status_table(rows: Sequence[StepRecord], jobs: Mapping[str, JobState] | None = None) -> Table:
    """The steps of a study, their states, and the last Slurm job of each that had one."""
    done = sum(row.state == "done" for row in rows)
    jobs = jobs or {}
    cells = [
        [row.name, row.state, *([str(jobs.get(row.name, ""))] if jobs else []),
         "" if row.seconds is None else Number(row.seconds, ".1f"),
         f"since {row.since}: {row.progress}" if row.since else row.why]
        for row in rows
    ]  # fmt: skip
    columns = ["step", "state", *(["job"] if jobs else []), "seconds", "progress, or why"]
    return Table(columns, cells, f"{done} of {len(rows)} steps done")


def places_table(rows: Sequence[FreezeOrRevert]) -> Table:
    """Each partition frozen in training, and reset to the base after it (paper 2, table 2)."""
    tasks = list(rows[0].scores)
    cells: list[list[Any]] = [
        [row.partition or "", row.treatment, *(Number(row.scores[task], ".3f") for task in tasks)]
        for row in rows
    ]
    return Table(["partition", "rest of the model", *tasks], cells)


def mix_table(card: Mapping[str, Any]) -> Table:
    """The sources of a data card: rows read, dropped by each filter, and kept."""
    filters = [name for name, facts in card["filters"].items() if facts["dropped"]]
    tokens = ["tokens"] if card["tokenizer"] else []
    rows = [
        [name, facts["looked_at"], facts["empty"] + facts["left_out_by_where"],
         *(facts["dropped"].get(title, 0) for title in filters), facts["kept"],
         *(facts[title] for title in tokens)]
        for name, facts in card["sources"].items()
    ]  # fmt: skip
    columns = ["source", "read", "left out", *filters, "kept", *tokens]
    words = [column.replace("_", " ") for column in columns]
    return Table(words, rows, "rows dropped by each filter, and rows kept")


def comparison_tables(compared: SideBySide) -> list[Table]:
    """Models down for each benchmark: documents, scores, and differences to the first model.

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


def _balanced_tables(compared: SideBySide) -> Iterator[Table]:
    """The balanced measures of every row that is a classification."""
    for (benchmark, language, _), cells in zip(compared.rows, compared.cells, strict=True):
        rows: list[list[Any]] = [
            [model, *vars(cell.balanced).values(),
             *balanced_differences(cell.balanced_against)]
            for model, cell in zip(compared.models, cells, strict=True) if cell and cell.balanced
        ]  # fmt: skip
        if rows:
            where = ", ".join(filter(None, [benchmark, language and language_name(language)]))
            columns = [f"{name}{minus}" for minus in ("", f" minus {compared.models[0]}")
                       for name in BALANCED]  # fmt: skip
            caption = f"{where}: mean recall and mean F1 over labels, %, with 95% intervals"
            yield Table(["model", *columns], rows, caption)


def _of_benchmark(
    models: Sequence[str],
    key: tuple[str, str],
    lines: Mapping[str, Sequence[ScoreCell | None]],
    mean: LanguageMean | None,
) -> Iterator[Table]:
    unit = unit_of(key[1])
    names = [language_name(code) if code else "" for code in lines]
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


def _documents(cells: Sequence[ScoreCell | None]) -> Count:
    """Number of compared documents, and the model's total if larger."""
    common = sum(cell.score.n for cell in cells if cell is not None)
    whole = sum(cell.documents for cell in cells if cell is not None)
    return Count(common, whole)


def _gap(cell: ScoreCell | None, unit: str) -> Difference:
    if cell is None or cell.against is None:
        return Difference(None)
    return Difference(cell.against.difference, unit, corrected=cell.significant)
