"""Tables of a report as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.evaluation.compare import ScoreCell, SideBySide
from layerswap.evaluation.languages import language_name
from layerswap.evaluation.statistics import Interval
from layerswap.report.page import Table


def write_tables(stem: Path, tables: Mapping[str, Table], *, title: str = "") -> None:
    """Write tables by their heading into one Markdown and one LaTeX file.

    Args:
        stem: of both files: `.md` and `.tex` are put after it.
        tables: by heading.
        title: above the tables of the Markdown file; none when empty.
    """
    markdown = [f"# {title}"] if title else []
    markdown += [f"## {heading}\n\n{table_markdown(table)}\n\n{table.caption}".rstrip()
                 for heading, table in tables.items()]  # fmt: skip
    latex = [table_latex(table, f"tab:{slug(heading)}") for heading, table in tables.items()]
    stem.with_suffix(".md").write_text("\n\n".join(markdown) + "\n", "utf-8")
    stem.with_suffix(".tex").write_text("\n\n".join(latex) + "\n", "utf-8")


def table_markdown(table: Table) -> str:
    """The table in Markdown; the row to bring out is bold."""
    lines = [f"| {' | '.join(map(_bare, table.columns))} |"]
    lines.append("|---|" + "---:|" * (len(table.columns) - 1))
    for i, row in enumerate(table.rows):
        bold = "**{}**" if i == table.highlight else "{}"
        cells = [bold.format(_bare(_told(cell, table.unit))) for cell in row]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_latex(table: Table, label: str = "") -> str:
    """The table in LaTeX, for the package booktabs; the row to bring out is bold.

    Args:
        table: the table.
        label: of the floating table that it is put into with its caption; none when empty.
    """
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}", r"\toprule"]
    lines += [rf"{' & '.join(map(_escaped, table.columns))} \\", r"\midrule"]
    for i, row in enumerate(table.rows):
        bold = r"\textbf{%s}" if i == table.highlight else "%s"
        cells = [bold % _escaped(_told(cell, table.unit)) for cell in row]
        lines.append(rf"{' & '.join(cells)} \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    if label:
        lines = [r"\begin{table}", r"\centering", *lines,
                 rf"\caption{{{_escaped(table.caption)}}}", rf"\label{{{label}}}",
                 r"\end{table}"]  # fmt: skip
    return "\n".join(lines)


def difference_words(found: Interval | None) -> str:
    """A difference of fractions in per cent, with a star where it is clear of zero."""
    if found is None:
        return ""
    mean, low, high = (100 * value for value in (found.mean, found.low, found.high))
    clear = " *" if low > 0 or high < 0 else ""
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]{clear}"


def interval_words(found: Interval) -> str:
    """An interval of fractions in per cent."""
    return f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def slug(heading: str) -> str:
    """A heading as a part of a file's name, or of a label."""
    return "".join(c if c.isalnum() else "-" for c in heading)


def _told(cell: Any, unit: str) -> str:
    scale = 100 if unit == "%" else 1
    if cell is None:
        return "\u2013"
    if isinstance(cell, Interval):
        return f"{scale * cell.mean:.1f} [{scale * cell.low:.1f}, {scale * cell.high:.1f}]"
    return f"{scale * cell:.1f}" if isinstance(cell, float) else str(cell)


def _bare(text: str) -> str:
    return text.replace("|", "\\|")


ESCAPES = {"\\": r"\textbackslash{}", "\u2013": "--", "\u2212": "$-$", "~": r"\textasciitilde{}",
           "^": r"\textasciicircum{}"} | {c: rf"\{c}" for c in "&%$#_{}"}  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(character, character) for character in text)


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
    head = " & ".join(["benchmark", "language", *map(_escaped_cell, table.models)])
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


def _cell(cell: ScoreCell | None, metric: str, bold: str, *, opening: str = "[") -> str:
    if cell is None:
        return ""
    # Right or wrong is shown in percent; chrF is from 0 to 100 already.
    scale = 1 if "chrf" in metric else 100
    mean, low, high = (scale * v for v in (cell.score.mean, cell.score.low, cell.score.high))
    text = bold.format(f"{mean:.1f}") if cell.best else f"{mean:.1f}"
    return f"{text}{cell.mark} {opening}{low:.1f}, {high:.1f}]"


def _escaped_cell(text: str) -> str:
    return text.replace("_", r"\_").replace("&", r"\&").replace("%", r"\%")
