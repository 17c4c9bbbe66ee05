"""Results on disk: lm-eval's own JSON for each model, and one tidy table of every score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluate.samples import write_samples
from layerswap.evaluate.suites.suites import Asked, asked_of
from layerswap.evaluate.tidy_tables import read_rows, write_rows

TABLE = "scores.parquet"
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
            raise EvaluationError(f"{folder}: is no run of `layerswap eval`; choose another output")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EvaluationError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def tidy(results: Mapping[str, Mapping[str, Any]], asked: Sequence[Asked]) -> list[Score]:
    """Every score of every document, of all models.

    Subjects of a group count as its documents. Of a metric over a whole corpus, such as BLEU,
    there is no score of a document; sentence chrF stands for FLORES then.
    """
    found: list[Score] = []
    for model, result in results.items():
        for task, samples in sorted(result["samples"].items()):
            of = asked_of(task, asked)
            main = ("sentence_chrf", "none") if of.metric[0] == "bleu" else of.metric
            for sample in samples:
                for metric in sample["metrics"]:
                    value = sample[metric]
                    if isinstance(value, bool | int | float):
                        where = (metric, sample["filter"])
                        found.append(Score(
                            model, of.benchmark, of.language, task, *where,
                            int(sample["doc_id"]), float(value), where == main,
                        ))  # fmt: skip
    return found


def headline(result: Mapping[str, Any], asked: Asked) -> float:
    """The score that counts, of one model on one task or group, as lm-eval aggregates it."""
    for part in ("results", "groups"):
        values = result.get(part, {}).get(asked.name, {})
        key = ",".join(asked.metric)
        if key in values:
            return float(values[key])
    raise EvaluationError(f"{asked.name}: lm-eval gave no {','.join(asked.metric)}")


def write_results(
    out: Path, results: Mapping[str, Mapping[str, Any]], asked: Sequence[Asked]
) -> None:
    """Write `<model>/results.json` for each model, `scores.parquet` and `samples.parquet`."""
    from lm_eval.utils import handle_non_serializable

    for model, result in results.items():
        folder = out / model
        folder.mkdir(parents=True, exist_ok=True)
        kept = {key: value for key, value in result.items() if key != "samples"}
        text = json.dumps(kept, indent=2, default=handle_non_serializable, ensure_ascii=False)
        (folder / RESULTS).write_text(text + "\n", "utf-8")
    write_rows(out / TABLE, tidy(results, asked), Score)
    write_samples(out, results, asked)


def read_scores(out: Path) -> list[Score]:
    """The table that `write_results` wrote.

    Raises:
        EvaluationError: there is none, or it is another table.
    """
    path = out / TABLE
    if not path.is_file():
        raise EvaluationError(f"{out}: no {TABLE}; give a folder that `layerswap eval` wrote")
    return read_rows(path, Score)
