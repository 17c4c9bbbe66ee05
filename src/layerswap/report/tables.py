"""Tables of typed cells and the format of numbers, for terminal, Markdown, LaTeX, HTML and CSV.

All text passes through the escape of its format, so a name cannot start markup, a link or a row.
"""

from __future__ import annotations

import csv
import io
import math
import re
import shutil
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.ground.errors import visible

if TYPE_CHECKING:
    from rich.table import Table as Grid

    from layerswap.evaluation.statistics import Interval


MINUS, DASH = "\N{MINUS SIGN}", "\N{EN DASH}"
NAME_WIDTH, NARROW = 20, 80
"""Longest row name that is never cut, and the narrowest terminal for it, in columns."""
PIPE = 160
"""Width of a table where standard output is no terminal and COLUMNS is not set."""


def score(value: float, unit: str = "%") -> str:
    """A number in words, with a true minus sign.

    A fraction becomes a percentage with one decimal. A number in another unit has three decimals
    below 10 and one above.

    Example: `score(0.4567)` is `"45.7"`; `score(1.2345, "nats")` is `"1.234"`.
    """
    if not math.isfinite(value):
        raise ValueError(f"a report cannot show {value}")
    scaled = 100 * value if unit == "%" else value
    shown = f"{scaled:.{3 if unit != '%' and abs(scaled) < 10 else 1}f}"
    return (shown.lstrip("-") if float(shown) == 0 else shown).replace("-", MINUS)


def unit_of(metric: str) -> str:
    """The unit of a metric in tables: % of a share, none of a score of another kind."""
    return "" if re.search(r"chrf|bleu|perplexity|^ter$|^bits_per", metric) else "%"


STAR = "*: the interval of the difference excludes zero."
"""The legend of `Difference`."""


class Words(NamedTuple):
    """A cell of numbers in words: a number, an interval in brackets, and stars."""

    number: str
    interval: str = ""
    stars: str = ""

    @property
    def lines(self) -> list[str]:
        """The number, and the interval with its stars if there is an interval."""
        return [self.number, *([self.interval + self.stars] if self.interval else [])]

    def __str__(self) -> str:
        return " ".join(self.lines)


@dataclass(frozen=True)
class Difference:
    """A paired difference, such as `+3.1 [1.2 to 5.0] *`; an empty cell without an interval.

    A star means that the interval excludes zero, a second one that the corrected p-value agrees.
    """

    interval: Interval | None
    unit: str = "%"
    corrected: bool = False

    @property
    def words(self) -> Words:
        """The difference with its sign, in its own unit."""
        apart = self.interval
        if apart is None:
            return Words("")
        mean, low, high = (score(v, self.unit) for v in (apart.mean, apart.low, apart.high))
        sign = "" if mean.startswith(MINUS) else "+"
        stars = (" **" if self.corrected else " *") if apart.sign else ""
        return Words(f"{sign}{mean}", f"[{low} to {high}]", stars)


@dataclass(frozen=True)
class Spread:
    """A mean with the lowest and the highest of several, such as `61.2 (58.1 to 64.3)`."""

    mean: float
    low: float
    high: float
    unit: str = "%"

    @property
    def words(self) -> Words:
        """The mean, and the extremes if they differ."""
        mean, low, high = (score(value, self.unit) for value in (self.mean, self.low, self.high))
        return Words(mean, f"({low} to {high})") if low != high else Words(mean)


@dataclass(frozen=True)
class Number:
    """A number with a format of its own, such as `.4f`."""

    value: float
    format: str

    @property
    def words(self) -> Words:
        """The number."""
        return Words(format(self.value, self.format))


if TYPE_CHECKING:
    Cell = str | int | float | Words | Interval | Difference | Spread | Number | None


def words_of(cell: Cell, unit: str = "%") -> Words | str:
    """A cell in words, before any escape; a text is itself."""
    if isinstance(cell, str | Words):
        return cell
    if isinstance(cell, Difference | Spread | Number):
        return cell.words
    if cell is None or isinstance(cell, int):
        return Words(DASH if cell is None else f"{cell:,}")
    return Words(score(cell, unit)) if isinstance(cell, float) else _with_interval(cell, unit)


def _with_interval(cell: Interval, unit: str) -> Words:
    """A mean with its interval: `61.2 [58.1, 64.3]`, or `-0.2 [-3.0 to 2.5]` below zero."""
    mean, low, high = (score(value, unit) for value in (cell.mean, cell.low, cell.high))
    between = " to " if MINUS in low + high else ", "
    return Words(mean, f"[{low}{between}{high}]")


