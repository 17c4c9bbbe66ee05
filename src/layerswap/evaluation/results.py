"""Writes and reads the results of an evaluation, and compares models side by side.

Scores and answers are Parquet tables; each model also has lm-eval's results as JSON. A comparison
has scores with intervals, and marks significant differences.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from layerswap.checkpoint.remote import local_name
from layerswap.evaluation.languages import known_language, sample_shares
from layerswap.evaluation.statistics import (
    Balanced,
    Classified,
    Comparison,
    Interval,
    classified_of,
    compare,
    disagreements,
    holm,
    mean_interval,
    mean_over_groups,
    paired_over_groups,
)
from layerswap.evaluation.suites.suites import WrittenTask, has_variants
from layerswap.ground.errors import EvaluationError, one_line

SCORES_TABLE, SAMPLES_TABLE = "scores.parquet", "samples.parquet"
RESULTS = "results.json"
TASKS = "tasks"
ANSWERS = "answers.sqlite"
Results = Mapping[str, Mapping[str, Any]]
"""The results of lm-eval by model, with `samples`."""
RowT = TypeVar("RowT")
KeyT = TypeVar("KeyT")


def write_rows(
    path: Path, rows: Sequence[Any], kind: type, columns: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write rows of a dataclass as a Parquet table, with further columns of each row by name."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [field.name for field in fields(kind)]
    records = [asdict(row) for row in rows]
    if columns:
        names += [name for name in columns[0] if name not in names]
        records = [{**more, **row} for row, more in zip(records, columns, strict=True)]
    draft = path.with_name(f".{path.name}")
    pq.write_table(pa.table({name: [row.get(name) for row in records] for name in names}), draft)
    draft.replace(path)


def read_rows(path: Path, kind: type[RowT]) -> Iterator[tuple[RowT, dict[str, Any]]]:
    """Read a table of `write_rows`; each row comes with all its columns by name."""
    rows = _table(path)
    yield from zip(_made(kind, rows, path), rows, strict=True)


def _made(kind: type[RowT], rows: Iterable[Mapping[str, Any]], path: Path) -> list[RowT]:
    """Make dataclasses of rows; refuse missing columns, and values of other types."""
    from pydantic import TypeAdapter, ValidationError

    try:
        return TypeAdapter(list[kind]).validate_python(list(rows))  # type: ignore[valid-type]
    except ValidationError:
        raise EvaluationError(f"{path}: not a table of `layerswap eval` or `sweep`") from None


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        why = one_line(error, 160)
        raise EvaluationError(f"{path}: cannot be read ({why})") from None
    return rows


@dataclass(frozen=True)
class Score:
    """One number about one document."""

    model: str  # name in the run
    benchmark: str
    language: str  # BCP 47 tag
    task: str
    metric: str
    filter: str
    document: int  # position in the task
    score: float  # 0 or 1 for wrong and right
    main: bool  # true for the headline metric of the benchmark
    label: str = ""  # right label of a classification; empty for other tasks
    predicted: str = ""  # label that the model answers


def open_folder(out: Path) -> Path:
    """Open or create the folder of a run; refuse a folder with anything else."""
    folder = out.expanduser().absolute()
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / TASKS).is_dir():
            raise EvaluationError(
                f"{folder}: not written by `layerswap eval`; choose another folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def task_of(name: str, asked: Sequence[WrittenTask]) -> WrittenTask:
    """Find the task that an lm-eval task belongs to: itself, or its group."""
    own = [task for task in asked if task.name == name]
    for task in own or [task for task in asked if name.startswith(f"{task.name}_")]:
        return task
    raise EvaluationError(f"task {name} is not part of this evaluation")


def document_scores(
    samples: Sequence[Mapping[str, Any]], language: str | None, filter_name: str
) -> Iterator[tuple[str, str, int, float, str, str]]:
    """Yield metric, filter, document, score, label and answer of every number about one document.

    Metrics over a whole corpus, such as BLEU, have no such score. With `language`, the share of the
    answer in this language is another metric, under the filter `filter_name`.
    """
    for sample in samples:
        document, name = int(sample["doc_id"]), sample["filter"]
        if language and name == filter_name:
            for metric, share in sample_shares(sample, language).items():
                yield metric, name, document, share, "", ""
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, bool | int | float):
                answered = sample.get("answered", {}).get(metric, ("", ""))
                yield metric, name, document, float(value), *answered


def tidy(results: Results, asked: Sequence[WrittenTask]) -> list[Score]:
    """List every score of every document; a group's documents include its members'."""
    scores: list[Score] = []
    for model, result in results.items():
        for name, samples in sorted(result["samples"].items()):
            task = task_of(name, asked)
            main = task.document_metric or task.metric
            language = known_language(task.language) if task.in_language else None
            for metric, filter_, document, score, *answered in document_scores(
                samples, language, main[1]
            ):
                scores.append(Score(
                    model, task.benchmark, task.language, name, metric, filter_, document, score,
                    (metric, filter_) == main, *answered,
                ))  # fmt: skip
    return scores


def tasks_of(results: Results, language: str = "") -> list[WrittenTask]:
    """List the tasks of results without a suite, each with its first metric as the headline."""
    tasks: dict[str, WrittenTask] = {}
    for result in results.values():
        for task in sorted(result["samples"]):
            values = result["results"].get(task, {})
            key = next((k for k in values if "," in k and "_stderr" not in k), None)
            if key is not None:
                metric, _, name = key.partition(",")
                tasks.setdefault(task, WrittenTask(task, task, language, (metric, name)))
    return list(tasks.values())


def classified(
    scores: Sequence[Score], asked: Sequence[WrittenTask]
) -> dict[tuple[str, str], Classified]:
    """Collect the headline answers of classifications, by model and task."""
    return {
        key: found
        for key, group in _headlines(scores, asked).items()
        if (found := classified_of([(score.label, score.predicted) for score in group]))
    }


def uneven_labels(scores: Sequence[Score], metric: str) -> Iterator[str]:
    """Warn about tasks whose labels are not equally frequent, which calibration assumes."""
    labels: dict[str, dict[int, str]] = {}
    for score in scores:
        if score.metric == metric and score.label:
            labels.setdefault(score.task, {})[score.document] = score.label
    for task, by_document in labels.items():
        counts = Counter(by_document.values()).most_common()
        (most, often), (least, seldom) = counts[0], counts[-1]
        if often >= 1.5 * seldom:
            yield (
                f"{task}: calibration assumes equally frequent labels, but of "
                f"{len(by_document):,} documents {often:,} are {most!r} and {seldom:,} {least!r}; "
                "calibrated accuracy can be much lower"
            )


def headline(result: Mapping[str, Any], task: WrittenTask) -> float:
    """Return the headline score of a model on a task or group, as lm-eval aggregates it."""
    key = ",".join(task.metric)
    for part in ("results", "groups"):
        values = result.get(part, {}).get(task.name, {})
        if key in values:
            return float(values[key])
    raise EvaluationError(f"{task.name}: lm-eval has no {key}")


def intervals_of(
    scores: Sequence[Score], asked: Sequence[WrittenTask]
) -> dict[tuple[str, str], Interval | None]:
    """Compute the mean over documents with its interval, by model and task or group.

    None if the headline score is of a whole corpus, such as BLEU.
    """
    corpus = {task.name for task in asked if task.document_metric is not None}
    return {
        (model, task): None if task in corpus else mean_interval(
            np.array([score.score for score in group])
        )
        for (model, task), group in _headlines(scores, asked).items()
    }  # fmt: skip


def grouped(scores: Iterable[Score], key: Callable[[Score], KeyT]) -> dict[KeyT, list[Score]]:
    """Group scores by a key, in the order of its first scores."""
    groups: dict[KeyT, list[Score]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return groups


def _headlines(
    scores: Sequence[Score], asked: Sequence[WrittenTask]
) -> dict[tuple[str, str], list[Score]]:
    main = (score for score in scores if score.main)
    return grouped(main, lambda score: (score.model, task_of(score.task, asked).name))


def write_results(
    out: Path,
    results: Results,
    asked: Sequence[WrittenTask],
    *,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
    kept: Earlier | None = None,
) -> list[Score]:
    """Write `<model>/results.json` for each model, `scores.parquet` and `samples.parquet`.

    Returns the scores of `results`; `columns` adds further columns by model to `scores.parquet`.
    Both tables begin with the rows of `kept`.
    """
    from lm_eval.utils import handle_non_serializable

    kept = kept or Earlier([], [])
    for model, result in results.items():
        folder = out / model
        folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value for key, value in result.items() if key != "samples"}
        if any(row.model == model for row, _ in kept.scores) and (folder / RESULTS).is_file():
            old = json.loads((folder / RESULTS).read_text("utf-8"))
            whole |= {key: {**old[key], **value} for key, value in whole.items()
                      if key != "config" and isinstance(value, dict) and key in old}  # fmt: skip
        text = json.dumps(whole, indent=2, default=handle_non_serializable, ensure_ascii=False)
        (folder / RESULTS).write_bytes((text + "\n").encode())
    scores = tidy(results, asked)
    further = [columns[score.model] for score in scores] if columns else [{} for _ in scores]
    rows = [*zip(scores, further, strict=True), *kept.scores]
    write_rows(out / SCORES_TABLE, [row for row, _ in rows], Score, [more for _, more in rows])
    samples = [
        sample
        for model, result in results.items()
        for name, answers in sorted(result["samples"].items())
        for sample in samples_of(model, name, answers, task_of(name, asked).metric[1])
    ]
    write_rows(out / SAMPLES_TABLE, [*samples, *kept.samples], Sample)
    return scores


def lost_paths(results: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what models did not allow to share (see `Sweep.lost_paths`), each line once."""
    return list(dict.fromkeys(line for one in results for line in one.get("lost_paths", ())))


