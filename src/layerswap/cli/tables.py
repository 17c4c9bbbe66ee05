"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerswap.deltas.suggestion import Evidence
    from layerswap.evaluation.composability import Predictor
    from layerswap.evaluation.statistics import Interval
    from layerswap.search.evaluator import SweepTested
    from layerswap.study.steps import Graph
    from layerswap.training.expert.freezing import FreezeOrRevert
    from layerswap.training.expert.select import Selection


def score_table(scores: Mapping[str, Mapping[Any, Interval]]) -> str:
    """Models down the side, measures across, each cell a percentage with its 95% interval."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    measures = list(next(iter(scores.values())))
    table = Table(box=SIMPLE_HEAD, caption="% right, with 95% bootstrap intervals")
    table.add_column("model", overflow="fold")
    for measure in measures:
        table.add_column(measure.replace("_", " "), justify="right", no_wrap=True)
    for name, row in scores.items():
        table.add_row(name.replace("_", " "), *(percent(row[measure]) for measure in measures))
    return _drawn(table, 120)


def evidence_table(evidence: Sequence[Evidence]) -> str:
    """What is known of each layer, the last on top, as everywhere."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption="each layer's share of what an expert changed")
    for column in ("layer", "task", "language", "excess", "rows in common", "cosine"):
        table.add_column(column, justify="right", no_wrap=True)
    for layer in reversed(evidence):
        table.add_row(
            str(layer.layer),
            f"{layer.task:.1%}",
            f"{layer.language:.1%}",
            f"{layer.excess:+.1%}",
            "" if layer.overlap is None else f"{layer.overlap:.0%}",
            "" if layer.cosine is None else f"{layer.cosine:+.3f}",
        )
    return _drawn(table, 100)


def board_table(board: SweepTested) -> str:
    """A sweep's contenders on the test split, and how far the best is from each."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    if board.measure is None:
        return "No task to compare the contenders on."
    task, metric, name = board.measure
    table = Table(box=SIMPLE_HEAD, caption=f"{task}, {name}; 95% bootstrap intervals")
    for column in ("model", metric, "best minus it"):
        table.add_column(column, justify="left" if column == "model" else "right")
    differences = board.differences()
    for model, value in board.intervals().items():
        cells = [_plain(one) if one else "" for one in (value, differences.get(model))]
        table.add_row(model, *cells)
    return _drawn(table, 100)


def selection_table(selection: Selection) -> str:
    """Candidates, the best first; those that are kept are marked."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    tasks = list(selection.ranked[0].scores)
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("checkpoint", overflow="fold")
    for column in ("validation loss", *tasks):
        table.add_column(column, justify="right")
    for one in selection.ranked:
        scores = (f"{one.scores[task]:.3f}" for task in tasks)
        loss = "" if one.loss is None else f"{one.loss:.4f}"
        table.add_row("keep" if one in selection.chosen else "", one.folder, loss, *scores)
    return _drawn(table, 120)


def predictor_table(found: Sequence[Predictor], merges: int) -> str:
    """Signals by how well they order the merges."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, caption=f"over {merges} merges, with 95% bootstrap intervals")
    for column in ("signal", "Spearman", "p", "Kendall"):
        table.add_column(column, justify="left" if column == "signal" else "right")
    for one in found:
        row = (_plain(one.spearman), f"{one.p_spearman:.3f}", _plain(one.kendall))
        table.add_row(one.signal, *row)
    return _drawn(table, 120)


def plan_table(graph: Graph) -> str:
    """The steps of a study, what they need, and what they are thought to cost."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    hours = sum(step.estimate.gpu_hours for step in graph)
    disk = sum(step.estimate.disk_gb for step in graph)
    caption = f"{len(graph)} steps, about {hours:,.0f} GPU hours and {disk:,.0f} GB of disk"
    table = Table(box=SIMPLE_HEAD, caption=caption)
    for column in ("step", "needs", "GPU hours", "GB"):
        table.add_column(column, justify="left" if column in ("step", "needs") else "right")
    for step in graph:
        cost = (f"{step.estimate.gpu_hours:.1f}", f"{step.estimate.disk_gb:.1f}")
        table.add_row(step.name, ", ".join(step.needs), *cost)
    return _drawn(table, 120)


def status_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The steps of a study, and what has become of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    done = sum(row["state"] == "done" for row in rows)
    table = Table(box=SIMPLE_HEAD, caption=f"{done} of {len(rows)} steps are done")
    for column in ("step", "state", "seconds", "why"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for row in rows:
        seconds = "" if row["seconds"] is None else f"{row['seconds']:.1f}"
        table.add_row(row["step"], row["state"], seconds, Text(row["why"]))
    return _drawn(table, 120)


def places_table(rows: Sequence[FreezeOrRevert]) -> str:
    """The second paper's table 2: each partition frozen in training, and put back after it."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    tasks = list(rows[0].scores)
    for column in ("partition", "rest of it", *tasks):
        table.add_column(column, justify="left" if column not in tasks else "right")
    for row in rows:
        scores = (f"{row.scores[task]:.3f}" for task in tasks)
        table.add_row(row.partition or "", row.treatment, *scores)
    return _drawn(table, 120)


def _drawn(table: Any, width: int) -> str:
    from io import StringIO

    from rich.console import Console

    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue().rstrip()


def _plain(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def mix_table(card: Mapping[str, Any]) -> str:
    """The sources of a data card down the side: rows, what each filter dropped, what is kept."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    filters = [name for name, facts in card["filters"].items() if facts["dropped"]]
    tokens = ["tokens"] if card["tokenizer"] else []
    table = Table(box=SIMPLE_HEAD, caption="rows dropped by each filter, and rows kept")
    table.add_column("source", overflow="fold")
    for title in ("looked at", "left out", *filters, "kept", *tokens):
        table.add_column(title.replace("_", " "), justify="right", no_wrap=True)
    for name, facts in card["sources"].items():
        counts = [facts["looked_at"], facts["empty"] + facts["left_out_by_where"]]
        counts += [facts["dropped"].get(title, 0) for title in filters]
        counts += [facts["kept"], *(facts[title] for title in tokens)]
        table.add_row(name, *(f"{count:,}" for count in counts))
    return _drawn(table, 120)


def percent(interval: Interval) -> str:
    """An interval as `61.2 [58.1, 64.3]`, in percent."""
    return f"{interval.mean:.1%} [{interval.low:.1%}, {interval.high:.1%}]".replace("%", "")
