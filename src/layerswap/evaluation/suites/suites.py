"""Reads benchmarks and suites from YAML files, and writes their lm-eval tasks in any language.

A new benchmark is one file, anywhere; docs/evaluation.md has a complete example.

Placeholders are `${code}`, `${shots}`, `${files}`, `${labels}`, the keys of `variants`, and each of
these with `_name` for the English name of a language. Benchmarks with rules of their own name
Python functions: `rows` reads the data, `modules` gives the task its metrics and filters. As with
lm-eval's own tasks, a file from somebody else can run code. Data files are looked for beside the
YAML first, at the path that it gives, then in the folder of `--data`.

A suite has the number of exemplars of each of its benchmarks, shipped or a file beside it, such as
`benchmarks: {mgsm: 8, greetings.yaml: 0}`. A benchmark alone is a suite too, with its default
number of exemplars.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, NonNegativeInt, PositiveInt, field_validator, model_validator

from layerswap.evaluation.languages import language_name, match, standard_tag
from layerswap.evaluation.suites import suite_names
from layerswap.evaluation.suites.folders import (
    VARIABLE,
    DataFolder,
    NotHereError,
    Rows,
    TaskFolder,
    Verbatim,
    hub_rows,
)
from layerswap.ground.errors import EvaluationError, LayerswapError, one_line
from layerswap.ground.placeholders import fill
from layerswap.ground.strict import Strict, once
from layerswap.ground.yaml_file import nearest, parse_yaml, read_text, validate
from layerswap.reading.files import rows_of

DEVELOPMENT = "_dev"
"""Suffix of the task of a published development split."""
EXEMPLARS = {"fewshot_split", "fewshot_config", "training_split", "validation_split"}
"""Keys of a task that say where its exemplars come from."""
WITH_EXEMPLARS = "with_exemplars"
"""Key of a task whose contents are written only if the split of the exemplars is."""
PLACEHOLDER = re.compile(r"(?<!\{)\$?\{(\w+)\}(?!\})")
"""A parameter; double braces are lm-eval's own. Files of earlier versions lack the dollar."""
FIELD = re.compile(r"\{\{\s*(\w+)\s*\}\}")
"""A template of lm-eval that inserts a column."""

Metric = Annotated[
    tuple[str, str],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]
"""lm-eval's names of a metric and of the filter before it."""


class Size(Strict):
    """Typical size of a benchmark in one language, for estimates of cost."""

    documents: PositiveInt
    read: PositiveInt  # tokens of one document, and of one exemplar
    written: NonNegativeInt = 0  # tokens generated per document; 0 if answers are only scored


class Data(Strict):
    """A table per language and split: a published file, or a data set of the Hub."""

    files: list[str] = []  # `.jsonl`, or tables with a header; the preferred first
    hub: list[str] = []  # names on the Hub, the current one first; the code is its configuration
    hub_splits: dict[str, str] = {}  # the Hub's names of splits if they differ
    # Columns to keep, or for each column of the task the column of the table; of several, the first
    # that the table has.
    columns: list[str] | dict[str, str | list[str]]
    label_numbers: list[str] = []  # labels that numbers in the column `label` mean
    strip: bool = False  # remove blanks around texts

    @property
    def sources(self) -> dict[str, list[str]]:
        """For each column of the task, the columns of the table that may hold it."""
        if isinstance(self.columns, list):
            return {name: [name] for name in self.columns}
        return {k: v if isinstance(v, list) else [v] for k, v in self.columns.items()}


class Exemplars(Strict):
    """Exemplars in another language than the documents: in turns, one of each label."""

    code: str  # of their language, in the data
    split: str
    language: str | None = None  # as mixes write it; the code when not given
    data: Data | None = None  # the benchmark's when not given


class Group(Strict):
    """One task per value of a column, in an lm-eval group."""

    by: str  # the column
    task: dict[str, Any] = {}  # further keys of the group


