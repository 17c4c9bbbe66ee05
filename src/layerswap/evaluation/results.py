"""Reads and writes the results of an evaluation, and compares the models of several side by side.

Scores and answers are in Parquet, and JSON by model. A comparison has scores with intervals, and
marks significant differences.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import OTHERWISE, known_language, sample_shares
from layerswap.evaluation.statistics import Comparison, Interval, compare, holm, mean_interval
from layerswap.evaluation.suites.suites import WrittenTask, written_tasks_of

RowT = TypeVar("RowT")


def write_rows(
    path: Path, rows: Sequence[Any], kind: type, columns: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write rows of a dataclass, a column for each of its fields.

    Args:
        path: of the file.
        rows: of the dataclass.
        kind: the dataclass.
        columns: further columns of each row, by name; the same names in all.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = [one.name for one in fields(kind)]
    records = [asdict(row) for row in rows]
    if columns:
        names += [name for name in columns[0] if name not in names]
        records = [{**more, **row} for row, more in zip(records, columns, strict=True)]
    draft = path.with_name(f".{path.name}")
    pq.write_table(pa.table({name: [row[name] for row in records] for name in names}), draft)
    draft.replace(path)


def read_rows(path: Path, kind: type[RowT]) -> list[RowT]:
    """The rows that `write_rows` wrote, without further columns.

    Raises:
        EvaluationError: the file cannot be read, or lacks columns.
    """
    return [row for row, _ in read_all_columns(path, kind)]


def read_all_columns(path: Path, kind: type[RowT]) -> Iterator[tuple[RowT, dict[str, Any]]]:
    """The rows that `write_rows` wrote, each with all its columns by name.

    Raises:
        EvaluationError: the file cannot be read, or lacks columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path).to_pylist()
    except (OSError, pa.ArrowInvalid) as error:
        why = " ".join(str(error).split())[:160]
        raise EvaluationError(f"{path}: cannot be read ({why})") from None
    wanted: Any = kind
    names = [one.name for one in fields(wanted)]
    if rows and not set(names) <= set(rows[0]):
        raise EvaluationError(f"{path}: not a table of `layerswap eval`")
    for row in rows:
        yield kind(**{name: row[name] for name in names}), row


SCORES_TABLE = "scores.parquet"
RESULTS = "results.json"
TASKS = "tasks"
ANSWERS = "answers.sqlite"


@dataclass(frozen=True)
class Score:
    """One number about one document.

    Attributes:
        model: its name in the run.
        benchmark: such as `mgsm`.
        language: BCP 47 tag.
        task: lm-eval's name.
        metric: lm-eval's name.
        filter: lm-eval's name.
        document: position in the task.
        score: 0 or 1 for right and wrong.
        main: whether it is the metric that counts for its benchmark.
    """

    model: str
    benchmark: str
    language: str
    task: str
    metric: str
    filter: str
    document: int
    score: float
    main: bool


def open_folder(out: Path) -> Path:
    """The folder of a run, made where there is none.

    Raises:
        EvaluationError: it holds something else than a run, or cannot be made.
    """
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


def tidy(results: Mapping[str, Mapping[str, Any]], asked: Sequence[WrittenTask]) -> list[Score]:
    """Every score of every document, of all models.

    Subjects of a group count as its documents. Of a metric over a whole corpus, such as BLEU,
    there is no score of a document; sentence chrF stands for FLORES then. Where a model wrote
    text in a language that can be identified, its share of the letters is a metric too.
    """
    found: list[Score] = []
    for model, result in results.items():
        for task, samples in sorted(result["samples"].items()):
            of = written_tasks_of(task, asked)
            main = ("sentence_chrf", "none") if of.metric[0] == "bleu" else of.metric
            meant = known_language("" if of.benchmark in OTHERWISE else of.language)
            for sample in samples:
                shares = (
                    sample_shares(sample, meant) if meant and sample["filter"] == main[1] else {}
                )
                found += [
                    Score(model, of.benchmark, of.language, task, metric, main[1],
                          int(sample["doc_id"]), share, main=False)
                    for metric, share in shares.items()
                ]  # fmt: skip
                for metric in sample["metrics"]:
                    value = sample[metric]
                    if isinstance(value, bool | int | float):
                        where = (metric, sample["filter"])
                        found.append(Score(
                            model, of.benchmark, of.language, task, *where,
                            int(sample["doc_id"]), float(value), where == main,
                        ))  # fmt: skip
    return found


