"""Tables of a report as Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.evaluate.statistics import Interval
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