@dataclass(frozen=True)
class Earlier:
    """Score and sample tables of earlier evaluations."""

    scores: Sequence[tuple[Score, Mapping[str, Any]]]  # with all columns by name
    samples: Sequence[Sample]

    @classmethod
    def read(cls, out: Path) -> Earlier:
        """Read the tables of a folder; a new folder has empty tables."""
        path = out / SCORES_TABLE
        return cls(list(read_rows(path, Score)) if path.is_file() else [], read_samples(out))

    def without(
        self, results: Results, columns: Mapping[str, Mapping[str, Any]]
    ) -> tuple[Earlier, list[str]]:
        """Drop the rows that `results` replaces; also return the replaced models and tasks.

        All rows of a model go if its columns differ: another model has its name now.
        """
        others = {row.model for row, more in self.scores if row.model in results and any(
            more.get(key) != value for key, value in columns[row.model].items())}  # fmt: skip

        def stays(row: Score | Sample) -> bool:
            again = row.model in results and row.task in results[row.model]["samples"]
            return not again and row.model not in others

        rows = [row for row, _ in self.scores if not stays(row)]
        replaced = dict.fromkeys(f"{row.model} on {row.task}" for row in rows)
        scores = [(row, more) for row, more in self.scores if stays(row)]
        return Earlier(scores, list(filter(stays, self.samples))), list(replaced)