def tasks_of(results: Mapping[str, Mapping[str, Any]], language: str = "") -> list[WrittenTask]:
    """The tasks of results that no suite wrote, each with its first metric as the one that counts.

    Args:
        results: by model what lm-eval gives, with `samples`.
        language: that the answers should be in.
    """
    found: dict[str, WrittenTask] = {}
    for result in results.values():
        for task in sorted(result["samples"]):
            values = result["results"].get(task, {})
            key = next((k for k in values if "," in k and "_stderr" not in k), None)
            if key is not None:
                metric, _, name = key.partition(",")
                found.setdefault(task, WrittenTask(task, task, language, (metric, name)))
    return list(found.values())


def by_task(
    scores: Sequence[Score], metrics: Sequence[str]
) -> dict[tuple[str, str, str], list[float]]:
    """The scores under some metrics, by model, task and metric."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for score in scores:
        if score.metric in metrics:
            found.setdefault((score.model, score.task, score.metric), []).append(score.score)
    return found


def headline(result: Mapping[str, Any], asked: WrittenTask) -> float:
    """The score that counts, of one model on one task or group, as lm-eval aggregates it."""
    for part in ("results", "groups"):
        values = result.get(part, {}).get(asked.name, {})
        key = ",".join(asked.metric)
        if key in values:
            return float(values[key])
    raise EvaluationError(f"{asked.name}: lm-eval gave no {','.join(asked.metric)}")


def intervals_of(
    scores: Sequence[Score], asked: Sequence[WrittenTask]
) -> dict[tuple[str, str], Interval | None]:
    """The mean over documents with its interval, by model and task or group.

    None where the score that counts is of a whole corpus, such as BLEU.
    """
    found: dict[tuple[str, str], list[float]] = {}
    for score in scores:
        if score.main:
            of = written_tasks_of(score.task, asked)
            found.setdefault((score.model, of.name), []).append(score.score)
    whole = {one.name for one in asked if one.metric[0] == "bleu"}
    return {
        (model, task): None if task in whole else mean_interval(np.array(values))
        for (model, task), values in found.items()
    }


def write_results(
    out: Path,
    results: Mapping[str, Mapping[str, Any]],
    asked: Sequence[WrittenTask],
    *,
    columns: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Score]:
    """Write `<model>/results.json` for each model, `scores.parquet` and `samples.parquet`.

    Args:
        out: the folder.
        results: of each model, as lm-eval gives them.
        asked: the tasks.
        columns: further columns of `scores.parquet`, by model.

    Returns:
        The rows of `scores.parquet`.
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
    write_samples(out, results, asked)
    return scores


def read_scores(out: Path) -> list[Score]:
    """The table that `write_results` wrote.

    Raises:
        EvaluationError: there is none, or it is another table.
    """
    return [score for score, _ in read_all_scores(out)]


def read_all_scores(out: Path) -> Iterator[tuple[Score, dict[str, Any]]]:
    """The same, each score with all its columns. See `read_scores`."""
    path = out / SCORES_TABLE
    if not path.is_file():
        raise EvaluationError(
            f"{out}: no {SCORES_TABLE}; give a folder that `layerswap eval` wrote"
        )
    return read_all_columns(path, Score)