class Benchmark(Strict):
    """A benchmark. docs/evaluation.md has an example."""

    name: str = ""  # its file's when not given
    title: str
    paper: str = ""  # authors, year and address
    source: str  # address of the published data
    licence: str  # of the data
    languages: list[str] | Literal["any"]  # its own codes; `any` if users translate
    shots: NonNegativeInt = 0  # default number of exemplars
    metric: Metric  # metric and filter of the headline score
    document_metric: Metric | None = None  # of one document, where `metric` is over a whole corpus
    answers_in_language: bool = True  # true if answers should be in the language of the task
    runs_code: bool = False  # true if the metric runs programs that a model writes
    size: Size
    task_name: str  # pattern of the name of a task
    variants: list[dict[str, str]] = [{}]  # placeholders of several tasks per language
    splits: list[str] = []  # splits to write, in their order
    development: str | None = None  # published development split, a task of its own
    labels: list[str] = []  # labels of a classification; rows with other labels are left out
    data: Data | None = None  # the table of the documents
    exemplars: Exemplars | None = None  # exemplars in another language
    rows: str | None = None  # instead of `data`, a function `module:name`; see `flores.rows`
    group: Group | None = None  # split into one task per value of a column
    modules: dict[str, str] = {}  # Python modules to write beside the task, by name
    task: dict[str, Any]  # the task for lm-eval; `include` is relative to lm-eval's tasks

    _once = field_validator("labels")(once)

    @model_validator(mode="after")
    def _one_source(self) -> Benchmark:
        if (self.data is None) == (self.rows is None):
            raise ValueError("give either data or rows")
        if self.data is not None and not self.splits:
            raise ValueError("splits: name at least one split of the data")
        needed = {"labels": "label" if self.labels else None, "group": self.group and self.group.by}
        for key, column in needed.items():
            if self.data is not None and column and column not in self.data.sources:
                raise ValueError(f"{key}: data.columns has no column {column!r}")
        return self


class Suite(Strict):
    """Benchmarks that are evaluated together."""

    title: str
    paper: str = ""
    benchmarks: dict[str, NonNegativeInt]  # exemplars by benchmark: a name or a file


@dataclass(frozen=True)
class TaskPart:
    """A benchmark of a suite, and the number of exemplars in its prompt."""

    benchmark: Benchmark
    shots: int
    file: Path | None = None  # its YAML; None if it ships with the package


@dataclass(frozen=True)
class WrittenTask:
    """A task to evaluate on."""

    name: str  # lm-eval's name of the task or group
    benchmark: str
    language: str  # BCP 47 tag; empty if unknown
    metric: Metric  # metric and filter of the headline score
    document_metric: Metric | None = None  # of one document's score; `metric` when None
    in_language: bool = True  # true if answers should be in the language


# --- suites ---


def parts_of(suite: str) -> tuple[TaskPart, ...]:
    """Read the benchmarks of a suite, given by its name or its file (`.yaml`)."""
    path = Path(suite)
    if path.suffix != ".yaml":
        known = suite_names()
        if suite not in known:
            raise EvaluationError(f"no suite {suite!r}{nearest(suite, known)}")
        path = Path(__file__).parent / f"{suite}.yaml"
    whole = _read_suite(path, read_text(path))
    if isinstance(whole, TaskPart):
        return (whole,)
    return tuple(
        TaskPart(part.benchmark, shots, part.file)
        for name, shots in whole.benchmarks.items()
        for part in parts_of(str(path.parent / name) if name.endswith(".yaml") else name)
    )


@lru_cache(maxsize=64)
def _read_suite(path: Path, text: str) -> TaskPart | Suite:
    """Read a suite or a benchmark; cached, because the plan of a study asks for it again."""
    data, lines = parse_yaml(text, str(path))
    if isinstance(data, dict) and ("like" in data or {"base", "evaluate"} <= set(data)):
        raise EvaluationError(
            f"{path}: is a study, not a suite or a benchmark; run it by `layerswap study run`, or "
            "give the file in its evaluate.suite"
        )
    if not (isinstance(data, dict) and "benchmarks" in data):
        expected = "a benchmark is a mapping with `task` and `data`"
        benchmark = validate(Benchmark, data, where=str(path), expected=expected, lines=lines)
        named = benchmark.model_copy(update={"name": benchmark.name or path.stem})
        shipped = path.parent == Path(__file__).parent
        return TaskPart(named, named.shots, None if shipped else path)
    expected = "a suite is a mapping with `benchmarks`"
    return validate(Suite, data, where=str(path), expected=expected, lines=lines)


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
    """Write the tasks of a suite, given by name or file, in some languages.

    `skip` is called with a line per benchmark that a language does not have, which is an error when
    None; with `needed`, missing data are an error nevertheless. `development` adds the tasks of
    published development splits, where the data have one. Data that `data` may not fetch are no
    error.
    """
    parts = parts_of(suite)
    written: list[WrittenTask] = []
    elsewhere = False
    for language in languages:
        for part in parts:
            benchmark = part.benchmark
            code = None
            try:
                code = _code(benchmark, language, allow_code)
                count = part.shots if shots is None else shots
                if part.file is not None:
                    _warn_of_code(benchmark, part.file)
                names = write_benchmark(
                    benchmark, code, count, data.of(part.file), tasks, development=development
                )
                if development and benchmark.development and not names[-1].endswith(DEVELOPMENT):
                    (skip or str)(f"{benchmark.name} in {language}: no development split")
            except NotHereError as error:
                (skip or str)(f"{benchmark.name} in {language}: {error}")
                elsewhere = True
                continue
            except EvaluationError as error:
                if skip is None or len(parts) == 1 or (needed and code is not None):
                    raise
                skip(f"left out: {error}")
                continue
            written += [
                WrittenTask(
                    name, benchmark.name, standard_tag(language), benchmark.metric,
                    benchmark.document_metric, benchmark.answers_in_language,
                )
                for name in names
            ]  # fmt: skip
    if not written and not elsewhere:
        raise EvaluationError(f"{suite}: no benchmark of it is available in {', '.join(languages)}")
    return written