def read_scores(out: Path) -> list[Score]:
    """Read the scores in a folder, as `read_all_scores` without the columns."""
    return [score for score, _ in read_all_scores(out)]


def read_all_scores(out: Path) -> Iterator[tuple[Score, dict[str, Any]]]:
    """Read the scores in a folder of `layerswap eval`, `sweep` or `study`, with their columns.

    From a sweep these are the scores on the test split, with a task's first metric as the headline.
    """
    tables = [out / SCORES_TABLE]
    if not tables[0].is_file():
        tables = sorted(out.glob(f"**/{SCORES_TABLE}"))
    if not tables:
        raise EvaluationError(
            f"{out}: no {SCORES_TABLE}; give a folder that `layerswap eval`, `sweep` or `study` "
            "wrote"
        )
    for path in tables:
        rows = _table(path)
        if rows and {"split", "composition"} <= set(rows[0]):
            yield from ((score, {}) for score in _made(Score, _swept_scores(rows), path))
        else:
            yield from read_rows(path, Score)


def _swept_scores(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    first: dict[str, tuple[Any, Any]] = {}
    for row in rows:
        measure = row.get("metric"), row.get("filter")
        main = first.setdefault(str(row.get("task")), measure) == measure
        if row["split"] == "test":
            names = {"model": row["composition"], "benchmark": row.get("task"), "language": ""}
            yield {**row, **names, "main": main}


@dataclass(frozen=True)
class Sample:
    """One answer of one model."""

    model: str  # name in the run
    task: str
    document: int  # position in the task
    question: str  # last block of the prompt, without exemplars
    target: str  # right answer, as the task has it
    answer: str  # text after the task's filter, or the choice of the model


def samples_of(
    model: str, task: str, samples: Sequence[Mapping[str, Any]], name: str
) -> Iterator[Sample]:
    """Yield the answers of a model to a task under the filter of this name."""
    for sample in samples:
        if sample["filter"] == name:
            yield Sample(
                model, task, int(sample["doc_id"]), _question(sample), str(sample["target"]),
                _answer(sample),
            )  # fmt: skip


def read_samples(out: Path) -> list[Sample]:
    """Read the answers in a folder of `write_results`; empty if it has none."""
    path = out / SAMPLES_TABLE
    return [sample for sample, _ in read_rows(path, Sample)] if path.is_file() else []


def _question(sample: Mapping[str, Any]) -> str:
    """Cut exemplars from the prompt, which all choices of a document share."""
    first = sample["arguments"][0]
    prompt = str(first[0] if isinstance(first, list | tuple) else first)
    return prompt.rstrip().rpartition("\n\n")[2]


def _answer(sample: Mapping[str, Any]) -> str:
    answers = sample["filtered_resps"]
    if answers and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in answers):
        scores = [float(logprob) for logprob, _ in answers]  # of the choices
        chosen = sample["arguments"][scores.index(max(scores))]
        return str(chosen[1]).strip()
    return str(answers[0]) if len(answers) == 1 else "; ".join(map(str, answers))


