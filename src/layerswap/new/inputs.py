"""Checks the arguments of `layerswap new` before anything is written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any

from layerswap.checkpoint import Checkpoint, open_checkpoint, text_config
from layerswap.checkpoint.loading import load_tokenizer, open_device, pick_device
from layerswap.evaluation.classifier import open_encoder
from layerswap.evaluation.languages import Seen, language_name, languages_seen, standard_tag
from layerswap.evaluation.metrics import normalised
from layerswap.evaluation.suites import suite_names
from layerswap.evaluation.suites.suites import check_askable, check_translation
from layerswap.ground.errors import DataError, RecipeError, StudyError
from layerswap.ground.types import Scoring, counted
from layerswap.new.tables import Table, code_of, is_table, read_parallel, read_texts
from layerswap.new.tasks import Document, Task, read_task
from layerswap.reading.files import evenly_spaced
from layerswap.reading.letters import bare
from layerswap.study.spec import FOLDS
from layerswap.training.mix.card import unknown_warning
from layerswap.training.mix.examples import shown
from layerswap.training.mix.schema import ready_recipes
from layerswap.training.mix.templates import parse_template, text_of

SAMPLE = 200
HELD_OUT = 100
"""Most questions of the task that are held out: for a score in English, or in place of a test."""
TASK_LANGUAGE = "en"
FEW = 100
"""Test documents below which the report has a caution."""


@dataclass(frozen=True)
class Request:
    """The user's arguments; files and names by language."""

    folder: Path
    base: str
    languages: Sequence[str]  # standard codes
    task: str
    texts: Mapping[str, str]
    parallel: Mapping[str, tuple[str, str]]
    tests: Mapping[str, str]
    developments: Mapping[str, str]
    translated_tests: Mapping[str, str] = field(default_factory=dict)
    translated_tasks: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    leave_out: Sequence[str] = ()
    metric: Scoring | None = None
    seeds: int | None = None
    trial: bool = False
    encoder: str | None = None
    device: str | None = None

    @property
    def documents(self) -> dict[str, Mapping[str, str]]:
        """Files of test documents, by split and language."""
        return {
            "test": self.tests,
            "dev": {**self.labels, **self.developments},
            "translated": self.translated_tests,
        }


