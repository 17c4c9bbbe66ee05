"""The answers table: a row for every number about one document, with the answer of the model.

`eval`, `sweep` and `study` write it as `answers.parquet`, and every comparison reads it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from layerswap.evaluation.languages import Speaks, known_language, language_shares
from layerswap.evaluation.statistics import Interval
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.experiment.conditions import BASELINES, CHECKPOINT, Condition
from layerswap.ground.errors import EvaluationError, one_line

ANSWERS_TABLE = "answers.parquet"
RESULTS = "results.json"
TASKS = "tasks"
ANSWERS = "answers.sqlite"
Results = Mapping[str, Mapping[str, Any]]
"""The results of lm-eval by model, with `samples`."""
Measure = tuple[str, str, str]
"""Task, metric and filter."""
Values = npt.NDArray[np.float64]
"""One score per document."""
ItemT = TypeVar("ItemT")
KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class Answer:
    """One number about one document, and the answer that it measures."""

    model: str  # name in the run; of a composition its condition as text
    task: str
    document: int  # position in the task
    metric: str
    filter: str  # lm-eval's name for how the answer was read
    score: float  # such as 0 or 1 for wrong and right
    main: bool = False  # true for the headline metric of the benchmark
    benchmark: str = ""
    language: str = ""  # BCP 47 tag
    label: str = ""  # right label of a classification; empty for other tasks
    predicted: str = ""  # label that the model answers
    split: str = ""  # development or test; empty if nothing is chosen
    question: str = ""  # last block of the prompt, without exemplars
    target: str = ""  # right answer, as the task has it
    answer: str = ""  # text after the task's filter, or the choice of the model
    text: str = ""  # the document as the task writes it; without exemplars, the whole prompt
    choices: int = 0  # number of answers to choose from; 0 for free answers
    weights: str = ""  # key of the model's weights
    document_hash: str = ""  # of the text and the choices; equal in every chat template
    prompts: str = ""  # the settings of the prompts, such as `num_fewshot=0`
    generation: str = ""  # the settings of a written answer, such as its token limit
    condition: Condition = CHECKPOINT

    @property
    def measure(self) -> Measure:
        """Task, metric and filter."""
        return self.task, self.metric, self.filter

    @property
    def is_baseline(self) -> bool:
        """True for a baseline that needs no language model."""
        return self.condition.method in BASELINES

    def to_dict(self) -> dict[str, Any]:
        """Returns the columns on disk: all fields, and those of the condition."""
        return {**vars(self), **self.condition.to_dict()} | {"condition": str(self.condition)}


def fraction(answer: Answer) -> float:
    """A score from 0 to 1; chrF is from 0 to 100 on disk."""
    return answer.score / (100 if "chrf" in answer.metric else 1)


def write_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Write the answers table; an existing one is replaced whole."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}
    schema = {field.name: types.get(str(field.type), pa.string()) for field in fields(Answer)}
    schema |= {name: pa.string() if isinstance(value, str) else pa.int64()
               for name, value in CHECKPOINT.to_dict().items()}  # fmt: skip
    rows = [answer.to_dict() for answer in answers]
    draft = path.with_name(f".{path.name}")
    pq.write_table(pa.Table.from_pylist(rows, schema=pa.schema(schema)), draft)
    draft.replace(path)


def read_answers(out: Path) -> list[Answer]:
    """Read the answers in a folder of `layerswap eval`, `sweep` or `study`, or below it.

    Of a sweep these are the answers on the test split.
    """
    table = out / ANSWERS_TABLE
    paths = [table] if table.is_file() else sorted(out.glob(f"**/{ANSWERS_TABLE}"))
    if not paths:
        raise EvaluationError(
            f"{out}: no {ANSWERS_TABLE}; give a folder that `layerswap eval`, `sweep` or `study` "
            "wrote"
        )
    answers = [answer for path in paths for answer in made(read_table(path), path)]
    return [answer for answer in answers if answer.split != "development"]


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a Parquet table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        why = one_line(error, 160)
        raise EvaluationError(f"{path}: cannot be read ({why})") from None
    return rows


def made(rows: Sequence[Mapping[str, Any]], path: Path) -> list[Answer]:
    """Make answers of rows; refuse missing columns, and values of other types."""
    from pydantic import TypeAdapter, ValidationError

    columns, known = tuple(CHECKPOINT.to_dict()), dict[tuple[Any, ...], Condition]()

    def condition(row: Mapping[str, Any]) -> Condition:
        key = tuple(map(row.get, columns))
        if key not in known:  # thousands of rows share one
            known[key] = Condition.from_dict(row) if row.get("method") else CHECKPOINT
        return known[key]

    try:
        return TypeAdapter(list[Answer]).validate_python([
            {**row, "condition": condition(row)} for row in rows
        ])  # fmt: skip
    except (ValidationError, TypeError):  # of lists, which no key can hold
        raise EvaluationError(f"{path}: not a table of `layerswap eval` or `sweep`") from None


def under(answers: Iterable[Answer], measure: Measure) -> dict[Condition, list[Answer]]:
    """Returns the answers of every condition under a measure, in the order of documents."""
    by = grouped((answer for answer in answers if answer.measure == measure), lambda a: a.condition)
    return {
        condition: [*{a.document: a for a in sorted(same, key=lambda a: a.document)}.values()]
        for condition, same in by.items()
    }


def open_folder(out: Path, command: str = "eval") -> Path:
    """Open or create the folder of `eval` or `sweep`; refuse a folder with anything else."""
    folder = out.expanduser().absolute()
    marker = {"eval": TASKS, "sweep": ANSWERS}[command]
    try:
        if folder.is_dir() and any(folder.iterdir()) and not (folder / marker).exists():
            raise EvaluationError(
                f"{folder}: not written by `layerswap {command}`; choose another folder"
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


def answers_to(
    samples: Sequence[Mapping[str, Any]],
    answer_language: str | Speaks | None,
    main: tuple[str, str],
    **shared: Any,
) -> Iterator[Answer]:
    """Yield a row for every number about one document of lm-eval's samples of a task.

    Metrics over a whole corpus, such as BLEU, have no such number: their rows have the answers
    alone. The share of the answer in `answer_language`, if given, is another metric under the
    filter of `main`. `shared` are fields of all rows.
    """
    for sample in samples:
        name = sample["filter"]
        more: dict[str, Any] = {**shared, "document": int(sample["doc_id"]), "filter": name}
        more |= {key: sample.get(key, "") for key in ("document_hash", "prompts")}
        more["generation"] = _generation(sample)
        count = len(sample["arguments"])
        if name == main[1]:
            more |= {
                "question": _prompt(sample).rpartition("\n\n")[2], "target": str(sample["target"]),
                "answer": _answer(sample), "choices": count if count > 1 else 0,
                "text": str(sample.get("text", _prompt(sample))),
            }  # fmt: skip
            written = sample["resps"][0][0]
            if answer_language and isinstance(written, str):
                for metric, share in language_shares(written, answer_language).items():
                    yield Answer(metric=metric, score=share, **more)
        for metric in sample["metrics"]:
            value, headline = sample[metric], (metric, name) == main
            if isinstance(value, bool | int | float):
                label, predicted = sample.get("answered", {}).get(metric, ("", ""))
                yield Answer(metric=metric, score=float(value), main=headline, label=label,
                             predicted=predicted, **more)  # fmt: skip
            elif headline:
                yield Answer(metric=metric, score=float("nan"), **more)


def answers_of(
    results: Results,
    asked: Sequence[WrittenTask],
    of_model: Mapping[str, Mapping[str, Any]],
    speaks: str | Speaks | None = None,
) -> list[Answer]:
    """List every answer of lm-eval's results; a group's documents include its members'.

    `of_model` has further fields by model. `speaks` identifies the answers' language in place of
    the tasks' languages.
    """
    return [
        answer
        for model, result in results.items()
        for name, samples in sorted(result["samples"].items())
        for task in [task_of(name, asked)]
        for answer in answers_to(
            samples,
            (speaks or known_language(task.language)) if task.in_language else None,
            task.document_metric or task.metric, model=model, task=name,
            benchmark=task.benchmark, language=task.language, **of_model.get(model, {}),
        )
    ]  # fmt: skip


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


def whole_score(result: Mapping[str, Any], task: WrittenTask) -> float | Interval:
    """Return lm-eval's headline score of a task or group, with its interval if it has a reach."""
    key, (metric, name) = ",".join(task.metric), task.metric
    own, group = (result.get(part, {}).get(task.name, {}) for part in ("results", "groups"))
    if key not in {**group, **own}:
        raise EvaluationError(f"{task.name}: lm-eval has no {key}")
    score, reach = float({**group, **own}[key]), own.get(f"{metric}_reach,{name}")
    if reach is None:
        return score
    return Interval(
        score, max(0.0, score - reach), score + reach, len(result["samples"][task.name])
    )


