"""Writes HTML reports: one self-contained file for screen, phone and paper."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerswap.ground.commit import atomic_file
from layerswap.ground.errors import visible
from layerswap.report.drawing import stylesheet, variables
from layerswap.report.tables import Table, Words, slug, words_of

if TYPE_CHECKING:
    from jinja2 import Environment

    from layerswap.report.drawing import Drawing

LONGEST = 1200
"""Most characters of a question or an answer on a page."""


@dataclass(frozen=True)
class ShownAnswer:
    """One document with the answers of several models.

    Attributes:
        task: the task of the document.
        document: its position in the task.
        question: the prompt, without exemplars.
        target: the right answer.
        answers: the answer of each model.
        right: for each model, True if its answer is right.
    """

    task: str
    document: int
    question: str
    target: str
    answers: tuple[str, ...]
    right: tuple[bool, ...]


@dataclass(frozen=True)
class Answers:
    """Answers of models to documents, grouped by which of the first two models is right.

    Attributes:
        models: names of two or more, in the order of every document's answers.
        documents: the documents.
    """

    models: Sequence[str]
    documents: Sequence[ShownAnswer]

    @property
    def groups(self) -> dict[str, list[ShownAnswer]]:
        """The documents by heading, without empty groups."""
        first, second, *_ = self.models
        headings = {
            (True, False): f"{first} is right, {second} is wrong",
            (False, True): f"{second} is right, {first} is wrong",
            (True, True): f"{first} and {second} are right",
            (False, False): f"{first} and {second} are wrong",
        }
        groups = {
            heading: [document for document in self.documents if document.right[:2] == right]
            for right, heading in headings.items()
        }
        return {heading: documents for heading, documents in groups.items() if documents}


@dataclass(frozen=True)
class Section:
    """A part of the report: heading, text, command, figure, table, answers and note.

    Attributes:
        heading: a few words.
        text: paragraphs, divided by empty lines.
        command: a line for a shell, to copy.
        figure: a drawing of this package.
        table: results, which readers can download as CSV.
        note: a caution, set apart. Paragraphs like `text`.
        answers: answers one by one.
    """

    heading: str
    text: str = ""
    command: str = ""
    figure: Drawing | None = None
    table: Table | None = None
    note: str | None = None
    answers: Answers | None = None


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


def render(report: Report) -> str:
    """The report as one HTML file without fonts, links or requests; equal reports, equal bytes."""
    return _environment().get_template("report.html.j2").render(report=report)


def write_report(path: str | os.PathLike[str], report: Report) -> Path:
    """Write the report to `path`: completely, or not at all.

    Raises:
        LayerswapError: the file cannot be written.
    """
    target = Path(path).absolute()
    with atomic_file(target, is_ours=lambda file: True, overwrite=True) as partial:
        partial.write_bytes(render(report).encode())
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
        paragraphs=_paragraphs, cell=_cell, visible=visible, slug=slug,
        shortened=_shortened, lines=_lines,
    )  # fmt: skip
    environment.globals.update(variables=variables, stylesheet=stylesheet)
    return environment


def _paragraphs(words: str) -> list[str]:
    return [p for p in (visible(" ".join(part.split())) for part in words.split("\n\n")) if p]


def _shortened(text: str) -> str:
    """Cut a long text to its last `LONGEST` characters."""
    return _lines(text if len(text) <= LONGEST else f"\u2026{text[-LONGEST:]}")


def _lines(text: str) -> str:
    """A text with its line breaks and without other control characters."""
    return "\n".join(map(visible, text.split("\n")))


def _cell(cell: Any, unit: str) -> Words:
    words = words_of(cell, unit)
    return Words(visible(words)) if isinstance(words, str) else words