@dataclass(frozen=True)
class LanguageInput:
    """The data of one language."""

    code: str
    name: str  # in English
    ready: str | None  # a ready mix
    text: Table | None
    parallel: Table | None
    other: str  # column of the other language in `parallel`
    tests: Mapping[str, list[Document]]  # documents by split, from files
    remarks: Mapping[str, str]  # on incomplete or repeated rows, by split
    proved: bool  # false without a test
    task: Task | None = None  # the task in the language, by a translator
    labelled: Task | None = None  # rows of the task in the language, to train on at the end

    @property
    def tables(self) -> list[tuple[Table, str]]:
        """Its files, each with the column of the texts in the language."""
        columns = ((self.text, "text"), (self.parallel, self.code))
        return [(table, column) for table, column in columns if table is not None]

    def templates(self) -> Iterator[tuple[str, Table, str, int]]:
        """The sources of its mix: name, table, template of a text, weight."""
        if self.text is not None:
            yield "text", self.text, "{text}", 3
        if (pairs := self.parallel) is not None:
            other = "English" if self.other == "en" else language_name(self.other)
            own, theirs = f"{{{self.code}}}", f"{{{self.other}}}"
            if self.text is None:
                yield "text", pairs, own, 3
            yield f"to-{self.code}", pairs, f"{other}: {theirs}\n{self.name}: {own}", 1
            yield f"from-{self.code}", pairs, f"{self.name}: {own}\n{other}: {theirs}", 1

    @property
    def rows(self) -> int:
        """The largest number of examples in its mix, where one of its files ends."""
        weighed = [(table.count, weight) for _, table, _, weight in self.templates()]
        whole = sum(weight for _, weight in weighed)
        return min(count * whole // weight for count, weight in weighed)

    def found(self) -> list[str]:
        """Describe each of its files with its first texts, and with languages that seem others."""
        lines = []
        for table, column in self.tables:
            texts = [row[column] for row in table.rows]
            full = [text for text in texts if text_of(text, column)]
            few = "at least " * (len(texts) < table.count)
            empty = f" ({few}{len(texts) - len(full):,} empty)" if len(full) < len(texts) else ""
            form = {"text": ", one on each line", "paragraphs": ", between blank lines"}
            how = form.get(table.keys.get("format", ""), "")
            how += "".join(f", {remark}" for remark in table.kept)
            lines += [f"{table.name}: {counted(table.count, 'text')}{empty} in {self.name}{how}"]
            lines += [f"  {shown({'text': text})}" for text in full[:3]]
            seen = self._languages_seen(full)
            if seen and not seen.clear:  # a clear language is a caution
                lines.append(f"  {seen.words}")
        if self.parallel is not None:
            shares = "three fifths plain text, a fifth translations each way"
            lines.append(f"  the expert trains on {self.rows:,} rows: {shares}")
        return lines

    def _languages_seen(self, texts: Sequence[Any]) -> Seen | None:
        """Describe the other languages among its texts."""
        return languages_seen(map(str, evenly_spaced(texts, SAMPLE)), self.code)

    def cautions(self, task: Task | str) -> Iterator[str]:
        """Cautions for the report: a leaked test, another language, a missing or small test."""
        written = [text for text in self.own_texts() if text.strip()]
        lines, read = {*map(bare, written)}, {"The text": written}
        for split, use in (("test", "test"), ("dev", "development")):
            documents = self.tests.get(split, [])
            own = task.kept_out(documents) if documents and isinstance(task, Task) else []
            shared = sum(any(bare(text) in lines for text in texts) for texts in own)
            if shared:
                yield (f"The text in {self.name} has {shared:,} of the {len(documents):,} {use} "
                       "documents; the expert trains without them.")  # fmt: skip
            read[f"The {use} documents"] = [text for texts in own for text in texts]
        for what, texts in read.items():
            if (seen := self._languages_seen(texts)) and seen.clear:
                yield f"{what} may be in another language than {self.name}: {seen.words}."
        count = len(self.tests.get("test", ()))
        if not self.proved:
            yield (f"{self.name} has no test: its results are on held-out rows of the task, and "
                   "prove nothing in the language.")  # fmt: skip
        elif 0 < count < FEW:
            reach = round(98 / count**0.5)
            yield (f"The test in {self.name} has {counted(count, 'document')}: intervals of scores "
                   f"reach up to {reach} points on each side.")  # fmt: skip

    def own_texts(self) -> list[str]:
        """Return the texts in the language itself, as read."""
        return [str(row[column] or "") for table, column in self.tables for row in table.rows]

    def texts(self) -> list[str]:
        """Return the first texts of every source, formatted as in training."""
        return [
            render(row)
            for _, table, template, _ in self.templates()
            for render in [parse_template(template, "plain").render]
            for row in table.rows[:SAMPLE]
        ]


@dataclass(frozen=True)
class Inputs:
    """The checked inputs of a study."""

    request: Request
    base: Checkpoint
    tokenizer: Any
    device: str
    task: Task | str  # a ready mix by name
    suite: str | None  # a ready suite
    languages: list[LanguageInput]
    held_out: list[list[int]]  # rows of the task, by question
    cautions: list[str] = field(default_factory=list)  # sentences for the report

    @cached_property
    def billions(self) -> float:
        """Parameters of the base, in billions."""
        return sum(tensor.elements for tensor in self.base.tensors.values()) / 1e9

    @property
    def task_name(self) -> str:
        """The name of the task's mix and benchmark."""
        return self.task if isinstance(self.task, str) else self.task.name

    @property
    def task_count(self) -> int:
        """The rows of the task; a guess for a ready mix."""
        return len(self.task.table.rows) if isinstance(self.task, Task) else 2000

    @cached_property
    def longest(self) -> int:
        """The most tokens that the base reads."""
        config = text_config(self.base.config)
        return int(config.get("max_position_embeddings") or 1 << 20)

    def tokens(self, text: str) -> int:
        """The number of tokens of a text."""
        return len(self.tokenizer(text)["input_ids"])

    @cached_property
    def task_rows(self) -> list[tuple[str, str]]:
        """Prompts and completions of the task; for a ready task, texts of the language."""
        if isinstance(self.task, Task):
            return self.task.rows(SAMPLE)
        texts = [text for language in self.languages for text in language.texts()][:SAMPLE]
        return [("Text:", f" {text}") for text in texts or ["a text of usual length"]]

    @cached_property
    def most_written(self) -> int:
        """The token limit of a written answer; long prompts leave it half of the context."""
        assert isinstance(self.task, Task)
        asked = self.task.pairs([document for _, test in self.task.tests for document in test])
        prompts, _ = zip(*self.task_rows, *asked, strict=True)
        answers = [answer for _, answer in self.task_rows]
        answers += [f" {text}" for _, texts in self.task.answers[1:] for text in texts]
        longest = max(map(self.tokens, answers))
        room = max(self.longest // 2, self.longest - max(map(self.tokens, prompts)))
        return max(16, min(2 * longest, max(longest, 512), room))

    def unwritable(self, language: LanguageInput) -> Iterator[str]:
        """Yield cautions on unknown tokens and on cut prompts and answers."""
        if said := unknown_warning(({"text": text} for text in language.texts()), self.tokenizer):
            yield f"The text in {language.name}: {said}."
        task, test = self.task, language.tests.get("test", ())
        if not (isinstance(task, Task) and task.generates and test) or task.numeric:
            return
        pairs, room = task.pairs(test), self.longest - self.most_written
        codes = {answer: self.tokenizer(answer)["input_ids"] for _, answer in pairs}
        cut = sum(self.tokens(prompt) > room for prompt, _ in pairs)
        long = sum(len(ids) > self.most_written for ids in codes.values())
        lost = sum(normalised(self.tokenizer.decode(ids, skip_special_tokens=True))
                   != normalised(answer) for answer, ids in codes.items())  # fmt: skip
        of_them = f"of the {len(codes):,} right answers in {language.name}"
        if cut:
            yield (f"{cut:,} of the {len(pairs):,} prompts in {language.name} lose their "
                   f"beginning: they have more than the {room:,} tokens that the base reads "
                   "before an answer; shorten them, or give a base that reads more.")  # fmt: skip
        if long:
            yield (f"No model can write {long:,} {of_them}: they have more than "
                   f"{self.most_written:,} tokens.")  # fmt: skip
        if lost:
            yield (f"No model can write {lost:,} {of_them}: the base's tokenizer lacks some of "
                   "their letters.")  # fmt: skip

    def longest_row(self, most: int) -> tuple[str, str]:
        """Return the task's longest row below `most` tokens: its prompt and its completion."""
        rows = self.task.rows(self.task_count) if isinstance(self.task, Task) else self.task_rows
        sizes = {row: self.tokens("".join(row)) for row in rows}
        return max(rows, key=lambda row: (sizes[row] < most, sizes[row]))

    def mean_tokens(self, language: LanguageInput) -> int:
        """The mean length of the examples in the language's mix."""
        return max(1, round(mean(self.tokens(text) for text in language.texts())))


def check_request(request: Request) -> Inputs:
    """Read and check a request."""
    if request.folder.exists():
        raise StudyError(f"{request.folder}: exists already; choose another name, or delete it")
    columns, codes = request.columns, (*request.languages, TASK_LANGUAGE)
    request = replace(request, columns={k: v for k, v in columns.items() if k not in codes})
    device = pick_device(request.device)
    open_device(device)
    if request.encoder is not None:
        open_encoder(request.encoder, "cpu")
    base, tokenizer = _open_base(request.base)
    ready = request.task in ready_recipes() and not Path(request.task).exists()
    task: Task | str = request.task if ready else read_task(request.task, request.columns)
    if request.metric and not (isinstance(task, Task) and task.generates):
        raise RecipeError(f"--metric {request.metric}: is for a task file with written answers")
    task = replace(task, scoring=request.metric) if isinstance(task, Task) else task
    named = {*request.tests.values()} & {*suite_names()}
    suites = {name for name in named if not Path(name).exists()}
    suite = _check_suites(request, suites, ready)
    if request.leave_out and not isinstance(task, Task):
        raise RecipeError(f"--leave-out needs a task file; {task} is a ready mix")
    languages = [_language(request, code, task, suite, columns) for code in request.languages]
    if isinstance(task, Task):
        task = replace(task, tests=[
            (TASK_LANGUAGE if split == "translated" else language.code, documents)
            for language in languages for split, documents in language.tests.items()
        ])  # fmt: skip
        if request.translated_tests and task.generates and not task.numeric:
            raise RecipeError(
                "--translated-test: answers that are written in two languages cannot be compared; "
                "it takes labels, choices and numbers"
            )
    held: list[list[int]] = []
    if isinstance(task, Task) and (suite is None or not all(one.proved for one in languages)):
        held = task.held_out(HELD_OUT)
    return Inputs(request, base, tokenizer, device, task, suite, languages, held)


def _open_base(given: str) -> tuple[Checkpoint, Any]:
    if given == "lab":
        from layerswap.lab.assets import shipped

        given = str(shipped().base)
    base = open_checkpoint(given)
    tokenizer = load_tokenizer(base.folder, named=f"--base {given}")
    if tokenizer.eos_token is None:
        raise StudyError(f"--base {given}: its tokenizer has no end-of-sequence token")
    return base, tokenizer


def _check_suites(request: Request, suites: set[str], ready: bool) -> str | None:
    files = [test for test in request.tests.values() if test not in suites]
    if len(suites) > 1 or (suites and files):
        raise RecipeError("--test: give one suite for all languages, or files")
    if ready and not suites:
        raise RecipeError(
            f"--task {request.task}: a ready mix goes with a suite, such as --test mgsm; there are "
            f"{', '.join(suite_names())}"
        )
    for suite in suites:
        for language in request.languages:
            check_askable(suite, language)
        return suite
    return None


def read_languages(given: Sequence[str]) -> dict[str, str | None]:
    """Parse `CODE` and `CODE=FILE`; return the files by standard language code."""
    files: dict[str, str | None] = {}
    first: dict[str, str] = {}
    for entry in given:
        name, _, file = entry.partition("=")
        code = standard_tag(name)
        if code in files:
            raise RecipeError(
                f"--language: {first[code]} and {entry} are the same language; give it once, "
                f"such as --language {code}=FILE"
            )
        files[code], first[code] = file or None, entry
    return files


def _language(
    request: Request, code: str, task: Task | str, suite: str | None, columns: Mapping[str, str]
) -> LanguageInput:
    text, pair = request.texts.get(code), request.parallel.get(code)
    if text is None and pair is None:
        raise RecipeError(
            f"--language {code}: has no text; give --text FILE, --parallel FILE FILE or "
            f"--language {code}=FILE"
        )
    ready = text if text in ready_recipes() and not Path(text or "").exists() else None
    if ready and pair:
        raise RecipeError(f"--text {ready}: is a ready mix; give it without --parallel")
    tests: dict[str, list[Document]] = {}
    remarks: dict[str, str] = {}
    for split, files in request.documents.items():
        given = files.get(code)
        if given is None or given == suite:
            continue
        if not isinstance(task, Task):
            raise RecipeError(f"{given}: a test file needs a task from a file; give a suite")
        tests[split], remarks[split] = task.read_test(
            given, request.columns, request.leave_out, split
        )
    if alone := next((split for split in tests if "test" not in tests), None):
        raise RecipeError(f"{request.documents[alone][code]}: needs a --test file")
    test, development = tests.get("test", ()), tests.get("dev", ())
    if "translated" in tests:
        check_translation(request.translated_tests[code], tests["translated"], tests["test"])
    in_language, labelled = (
        _in_language(option, files.get(code), task, test, request.columns)
        for option, files in (("--translated-task", request.translated_tasks),
                              ("--labels", request.labels))
    )  # fmt: skip
    if labelled and len(labelled.complete) < FOLDS:
        raise DataError(
            f"{request.labels[code]}: has {counted(len(labelled.complete), 'complete row')}; "
            f"cross-validation needs {FOLDS}, and a training about a hundred"
        )
    shared = task.shared(development, test) if isinstance(task, Task) else 0
    if shared > len(development) / 4:
        raise DataError(
            f"{request.documents['dev'][code]}: {shared:,} of its rows are also in the test, so "
            "a choice here would flatter its score; give other documents"
        )
    if labelled and (tested := labelled.shared(labelled.complete, test)):
        raise DataError(
            f"{request.labels[code]}: test documents among its rows: {tested:,}; leave them out, "
            "since no model may train on them"
        )
    parallel, other = _parallel(pair, code, columns) if pair else (None, "")
    read = None if text is None or ready else read_texts(text, code, columns)
    if code in columns and not any(table and table.fields for table in (read, parallel)):
        raise RecipeError(
            f"--columns {code}={columns[code]}: no file of text in {code} has columns"
        )
    name = language_name(code)
    name = code if name.startswith("Unknown") else name
    return LanguageInput(code, name, ready, read, parallel, other, tests, remarks,
                         suite is not None or "test" in tests, in_language, labelled)  # fmt: skip


def _in_language(
    option: str,
    given: str | None,
    task: Task | str,
    test: Sequence[Document],
    columns: Mapping[str, str],
) -> Task | None:
    """Read rows of the task in a language, to train on."""
    if given is None:
        return None
    if not (isinstance(task, Task) and test):
        raise RecipeError(f"{option} {given}: needs a --task file and a --test file")
    return task.translation(given, columns)


def _parallel(pair: tuple[str, str], code: str, columns: Mapping[str, str]) -> tuple[Table, str]:
    """Read a pair of files, one in the language and one in another, in either order."""
    if pair[0] == pair[1] and is_table(pair[0]):
        return read_parallel(pair, (code, "en"), columns), "en"
    named = [code_of(given, code) for given in pair]
    files = pair[::-1] if named[1] == code and named[0] != code else pair
    other = named[pair.index(files[1])] or "en"
    if other == code:
        raise DataError(f"{pair[0]} and {pair[1]} are both in {code}; give two languages")
    return read_parallel(files, (code, other)), other
