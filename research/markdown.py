"""Intervals and tables as the pages of the docs write them."""

from __future__ import annotations

from collections.abc import Sequence

from layerswap.evaluation.statistics import Interval


def per_cent(found: Interval) -> str:
    return f"{100 * found.mean:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def points(found: Interval) -> str:
    star = r" \*" if found.low > 0 or found.high < 0 else ""
    return f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]{star}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, words: int = 1) -> str:
    """A Markdown table whose first `words` columns are text."""
    first, *rest = (f"| {' | '.join(row)} |" for row in [head, *rows])
    rule = ["---"] * words + ["--:"] * (len(head) - words)
    return "\n".join([first, f"|{'|'.join(rule)}|", *rest])
