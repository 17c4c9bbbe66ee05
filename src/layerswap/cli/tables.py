"""Tables of results for the terminal, one function per kind of result."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerswap.evaluation.composability import Predictor
    from layerswap.evaluation.results import ScoreCell, SideBySide
    from layerswap.evaluation.statistics import Interval
    from layerswap.report.tables import Table
    from layerswap.study.estimate import StudyCosts
    from layerswap.study.journal import StepRecord
    from layerswap.study.results import StudyResults
    from layerswap.study.steps import Graph
    from layerswap.training.expert.select import FreezeOrRevert, Selection


def score_table(scores: Mapping[str, Mapping[Any, Interval]]) -> Table:
    """Models down the side, measures across, each cell a percentage with its 95% interval."""
    measures = [measure.replace("_", " ") for measure in next(iter(scores.values()))]
    rows = [[name.replace("_", " "), *row.values()] for name, row in scores.items()]
    return _table(["model", *measures], rows, "% right, with 95% bootstrap intervals")


def evaluation_table(scores: Sequence[Mapping[str, Any]]) -> Table:
    """The scores of models on tasks, with intervals if each document has a score."""
    from layerswap.evaluation.statistics import Interval

    rows = [
        [one["model"], one["task"], one["metric"],
         Interval(one["score"], one["low"], one["high"], one["n"]) if "n" in one else one["score"],
         f"{one['n']:,}" if "n" in one else ""]
        for one in scores
    ]  # fmt: skip
    columns = ["model", "task", "metric", "score", "documents"]
    return _table(columns, rows, "with 95% bootstrap intervals", unit="")


def selection_table(found: Selection) -> Table:
    """Checkpoints, the best first, with a mark on those to keep."""
    tasks = list(found.ranked[0].scores)
    rows = [
        [one.folder, "keep" if one in found.chosen else "",
         "" if one.loss is None else f"{one.loss:.4f}",
         *(f"{one.scores[task]:.3f}" for task in tasks)]
        for one in found.ranked
    ]  # fmt: skip
    return _table(["checkpoint", "", "validation loss", *tasks], rows)


def predictor_table(found: Sequence[Predictor], merges: int) -> Table:
    """Rank correlations of signals with the scores of merges."""
    rows = [[one.signal, one.spearman, one.p_spearman, one.kendall] for one in found]
    caption = f"over {merges} merges, with 95% bootstrap intervals"
    return _table(["signal", "Spearman", "p", "Kendall"], rows, caption, unit="")


def plan_table(graph: Graph, costs: StudyCosts, done: Collection[str] = ()) -> Table:
    """The steps of a study, what they need, and their estimated cost.

    Args:
        graph: the steps.
        costs: their estimated costs.
        done: names of the steps that an earlier run finished.
    """
    rows = [
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
    return _table(["step", "needs", "hours", "memory, GB", "disk, GB"], rows, caption)


def amount(value: float) -> str:
    """An estimate with two digits: `0.014`, `1.3`, `250`, `11,000`."""
    if value < 0.0005:
        return "0"
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"


def results_table(results: StudyResults) -> Table:
    """The scores of every treatment of a study, with intervals."""
    table = results.summary
    return _table(table.columns, table.rows, table.caption)


def status_table(rows: Sequence[StepRecord]) -> Table:
    """The steps of a study and their states."""
    done = sum(row.state == "done" for row in rows)
    cells = [
        [row.name, row.state, "" if row.seconds is None else f"{row.seconds:.1f}",
         f"since {row.since}: {row.progress}" if row.since else row.why]
        for row in rows
    ]  # fmt: skip
    return _table(
        ["step", "state", "seconds", "progress, or why"], cells, f"{done} of {len(rows)} steps done"
    )


def places_table(rows: Sequence[FreezeOrRevert]) -> Table:
    """Each partition frozen in training, and reset to the base after it (paper 2, table 2)."""
    tasks = list(rows[0].scores)
    cells = [[row.partition or "", row.treatment, *(f"{row.scores[task]:.3f}" for task in tasks)]
             for row in rows]  # fmt: skip
    return _table(["partition", "rest of the model", *tasks], cells)


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
    return _table(words, rows, "rows dropped by each filter, and rows kept")


def comparison_table(compared: SideBySide) -> Table:
    """Models across, benchmarks and languages down; the best score of a row is bold."""
    from layerswap.evaluation.languages import language_name
    from layerswap.report.tables import Table

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
    from layerswap.report.tables import interval_words

    if cell is None:
        return ""
    mean, _, rest = interval_words(cell.score, "" if "chrf" in metric else "%").partition(" ")
    return f"{mean}{cell.mark} {rest}"


def _table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], caption: str = "", unit: str = "%"
) -> Table:
    from layerswap.report.tables import Table

    return Table(columns, rows, caption, unit=unit)
