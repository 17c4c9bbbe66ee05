"""Panels of a report: a grid of compositions with a slider, and a browser of single answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerswap.compose.presets import Zones
from layerswap.evaluation.statistics import Interval
from layerswap.report.drawing import even_scale
from layerswap.report.page import Panel

LONGEST = 1200
"""Most characters of a question or an answer on a page."""


def grid_panel(
    scores: Mapping[Zones, float],
    *,
    title: str,
    intervals: Mapping[Zones, Interval] | None = None,
    marks: Mapping[Zones, str] | None = None,
) -> Panel:
    """Scores by bottom and top zone, a slider over the transitions.

    Args:
        scores: of each composition, as fractions of 1.
        title: what is scored.
        intervals: to be told with a cell.
        marks: what to say of a cell, such as `chosen`.

    Raises:
        ValueError: no scores.
    """
    if not scores:
        raise ValueError("a grid needs at least one score")
    intervals, marks = intervals or {}, marks or {}
    order = sorted(scores, key=lambda z: (z.bottom_transition, z.top_transition))
    cells = [
        {
            "bottom": zones.bottom, "top": zones.top, "transitions": _transitions(zones),
            "score": scores[zones], "mark": marks.get(zones, ""),
            "words": _words(scores[zones], intervals.get(zones)),
        }
        for zones in order
    ]  # fmt: skip
    return Panel("grid", {
        "title": title,
        "cells": cells,
        "transitions": list(dict.fromkeys(map(_transitions, order))),
        "colours": {"light": even_scale(), "dark": even_scale(dark=True)},
    })  # fmt: skip


@dataclass(frozen=True)
class ShownAnswer:
    """One document, and what each model answered.

    Attributes:
        task: of the document.
        document: its position there.
        question: the prompt, without exemplars.
        target: the right answer.
        answers: of each model, as it wrote or chose them.
        right: of each model, whether its answer counts.
    """

    task: str
    document: int
    question: str
    target: str
    answers: tuple[str, ...]
    right: tuple[bool, ...]


def examples_panel(models: Sequence[str], examples: Sequence[ShownAnswer]) -> Panel:
    """A browser of documents: where one model is right and another is not, with their answers.

    Args:
        models: names, in the order of every example's answers; the first two are shown first.
        examples: the documents.
    """
    documents = [
        {
            "task": one.task, "document": one.document, "question": _short(one.question),
            "target": _short(one.target), "answers": [_short(text) for text in one.answers],
            "right": list(one.right),
        }
        for one in examples
    ]  # fmt: skip
    return Panel("examples", {"models": list(models), "documents": documents})


def _transitions(zones: Zones) -> str:
    return f"{zones.bottom_transition} and {zones.top_transition}"


def _words(score: float, interval: Interval | None) -> str:
    said = f"{100 * score:.1f}%"
    if interval is not None:
        said += f" [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"
    return said


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"\u2026{text[-LONGEST:]}"
