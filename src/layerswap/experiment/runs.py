"""Compares the models of several runs side by side, on the documents that all of them answered."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.statistics import (
    Balanced,
    Classified,
    Interval,
    PairedTest,
    classified_of,
    holm,
    mean_interval,
    mean_over_groups,
    paired_over_groups,
    paired_test,
)
from layerswap.evaluation.suites.suites import development_tasks, has_variants
from layerswap.experiment.answers import Answer, grouped, read_answers
from layerswap.ground.errors import EvaluationError
from layerswap.ground.types import PathLike, listed

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class ScoreCell:
    """One model on one benchmark in one language."""

    score: Interval  # mean over the common documents with its bootstrap interval
    against: PairedTest | None  # comparison with the first model; None for the first itself
    p: float | None  # of the comparison, corrected by Holm over the whole table
    best: bool  # true if no other model has a higher mean; false where documents are left out
    documents: int  # of the model, of which `score.n` are common to all models
    balanced: Balanced | None = None  # of a classification
    balanced_against: Balanced | None = None  # its paired differences to the first model

    @property
    def significant(self) -> bool:
        """True if the model differs from the first after the correction."""
        return self.p is not None and self.p < 0.05


@dataclass(frozen=True)
class LanguageMean:
    """The means of a benchmark over its languages."""

    benchmark: str
    metric: str
    scores: tuple[Interval | None, ...]  # by model; None if it lacks a language
    against: tuple[Interval | None, ...]  # paired differences to the first model


@dataclass(frozen=True)
class ComparedModels:
    """Models on the same documents."""

    models: tuple[str, ...]  # the reference first
    rows: tuple[tuple[str, str, str], ...]  # benchmark, language and metric
    cells: tuple[tuple[ScoreCell | None, ...], ...]  # by row and model; None without scores
    means: tuple[LanguageMean, ...]  # of benchmarks with several languages
    notes: tuple[str, ...]  # about documents that are left out

    def to_pandas(self) -> pd.DataFrame:
        """A row for each benchmark, language, metric and model.

        `difference` is paired, model minus the first, with its interval from `lower` to `upper`;
        `p` is corrected by Holm over the whole table.
        """
        import pandas as pd

        return pd.DataFrame(list(self._records()))

    def __repr__(self) -> str:
        return f"Comparison of {', '.join(self.models)} on {len(self.rows)} benchmarks"

    def _repr_html_(self) -> str:
        return str(self.to_pandas().to_html(index=False, float_format="{:.3f}".format))

    def _records(self) -> Iterator[dict[str, Any]]:
        for row, cells in zip(self.rows, self.cells, strict=True):
            for model, cell in zip(self.models, cells, strict=True):
                if cell is None:
                    continue
                gap = None if cell.against is None else cell.against.difference
                yield {
                    **dict(zip(("benchmark", "language", "metric"), row, strict=True)),
                    "model": model, "score": cell.score.mean, **cell.score.bounds,
                    **({} if gap is None else {"difference": gap.mean, "lower": gap.low,
                                               "upper": gap.high, "p": cell.p}),
                    **({} if cell.balanced is None else {
                        metric: interval.mean for metric, interval in vars(cell.balanced).items()
                    }),
                }  # fmt: skip


def compare(
    runs: PathLike | Sequence[PathLike], *, models: str | Sequence[str] = ()
) -> ComparedModels:
    """Compare the models of one or several runs on the documents that they share.

    This is `layerswap compare` from Python. A model that two runs evaluated is one model. Another
    name that two runs share is prefixed with the run's folder.

    Args:
        runs: folders that `eval`, `sweep` (the test split) or `study` wrote.
        models: the models to compare, the reference first; all when empty.

    Raises:
        EvaluationError: a folder holds no results, or there are fewer than two models.

    Example:
        compared = ls.compare(["results/base", "results/swap"], models=["base", "swap"])
        compared.to_pandas()
    """
    scores, flattered = _documents([Path(run) for run in listed(runs)])
    names = listed(models) or list(scores)
    unknown = next((name for name in names if name not in scores), None)
    if unknown is not None:
        raise EvaluationError(f"no model {unknown!r}; there are {', '.join(scores)}")
    if len(names) < 2:
        raise EvaluationError("a comparison needs two models; there is " + ", ".join(names))
    rows = list(dict.fromkeys(row for name in names for row in scores[name]))
    named = {name: scores[name] for name in names}
    notes = [note for row in rows for note in _differences(named, row)]
    table = {row: _compared([scores[name].get(row) for name in names], row) for row in rows}
    given = [cell.p for line in table.values() for cell in line if cell and cell.p is not None]
    corrected = iter(holm(given))
    cells = []
    for line in table.values():
        honest = {
            name: cell.score.mean for name, cell in zip(names, line, strict=True)
            if cell and name not in flattered
        }  # fmt: skip
        whole = all(cell is None or cell.documents == cell.score.n for cell in line)
        cells.append(tuple(
            cell and replace(
                cell, p=None if cell.p is None else next(corrected),
                best=whole and name in honest and honest[name] == max(honest.values()),
            )
            for name, cell in zip(names, line, strict=True)
        ))  # fmt: skip
    means = _means(named, rows)
    notes += _left_out(names, dict(zip(rows, cells, strict=True)))
    return ComparedModels(tuple(names), tuple(rows), tuple(cells), tuple(means), tuple(notes))


_Row = tuple[str, str, str]


_Documents = dict[tuple[str, int], Answer]
"""By hash and its repetition; without hashes by task and position."""


def _documents(runs: Sequence[Path]) -> tuple[dict[str, dict[_Row, _Documents]], set[str]]:
    """Read the scores of every document by model and row of the table, and flattered models.

    Flattered are the compositions of a study's grid, the best of which is the best of many.
    """
    read: dict[str, dict[tuple[str, Path], dict[_Row, _Documents]]] = {}
    flattered = set()
    answers = [(run, answer) for run in runs for answer in _tested(run)]
    hashes = {(run, answer.task, answer.document): answer.document_hash
              for run, answer in answers if not answer.is_baseline}  # fmt: skip
    for run, answer in answers:
        place = answer.task, answer.document
        # A baseline answers the documents of its run, perhaps in translation.
        known = hashes.get((run, *place)) if answer.is_baseline else None
        score = replace(answer, document_hash=known or answer.document_hash)
        # Without a record of the weights, a model is one only within its run.
        documents = read.setdefault(score.model, {}).setdefault((score.weights, run), {})
        documents.setdefault(_row(score), {})[place] = score
        if score.condition.zones is not None:
            flattered.add(score.model)
    tables = [rows for places in read.values() for rows in places.values()]
    by_position = {row for rows in tables for row, by in rows.items()
                   if not all(answer.document_hash for answer in by.values())}  # fmt: skip
    for rows in tables:
        rows |= {row: _by_hash(rows[row]) for row in rows.keys() - by_position}
    by_model: dict[str, dict[_Row, _Documents]] = {}
    folders = _names([*dict.fromkeys(runs)])
    for name, places in read.items():
        if len(places) == 1 or _is_one(places):
            merged = by_model.setdefault(name, {})
            for rows in places.values():
                for row, by_document in rows.items():
                    merged.setdefault(row, {}).update(by_document)
        else:
            by_model |= {f"{folders[run]}/{name}": rows for (_, run), rows in places.items()}
    return by_model, flattered


def _tested(run: Path) -> Iterator[Answer]:
    """Return a run's main answers, without the published development split for its choices."""
    answers = read_answers(run)
    chosen_on = development_tasks(answer.task for answer in answers)
    return (answer for answer in answers if answer.main and answer.task not in chosen_on)


