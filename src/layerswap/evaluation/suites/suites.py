"""Provides the papers' evaluation suites, for any language that their benchmarks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from layerswap.compose.yaml_file import nearest
from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import match, standard_tag
from layerswap.evaluation.suites import mgsm
from layerswap.evaluation.suites.classification import (
    DEVELOPMENT,
    NEWS,
    NEWS_CODES,
    SIB,
    TWEET_CODES,
    TWEETS,
    LabelledTexts,
    write_classification,
)
from layerswap.evaluation.suites.flores import ENGLISH, write_flores
from layerswap.evaluation.suites.folders import DataFolder, TaskFolder, builtin
from layerswap.evaluation.suites.mbpp import write_mbpp
from layerswap.evaluation.suites.reading import write_belebele, write_mmlu

Write = Callable[[str, int, DataFolder, TaskFolder], str | list[str]]


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
        write: writes its task, or tasks, in a language.
        codes: the languages that it has, in its own codes; None for any.
        metric: the metric that counts, and the filter it is behind.
        runs_code: whether it runs what a model wrote.
        development: whether its published development split is written as a task of its own.
    """

    write: Write
    codes: Callable[[], Sequence[str]] | None
    metric: tuple[str, str]
    runs_code: bool = False
    development: bool = False


@dataclass(frozen=True)
class TaskPart:
    """A benchmark of a suite, and how many exemplars its prompt has."""

    benchmark: str
    shots: int


@dataclass(frozen=True)
class WrittenTask:
    """A task that was written.

    Attributes:
        name: lm-eval's.
        benchmark: which one it is.
        language: its BCP 47 tag; empty for a task that no suite wrote.
        metric: the metric that counts, and the filter it is behind.
    """

    name: str
    benchmark: str
    language: str
    metric: tuple[str, str]


def written_tasks_of(task: str, asked: Sequence[WrittenTask]) -> WrittenTask:
    """The one that a task, or a part of its group, was written for.

    Raises:
        EvaluationError: it was not asked for.
    """
    for one in asked:
        if task == one.name:
            return one
    for one in asked:
        if task.startswith(f"{one.name}_"):
            return one
    raise EvaluationError(f"task {task} was not asked for")


@cache
def _belebele_codes() -> tuple[str, ...]:
    folder = Path(builtin("belebele/belebele_swh_Latn.yaml")).parent
    return tuple(p.stem.removeprefix("belebele_") for p in sorted(folder.glob("belebele_*_*.yaml")))


@cache
def _mmlu_codes() -> tuple[str, ...]:
    folder = Path(builtin("global_mmlu/full/sw/_sw_template_yaml")).parent.parent
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir()))


def _classification(source: LabelledTexts, codes: Callable[[], Sequence[str]]) -> Benchmark:
    write = partial(write_classification, source)
    return Benchmark(write, codes, ("acc", "none"), development=True)


BENCHMARKS: dict[str, Benchmark] = {
    "mgsm": Benchmark(mgsm.write_mgsm, lambda: mgsm.LANGUAGES, ("exact_match", mgsm.NUMBER_FILTER)),
    "belebele": Benchmark(write_belebele, _belebele_codes, ("acc", "none")),
    # FLORES-200 covers what Belebele does, which was made from it.
    "flores": Benchmark(write_flores, _belebele_codes, ("bleu", "none")),
    "mbpp": Benchmark(write_mbpp, None, ("pass_at_1", "none"), runs_code=True),
    "mmlu": Benchmark(write_mmlu, _mmlu_codes, ("acc", "none")),
    # Of SIB-200's 205 languages, FLORES-200's, those that Belebele has too.
    "sib200": _classification(SIB, _belebele_codes),
    "masakhanews": _classification(NEWS, lambda: NEWS_CODES),
    "afrisenti": _classification(TWEETS, lambda: TWEET_CODES),
}
SUITES: dict[str, tuple[TaskPart, ...]] = {
    # Paper 1, section 5 and appendix A.3.
    "layer-swapping": (
        TaskPart("mgsm", 8), TaskPart("belebele", 5), TaskPart("flores", 0), TaskPart("mbpp", 0),
        TaskPart("mmlu", 5),
    ),
    # Paper 2, sections 3 and 5; it does not say how many exemplars the last two have.
    "unreasonable": (TaskPart("mgsm", 2), TaskPart("belebele", 0), TaskPart("mmlu", 0)),
    "mgsm": (TaskPart("mgsm", 8),),
    "belebele": (TaskPart("belebele", 5),),
    "flores": (TaskPart("flores", 0),),
    "mbpp": (TaskPart("mbpp", 0),),
    "mmlu": (TaskPart("mmlu", 5),),
    "sib200": (TaskPart("sib200", 0),),
    "masakhanews": (TaskPart("masakhanews", 0),),
    "afrisenti": (TaskPart("afrisenti", 0),),
}  # fmt: skip


