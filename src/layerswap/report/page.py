"""Writes HTML reports: one file each, for screen, phone and paper, that fetches nothing."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from layerswap.errors import LayerswapError, visible
from layerswap.report.tables import Table, score, slug

if TYPE_CHECKING:
    from jinja2 import Environment

    from layerswap.evaluation.statistics import Interval
    from layerswap.report.drawing import Drawing


@dataclass(frozen=True)
class Panel:
    """An interactive part of a page; it needs JavaScript.

    Attributes:
        kind: `maps` (see `delta_map.map_panel`), `grid` or `examples` (see `panels`).
        data: plain data that it shows.
    """

    kind: Literal["maps", "grid", "examples"]
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A part of the report, shown in this order: heading, text, figure, table, panel, note.

    Attributes:
        heading: a few words.
        text: paragraphs, divided by empty lines.
        figure: a drawing of this package.
        table: results; readers can sort it.
        panel: an interactive part.
        note: a caution, set apart. Paragraphs like `text`.
    """

    heading: str
    text: str = ""
    figure: Drawing | None = None
    table: Table | None = None
    note: str | None = None
    panel: Panel | None = None


@dataclass(frozen=True)
class Report:
    """A whole report.

    Attributes:
        title: of the page.
        lead: the result in a sentence or two; paragraphs divided by empty lines.
        sections: the parts, in order.
        figure: the drawing beside the lead, such as the stack of the best composition.
        colophon: small print at the end, such as versions, seeds and the date.
    """

    title: str
    lead: str
    sections: Sequence[Section]
    figure: Drawing | None = None
    colophon: str = ""

    @property
    def panels(self) -> list[str]:
        """The kinds of panel on the page, each once."""
        kinds = (section.panel.kind for section in self.sections if section.panel)
        return list(dict.fromkeys(kinds))


def render(report: Report) -> str:
    """The report as one HTML file: no font, no link, nothing fetched; equal reports, equal bytes.

    All text is escaped; drawings escape their own.
    """
    return _environment().get_template("report.html.j2").render(report=report)


def render_map_page(panel: Panel, experts: Sequence[str], base: str, axis: str) -> str:
    """A page with the interactive maps of experts alone.

    Args:
        panel: the maps; see `delta_map.map_panel`.
        experts: their names.
        base: what they were fine-tuned from.
        axis: `input` or `output`; what a row is.
    """
    return (
        _environment()
        .get_template("delta.html.j2")
        .render(panel=panel, experts=list(map(visible, experts)), base=base, axis=axis)
    )


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


@cache
def _environment() -> Environment:
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
        paragraphs=_paragraphs, kind=_kind, score=score, amount=_amount, island=_island,
        visible=visible, slug=slug,
    )  # fmt: skip
    return environment


def _island(panel: Panel) -> str:
    """The data of a panel for a script element; only "</" could end that."""
    text = json.dumps(panel.data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("</", "<\\/").replace("<!--", "<\\u0021--")


def _amount(cell: float | Interval) -> float:
    """The number that a cell is sorted by."""
    return cell if isinstance(cell, float) else cell.mean


def _paragraphs(words: str) -> list[str]:
    return [p for p in (visible(" ".join(part.split())) for part in words.split("\n\n")) if p]


def _kind(cell: Any) -> str:
    """Which way the template shows a cell."""
    if cell is None:
        return "missing"
    if isinstance(cell, str | int):
        return "text"
    return "score" if isinstance(cell, float) else "interval"