def _code(benchmark: Benchmark, language: str, allow_code: bool) -> str:
    if benchmark.runs_code and not allow_code:
        raise EvaluationError(
            f"{benchmark.name} runs programs that a model writes; allow it with --allow-code"
        )
    if benchmark.languages == "any":
        return standard_tag(language)
    code = match(language, benchmark.languages)
    if code is None:
        raise EvaluationError(f"{benchmark.name} does not have {language}")
    return code


def _warn_of_code(benchmark: Benchmark, file: Path) -> None:
    """Warn before the Python code of a user's benchmark runs."""
    if benchmark.rows or benchmark.modules or "!function" in str(benchmark.task):
        warnings.warn(
            f"{file}: runs Python code (rows, modules or !function), outside the sandbox",
            stacklevel=3,
        )


# --- tasks of a benchmark ---


def write_benchmark(
    benchmark: Benchmark,
    code: str,
    shots: int,
    data: DataFolder,
    tasks: TaskFolder,
    *,
    development: bool = False,
) -> list[str]:
    """Write the tasks of a benchmark in one language, given by the benchmark's code.

    With `development`, a published development split is a second task, named with the suffix
    `DEVELOPMENT`, if the data have the split.
    """
    names: list[str] = []
    for variant in benchmark.variants:
        values: dict[str, Any] = {"code": code, "shots": shots,
                                  "labels": [*map(Verbatim, benchmark.labels)]}  # fmt: skip
        values |= {key: filled(text, values) for key, text in variant.items()}
        name = str(filled(benchmark.task_name, values))
        try:
            parts = _splits(benchmark, values, data, development)
        except LayerswapError:
            raise
        except Exception as error:  # published files can be damaged in any way
            why = f"{type(error).__name__}: {one_line(error, 160)}"
            raise EvaluationError(
                f"{benchmark.title} in {code}: its files cannot be read ({why})"
            ) from error
        for suffix, splits in parts.items():
            _write_task(benchmark, name + suffix, splits, values, tasks)
            names.append(name + suffix)
        for module, text in benchmark.modules.items():
            tasks.module(filled(module, values), filled(text, values))
    return sorted(names, key=lambda name: name.endswith(DEVELOPMENT))


def _splits(
    benchmark: Benchmark, values: Mapping[str, Any], data: DataFolder, development: bool
) -> dict[str, dict[str, Rows]]:
    """Read the rows of each task by split; keys are suffixes of the task's name."""
    if benchmark.rows is not None:
        if data.translated:
            why = "reads its documents by Python code, so they have no translation"
            raise EvaluationError(f"{data.translated}: {benchmark.name} {why}")
        module, _, function = benchmark.rows.partition(":")
        return {"": getattr(importlib.import_module(module), function)(values, data)}
    table = benchmark.data
    assert table is not None, "a benchmark has data or rows"
    exemplars = {}
    if values["shots"] and (others := benchmark.exemplars) is not None:
        rows = _read(benchmark, others.data or table, others.code, others.split, data)
        exemplars = {others.split: _in_turns(rows)}

    def read(split: str) -> Rows:
        return _read(benchmark, table, values["code"], split, data)

    def here(split: str) -> bool:
        return data.find(*table_files(table, values["code"], split)) is not None

    tasks, known, scored = {}, benchmark.development, benchmark.splits[-1]
    # Files of the test documents without one of the development split have none; the Hub's data
    # sets have it.
    if development and known and (here(known) or (table.hub and not here(scored))):
        tasks[DEVELOPMENT] = {**exemplars, scored: read(known)}
    tasks[""] = {**exemplars, **{split: read(split) for split in benchmark.splits}}
    if (file := data.translated) is not None:
        made = _documents(benchmark, table, list(rows_of(file)), file)
        check_translation(file, made, tasks[""][scored])
        tasks[""][scored] = made
    return tasks


