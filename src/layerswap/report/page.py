"""The HTML report: one file that needs nothing else, and shows on screen, phone and paper."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.errors import LayerswapError
from layerswap.report.svg import score

if TYPE_CHECKING:
    from jinja2 import Template

    from layerswap.evaluate.statistics import Interval

    Cell = str | int | float | Interval | None


@dataclass(frozen=True)
class Table:
    """Rows of results.

    Attributes:
        columns: the headings; the first column names the rows.
        rows: as many cells as columns. An interval shows its mean over its range, a float is a
            score in `unit`, an int a count, None a dash, and text itself.
        caption: one sentence above the table.
        highlight: index of the row to bring out, if any.
        unit: of intervals and floats; `%` shows fractions of 1 as per cent.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    highlight: int | None = None
    unit: str = "%"

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"{len(self.columns)} columns, but a row has {len(row)} cells")
        if self.highlight is not None and not 0 <= self.highlight < len(self.rows):
            raise ValueError(f"row {self.highlight} of {len(self.rows)} cannot be highlighted")


@dataclass(frozen=True)
class Section:
    """A part of the report, shown in this order: heading, text, figure, table, note.

    Attributes:
        heading: a few words.
        text: paragraphs, divided by empty lines.
        figure_svg: a figure of this package, placed on the page as it is.
        table: results.
        note: what the reader should be careful about; set apart. Paragraphs like `text`.
    """

    heading: str
    text: str = ""
    figure_svg: str | None = None
    table: Table | None = None
    note: str | None = None

    def __post_init__(self) -> None:
        _check_figure(self.figure_svg)


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        lead: what was found, in a sentence or two; paragraphs divided by empty lines.
        sections: the parts, in order.
        figure_svg: the figure beside the lead, such as the stack of the best composition.
        colophon: small print at the end, such as versions, seeds and the date.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    figure_svg: str | None = None
    colophon: str = ""

    def __post_init__(self) -> None:
        _check_figure(self.figure_svg)


def render(report: Report) -> str:
    """The report as one HTML file: no script, no font and no link; equal reports, equal bytes.

    All text is escaped. Only `figure_svg` is placed as it is, which the figures of this package
    have escaped themselves.
    """
    return _template().render(report=report)


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the report to `path`: completely, or not at all.

    Raises:
        LayerswapError: the file cannot be written.
    """
    target = Path(path)
    # Named after its target, and never one that another process is writing.
    partial = target.with_name(f".{target.name}.partial-{uuid.uuid4().hex[:8]}")
    content = render(report).encode()
    try:
        try:
            with partial.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        detail = error.strerror or str(error)
        raise LayerswapError(f"{target}: cannot be written ({detail})") from error
    return target


def _check_figure(figure: str | None) -> None:
    if figure is not None and not figure.startswith("<svg "):
        raise ValueError("a figure is an SVG document, as the functions of this package draw it")


@cache
def _template() -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("layerswap.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(paragraphs=_paragraphs, kind=_kind, score=score, numeric=_numeric)
    return environment.get_template("report.html.j2")


def _paragraphs(words: str) -> list[str]:
    return [p for p in (" ".join(part.split()) for part in words.split("\n\n")) if p]


def _kind(cell: Any) -> str:
    """Which way the template shows a cell."""
    if cell is None:
        return "missing"
    if isinstance(cell, str | int):
        return "text"
    return "score" if isinstance(cell, float) else "interval"


def _numeric(table: Table, column: int) -> bool:
    """Whether a column holds numbers, which are set flush right."""
    return column > 0 and not any(isinstance(row[column], str) for row in table.rows)
