"""Tables of results for the terminal, one function per kind of result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerswap.evaluation.languages import language_name
from layerswap.evaluation.statistics import Interval
from layerswap.report.tables import Table, interval_words

if TYPE_CHECKING:
    from layerswap.evaluation.results import ScoreCell, SideBySide
    from layerswap.evaluation.statistics import Predictor
    from layerswap.study.estimate import StudyCosts
    from layerswap.study.journal import StepRecord
    from layerswap.study.steps import Graph
    from layerswap.training.expert.select import FreezeOrRevert, Selection


def score_table(scores: Mapping[str, Mapping[Any, Interval]]) -> Table:
    """Models down the side, measures across, each cell a percentage with its 95% interval."""
    measures = [measure.replace("_", " ") for measure in next(iter(scores.values()))]
    rows: list[list[Any]] = [
        [name.replace("_", " "), *row.values()] for name, row in scores.items()
    ]
    return Table(["model", *measures], rows, "% right, with 95% bootstrap intervals")


def evaluation_table(scores: Sequence[Mapping[str, Any]]) -> Table:
    """The scores of models on tasks, with intervals if each document has a score."""
    rows: list[list[Any]] = []
    for row in scores:
        score, documents = row["score"], ""
        if "n" in row:
            score = Interval(score, row["low"], row["high"], row["n"])
            documents = f"{row['n']:,}"
        rows.append([row["model"], row["task"], row["metric"], score, documents])
    columns = ["model", "task", "metric", "score", "documents"]
    return Table(columns, rows, "with 95% bootstrap intervals", unit="")


def selection_table(selection: Selection) -> Table:
    """Checkpoints, the best first, with a mark on those to keep."""
    tasks = list(selection.ranked[0].scores)
    rows = [
        [candidate.folder, "keep" if candidate in selection.chosen else "",
         "" if candidate.loss is None else f"{candidate.loss:.4f}",
         *(f"{candidate.scores[task]:.3f}" for task in tasks)]
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
        [step.name, ", ".join(step.needs),
         "done" if step.name in done else amount(costs.steps[step.name].hours),
         amount(costs.steps[step.name].memory_gb), amount(costs.steps[step.name].disk_gb)]
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
    return Table(["step", "needs", "hours", "memory, GB", "disk, GB"], rows, caption)


def amount(value: float) -> str:
    """An estimate with two digits: `0.014`, `1.3`, `250`, `11,000`."""
    if value < 0.0005:
        return "0"
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def status_table(rows: Sequence[StepRecord]) -> Table:
    """The steps of a study and their states."""
    done = sum(row.state == "done" for row in rows)
    cells = [
        [row.name, row.state, "" if row.seconds is None else f"{row.seconds:.1f}",
         f"since {row.since}: {row.progress}" if row.since else row.why]
        for row in rows
    ]  # fmt: skip
    return Table(
        ["step", "state", "seconds", "progress, or why"], cells, f"{done} of {len(rows)} steps done"
    )


def places_table(rows: Sequence[FreezeOrRevert]) -> Table:
    """Each partition frozen in training, and reset to the base after it (paper 2, table 2)."""
    tasks = list(rows[0].scores)
    cells = [[row.partition or "", row.treatment, *(f"{row.scores[task]:.3f}" for task in tasks)]
             for row in rows]  # fmt: skip
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


def comparison_table(compared: SideBySide) -> Table:
    """Models across, benchmarks and languages down; the best score of a row is bold."""
    rows = [
        [
            benchmark.replace("_", " "),
            language_name(language) if language else "",
            *(_marked(cell, metric) for cell in cells),
        ]
        for (benchmark, language, metric), cells in zip(compared.rows, compared.cells, strict=True)
    ]
    bold = {(i, k + 2) for i, cells in enumerate(compared.cells) for k, cell in enumerate(cells)
            if cell is not None and cell.best}  # fmt: skip
    caption = (
        "+ and - : better and worse than the first model (paired bootstrap, Holm-corrected, "
        "p < .05). Intervals: 95% bootstrap over documents."
    )
    return Table(["benchmark", "language", *compared.models], rows, caption, bold=bold)


def _marked(cell: ScoreCell | None, metric: str) -> str:
    if cell is None:
        return ""
    mean, _, rest = interval_words(cell.score, "" if "chrf" in metric else "%").partition(" ")
    return f"{mean}{cell.mark} {rest}"
