"""A comparison as a table for the terminal, for Markdown and for LaTeX."""

from __future__ import annotations

from layerswap.evaluate.comparing import Cell, SideBySide
from layerswap.evaluate.languages import language_name

NOTE = (
    "+ and - : better and worse than the first model (paired bootstrap, Holm-corrected, p < .05). "
    "Intervals: 95% bootstrap over documents."
)


def as_markdown(table: SideBySide) -> str:
    """The table in Markdown; the best of a row is bold."""
    head = ["benchmark", "language", *table.models]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * len(table.models)]
    for row, cells in zip(table.rows, table.cells, strict=True):
        shown = [_cell(cell, row[2], "**{}**") for cell in cells]
        lines.append(f"| {' | '.join([*_names(row), *shown])} |")
    return "\n".join([*lines, "", NOTE])


def as_latex(table: SideBySide) -> str:
    """The table in LaTeX, for the package booktabs."""
    columns = "ll" + "r" * len(table.models)
    head = " & ".join(["benchmark", "language", *map(_escaped, table.models)])
    lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", rf"{head} \\", r"\midrule"]
    for row, cells in zip(table.rows, table.cells, strict=True):
        shown = [_cell(cell, row[2], r"\textbf{{{}}}") for cell in cells]
        lines.append(rf"{' & '.join([*map(_escaped, _names(row)), *shown])} \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", f"% {NOTE}"])


def as_text(table: SideBySide) -> str:
    """The table for a terminal."""
    from io import StringIO

    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=SIMPLE_HEAD, caption=NOTE)
    drawn.add_column("benchmark")
    drawn.add_column("language")
    for model in table.models:
        drawn.add_column(model, justify="right")
    for row, cells in zip(table.rows, table.cells, strict=True):
        shown = [_cell(cell, row[2], "[bold]{}[/bold]", opening="\\[") for cell in cells]
        drawn.add_row(*_names(row), *shown)
    text = StringIO()
    Console(file=text, width=max(80, 40 + 28 * len(table.models))).print(drawn)
    return text.getvalue().rstrip()


def _names(row: tuple[str, str, str]) -> tuple[str, str]:
    return row[0].replace("_", " "), language_name(row[1])


def _cell(cell: Cell | None, metric: str, bold: str, *, opening: str = "[") -> str:
    if cell is None:
        return ""
    # Right or wrong is shown in percent; chrF is from 0 to 100 already.
    scale = 1 if "chrf" in metric else 100
    mean, low, high = (scale * v for v in (cell.score.mean, cell.score.low, cell.score.high))
    text = bold.format(f"{mean:.1f}") if cell.best else f"{mean:.1f}"
    return f"{text}{cell.mark} {opening}{low:.1f}, {high:.1f}]"


def _escaped(text: str) -> str:
    return text.replace("_", r"\_").replace("&", r"\&").replace("%", r"\%")
