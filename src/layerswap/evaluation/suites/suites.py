"""Reads suites of benchmarks, and writes their tasks in any language of the benchmarks.

A suite is a YAML file with the number of exemplars of each of its benchmarks, shipped or a file
beside it:

    title: My suite
    benchmarks: {mgsm: 8, greetings.yaml: 0}

A benchmark alone is a suite too, with its default number of exemplars.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import NonNegativeInt

from layerswap.compose.schema import Strict
from layerswap.compose.yaml_file import nearest, parse_yaml, read_text, validate
from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import match, standard_tag
from layerswap.evaluation.suites import suite_names
from layerswap.evaluation.suites.benchmark import (
    DEVELOPMENT,
    Benchmark,
    Metric,
    write_benchmark,
)
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder


class Suite(Strict):
    """A suite."""

    title: str
    paper: str = ""
    benchmarks: dict[str, NonNegativeInt]  # exemplars by benchmark: a name or a file


@dataclass(frozen=True)
class TaskPart:
    """A benchmark of a suite, and the number of exemplars in its prompt."""

    benchmark: Benchmark
    shots: int


@dataclass(frozen=True)
class WrittenTask:
    """A task to evaluate on."""

    name: str  # lm-eval's name of the task or group
    benchmark: str
    language: str  # BCP 47 tag; empty if unknown
    metric: Metric  # metric and filter of the headline score
    document_metric: Metric | None = None  # of one document's score; `metric` when None
    in_language: bool = True  # true if answers should be in the language


def parts_of(suite: str) -> tuple[TaskPart, ...]:
    """Read the benchmarks of a suite, given by its name or its file (`.yaml`)."""
    return _parts(Path(suite)) if suite.endswith(".yaml") else _shipped(suite)


@cache
def _shipped(suite: str) -> tuple[TaskPart, ...]:
    known = suite_names()
    if suite not in known:
        raise EvaluationError(f"no suite {suite!r}{nearest(suite, known)}")
    return _parts(Path(__file__).parent / f"{suite}.yaml")


def _parts(path: Path) -> tuple[TaskPart, ...]:
    data, lines = parse_yaml(read_text(path), str(path))
    if not (isinstance(data, dict) and "benchmarks" in data):
        expected = "a benchmark is a mapping with `task` and `data`"
        benchmark = validate(Benchmark, data, where=str(path), expected=expected, lines=lines)
        named = benchmark.model_copy(update={"name": benchmark.name or path.stem})
        return (TaskPart(named, named.shots),)
    expected = "a suite is a mapping with `benchmarks`"
    suite = validate(Suite, data, where=str(path), expected=expected, lines=lines)
    return tuple(
        TaskPart(part.benchmark, shots)
        for name, shots in suite.benchmarks.items()
        for part in parts_of(str(path.parent / name) if name.endswith(".yaml") else name)
    )


@cache
def has_variants(benchmark: str) -> bool:
    """True if a shipped benchmark has several tasks per language, each with scores of its own."""
    return benchmark in suite_names() and any(
        part.benchmark.name == benchmark and len(part.benchmark.variants) > 1
        for part in parts_of(benchmark)
    )


def development_tasks(tasks: Iterable[str]) -> set[str]:
    """Find the tasks of published development splits among all tasks of a benchmark."""
    names = set(tasks)
    return {f"{name}{DEVELOPMENT}" for name in names} & names


def check_askable(suite: str, language: str, *, allow_code: bool = False) -> None:
    """Refuse a suite if none of its benchmarks has a language; no data is read or fetched."""
    reasons = []
    for part in parts_of(suite):
        try:
            _code(part.benchmark, language, allow_code)
        except EvaluationError as error:
            reasons.append(str(error))
        else:
            return
    raise EvaluationError("; ".join(dict.fromkeys(reasons)))


def write_suite(
    suite: str,
    languages: Sequence[str],
    tasks: TaskFolder,
    *,
    data: DataFolder,
    shots: int | None = None,
    allow_code: bool = False,
    skip: Callable[[str], None] | None = None,
    needed: bool = False,
    development: bool = False,
) -> list[WrittenTask]:
    """Write the tasks of a suite in some languages.

    Args:
        suite: name or file.
        languages: any codes or names; see `evaluation.languages`.
        tasks: folder to write to.
        data: folder of published files.
        shots: exemplars in a prompt; the suite's own number when None.
        allow_code: run programs that a model writes.
        skip: called with a line per benchmark that a language does not have; an error when None.
        needed: treat missing data as an error even with `skip`.
        development: add the tasks of published development splits.
    """
    parts = parts_of(suite)
    written: list[WrittenTask] = []
    for language in languages:
        for part in parts:
            benchmark = part.benchmark
            code = None
            try:
                code = _code(benchmark, language, allow_code)
                count = part.shots if shots is None else shots
                names = write_benchmark(benchmark, code, count, data, tasks)
            except EvaluationError as error:
                if skip is None or len(parts) == 1 or (needed and code is not None):
                    raise
                skip(f"left out: {error}")
                continue
            if development and benchmark.development is not None:
                names += [f"{name}{DEVELOPMENT}" for name in names]
            written += [
                WrittenTask(
                    name, benchmark.name, standard_tag(language), benchmark.metric,
                    benchmark.document_metric, benchmark.answers_in_language,
                )
                for name in names
            ]  # fmt: skip
    if not written:
        raise EvaluationError(f"{suite}: no benchmark of it is available in {', '.join(languages)}")
    return written


def _code(benchmark: Benchmark, language: str, allow_code: bool) -> str:
    """Find the benchmark's code of a language."""
    if benchmark.runs_code and not allow_code:
        raise EvaluationError(
            f"{benchmark.name} runs programs that a model writes; allow it with --allow-code, or "
            "evaluate.allow_code in a study"
        )
    if benchmark.languages == "any":
        return standard_tag(language)
    code = match(language, benchmark.languages)
    if code is None:
        raise EvaluationError(f"{benchmark.name} does not have {language}")
    return code