def _names(runs: Sequence[Path]) -> dict[Path, str]:
    """Return the shortest ends of the runs' paths that differ from each other."""
    parts = {run: run.absolute().parts for run in runs}
    length = 1
    while len({path[-length:] for path in parts.values()}) < len({*parts.values()}):
        length += 1
    return {run: "/".join(path[-length:]) for run, path in parts.items()}


def _by_hash(documents: _Documents) -> _Documents:
    """Key documents by the hash of their text; equal texts are numbered by right answer."""
    ordered = sorted(documents.values(), key=lambda a: (a.target, a.task, a.document))
    equal = grouped(ordered, lambda answer: answer.document_hash)
    return {(text, n): answer for text, same in equal.items() for n, answer in enumerate(same)}


def _differences(scores: Mapping[str, Mapping[_Row, _Documents]], row: _Row) -> Iterator[str]:
    """Describe different prompts of models; refuse documents whose right answers differ."""
    where, common = " ".join(filter(None, row[:2])), _common(scores.values(), row)
    first, ways = "", dict[str, str]()
    for name, by in scores.items():
        if row not in by or any(answer.is_baseline for answer in by[row].values()):
            continue
        first = first or name
        pairs = [(by[row][key], scores[first][row][key]) for key in common]
        if other := sum("" != a.target.strip() != b.target.strip() != "" for a, b in pairs):
            raise EvaluationError(
                f"{where}: the right answers to {other:,} of {len(common):,} documents differ "
                f"between {first} and {name}; evaluate both on one version of the test"
            )
        if any(a.question != b.question and not a.document_hash == b.document_hash != ""
               for a, b in pairs):  # fmt: skip
            yield (
                f"{where}: the documents of {first} and {name} are paired by position, because an "
                "earlier version wrote the answers; check that both had the same test file"
            )
        how = {f"{a.prompts}, filter={a.filter!r}" for a in by[row].values() if a.prompts}
        ways |= {name: " and ".join(sorted(how))} if how else {}
    if len({*ways.values()}) > 1:
        listed_ways = "; ".join(f"{name} by {how}" for name, how in ways.items())
        yield f"{where}: the models were asked differently: {listed_ways}"


