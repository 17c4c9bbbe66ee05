"""Writes and reads the results of an evaluation, and compares models side by side.

Scores and answers are Parquet tables; each model also has lm-eval's results as JSON. A comparison
has scores with intervals, and marks significant differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from layerswap.checkpoint.remote import local_name
from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import known_language, sample_shares
from layerswap.evaluation.statistics import Comparison, Interval, compare, holm, mean_interval
from layerswap.evaluation.suites.suites import WrittenTask, has_variants

SCORES_TABLE, SAMPLES_TABLE = "scores.parquet", "samples.parquet"
RESULTS = "results.json"
TASKS = "tasks"
ANSWERS = "answers.sqlite"
Results = Mapping[str, Mapping[str, Any]]
"""The results of lm-eval by model, with `samples`."""
RowT = TypeVar("RowT")


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
    pq.write_table(pa.table({name: [row[name] for row in records] for name in names}), draft)
    draft.replace(path)


def read_rows(path: Path, kind: type[RowT]) -> Iterator[tuple[RowT, dict[str, Any]]]:
    """Read a table of `write_rows`; each row comes with all its columns by name."""
    rows = _table(path)
    dataclass_type: Any = kind
    names = [field.name for field in fields(dataclass_type)]
    if rows and not set(names) <= set(rows[0]):
        raise EvaluationError(f"{path}: not a table of `layerswap eval`")
    for row in rows:
        yield kind(**{name: row[name] for name in names}), row


def _table(path: Path) -> list[dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        why = " ".join(str(error).split())[:160]
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
    for task in asked:
        if name == task.name:
            return task
    for task in asked:
        if name.startswith(f"{task.name}_"):
            return task
    raise EvaluationError(f"task {name} is not part of this evaluation")


def document_scores(
    samples: Sequence[Mapping[str, Any]], language: str | None, filter_name: str
) -> Iterator[tuple[str, str, int, float]]:
    """Yield metric, filter, document and score of every number about one document.

    Metrics over a whole corpus, such as BLEU, have no such score. With `language`, the share of the
    answer in this language is another metric, under the filter `filter_name`.
    """
    for sample in samples:
        document, name = int(sample["doc_id"]), sample["filter"]
        if language and name == filter_name:
            for metric, share in sample_shares(sample, language).items():
                yield metric, name, document, share
        for metric in sample["metrics"]:
            value = sample[metric]
            if isinstance(value, bool | int | float):
                yield metric, name, document, float(value)


def tidy(results: Results, asked: Sequence[WrittenTask]) -> list[Score]:
    """List every score of every document; documents of a group's members are its documents."""
    scores: list[Score] = []
    for model, result in results.items():
        for name, samples in sorted(result["samples"].items()):
            task = task_of(name, asked)
            main = task.document_metric or task.metric
            language = known_language(task.language) if task.in_language else None
            for metric, filter_, document, score in document_scores(samples, language, main[1]):
                scores.append(Score(
                    model, task.benchmark, task.language, name, metric, filter_, document, score,
                    main=(metric, filter_) == main,
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


def by_task(
    scores: Sequence[Score], metrics: Sequence[str]
) -> dict[tuple[str, str, str], list[float]]:
    """Group the scores under some metrics by model, task and metric."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for score in scores:
        if score.metric in metrics:
            groups.setdefault((score.model, score.task, score.metric), []).append(score.score)
    return groups


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
    groups: dict[tuple[str, str], list[float]] = {}
    for score in scores:
        if score.main:
            task = task_of(score.task, asked)
            groups.setdefault((score.model, task.name), []).append(score.score)
    corpus = {task.name for task in asked if task.document_metric is not None}
    return {
        (model, task): None if task in corpus else mean_interval(np.array(values))
        for (model, task), values in groups.items()
    }


def write_results(
    out: Path,
    results: Results,
    asked: Sequence[WrittenTask],
    *,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Score]:
    """Write `<model>/results.json` for each model, `scores.parquet` and `samples.parquet`.

    Returns the rows of `scores.parquet`, to which `columns` adds further columns by model.
    """
    from lm_eval.utils import handle_non_serializable

    for model, result in results.items():
        folder = out / model
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in result.items() if key != "samples"}
        text = json.dumps(kept, indent=2, default=handle_non_serializable, ensure_ascii=False)
        (folder / RESULTS).write_text(text + "\n", "utf-8")
    scores = tidy(results, asked)
    further = [columns[score.model] for score in scores] if columns else ()
    write_rows(out / SCORES_TABLE, scores, Score, further)
    write_rows(out / SAMPLES_TABLE, _samples(results, asked), Sample)
    return scores


def read_scores(out: Path) -> list[Score]:
    """Read the scores in a folder of `write_results`."""
    return [score for score, _ in read_all_scores(out)]


def read_all_scores(out: Path) -> Iterator[tuple[Score, dict[str, Any]]]:
    """Read the scores in a folder of `write_results`, each with all its columns."""
    path = out / SCORES_TABLE
    if not path.is_file():
        raise EvaluationError(
            f"{out}: no {SCORES_TABLE}; give a folder that `layerswap eval` wrote"
        )
    return read_rows(path, Score)


def read_any_scores(out: Path) -> list[Score]:
    """Read the scores in a folder of `layerswap eval`, `sweep` or `study`.

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
    scores: list[Score] = []
    for path in tables:
        rows = _table(path)
        if rows and {"split", "composition"} <= set(rows[0]):
            scores += _swept_scores(rows)
        else:
            scores += [score for score, _ in read_rows(path, Score)]
    return scores


def _swept_scores(rows: Sequence[Mapping[str, Any]]) -> Iterator[Score]:
    first: dict[str, tuple[str, str]] = {}
    for row in rows:
        measure = row["metric"], row["filter"]
        main = first.setdefault(row["task"], measure) == measure
        if row["split"] == "test":
            yield Score(
                row["composition"], row["task"], "", row["task"], *measure, row["document"],
                row["score"], main,
            )  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """One answer of one model."""

    model: str  # name in the run
    task: str
    document: int  # position in the task
    question: str  # last block of the prompt, without exemplars
    target: str  # right answer, as the task has it
    answer: str  # text after the task's filter, or the choice of the model


def _samples(results: Results, asked: Sequence[WrittenTask]) -> list[Sample]:
    """List every answer of every model, under the filter of the headline metric."""
    return [
        sample
        for model, result in results.items()
        for name, samples in sorted(result["samples"].items())
        for sample in samples_of(model, name, samples, task_of(name, asked).metric[1])
    ]


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


SIGNIFICANCE_LEVEL = 0.05
"""Corrected p-values below this level are marked."""


@dataclass(frozen=True)
class ScoreCell:
    """One model on one benchmark in one language."""

    score: Interval  # mean over the documents with its bootstrap interval
    against: Comparison | None  # comparison with the first model; None for the first itself
    p: float | None  # of the comparison, corrected by Holm over the whole table
    best: bool  # true if no other model has a higher mean

    @property
    def mark(self) -> str:
        """`+` or `-` if the model is significantly better or worse than the first."""
        if self.p is None or self.p >= SIGNIFICANCE_LEVEL or self.against is None:
            return ""
        return "+" if self.against.difference.mean > 0 else "-"


@dataclass(frozen=True)
class SideBySide:
    """Models across, benchmarks and languages down."""

    models: tuple[str, ...]  # the reference first
    rows: tuple[tuple[str, str, str], ...]  # benchmark, language and metric
    cells: tuple[tuple[ScoreCell | None, ...], ...]  # by row; None without scores


def compare_runs(runs: Sequence[Path], *, models: Sequence[str] | None = None) -> SideBySide:
    """Compare the models of one or several runs on their common documents.

    Runs are folders of `layerswap eval`, `sweep` (the test split) or `study`. The first of the
    models (all when None) is the reference. A name that two runs share is prefixed with the run's
    folder.
    """
    scores = _documents(runs)
    names = list(models or scores)
    unknown = next((name for name in names if name not in scores), None)
    if unknown is not None:
        raise EvaluationError(f"no model {unknown!r}; there are {', '.join(scores)}")
    if len(names) < 2:
        raise EvaluationError("a comparison needs two models; there is " + ", ".join(names))
    rows = list(dict.fromkeys(row for name in names for row in scores[name]))
    table = [_compared([scores[name].get(row) for name in names], row) for row in rows]
    given = [
        against.p_bootstrap for line in table for cell in line if cell and (against := cell[1])
    ]
    corrected = iter(holm(given))
    cells = []
    for line in table:
        top = max(cell[0].mean for cell in line if cell)
        cells.append(tuple(
            cell and ScoreCell(
                cell[0], cell[1], next(corrected) if cell[1] else None, cell[0].mean == top
            )
            for cell in line
        ))  # fmt: skip
    return SideBySide(tuple(names), tuple(rows), tuple(cells))


_Row = tuple[str, str, str]
_Documents = dict[tuple[str, int], float]
"""Score by task and document."""


def _documents(runs: Sequence[Path]) -> dict[str, dict[_Row, _Documents]]:
    """Read the scores of every document by model and row of the table."""
    read = {run: [score for score in read_any_scores(run) if score.main] for run in runs}
    seen = [model for scores in read.values() for model in {score.model for score in scores}]
    by_model: dict[str, dict[_Row, _Documents]] = {}
    for run, scores in read.items():
        for score in scores:
            name = score.model
            if seen.count(name) > 1:
                name = f"{local_name(run)}/{name}"
            documents = by_model.setdefault(name, {}).setdefault(_row(score), {})
            documents[score.task, score.document] = score.score
    return by_model


def _row(score: Score) -> _Row:
    # Each direction of a translation is a benchmark.
    variants = has_variants(score.benchmark)
    benchmark = score.task.rpartition("_")[0] if variants else score.benchmark
    return benchmark, score.language, score.metric


def _compared(
    models: Sequence[_Documents | None], row: _Row
) -> list[tuple[Interval, Comparison | None] | None]:
    """Compare each model with the first, on the documents that all models of a row share."""
    common = sorted(set.intersection(*(set(documents) for documents in models if documents)))
    if not common:
        raise EvaluationError(f"{' '.join(row)}: the models share no document")
    reference: npt.NDArray[np.float64] | None = None
    cells: list[tuple[Interval, Comparison | None] | None] = []
    for number, documents in enumerate(models):
        if documents is None:
            cells.append(None)
            continue
        values = np.array([documents[document] for document in common])
        against = None if reference is None else compare(values, reference)
        cells.append((mean_interval(values), against))
        reference = values if number == 0 else reference
    return cells