def parts_of(suite: str) -> tuple[TaskPart, ...]:
    """The benchmarks of a suite.

    Raises:
        EvaluationError: there is no such suite.
    """
    if suite not in SUITES:
        raise EvaluationError(f"no suite {suite!r}{nearest(suite, list(SUITES))}")
    return SUITES[suite]


def is_development(benchmark: str, task: str) -> bool:
    """True for a task that is a benchmark's published development split.

    Args:
        benchmark: one of `BENCHMARKS`, or any name, whose tasks are no such split.
        task: the task's name.
    """
    known = BENCHMARKS.get(benchmark)
    return known is not None and known.development and task.endswith(DEVELOPMENT)


def check_askable(suite: str, language: str, *, allow_code: bool = False) -> None:
    """Refuse a suite of which nothing can be asked in a language; nothing is read or fetched.

    Args:
        suite: one of `SUITES`.
        language: any code or name.
        allow_code: whether programs that a model wrote may be run.

    Raises:
        EvaluationError: there is no such suite, or none of its benchmarks has the language.
    """
    refused = []
    for part in parts_of(suite):
        try:
            _code(part.benchmark, language, allow_code)
        except EvaluationError as error:
            refused.append(str(error))
        else:
            return
    raise EvaluationError("; ".join(dict.fromkeys(refused)))


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
    """Write the tasks of a suite, in some languages.

    Args:
        suite: one of `SUITES`.
        languages: any codes or names; see `evaluation.languages`.
        tasks: where they go.
        data: where published files may be.
        shots: exemplars in a prompt; the suite's own when None.
        allow_code: whether programs that a model wrote may be run.
        skip: called with a line for each benchmark that cannot be asked in a language; without it,
            that is an error.
        needed: whether data that cannot be had are an error all the same.
        development: add the tasks of published development splits.

    Raises:
        EvaluationError: no such suite or language, or data that cannot be had.
    """
    parts = parts_of(suite)
    written: list[WrittenTask] = []
    for language in languages:
        for part in parts:
            benchmark = BENCHMARKS[part.benchmark]
            code = None
            try:
                code = _code(part.benchmark, language, allow_code)
                count = part.shots if shots is None else shots
                made = benchmark.write(code, count, data, tasks)
            except EvaluationError as error:
                if skip is None or len(parts) == 1 or (needed and code is not None):
                    raise
                skip(f"left out: {error}")
                continue
            names = [made] if isinstance(made, str) else made
            if development and benchmark.development:
                names = [*names, *(f"{name}{DEVELOPMENT}" for name in names)]
            tag = standard_tag(language)
            written += [WrittenTask(name, part.benchmark, tag, benchmark.metric) for name in names]
    if not written:
        raise EvaluationError(f"{suite}: nothing of it can be asked in {', '.join(languages)}")
    return written


def _code(name: str, language: str, allow_code: bool) -> str:
    """What a benchmark calls a language.

    Raises:
        EvaluationError: it does not have it, or may not be run.
    """
    benchmark = BENCHMARKS[name]
    if benchmark.runs_code and not allow_code:
        raise EvaluationError(
            f"{name} runs programs that a model wrote; allow it by --allow-code, or in a study by "
            "evaluate.allow_code"
        )
    if benchmark.codes is None:
        return standard_tag(language)
    code = match(language, benchmark.codes())
    if code is None:
        raise EvaluationError(f"{name} does not have {language}")
    if name == "flores" and code == ENGLISH:
        raise EvaluationError("flores: English is the other side of every pair")
    return code