def check_translation(file: str, translated: Rows, test: Rows) -> None:
    """Refuse translations that are not as many as the test documents, or have other labels."""
    if len(translated) != len(test):
        raise EvaluationError(
            f"{file}: has {len(translated):,} documents, and the test has {len(test):,}; translate "
            "each of them, in the same order"
        )
    for number, (made, own) in enumerate(zip(translated, test, strict=True), start=1):
        if made.get("label") != own.get("label"):
            raise EvaluationError(
                f"{file}: document {number:,} has the label {made['label']!r:.40}, and the test "
                f"{own['label']!r:.40}; keep the order of the test"
            )


def suite_files(suite: str, language: str) -> list[Path]:
    """List the YAML files of a user's suite, and their data files in a language."""
    files = [Path(suite)] if suite.endswith(".yaml") else []
    for part in parts_of(suite):
        benchmark = part.benchmark
        if part.file is None:
            continue
        files.append(part.file)
        try:
            code = _code(benchmark, language, allow_code=True)
        except EvaluationError:
            continue  # it is left out, or refused before the first step
        beside = DataFolder(None).of(part.file)
        wanted = [
            (benchmark.data, code, split) for split in (*benchmark.splits, benchmark.development)
        ]
        if (exemplars := benchmark.exemplars) is not None:
            wanted.append((exemplars.data or benchmark.data, exemplars.code, exemplars.split))
        for table, table_code, split in wanted:
            names = table_files(table, table_code, split) if table and split else []
            files += filter(None, [beside.find(*names)])
    return list(dict.fromkeys(files))


def table_files(table: Data, code: str, split: str) -> list[str]:
    """List the names that the files of a table may have, the preferred first."""
    return [str(filled(name, {"code": code, "split": split})) for name in table.files]


def _write_task(
    benchmark: Benchmark,
    name: str,
    splits: Mapping[str, Rows],
    values: Mapping[str, Any],
    tasks: TaskFolder,
) -> None:
    """Write one task, or one per value of the column of `benchmark.group`, and their group."""
    group = benchmark.group
    members = {name: splits}
    if group is not None:
        parts: dict[str, dict[str, Rows]] = defaultdict(lambda: {split: [] for split in splits})
        for split, rows in splits.items():
            for row in rows:
                parts[row[group.by]][split].append(row)
        scored = benchmark.splits[-1]
        members = {f"{name}_{part}": data for part, data in sorted(parts.items()) if data[scored]}
    for member, written in members.items():
        files = tasks.rows(member, written)
        given: dict[str, Any] = {}
        for key, value in benchmark.task.items():
            if key != WITH_EXEMPLARS:
                given[key] = value
            elif value["fewshot_split"] in written:
                given |= value
        config = _by_column(filled(given, {**values, "files": files}), written)
        if "include" in config:
            import lm_eval

            config["include"] = str(
                Path(str(lm_eval.__file__)).parent / "tasks" / config["include"]
            )
        elif values["shots"] and EXEMPLARS.isdisjoint(config):
            # Without the name of the split, lm-eval may show a document its own answer.
            config["fewshot_split"] = config.get("test_split")
        tasks.task(member, config)
    if group is not None:
        tasks.task(name, {"group": name, "task": list(members), **group.task})


