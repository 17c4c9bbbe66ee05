"""Compares models side by side: scores with intervals, and significant differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from layerswap.errors import EvaluationError
from layerswap.evaluation.results import Score, read_any_scores
from layerswap.evaluation.statistics import Comparison, Interval, compare, holm, mean_interval

LEVEL = 0.05
"""Corrected p-values below this are marked."""


@dataclass(frozen=True)
class ScoreCell:
    """One model on one benchmark in one language.

    Attributes:
        score: mean over the documents with its bootstrap interval.
        against: compared with the first model; None for the first itself.
        p: of that, corrected by Holm over the whole table; None for the first.
        best: True if no other model has a higher mean.
    """

    score: Interval
    against: Comparison | None
    p: float | None
    best: bool

    @property
    def mark(self) -> str:
        """`+` or `-` where it is significantly better or worse than the first."""
        if self.p is None or self.p >= LEVEL or self.against is None:
            return ""
        return "+" if self.against.difference.mean > 0 else "-"


@dataclass(frozen=True)
class SideBySide:
    """Models across, benchmarks and languages down.

    Attributes:
        models: names, the reference first.
        rows: benchmark, language and metric.
        cells: by row, one per model; None where a model was not asked.
    """

    models: tuple[str, ...]
    rows: tuple[tuple[str, str, str], ...]
    cells: tuple[tuple[ScoreCell | None, ...], ...]


def compare_runs(runs: Sequence[Path], *, models: Sequence[str] | None = None) -> SideBySide:
    """Compare the models of one or several runs on the documents that all were asked.

    Args:
        runs: folders that `layerswap eval`, `sweep` or `study` wrote; of a sweep, the documents
            of the test split.
        models: which, the reference first; all in their order when None. A name that two runs
            have is prefixed with the run's folder.

    Raises:
        EvaluationError: a folder is no run, no such model, or fewer than two models.
    """
    scores = _scores(runs)
    names = list(models or scores)
    unknown = next((name for name in names if name not in scores), None)
    if unknown is not None:
        raise EvaluationError(f"no model {unknown!r}; there are {', '.join(scores)}")
    if len(names) < 2:
        raise EvaluationError("a comparison needs two models; there is " + ", ".join(names))
    rows = list(dict.fromkeys(row for name in names for row in scores[name]))
    raw = [[_compared(scores, names, row, column) for column in range(len(names))] for row in rows]
    given = [found[1].p_bootstrap for line in raw for found in line if found and found[1]]
    corrected = iter(holm(given))
    cells = []
    for line in raw:
        top = max(found[0].mean for found in line if found)
        cells.append(
            tuple(
                None
                if found is None
                else ScoreCell(
                    found[0],
                    found[1],
                    next(corrected) if found[1] else None,
                    found[0].mean == top,
                )
                for found in line
            )
        )
    return SideBySide(tuple(names), tuple(rows), tuple(cells))


_Row = tuple[str, str, str]
_Documents = dict[tuple[str, int], float]


def _scores(runs: Sequence[Path]) -> dict[str, dict[_Row, _Documents]]:
    read = {run: [score for score in read_any_scores(run) if score.main] for run in runs}
    seen = [model for rows in read.values() for model in {score.model for score in rows}]
    found: dict[str, dict[_Row, _Documents]] = {}
    for run, rows in read.items():
        for score in rows:
            name = score.model
            if seen.count(name) > 1:
                name = f"{run.resolve().name}/{name}"
            documents = found.setdefault(name, {}).setdefault(_row(score), {})
            documents[score.task, score.document] = score.score
    return found


def _row(score: Score) -> _Row:
    # Both directions of a translation are one benchmark each.
    benchmark = score.task.rpartition("_")[0] if score.benchmark == "flores" else score.benchmark
    return benchmark, score.language, score.metric


def _compared(
    scores: dict[str, dict[_Row, _Documents]], names: Sequence[str], row: _Row, column: int
) -> tuple[Interval, Comparison | None] | None:
    mine = scores[names[column]].get(row)
    if mine is None:
        return None
    reference = scores[names[0]].get(row)
    asked = [scores[name][row] for name in names if row in scores[name]]
    common = sorted(set.intersection(*(set(documents) for documents in asked)))
    if not common:
        raise EvaluationError(f"{' '.join(row)}: no document that all models were asked")
    values = np.array([mine[document] for document in common])
    interval = mean_interval(values)
    if column == 0 or reference is None:
        return interval, None
    return interval, compare(values, np.array([reference[document] for document in common]))