@dataclass(frozen=True)
class ScoreCell:
    """One model on one benchmark in one language."""

    score: Interval  # mean over the common documents with its bootstrap interval
    against: Comparison | None  # comparison with the first model; None for the first itself
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
class SideBySide:
    """Models on the same documents."""

    models: tuple[str, ...]  # the reference first
    rows: tuple[tuple[str, str, str], ...]  # benchmark, language and metric
    cells: tuple[tuple[ScoreCell | None, ...], ...]  # by row and model; None without scores
    means: tuple[LanguageMean, ...]  # of benchmarks with several languages
    notes: tuple[str, ...]  # about documents that are left out
    disagreement: str  # where accuracy and balanced accuracy disagree; empty if nowhere


def compare_runs(runs: Sequence[Path], *, models: Sequence[str] | None = None) -> SideBySide:
    """Compare the models of one or several runs on their common documents.

    Runs are folders of `layerswap eval`, `sweep` (the test split) or `study`. The first of the
    models (all when None) is the reference. A model that two runs evaluated is one model. Another
    name that two runs share is prefixed with the run's folder.
    """
    scores, flattered = _documents(runs)
    names = list(models or scores)
    unknown = next((name for name in names if name not in scores), None)
    if unknown is not None:
        raise EvaluationError(f"no model {unknown!r}; there are {', '.join(scores)}")
    if len(names) < 2:
        raise EvaluationError("a comparison needs two models; there is " + ", ".join(names))
    rows = list(dict.fromkeys(row for name in names for row in scores[name]))
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
    means = _means({name: scores[name] for name in names}, rows)
    notes = tuple(_left_out(names, dict(zip(rows, cells, strict=True))))
    gaps = {
        f"{' '.join(filter(None, row[:2]))}, {name} against {names[0]}": (
            cell.against.difference, cell.balanced_against.balanced_accuracy
        )
        for row, line in zip(rows, cells, strict=True)
        for name, cell in zip(names, line, strict=True)
        if cell is not None and cell.against is not None and cell.balanced_against is not None
    }  # fmt: skip
    return SideBySide(
        tuple(names), tuple(rows), tuple(cells), tuple(means), notes, disagreements(gaps)
    )