def best_cells(rows: Sequence[Sequence[Any]], leave: Collection[int] = ()) -> set[tuple[int, int]]:
    """The cells with the highest mean of each column of intervals; rows of `leave` do not count."""
    found: set[tuple[int, int]] = set()
    for k in range(len(rows[0]) if rows else 0):
        means = {i: row[k].mean for i, row in enumerate(rows)
                 if i not in leave and hasattr(row[k], "mean")}  # fmt: skip
        if len(means) > 1:
            found |= {(i, k) for i, mean in means.items() if mean == max(means.values())}
    return found


@dataclass(frozen=True)
class Table:
    """Rows of results.

    Attributes:
        columns: the headings; the first column names the rows.
        rows: as many cells as columns: texts, or values of this module's types. An interval shows
            its mean and its range, a float a score in `unit`, an int a count, None a dash.
        caption: one sentence.
        highlight: index of the row to emphasise.
        unit: of intervals and floats; `%` shows fractions of 1 as percentages.
        bold: cells whose first number is emphasised, as (row, column).
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    highlight: int | None = None
    unit: str = "%"
    bold: Collection[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns, but a row has {len(row)} cells")
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise ValueError(f"row {self.highlight} of {len(self.rows)} cannot be highlighted")

    def numeric(self, column: int) -> bool:
        """True for a column of numbers, which is set flush right; never the first."""
        return column > 0 and all(
            not isinstance(row[column], str) or row[column] == "" for row in self.rows
        )

    def text(self, *, styled: bool = False) -> str:
        """The table for a terminal, as wide as the terminal at most, or 160 columns in a pipe.

        Cells wrap where the width is short. A highlighted row begins with `>`.

        Args:
            styled: print the cells of `bold` and the highlighted row in bold, by control codes.
        """
        from rich.console import Console

        width = shutil.get_terminal_size((PIPE, 24)).columns
        console = Console(file=io.StringIO(), width=width, force_terminal=styled,
                          color_system="standard" if styled else None)  # fmt: skip
        longest = max([0, *(len(str(row[0])) for row in self.rows)])
        name = min(longest, NAME_WIDTH) if width >= NARROW else 0
        grid, unbound = self._grid(" ", name), console.options.update(max_width=10 * PIPE)
        if console.measure(grid, options=unbound).maximum > width:
            grid = self._grid("\n", name)
        with console.capture() as printed:
            console.print(grid)
        lines = [line.rstrip() for line in printed.get().rstrip("\n").split("\n")]
        caption = textwrap.wrap(_plain(self.caption), width - 2)
        return "\n".join([*lines, *[""] * bool(caption), *(f"  {line}" for line in caption)])

    def _grid(self, between: str, name: int) -> Grid:
        """The table for rich, with `between` a number and its interval.

        With a width for `name`, neither names as long nor numbers are cut.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as Grid
        from rich.text import Text

        grid = Grid(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="")
        grid.add_column()
        for k, column in enumerate(self.columns):
            justify: Any = "right" if self.numeric(k) else "left"
            grid.add_column(
                Text(_plain(column)), justify=justify, overflow="fold",
                min_width=name if k == 0 else None, no_wrap=bool(name) and self.numeric(k),
            )  # fmt: skip
        for i, row in enumerate(self.rows):
            cells = [Text(">" if i == self.highlight else "")]
            for k, cell in enumerate(row):
                words = words_of(cell, self.unit)
                first, *rest = map(_plain, [words] if isinstance(words, str) else words.lines)
                text = Text(style="bold" if i == self.highlight else "")
                text.append(first, "bold" if (i, k) in self.bold else "")
                cells.append(text.append(between.join(["", *rest])))
            grid.add_row(*cells)
        return grid

    def __str__(self) -> str:
        return self.text()

    def styled(self) -> str:
        """The table for a terminal, with bold cells."""
        return self.text(styled=True)

    def markdown(self) -> str:
        """The table in Markdown."""
        right = [self.numeric(i) for i in range(len(self.columns))]
        lines = [*self._lines(_markdown, "**{}**", "| {} |", " | ")]
        lines.insert(1, "|" + "".join("---:|" if flush else "---|" for flush in right))
        return "\n".join(lines)

    def latex(self, label: str = "") -> str:
        """The table in LaTeX, for the package booktabs.

        With a label it floats and has the caption; else it is a tabular with a comment.
        """
        columns = "".join("r" if self.numeric(i) else "l" for i in range(len(self.columns)))
        head, *body = self._lines(_latex, r"\textbf{{{}}}", r"{} \\", " & ")
        lines = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *body,
                 r"\bottomrule", r"\end{tabular}"]  # fmt: skip
        if label:
            lines = [r"\begin{table}", r"\centering", *lines,
                     rf"\caption{{{_latex(self.caption)}}}", rf"\label{{{label}}}",
                     r"\end{table}"]  # fmt: skip
        elif self.caption:
            lines.append(f"% {visible(self.caption)}")
        return "\n".join(lines)

    def csv(self) -> str:
        """The table as CSV with unrounded numbers; an interval fills three columns."""
        columns: list[list[Any]] = []
        for k, name in enumerate(self.columns):
            cells = [getattr(row[k], "interval", getattr(row[k], "value", row[k]))
                     for row in self.rows]  # fmt: skip
            columns.append([name, *(getattr(cell, "mean", cell) for cell in cells)])
            for end in ("low", "high") if any(hasattr(cell, "mean") for cell in cells) else ():
                columns.append([f"{name}, {end}", *(getattr(cell, end, "") for cell in cells)])
        text = io.StringIO()
        rows = zip(*columns, strict=True)
        safe = ([f"'{c}" if is_formula(c) else c for c in row] for row in rows)
        csv.writer(text).writerows(safe)
        return text.getvalue()

    def _lines(
        self, escape: Callable[[str | Words], str], bold: str, line: str, between: str
    ) -> Sequence[str]:
        """The heading and every row in a format."""
        lines = [line.format(between.join(map(escape, self.columns)))]
        for i, cells in enumerate(self.rows):
            shown = []
            for k, cell in enumerate(cells):
                words = words_of(cell, self.unit)
                text, mark = escape(words), ""
                if (i, k) in self.bold and isinstance(words, Words):
                    text = escape(Words(words.number))
                    mark = escape(words).removeprefix(text)
                strong = text and (i == self.highlight or (i, k) in self.bold)
                shown.append(bold.format(text) + mark if strong else text)
            lines.append(line.format(between.join(shown)))
        return lines


