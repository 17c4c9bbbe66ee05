"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerswap.delta.proposal import Evidence
    from layerswap.evaluate.judging import Judged
    from layerswap.evaluate.statistics import Interval


def score_table(scores: Mapping[str, Mapping[Any, Interval]]) -> str:
    """Models down the side, measures across, each cell a percentage with its 95% interval."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    measures = list(next(iter(scores.values())))
    table = Table(box=SIMPLE_HEAD, caption="% right, with 95% bootstrap intervals")
    table.add_column("model", overflow="fold")
    for measure in measures:
        table.add_column(measure.replace("_", " "), justify="right", no_wrap=True)
    for name, row in scores.items():
        table.add_row(name.replace("_", " "), *(percent(row[measure]) for measure in measures))
    text = StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue().rstrip()


def evidence_table(evidence: Sequence[Evidence]) -> str:
    """What is known of each layer, the last on top, as everywhere."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
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
    text = StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue().rstrip()


def board_table(board: Judged) -> str:
    """A sweep's contenders on the test split, and how far the best is from each."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
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
    text = StringIO()
    Console(file=text, width=100).print(table)
    return text.getvalue().rstrip()


def _plain(interval: Interval) -> str:
    return f"{interval.mean:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def mix_table(card: Mapping[str, Any]) -> str:
    """The sources of a data card down the side: rows, what each filter dropped, what is kept."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
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
    text = StringIO()
    Console(file=text, width=120).print(table)
    return text.getvalue().rstrip()


def percent(interval: Interval) -> str:
    """An interval as `61.2 [58.1, 64.3]`, in percent."""
    return f"{interval.mean:.1%} [{interval.low:.1%}, {interval.high:.1%}]".replace("%", "")