_Row = tuple[str, str, str]


class Answered(NamedTuple):
    """One document of a comparison."""

    score: float
    label: str
    predicted: str


_Documents = dict[tuple[str, int], Answered]
"""By task and document."""


def _documents(runs: Sequence[Path]) -> tuple[dict[str, dict[_Row, _Documents]], set[str]]:
    """Read the scores of every document by model and row of the table, and flattered models.

    Flattered are the compositions of a study's grid, the best of which is the best of many.
    """
    read: dict[str, dict[tuple[str, Path], dict[_Row, _Documents]]] = {}
    flattered = set()
    for run in runs:
        for score, columns in read_all_scores(run):
            if score.main:
                # Without a record of the weights, a model is one only within its run.
                key = str(columns.get("weights") or ""), run
                documents = read.setdefault(score.model, {}).setdefault(key, {})
                answered = Answered(score.score, score.label, score.predicted)
                documents.setdefault(_row(score), {})[score.task, score.document] = answered
                if columns.get("bottom") is not None:
                    flattered.add(score.model)
    by_model: dict[str, dict[_Row, _Documents]] = {}
    for name, places in read.items():
        if len(places) == 1 or _is_one(places):
            merged = by_model.setdefault(name, {})
            for rows in places.values():
                for row, by_document in rows.items():
                    merged.setdefault(row, {}).update(by_document)
        else:
            by_model |= {f"{local_name(run)}/{name}": rows for (_, run), rows in places.items()}
    return by_model, flattered


def _is_one(places: Mapping[tuple[str, Path], Mapping[_Row, _Documents]]) -> bool:
    """True if runs of one name had equal weights, and equal scores wherever both have a score."""
    weights = {weights for weights, _ in places}
    found: dict[tuple[_Row, tuple[str, int]], float] = {}
    same = all(
        found.setdefault((row, document), one.score) == one.score
        for rows in places.values() for row, by in rows.items() for document, one in by.items()
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
            tuple(mean_over_groups(one) if one else None for one in values),
            tuple(paired_over_groups(one, first) if one and first and number else None
                  for number, one in enumerate(values)),
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


def _row(score: Score) -> _Row:
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
        raise EvaluationError(f"{' '.join(row)}: the models share no document")
    first = None if models[0] is None else _values(models[0], common)
    reference = None if models[0] is None else _classified(models[0], common)
    cells: list[ScoreCell | None] = []
    for number, documents in enumerate(models):
        if documents is None:
            cells.append(None)
            continue
        values = _values(documents, common)
        against = compare(values, first) if number and first is not None else None
        p = None if against is None else against.p_bootstrap
        answers = _classified(documents, common)
        cells.append(ScoreCell(
            mean_interval(values), against, p, best=False, documents=len(documents),
            balanced=None if answers is None else answers.balanced,
            balanced_against=answers.minus(reference) if number and answers and reference else None,
        ))  # fmt: skip
    return cells


def _common(scores: Iterable[Mapping[_Row, _Documents]], row: _Row) -> list[tuple[str, int]]:
    """List the documents that all models of a row answered."""
    return sorted(set.intersection(*(set(by[row]) for by in scores if row in by)))


def _values(documents: _Documents, common: Sequence[tuple[str, int]]) -> npt.NDArray[np.float64]:
    return np.array([documents[document].score for document in common])


def _classified(documents: _Documents, common: Sequence[tuple[str, int]]) -> Classified | None:
    return classified_of([documents[document][1:] for document in common])
