"""Intervals and tables as the pages of the docs write them."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from layerswap.evaluation.statistics import Interval


def per_cent(found: Interval) -> str:
    return f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def points(found: Interval) -> str:
    star = r" \*" if found.low > 0 or found.high < 0 else ""
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]{star}"


@dataclass(frozen=True)
class Table:
    """A table whose first `words` columns are text; as text it is Markdown."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1

    def __str__(self) -> str:
        first, *rest = (f"| {' | '.join(row)} |" for row in [self.head, *self.rows])
        rule = ["---"] * self.words + ["--:"] * (len(self.head) - self.words)
        return "\n".join([first, f"|{'|'.join(rule)}|", *rest])

    def part(self, columns: Sequence[int], rows: str | Collection[str] = "") -> Table:
        """Some columns of the rows whose first cell begins with a text, or is one of several."""
        kept = [
            row for row in self.rows
            if (row[0].startswith(rows) if isinstance(rows, str) else row[0] in rows)
        ]  # fmt: skip
        words = sum(column < self.words for column in columns)
        of = [[row[column] for column in columns] for row in (self.head, *kept)]
        return Table(of[0], of[1:], words)

    def csv(self) -> str:
        """The table as CSV."""
        text = io.StringIO()
        plain = ([cell.replace("\\*", "*") for cell in row] for row in (self.head, *self.rows))
        csv.writer(text, lineterminator="\n").writerows(plain)
        return text.getvalue()


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> Table:
    """A table whose first `words` columns are text."""
    return Table(head, rows, words)