def _is_one(places: Mapping[tuple[str, Path], Mapping[_Row, _Documents]]) -> bool:
    """True if runs of one name had equal weights, and equal scores wherever both have a score."""
    weights = {weights for weights, _ in places}
    first: dict[tuple[_Row, tuple[str, int]], Answer] = {}
    same = all(
        (other := first.setdefault((row, document), answer)).score == answer.score
        and (other.prompts == answer.prompts or "" in (other.prompts, answer.prompts))
        for rows in places.values() for row, by in rows.items() for document, answer in by.items()
    )  # fmt: skip
    return same and len(weights) == 1 and "" not in weights


def _means(
    scores: Mapping[str, Mapping[_Row, _Documents]], rows: Sequence[_Row]
) -> Iterator[LanguageMean]:
    """Average every benchmark that has several languages over them, for models that have all."""
    for benchmark, metric in dict.fromkeys((row[0], row[2]) for row in rows):
        same = [row for row in rows if (row[0], row[2]) == (benchmark, metric)]
        if len(same) == 1:
            continue
        values = [
            [_values(by[row], _common(scores.values(), row)) for row in same]
            if all(row in by for row in same) else None
            for by in scores.values()
        ]  # fmt: skip
        first = values[0]
        yield LanguageMean(
            benchmark, metric,
            tuple(mean_over_groups(groups) if groups else None for groups in values),
            tuple(paired_over_groups(groups, first) if groups and first and number else None
                  for number, groups in enumerate(values)),
        )  # fmt: skip


def _left_out(
    names: Sequence[str], table: Mapping[_Row, Sequence[ScoreCell | None]]
) -> Iterator[str]:
    """Describe the documents that are left out because a model lacks them."""
    for (benchmark, language, _), cells in table.items():
        counts = {name: c.documents for name, c in zip(names, cells, strict=True) if c is not None}
        common = next(cell.score.n for cell in cells if cell is not None)
        if set(counts.values()) != {common}:
            has = ", ".join(f"{name} {count:,}" for name, count in counts.items())
            yield (
                f"{' '.join(filter(None, [benchmark, language]))}: compared on the {common:,} "
                f"documents that all models have; {has}"
            )


def _row(score: Answer) -> _Row:
    # Each direction of a translation is a benchmark.
    variants = has_variants(score.benchmark)
    benchmark = score.task.rpartition("_")[0] if variants else score.benchmark
    return benchmark, score.language, score.metric


def _compared(models: Sequence[_Documents | None], row: _Row) -> list[ScoreCell | None]:
    """Compare each model with the first, on the documents that all models of a row share.

    The p-values are not corrected yet.
    """
    common = _common([{row: documents} for documents in models if documents], row)
    if not common:
        raise EvaluationError(
            f"{' '.join(row)}: the models share no document; their test files or prompts differ"
        )
    first = None if models[0] is None else _values(models[0], common)
    reference = None if models[0] is None else _classified(models[0], common)
    cells: list[ScoreCell | None] = []
    for number, documents in enumerate(models):
        if documents is None:
            cells.append(None)
            continue
        values = _values(documents, common)
        against = paired_test(values, first) if number and first is not None else None
        p = None if against is None else against.p_bootstrap
        answers = _classified(documents, common)
        cells.append(ScoreCell(
            mean_interval(values), against, p, best=False, documents=len(documents),
            balanced=None if answers is None else answers.balanced,
            balanced_against=answers.minus(reference) if number and answers and reference else None,
        ))  # fmt: skip
    return cells


def _common(scores: Iterable[Mapping[_Row, _Documents]], row: _Row) -> list[tuple[str, int]]:
    """List the documents that all models answered in the first one's order, as translations."""
    first, *others = [by[row] for by in scores if row in by]
    shared = set(first).intersection(*others)
    return sorted(shared, key=lambda key: (first[key].task, first[key].document))


def _values(documents: _Documents, common: Sequence[tuple[str, int]]) -> npt.NDArray[np.float64]:
    return np.array([documents[document].score for document in common])


def _classified(documents: _Documents, common: Sequence[tuple[str, int]]) -> Classified | None:
    answers = [documents[document] for document in common]
    return classified_of([(answer.label, answer.predicted) for answer in answers])
