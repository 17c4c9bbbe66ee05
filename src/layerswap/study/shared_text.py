"""Counts test documents that share text with the training data of a study."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from pathlib import Path
from typing import Any

from layerswap.experiment.answers import read_answers
from layerswap.experiment.benchmarks import RESULTS, BenchmarkResult
from layerswap.ground.errors import LayerswapError
from layerswap.report.tables import Table
from layerswap.study.journal import StudyJournal
from layerswap.study.spec import TASK
from layerswap.study.trainings import TrainStep
from layerswap.training.mix.filters import OVERLAP, overlap


def shared_text(
    journal: StudyJournal, results: Sequence[BenchmarkResult], evaluations: Mapping[str, Path]
) -> Table | None:
    """Tabulate the test documents that share a run of words with training text.

    Args:
        journal: of the study; data that is not on this machine has no count.
        results: the languages and benchmarks.
        evaluations: the folder of each language's evaluation.
    """
    data = _data(journal)
    items = {
        result.heading: _items(result, evaluations[result.language] / RESULTS) for result in results
    }
    shared: dict[str, Counter[str]] = {}
    for kind, given in data.items():
        asked = [result.heading for result in results if kind in (TASK, result.language)]
        owners = [heading for heading in asked for _ in items[heading]]
        texts = _texts(journal, given)
        with suppress(LayerswapError):  # its files changed since
            positions = overlap(texts, (item for heading in asked for item in items[heading]))
            shared[kind] = Counter(owners[position] for position in positions)
    rows: list[list[Any]] = []
    for reported in results:
        by_kind = [shared.get(kind) for kind in (TASK, reported.language)]
        if items[reported.heading] and any(by is not None for by in by_kind):
            counts = [None if by is None else by[reported.heading] for by in by_kind]
            rows.append([reported.heading, len(items[reported.heading]), *counts])
    if not rows:
        return None
    caption = (
        f"Test documents that share {OVERLAP} words in a row with the training text of the "
        "experts, beside the words that all questions of a task begin or end with. Models may "
        "know such documents from training."
    )
    return Table(["benchmark", "test documents", "task data", "language data"], rows, caption)


def _data(journal: StudyJournal) -> dict[str, Any]:
    """The training data by kind of expert."""
    found: dict[str, Any] = {}
    for name, training in TrainStep.all_of(journal.graph).items():
        if len(sets := training.data) == 1:
            built = journal.folder(sets[0].step) if sets[0].step else None
            found.setdefault(name.split("/")[1], sets[0].at(built))
    return found


def _texts(journal: StudyJournal, data: Any) -> Iterator[str]:
    """The training texts of a data set: prompts with completions, messages, or texts."""
    from layerswap.training.expert.job import load_rows
    from layerswap.training.expert.spec import Files

    files = Files.model_validate(data) if isinstance(data, Mapping) else data
    for row in load_rows(files, folder=journal.root).train:
        values = (value for value in row.values() if value)
        yield " ".join(
            value if isinstance(value, str) else " ".join(turn["content"] for turn in value)
            for value in values
        )


def _items(result: BenchmarkResult, folder: Path) -> list[str]:
    """The test documents: questions without their template, each with its answer."""
    samples = {
        (row.task, row.document): row for row in read_answers(folder)
        if row.main and result.benchmark in (row.benchmark, row.task)
    }  # fmt: skip
    test = set(result.documents(samples))
    tasks: dict[str, list[Any]] = defaultdict(list)
    for place in sorted(test):
        tasks[place[0]].append(samples[place])
    return [
        f"{question} {row.target}"
        for same in tasks.values()
        for question, row in zip(_without_template([s.question for s in same]), same, strict=True)
    ]


def _without_template(questions: Sequence[str]) -> list[str]:
    """Strip the common beginning and end of all questions, which training text may share."""
    if len(questions) == 1:
        return list(questions)
    start = len(commonprefix(questions))  # noqa: RUF071
    end = len(commonprefix([question[start:][::-1] for question in questions]))  # noqa: RUF071
    return [question[start : len(question) - end] for question in questions]