def grouped(items: Iterable[ItemT], key: Callable[[ItemT], KeyT]) -> dict[KeyT, list[ItemT]]:
    """Group answers or results by a key, in the order of the first of each group."""
    groups: dict[KeyT, list[ItemT]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def headlines(
    scores: Sequence[Answer], asked: Sequence[WrittenTask]
) -> dict[tuple[str, str], list[Answer]]:
    """Collect the headline scores by model and task or group."""
    main = (score for score in scores if score.main)
    return grouped(main, lambda score: (score.model, task_of(score.task, asked).name))


def write_results(
    out: Path,
    results: Results,
    asked: Sequence[WrittenTask],
    *,
    of_model: Mapping[str, Mapping[str, Any]],
    kept: Sequence[Answer] = (),
    speaks: str | Speaks | None = None,
    further: Callable[[Sequence[Answer]], Iterable[Answer]] = lambda answers: (),
) -> list[Answer]:
    """Write `<model>/results.json` for each model, and `answers.parquet`, whose rows it returns.

    `of_model` has further fields of a model's rows. The table also has the rows of `kept`, and
    those that `further` derives from the answers. `speaks` is as in `answers_of`.
    """
    from lm_eval.utils import handle_non_serializable

    for model, result in results.items():
        folder = out / model
        folder.mkdir(parents=True, exist_ok=True)
        whole = {key: value for key, value in result.items() if key != "samples"}
        if any(row.model == model for row in kept) and (folder / RESULTS).is_file():
            old = json.loads((folder / RESULTS).read_text("utf-8"))
            whole |= {key: {**old[key], **value} for key, value in whole.items()
                      if key != "config" and isinstance(value, dict) and key in old}  # fmt: skip
        text = json.dumps(whole, indent=2, default=handle_non_serializable, ensure_ascii=False)
        (folder / RESULTS).write_bytes((text + "\n").encode())
    answers = answers_of(results, asked, of_model, speaks)
    answers += further(answers)
    write_answers(out / ANSWERS_TABLE, [*answers, *kept])
    return answers


def kept_answers(
    earlier: Sequence[Answer], results: Results, weights: Mapping[str, str]
) -> tuple[list[Answer], list[str]]:
    """Drop the rows that `results` replaces; also return the replaced models and tasks.

    All rows of a model go if its weights differ: another model has its name now.
    """
    others = {row.model for row in earlier if row.weights != weights.get(row.model, row.weights)}
    asked = {model: set(result["samples"]) for model, result in results.items()}
    asked |= {str(baseline): set().union(*asked.values())
              for baseline in (row.condition for row in earlier if row.is_baseline)}  # fmt: skip

    def stays(row: Answer) -> bool:
        return row.task not in asked.get(row.model, ()) and row.model not in others

    replaced = dict.fromkeys(f"{row.model} on {row.task}" for row in earlier
                             if not stays(row) and not row.is_baseline)  # fmt: skip
    return list(filter(stays, earlier)), list(replaced)


def _generation(sample: Mapping[str, Any]) -> str:
    """Return the settings by which lm-eval wrote an answer, as JSON; an empty text for choices."""
    given = sample["arguments"][0]
    settings = given[-1] if isinstance(given, list | tuple) else None
    return json.dumps(settings, sort_keys=True, default=str) if isinstance(settings, dict) else ""


def _prompt(sample: Mapping[str, Any]) -> str:
    """Return the prompt, with exemplars, which all choices of a document share."""
    first = sample["arguments"][0]
    return str(first[0] if isinstance(first, list | tuple) else first).rstrip()


def _answer(sample: Mapping[str, Any]) -> str:
    answers = sample["filtered_resps"]
    if answers and all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in answers):
        scores = [float(logprob) for logprob, _ in answers]  # of the choices
        chosen = sample["arguments"][scores.index(max(scores))]
        return str(chosen[1]).strip()
    return str(answers[0]) if len(answers) == 1 else "; ".join(map(str, answers))
