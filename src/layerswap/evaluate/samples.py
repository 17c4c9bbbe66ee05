"""What each model answered, document by document: lm-eval's samples as one tidy table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.evaluate.suites.suites import Asked, asked_of
from layerswap.evaluate.tidy_tables import read_rows, write_rows

TABLE = "samples.parquet"


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


def samples_of(results: Mapping[str, Mapping[str, Any]], asked: Sequence[Asked]) -> list[Sample]:
    """Every model's answers, under the filter that counts for each benchmark."""
    found = []
    for model, result in results.items():
        for task, samples in sorted(result["samples"].items()):
            counted = asked_of(task, asked).metric[1]
            for sample in samples:
                if sample["filter"] == counted:
                    found.append(Sample(
                        model, task, int(sample["doc_id"]), _question(sample),
                        str(sample["target"]), _answer(sample),
                    ))  # fmt: skip
    return found


def write_samples(
    out: Path, results: Mapping[str, Mapping[str, Any]], asked: Sequence[Asked]
) -> None:
    """Write `samples.parquet`."""
    write_rows(out / TABLE, samples_of(results, asked), Sample)


def read_samples(out: Path) -> list[Sample]:
    """The table that `write_samples` wrote; empty where there is none.

    Raises:
        EvaluationError: it cannot be read, or is another table.
    """
    path = out / TABLE
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
    """Whether this is a log-likelihood, and whether it is the greedy one."""
    return isinstance(answer, list | tuple) and len(answer) == 2