def read_any_scores(out: Path) -> list[Score]:
    """The scores in a folder of `layerswap eval`, `sweep` or `study`.

    Of a sweep, those on the test split, with the first metric of a task as the one that counts.

    Raises:
        EvaluationError: there are none, or the table is another one.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    tables = [out / SCORES_TABLE]
    if not tables[0].is_file():
        tables = sorted(out.glob(f"**/{SCORES_TABLE}"))
    if not tables:
        raise EvaluationError(
            f"{out}: no {SCORES_TABLE}; give a folder that `layerswap eval`, `sweep` or `study` "
            "wrote"
        )
    found: list[Score] = []
    for path in tables:
        try:
            columns = set(pq.read_schema(path).names)
        except (OSError, pa.ArrowInvalid) as error:
            why = " ".join(str(error).split())[:160]
            raise EvaluationError(f"{path}: cannot be read ({why})") from None
        swept = {"split", "composition"} <= columns
        found += _swept_scores(path) if swept else read_rows(path, Score)
    return found


def _swept_scores(path: Path) -> list[Score]:
    import pyarrow.parquet as pq

    first: dict[str, tuple[str, str]] = {}
    found = []
    for row in pq.read_table(path).to_pylist():
        measure = row["metric"], row["filter"]
        main = first.setdefault(row["task"], measure) == measure
        if row["split"] == "test":
            found.append(Score(
                row["composition"], row["task"], "", row["task"], *measure, row["document"],
                row["score"], main,
            ))  # fmt: skip
    return found


SAMPLES_TABLE = "samples.parquet"


@dataclass(frozen=True)
class Sample:
    """One answer of one model.

    Attributes:
        model: its name in the run.
        task: lm-eval's name.
        document: position in the task.
        question: the prompt's last block: exemplars before it are left out.
        target: the right answer, as the task gives it.
        answer: what the model wrote after the task's filter, or the choice that it made.
    """

    model: str
    task: str
    document: int
    question: str
    target: str
    answer: str


def samples_of(
    results: Mapping[str, Mapping[str, Any]], asked: Sequence[WrittenTask]
) -> list[Sample]:
    """Every model's answers, under the filter that counts for each benchmark."""
    found = []
    for model, result in results.items():
        for task, samples in sorted(result["samples"].items()):
            counted = written_tasks_of(task, asked).metric[1]
            for sample in samples:
                if sample["filter"] == counted:
                    found.append(Sample(
                        model, task, int(sample["doc_id"]), _question(sample),
                        str(sample["target"]), _answer(sample),
                    ))  # fmt: skip
    return found


def write_samples(
    out: Path, results: Mapping[str, Mapping[str, Any]], asked: Sequence[WrittenTask]
) -> None:
    """Write `samples.parquet`."""
    write_rows(out / SAMPLES_TABLE, samples_of(results, asked), Sample)


def read_samples(out: Path) -> list[Sample]:
    """The table that `write_samples` wrote; empty where there is none.

    Raises:
        EvaluationError: it cannot be read, or is another table.
    """
    path = out / SAMPLES_TABLE
    return read_rows(path, Sample) if path.is_file() else []


def _question(sample: Mapping[str, Any]) -> str:
    """The prompt without exemplars; of choices, what they have in common comes first in each."""
    first = sample["arguments"][0]
    prompt = str(first[0] if isinstance(first, list | tuple) else first)
    return prompt.rstrip().rpartition("\n\n")[2]


def _answer(sample: Mapping[str, Any]) -> str:
    answers = sample["filtered_resps"]
    if answers and all(_is_choice(one) for one in answers):
        scores = [float(one[0]) for one in answers]
        chosen = sample["arguments"][scores.index(max(scores))]
        return str(chosen[1]).strip()
    return str(answers[0]) if len(answers) == 1 else "; ".join(map(str, answers))


def _is_choice(answer: Any) -> bool:
    """True for an answer of a choice: log-likelihood and greediness."""
    return isinstance(answer, list | tuple) and len(answer) == 2


SIGNIFICANCE_LEVEL = 0.05
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
        if self.p is None or self.p >= SIGNIFICANCE_LEVEL or self.against is None:
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