def _by_column(task: Mapping[str, Any], splits: Mapping[str, Rows]) -> dict[str, Any]:
    """Replace templates that only insert a column by the name of the column.

    lm-eval evaluates rendered digits and lists, and takes digits as positions of choices; so it
    still does where an answer is none of the choices.
    """
    rows = [row for split in splits.values() for row in split]
    named = dict(task)
    for key in ("doc_to_text", "doc_to_choice", "doc_to_target"):
        field = FIELD.fullmatch(str(task.get(key)))
        kinds = list if key == "doc_to_choice" else str | list
        if field and all(isinstance(row.get(field[1]), kinds) for row in rows):
            named[key] = field[1]
    target, choices = named.get("doc_to_target"), named.get("doc_to_choice")
    if isinstance(target, str) and target != task["doc_to_target"] and choices is not None:
        lists = (row.get(choices, ()) if isinstance(choices, str) else choices for row in rows)
        if not all(row[target] in known for row, known in zip(rows, lists, strict=True)):
            named["doc_to_target"] = task["doc_to_target"]
    if named.get("dataset_path") == "json":
        named["dataset_path"] = "parquet"
    return named


def _read(benchmark: Benchmark, table: Data, code: str, split: str, data: DataFolder) -> Rows:
    names = table_files(table, code, split)
    path = data.find(*names)
    if path is not None:
        rows, where = list(rows_of(path)), str(path)
    elif table.hub:
        where = next((name for name in table.hub if data.snapshot(name)), table.hub[0])
        copy = f"a copy of {where} (hf download --repo-type dataset {where})"
        wanted = f"{names[0]} of {benchmark.source}" if names else copy
        rows = hub_rows(where, code, table.hub_splits.get(split, split), data, wanted=wanted)
    else:
        beside = f"beside {benchmark.name}.yaml, or " if data.beside else ""
        raise EvaluationError(
            f"{benchmark.name}: no {names[0]} {beside}in the folder of --data or {VARIABLE}; its "
            f"source is {benchmark.source}"
        )
    return _documents(benchmark, table, rows, where)


def _documents(benchmark: Benchmark, table: Data, rows: Rows, where: str) -> Rows:
    """Return the rows of a table with the columns of the task."""
    if not rows:
        raise EvaluationError(f"{where}: has no rows")
    read = [
        {name: _cell(row, name, columns, table, where) for name, columns in table.sources.items()}
        for row in rows
    ]
    return _labelled(benchmark, read, where) if benchmark.labels else read


def _labelled(benchmark: Benchmark, rows: Rows, where: str) -> Rows:
    """Leave out rows without a label of the benchmark, with a warning."""
    kept = [row for row in rows if row["label"] in benchmark.labels]
    strange = {row["label"] for row in rows} - {*benchmark.labels}
    found = ", ".join(map(repr, sorted(strange)[:8]))
    wanted = f"label of {benchmark.name} ({', '.join(benchmark.labels)}); found {found:.100}"
    if not kept:
        raise EvaluationError(f"{where}: no row has a {wanted}")
    if strange:
        count = f"{len(rows) - len(kept):,} of {len(rows):,} rows"
        warnings.warn(f"{where}: {count} are left out: they have no {wanted}", stacklevel=2)
    return kept


def _cell(row: Mapping[str, Any], name: str, columns: list[str], table: Data, where: str) -> Any:
    """Return a cell as a text, or as a list of texts."""
    column = next((column for column in columns if column in row), None)
    if column is None:
        raise EvaluationError(f"{where}: has no column {columns[-1]!r}")
    value = row[column]
    if value is None:
        raise EvaluationError(f"{where}: a row has no {column!r}; the file has unequal rows")
    if name == "label" and isinstance(value, int):
        if not 0 <= value < len(table.label_numbers):
            raise EvaluationError(f"{where}: has an unknown label {value}")
        value = table.label_numbers[value]
    texts = [str(text).strip() if table.strip else str(text)
             for text in (value if isinstance(value, list) else [value])]  # fmt: skip
    return texts if isinstance(value, list) else texts[0]


def _in_turns(rows: Rows) -> Rows:
    """Interleave the labels: the first row of every label, the second of every label, and so on."""
    counts = Counter[str]()

    def turn(row: Mapping[str, Any]) -> int:
        counts[row["label"]] += 1
        return counts[row["label"]]

    return sorted(rows, key=turn)


def filled(node: Any, values: Mapping[str, Any]) -> Any:
    """Fill the placeholders of plain data; other names in braces stay."""
    return fill(node, PLACEHOLDER, lambda match: _value(match, values))


def _value(match: re.Match[str], values: Mapping[str, Any]) -> Any:
    name, whole = match[1], match[0]
    if name in values:
        return values[name]
    code = values.get(name.removesuffix("_name"))
    return whole if code is None or not name.endswith("_name") else language_name(code)