def _plain(text: str) -> str:
    """Text for a terminal, with minus signs that other programs read."""
    return visible(text).replace(MINUS, "-")


def _markdown(text: str | Words) -> str:
    if isinstance(text, Words):
        return str(text).replace(MINUS, "-")
    return re.sub(r"([\\`*_\[\]<>|~&$])", r"\\\1", _plain(text))


_LATEX = {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "`": r"\textasciigrave{}",
    '"': r"\textquotedbl{}", "[": "{[}", "]": "{]}", MINUS: "$-$", DASH: "--",
} | {c: rf"\{c}" for c in "&%$#_{}"}  # fmt: skip


def _latex(text: str | Words) -> str:
    brackets = "[]" if isinstance(text, Words) else ""
    return "".join(c if c in brackets else _LATEX.get(c, c) for c in visible(str(text)))


def write_tables(stem: Path, tables: Mapping[str, Table], *, title: str = "") -> None:
    """Write tables, by heading, into one Markdown and one LaTeX file."""
    markdown = [f"# {_markdown(title)}"] if title else []
    markdown += [f"## {_markdown(heading)}\n\n{table.markdown()}\n\n{_markdown(table.caption)}"
                 .rstrip() for heading, table in tables.items()]  # fmt: skip
    latex = [table.latex(f"tab:{slug(heading)}") for heading, table in tables.items()]
    stem.with_suffix(".md").write_bytes(("\n\n".join(markdown) + "\n").encode())
    stem.with_suffix(".tex").write_bytes(("\n\n".join(latex) + "\n").encode())


def is_formula(cell: object) -> bool:
    """True for a text that a spreadsheet would run; a number may begin with a sign."""
    signs = r"[=@\t\r\n\uff1d\uff20\uff0b\uff0d]"  # Japanese spreadsheets take wide ones too
    number = r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z"
    return isinstance(cell, str) and re.match(rf"{signs}|[-+](?!{number})", cell) is not None


def slug(heading: str) -> str:
    """A heading as a part of a file name or a label."""
    return "".join(c if c.isalnum() else "-" for c in heading)
