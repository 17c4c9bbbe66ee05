"""The HTML report: one file that needs nothing else, and shows on screen, phone and paper."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap.errors import LayerswapError
from layerswap.report.svg import score

if TYPE_CHECKING:
    from jinja2 import Template

    from layerswap.evaluation.statistics import Interval

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
class Panel:
    """Something to work with on the page; it needs JavaScript, and is quiet without it.

    Attributes:
        kind: `maps` (see `delta_page.map_panel`), `grid` or `examples` (see `panels`).
        data: what it shows; plain data.
    """

    kind: Literal["maps", "grid", "examples"]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the report, shown in this order: heading, text, figure, table, panel, note.

    Attributes:
        heading: a few words.
        text: paragraphs, divided by empty lines.
        figure_svg: a figure of this package, placed on the page as it is.
        table: results; it can be sorted on the page.
        panel: something to work with.
        note: what the reader should be careful about; set apart. Paragraphs like `text`.
    """

    heading: str
    text: str = ""
    figure_svg: str | None = None
    table: Table | None = None
    note: str | None = None
    panel: Panel | None = None

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

    @property
    def panels(self) -> list[str]:
        """The kinds of panel on the page, each once."""
        kinds = (section.panel.kind for section in self.sections if section.panel)
        return list(dict.fromkeys(kinds))


def render(report: Report) -> str:
    """The report as one HTML file: no font, no link, nothing fetched; equal reports, equal bytes.

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
    environment.filters.update(
        paragraphs=_paragraphs, kind=_kind, score=score, numeric=_numeric, amount=_amount,
        island=island,
    )  # fmt: skip
    return environment.get_template("report.html.j2")


def island(panel: Panel) -> str:
    """The data of a panel for a script element; only "</" could end that."""
    text = json.dumps(panel.data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _amount(cell: float | Interval) -> float:
    """What a cell is sorted by."""
    return cell if isinstance(cell, float) else cell.mean


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
