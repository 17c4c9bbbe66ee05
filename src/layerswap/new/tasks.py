"""Tasks: one prompt for the training and for the benchmark, labels, and how answers are scored."""

from __future__ import annotations

import json
import random
import re
import shlex
import unicodedata
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Literal

from layerswap.evaluation.languages import language_name
from layerswap.evaluation.metrics import WRITTEN
from layerswap.evaluation.suites.mgsm import is_number, last_number
from layerswap.ground.errors import DataError, EvaluationError, error_context
from layerswap.ground.system import unusable_name
from layerswap.ground.types import Scoring, counted
from layerswap.new.tables import NAMES, RULES, Kind, Shape, Table, ending, read_table, recognise
from layerswap.reading.files import FORMATS
from layerswap.reading.letters import bare, folded, is_unspaced
from layerswap.training.mix.examples import conversation, shown
from layerswap.training.mix.schema import Messages
from layerswap.training.mix.templates import parse_template, text_of

MOST_LABELS = 200
SCORED = {
    "exact_match": "the whole answer (exact_match), as short answers with numbers are",
    "token_f1": "the F1 of the answer's words (token_f1), as questions with short answers are",
    "chrf++": "chrF++, the likeness of texts (0 to 100); ROUGE-L stands beside it",
    "rouge_l": "ROUGE-L, the longest sequence of words that both texts have",
}
LONG = ("chrf++", "rouge_l")
"""Scores of long answers, whose texts stay out of the training as questions do."""
SHORT = {False: 4, True: 10}
"""Largest median length of short answers: words, and characters in a script without spaces."""
CODE = re.compile(
    r"^\s*(def \w|return\b|import \w|print\s*\(|for \w+ in\b|(let|var|const|int) \w+ ?=|SELECT )|"
    r"[;{]\s*$|^\s*}\s*$|\w\(.*\)\s*$", re.MULTILINE
)  # fmt: skip
"""Matches an answer with a line of a program."""
WORKED = 8
"""Largest median number of words in short numeric answers; longer ones are worked solutions."""
LETTERS = "ABCDEFGHIJ"
ENGLISH = re.compile(r"[-_.](?:en|eng|english|train)$", re.IGNORECASE)
ROLE = re.compile(r"{(\w+)}")
NUMBERS = """\
from layerswap.evaluation.suites.mgsm import number_filter

numbers = number_filter('${code}')
"""
_NUMPY = re.compile(r"[\[{].*(dtype=object|(['\"])\s+['\"].*\2\s*\]$)", re.DOTALL)
"""Matches arrays that numpy or pandas wrote as texts, without commas."""
Coding = Literal["text", "name", "letter", "number"]
"""Form of an answer that identifies a choice."""
ANSWERS = {"answer", "label", "references"}
"""Roles of a document outside its question."""
Document = dict[str, Any]
"""A row by the roles of its columns."""


@dataclass(frozen=True)
class Task:
    """The task of a table."""

    table: Table
    shape: Shape
    tests: Sequence[tuple[str, Sequence[Document]]] = ()  # language codes and documents
    scoring: Scoring | None = None  # None: chosen by the answers
    original: Task | None = None  # whose rows these are in another language, under its prompt

    @cached_property
    def name(self) -> str:
        """The name of its benchmark, from the file's: letters, digits and dashes."""
        stem = ENGLISH.sub("", Path(self.table.name.partition(":")[0]).stem)
        name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
        return "task" if unusable_name(name) else name

    @cached_property
    def labelled(self) -> bool:
        """True if each answer is one of a few labels."""
        return "label" in self.shape.columns

    @cached_property
    def labels(self) -> list[str]:
        """The labels, sorted; empty without labels."""
        if self.original or not self.labelled:
            return self.original.labels if self.original else []
        count = len(self.table.rows)
        labels = sorted({document["label"] for document in self.complete})
        _check_forms(dict.fromkeys(labels, self.table.name))
        if not 2 <= len(labels) <= min(MOST_LABELS, count - 1):
            raise DataError(
                f"{self.table.name}: column {self.shape.columns['label']!r} has "
                f"{counted(len(labels), 'different label')} in {counted(count, 'row')}; a task of "
                f"labels has 2 to {MOST_LABELS}. Name another column by --columns label=COLUMN"
            )
        return labels

    @cached_property
    def complete(self) -> list[Document]:
        """The documents of its table, without incomplete ones."""
        return self.documents(self.table.rows)

    @cached_property
    def coding(self) -> Coding:
        """How the answers identify a choice; "text" for a task without choices."""
        return _coding(self.table.rows, self.shape)

    @cached_property
    def generates(self) -> bool:
        """True if the model writes the answer, false if it chooses."""
        return not (self.labelled or self.shape.kind == "choices")

    @cached_property
    def answers(self) -> list[tuple[str, list[str]]]:
        """All right answers of the task and of each test, with their language's code."""
        groups = [("en", self.complete), *self.tests] if self.generates else []
        return [(code, [text for document in group for text in _right_answers(document)])
                for code, group in groups]  # fmt: skip

    @cached_property
    def numeric(self) -> bool:
        """True if every answer of a test is a number or a worked solution that ends in one.

        Answers that are trained on must then end in numbers; without a test they decide.
        """
        if self.scoring or not self.generates:
            return self.generates and self.scoring == "number"
        (code, own), *tests = self.answers
        if not tests:
            return _are_numbers(own, code)
        return _end_in_numbers(own, code) and all(
            _are_numbers(answers, code) for code, answers in tests
        )

    @cached_property
    def metric(self) -> str:
        """The metric of the headline score."""
        if self.numeric or not self.generates:
            return "exact_match" if self.generates else "acc"
        if self.scoring:
            return self.scoring
        scored = [answer for _, answers in self.answers[bool(self.tests) :] for answer in answers]
        by_letter = is_unspaced("".join(scored))
        sizes = [len(answer) if by_letter else len(answer.split()) for answer in scored]
        if median(sizes) > SHORT[by_letter]:
            return "chrf++"
        with_numbers = all(any(map(str.isdigit, answer)) for answer in scored)
        return "exact_match" if with_numbers else "token_f1"

    def own_texts(self, documents: Sequence[Document]) -> list[str]:
        """List the roles to keep out of the training: the question, and long answers.

        Texts that most documents share, such as stock answers, are left out.
        """
        left_out = ANSWERS - ({"answer"} if self.metric in LONG else set())
        first, *others = (role for role in documents[0] if role not in left_out)
        counts = {role: len({str(document[role]) for document in documents}) for role in others}
        return [first, *(role for role, count in counts.items() if 2 * count > len(documents))]

    def kept_out(self, documents: Sequence[Document]) -> list[list[str]]:
        """Return the texts of each document that the training leaves out, with all long answers."""
        roles = [role for role in self.own_texts(documents) if role != "choices"]
        return [[text for role in roles
                 for text in (_right_answers(document) if role == "answer" else [document[role]])]
                for document in documents]  # fmt: skip

    @cached_property
    def composed(self) -> bool:
        """True if every answer is in composed form (NFC), as models write it."""
        answers = (document.get("answer", "") for document in self.complete)
        return all(unicodedata.is_normalized("NFC", answer) for answer in answers)

    @cached_property
    def prompt(self) -> str:
        """The template of the prompt, with roles in braces."""
        if self.original:
            return self.original.prompt
        usual = "Relation" if self.shape.kind == "pairs" else "Label"
        names = {role: name.casefold() for role, name in self.shape.columns.items()}
        if self.shape.kind == "answers" and not any(names[role] in NAMES[role] for role in names):
            question, answer = (
                _heading(self.shape.columns[role]) for role in ("question", "answer")
            )
            return f"{question}: {{question}}\n{answer}:"
        noun = RULES["nouns"].get(names.get("label", ""), usual)
        return str(RULES["prompts"][self.shape.kind]) + f"{noun}:" * self.labelled

    def documents(
        self, rows: Sequence[Mapping[str, Any]], shape: Shape | None = None
    ) -> list[Document]:
        """Rows by the roles of the task, without incomplete ones."""
        coding = self.coding if shape is None else _coding(rows, shape)
        shape, made = shape or self.shape, []
        for number, row in enumerate(rows, start=1):
            with error_context(f"row {number}"):
                made.append(_document(row, shape, coding))
        return [document for document in made if all(str(value) for value in document.values())]

    def rows(self, count: int) -> list[tuple[str, str]]:
        """Return prompts and completions of the first rows, formatted as in training."""
        return self.pairs(self.documents(self.table.rows[:count]))

    def pairs(self, documents: Sequence[Document]) -> list[tuple[str, str]]:
        """Return the prompts and completions of documents."""
        role = "label" if self.labelled else "answer"
        return [(self._ask(document), f" {document[role]}") for document in documents]

    def read_test(
        self, given: str, columns: Mapping[str, str], leave_out: Sequence[str], split: str
    ) -> tuple[list[Document], str]:
        """Read a test or development file, and check it against the task.

        Returns its documents, and a remark on incomplete or repeated rows, empty without any.
        """
        return self._checked(*_read(given, columns, self.shape.kind, split), leave_out)

    def _checked(
        self, table: Table, shape: Shape, leave_out: Sequence[str] = ()
    ) -> tuple[list[Document], str]:
        given = table.name + f" ({', '.join(table.kept)})" * bool(table.kept)
        with error_context(given):
            complete = self.documents(table.rows, shape)
        kept = [document for document in complete if document.get("label") not in leave_out]
        if not kept:
            raise DataError(f"{given}: has no complete row")
        if self.labelled and len({document["label"] for document in kept}) == 1:
            raise DataError(
                f"{given}: every row has the label {kept[0]['label']!r:.40}; give rows of at least "
                "two labels"
            )
        if strange := {document["label"] for document in kept if self.labelled} - {*self.labels}:
            own = dict.fromkeys(self.labels, self.table.name)
            _check_forms(own | dict.fromkeys(sorted(strange), given))
            words = shlex.join(word for label in sorted(strange) for word in ("--leave-out", label))
            share, remedy = "some", f"correct them, or leave their rows out by {words}"
            if all(document["label"] in strange for document in kept):
                share, remedy = "all", f"write {', '.join(self.labels):.80} in their place"
            raise DataError(
                f"{given}: {self.table.name} lacks {share} of its labels "
                f"({', '.join(sorted(strange)):.80}); {remedy}"
            )
        for line in self.contradictions(kept, "it", fewest=0.5):
            raise DataError(f"{given}: {line}")
        same = self.shared(kept, self.complete)
        if same > len(kept) / 4:
            raise DataError(
                f"{given}: {same:,} of its {len(kept):,} rows are also in {self.table.name}, on "
                "which the task expert trains; give other documents"
            )
        lost, known = len(table.rows) - len(complete), {*map(self._seen, kept)}
        remarks = [*table.kept, *[f"{lost:,} incomplete rows left out"] * bool(lost)]
        remarks += [f"{len(kept) - len(known):,} repeated"] * (len(known) < len(kept))
        return kept, f" ({', '.join(remarks)})" * bool(remarks)

    def translation(self, given: str, columns: Mapping[str, str]) -> Task:
        """Read the task's rows in another language, with the checks of a test."""
        table, shape = _read(given, columns, self.shape.kind)
        self._checked(table, shape)
        return Task(table, shape, original=self)

    def doubts(self) -> Iterator[str]:
        """Cautions on the labels of rows to train on."""
        where = Path(self.table.name).name
        counts = Counter(document["label"] for document in self.complete if self.labelled)
        single = [label for label, count in counts.items() if count == 1]
        missing = [label for label in self.labels if label not in counts]
        for found, names in (("have one row each", single), ("have no row", missing)):
            if names:
                yield f"Labels of the task {found} in {where}: {', '.join(sorted(names)):.200}."
        yield from self.contradictions(self.complete, where)

    def contradictions(
        self, documents: Sequence[Document], where: str, *, fewest: float = 0
    ) -> Iterator[str]:
        """Count texts with several labels in a line, if more than a share `fewest` has them."""
        asked: dict[str, dict[str, Document]] = {}
        for document in documents:
            if "label" in document:
                asked.setdefault(self._seen(document), {}).setdefault(document["label"], document)
        several = [[*by.values()] for by in asked.values() if len(by) > 1]
        if len(several) > fewest * len(asked):
            text = next(str(value) for role, value in several[0][0].items() if role not in ANSWERS)
            answers = ", ".join(str(one.get("answer", one["label"])) for one in several[0])
            yield (
                f"{len(several):,} of the {len(asked):,} texts in {where} have contradictory "
                f"labels, such as {text[:60]!r} ({answers}); keep one label of each."
            )

    def collisions(self) -> Iterator[str]:
        """Count different answers that are scored as equal, in a line for each table."""
        for code, answers in self.answers if self.numeric else ():
            numbers = {answer: last_number(answer, code) for answer in answers}
            if more := len(numbers) - len({*numbers.values()}):
                yield (f"{more:,} of {len(numbers):,} different answers in {code} end in the "
                       "number of another one, and count as equal to it")  # fmt: skip

    def shared(self, documents: Sequence[Document], others: Sequence[Document]) -> int:
        """Count the documents whose question looks like a question of the others."""
        seen = {*map(self._seen, others)}
        return sum(self._seen(document) in seen for document in documents)

    def held_out(self, most: int) -> list[list[int]]:
        """Draw a tenth of the questions, at most `most`, and return the positions of their rows.

        Labels keep their shares. A label's only question is not drawn, nor one with several labels.
        """
        rows: dict[str, list[int]] = {}
        labels: dict[str, set[str]] = {}
        for i, row in enumerate(self.table.rows):
            for document in self.documents([row]):
                rows.setdefault(seen := self._seen(document), []).append(i)
                labels.setdefault(seen, set()).add(document.get("label", ""))
        counts = Counter(label for by in labels.values() for label in by)
        asked = [seen for seen, (label, *more) in labels.items() if counts[label] > 1 and not more]
        asked = asked or [*rows]
        random.Random(0).shuffle(asked)
        asked.sort(key=lambda seen: min(labels[seen]))
        step = len(asked) / max(1, min(most, len(asked) // 10))
        return [rows[asked[int((i + 0.5) * step)]] for i in range(round(len(asked) / step))]

    def _seen(self, document: Document) -> str:
        """Return the question of a document, normalised as in `layerswap data`."""
        asked = [value for role, value in document.items() if role not in ANSWERS]
        return "\n".join(bare(str(value)) for value in asked)

    def source(self, path: str, benchmark: str | None = None) -> dict[str, Any]:
        """The keys of the source of a mix whose rows are documents of the task.

        `benchmark` is a file of `benchmark()` that has the prompt; None: the source has it.
        """
        completion = {"completion": " {label}" if self.labelled else " {answer}"}
        if benchmark is None:
            return {"path": path, "prompt": self.prompt, **completion}
        # A benchmark with choices has no template of the right one.
        own = completion if self.shape.kind == "choices" else {}
        return {"path": path, "task": benchmark, **own}

    def benchmark(
        self, name: str, languages: Sequence[str], size: Mapping[str, int]
    ) -> dict[str, Any]:
        """The keys of a benchmark; `size` is its `size`."""
        asked = ROLE.findall(self.prompt)
        answer = ["answer"] if self.generates else ["label"]
        choices = ["choices"] if self.shape.kind == "choices" else []
        return {
            "title": name,
            "source": self.table.name,
            "licence": "not known",
            "languages": [*languages],
            "metric": [self.metric, self._filter],
            "size": {**size, "written": size["written"] if self.generates else 0},
            "task_name": f"{name}_${{code}}_${{shots}}shot",
            "splits": ["test"],
            "development": "dev",
            **({"labels": self.labels} if self.labelled else {}),
            "data": {
                "files": ["../data/${code}.${split}.jsonl"],
                "columns": [*asked, *choices, *answer],
                "strip": True,
            },
            **({"modules": {"numbers_${code}": NUMBERS}} if self.numeric else {}),
            "task": {
                "dataset_path": "json",
                "dataset_kwargs": {"data_files": "${files}"},
                "test_split": "test",
                "num_fewshot": "${shots}",
                "doc_to_text": ROLE.sub(r"{{\1}}", self.prompt),
                # A text that lm-eval reads as the position of a choice.
                "doc_to_target": "{{label|int}}" if choices else f"{{{{{answer[0]}}}}}",
                **(self._generating(size["written"]) if self.generates else self._choosing),
                "metadata": {"version": 1, **self._written},
            },
        }

    @cached_property
    def _ask(self) -> Callable[[Document], str]:
        return parse_template(self.prompt, "plain").render

    @property
    def _filter(self) -> str:
        return "number" if self.numeric else "whole" if self.generates else "none"

    @property
    def _written(self) -> dict[str, list[str]]:
        """The metrics of written answers, the headline's first."""
        if not self.generates:
            return {}
        if self.metric in WRITTEN:
            return {"written": [self.metric, *["rouge_l"] * (self.metric == "chrf++")]}
        return {"written": [] if self.numeric else ["token_f1"]}

    @property
    def _choosing(self) -> dict[str, Any]:
        metric = {"metric": "acc", "aggregation": "mean", "higher_is_better": True}
        return {"output_type": "multiple_choice", "metric_list": [metric],
                "doc_to_choice": "${labels}" if self.labelled else "{{choices}}"}  # fmt: skip

    def _generating(self, tokens: int) -> dict[str, Any]:
        metric = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True,
                  "ignore_case": True}  # fmt: skip
        several = any("\n" in answer for _, answers in self.answers for answer in answers)
        number = {"function": "custom", "filter_fn": "!function numbers_${code}.numbers"}
        kept = number if self.numeric else {"function": "remove_whitespace"}
        heading = next(iter(re.findall(r"^([^{}:]+):", self.prompt, re.MULTILINE)), "Question")
        until = [f"\n{heading}:"] if several else ["\n"]
        return {
            "output_type": "generate_until",
            "generation_kwargs": {"until": until, "max_gen_toks": tokens, "do_sample": False},
            "filter_list": [{"name": self._filter, "filter": [kept, {"function": "take_first"}]}],
            "metric_list": [metric],
        }


def read_task(given: str, columns: Mapping[str, str]) -> Task:
    """The task of a table."""
    task = Task(*_read(given, columns))
    if len(task.table.rows) < 2:
        raise DataError(f"{given}: has one row; the task expert trains on its rows, give more")
    with error_context(given):
        complete = task.complete
    if not (task.labels or complete):
        raise DataError(f"{given}: has no complete row")
    return task


def found_in(task: Task) -> list[str]:
    """List the recognised columns, the scoring, and three training rows."""
    pairs = ", ".join(f"{role}={column}" for role, column in task.shape.columns.items())
    labels = (f'"{label}"' if "," in label else label for label in task.labels)
    scored = (
        f"; labels {', '.join(labels)}" if task.labels
        else "; choices" if not task.generates
        else "" if task.original
        else "; scored by the last number of the answer; --metric changes it" if task.numeric
        else f"; scored by {SCORED[task.metric]}; --metric changes it"
    )  # fmt: skip
    rows = len(task.table.rows)
    left_out = rows - len(task.complete)
    several = sum(len(row.get("references", ())) > 1 for row in task.table.rows)
    remarks = [
        *task.table.kept,
        *[f"{several:,} with several right answers"] * bool(several),
        *[f"{left_out:,} incomplete, left out"] * bool(left_out),
    ]
    count = counted(rows, "row") + f" ({', '.join(remarks)})" * bool(remarks)
    lines = [f"{task.table.name}: {count}, columns {pairs}{scored}"]
    lines += [f"  {line}" for line in task.collisions() if not task.original]
    return lines + [
        f"  {shown({'prompt': prompt, 'answer': answer})}" for prompt, answer in task.rows(9)[:3]
    ]


def found_in_test(
    given: str, split: str, documents: Sequence[Document], remark: str, name: str
) -> list[str]:
    """Describe a test or development file by its number of documents and its first document."""
    use = {"test": "test documents", "dev": "development documents",
           "translated": "translations of the test"}[split]  # fmt: skip
    return [f"{given}: {len(documents):,} {use} in {name}{remark}",
            f"  {shown(documents[0])}"]  # fmt: skip


def target(task: Task, document: Document, language: str) -> Document:
    """Reduce a numeric answer to its number; compose the letters (NFC) of others as in training."""
    if not task.generates:
        return document
    answers = _right_answers(document)
    if task.numeric:
        answers = [last_number(answer, language) or answer for answer in answers]
    elif task.composed:
        answers = [unicodedata.normalize("NFC", answer) for answer in answers]
    answer = answers if "references" in document else answers[0]
    return {**document, "answer": answer}


def _right_answers(document: Document) -> list[str]:
    answers: list[str] = document.get("references", [document["answer"]])
    return answers


def _read(
    given: str, columns: Mapping[str, str], kind: Kind | None = None, split: str = "train"
) -> tuple[Table, Shape]:
    """Read a table of the task, and recognise its columns."""
    table = read_table(given, split=split.replace("translated", "test"))
    with error_context(given):
        table = _with_answers(table, columns)
    return table, recognise(table, columns, kind)


def _with_answers(table: Table, columns: Mapping[str, str]) -> Table:
    """Read lists and objects that CSV holds as texts, and several right answers to a question.

    The column keeps the first answer, on which a model trains; `references` has all.
    """
    rows, csv = table.rows, FORMATS.get(ending(table.name)) == "csv"

    def cells_of(column: str) -> list[Any]:
        cells = [row[column] for row in table.rows]
        # AfriQA writes lists as texts whatever the format of its file.
        return _decoded(cells, column) if csv or column == "answers" else cells

    for role, column in product(("answer", "label", "choices", "messages"), table.columns):
        if column.casefold() not in NAMES[role] and column != columns.get(role):
            continue
        cells = cells_of(column)
        if role == "answer":
            listed = [_listed(cell, column) for cell in cells]
            for further in (name for name in table.columns if name.casefold() in RULES["further"]):
                both = zip(listed, cells_of(further), strict=True)
                listed = [_listed([*_several(a), *_several(b)], column) for a, b in both]
            if any(isinstance(cell, list) for cell in listed):
                texts = [cell if isinstance(cell, list) else [text_of(cell, column)]
                         for cell in listed]  # fmt: skip
                cells = [(one or [""])[0] for one in texts]
                if any(len(one) > 1 for one in texts) or "references" in table.columns:
                    rows = [{**row, "references": one}
                            for row, one in zip(rows, texts, strict=True)]  # fmt: skip
        if any(cell is not row[column] for cell, row in zip(cells, rows, strict=True)):
            rows = [{**row, column: cell} for row, cell in zip(rows, cells, strict=True)]
    return replace(table, rows=rows)


def _decoded(cells: list[Any], column: str) -> list[Any]:
    """Read the lists of texts and the objects in cells, by the rules of JSON or of Python.

    Returns the cells unchanged if one of them only looks like such a value.
    """
    read: dict[str, Any] = {}
    for text in cells:
        if not isinstance(text, str) or text[:1] not in ("[", "{"):
            continue
        if _NUMPY.match(text):
            raise DataError(
                f"column {column!r} holds lists as numpy prints them, which cannot be read back; "
                "save the table by `to_json(FILE, orient='records', lines=True)`"
            )
        for parse in (literal_eval, json.loads):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
                read[text] = parse(text)
        value = read.get(text)
        texts = all(isinstance(one, str | dict) for one in value or ())
        if column != "answers" and (value is None or not texts):
            return cells
    return [read.get(cell, cell) if isinstance(cell, str) else cell for cell in cells]


def _listed(cell: Any, column: str) -> Any:
    """Return the distinct texts of a list, of spans or of TriviaQA's aliases; else the cell."""
    if isinstance(cell, Mapping) and {"text", "value"} & cell.keys():
        text = cell.get("text", cell.get("value"))
        cell = text if isinstance(text, list) else [text, *(cell.get("aliases") or ())]
    if isinstance(cell, list):
        cell = [one.get("text") if isinstance(one, Mapping) else one for one in cell]
    if isinstance(cell, list):
        return [*dict.fromkeys(text for one in cell if (text := text_of(one, column)))]
    return cell


def _several(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell] * bool(cell)


def _are_numbers(answers: Sequence[str], language: str) -> bool:
    """True if the answers differ in a number alone, or end in one after a shared mark.

    Short answers with equal numbers, such as chapters of different books, are texts, and so are
    programs, and numbers with several units.
    """
    numbers = {answer: last_number(answer, language) for answer in answers}
    if not _end_in_numbers(answers, language):
        return False
    if 2 * sum(CODE.search(answer) is not None for answer in answers) > len(answers):
        return False
    words, heads, marks = [], set(), set()
    for answer, number in numbers.items():
        parts = answer.split()
        words.append(len(parts))
        at = next((i for i in reversed(range(len(parts)))
                   if last_number(" ".join(parts[i:]), language) == number), 0)  # fmt: skip
        unit = re.sub(r"[\W\d_]+", "", " ".join(parts[at:]))
        heads.add(re.sub(r"[\W_]+", " ", f"{' '.join(parts[:at])} {unit}").strip().casefold())
        marks |= {*parts[max(0, at - 1) : at], *([unit] if unit else [])}
    worked = median(words) > WORKED
    alone = len({*numbers.values()}) == len(numbers) and not any(
        map(re.compile(r"\d").search, heads)
    )
    shared = len(marks) == 1 and (worked or alone)
    return len(heads - {""}) < 2 or (shared and not marks & {*"+-*/=", "return"})


def _end_in_numbers(answers: Sequence[str], language: str) -> bool:
    """True if each answer ends in a number, or in a number and a unit."""
    return all(is_number(re.sub(r"\s*[^\W\d]+$", "", answer), language)
               or is_number(answer, language) for answer in answers)  # fmt: skip


def _heading(column: str) -> str:
    """Return the heading of a text: the name of its language or of its column."""
    with suppress(EvaluationError):
        if len(column) == 2:
            return language_name(column)
    return re.sub(r"[_{}]", " ", column).strip().capitalize()


def _check_forms(files: Mapping[str, str]) -> None:
    """Refuse labels that differ in spelling alone, such as `Yes` and `yes`, or `1` and `1.0`.

    `files` has the file of each label.
    """
    first: dict[str, str] = {}
    for label, file in files.items():
        if (other := first.setdefault(spelling(label), label)) != label:
            where = f" of {files[other]}" * (files[other] != file)
            raise DataError(
                f"{file}: the labels {other!a}{where} and {label!a} read alike; write them in one "
                "form"
            )


def spelling(text: str) -> str:
    """Fold a text, with single spaces, and without `.0` at the end of a number."""
    return re.sub(r"(?<=\d)\.0+$", "", " ".join(folded(text).split()))


def _document(row: Mapping[str, Any], shape: Shape, coding: Coding) -> Document:
    if shape.kind == "messages":
        turns = conversation(row[shape.columns["messages"]], Messages(column="messages"))
        if len(turns) > 2:
            raise DataError(
                f"{len(turns) - 1} messages stand before the answer, and a test has one prompt; "
                "join them in one message, or train on them by `layerswap train`"
            )
        prompt = "\n".join(content for _, content in turns[:-1])
        return {"prompt": prompt, "answer": turns[-1][1] if turns else ""}
    cells = {role: row[column] for role, column in shape.columns.items()}
    texts = {role: text_of(cell, role) for role, cell in cells.items() if role != "choices"}
    if shape.kind != "choices":
        several = "answer" in cells and "references" in row
        return {**texts, "references": row["references"]} if several else texts
    choices, answer = _choices(cells["choices"]), texts["answer"]
    at = _position(answer, cells["choices"], coding) if choices and answer else None
    label, answer = ("", "") if at is None else (str(at), choices[at])
    return {"question": texts["question"], "choices": choices, "label": label, "answer": answer}


def _choices(cell: Any) -> list[str]:
    """Return the texts of a row's choices, which are a list or a mapping of `text` and `label`."""
    if isinstance(cell, Mapping):
        names, cell = cell.get("label"), cell.get("text")
        if not (isinstance(names, list) and isinstance(cell, list) and len(names) == len(cell)):
            raise DataError(
                "the choices are a mapping without equally long lists `text` and `label`"
            )
    if not isinstance(cell, list | None):
        raise DataError(f"the choices are not a list of texts, but {cell!s:.40}; write a list")
    if not all(isinstance(choice, str | int | float) for choice in cell or ()):
        raise DataError(f"a choice is not a text: {cell!s:.40}")
    return [str(choice).strip() for choice in cell or ()]


def _position(answer: str, cell: Any, coding: Coding) -> int | None:
    """Return the position of the right choice, or None if the answer has another form."""
    choices = _choices(cell)
    if coding in ("text", "name"):
        known = choices if coding == "text" else [*map(str, cell["label"])]
        return known.index(answer) if answer in known else None
    letter = LETTERS.find(answer.upper()) if len(answer) == 1 else -1
    number = int(answer) if answer.isdecimal() else -1
    at = letter if coding == "letter" else number
    return at if 0 <= at < len(choices) else None


def _coding(rows: Sequence[Mapping[str, Any]], shape: Shape) -> Coding:
    """Find the form that all answers of a table share; training and test must read the same."""
    left: list[Coding] = ["text", "letter", "number"]
    if shape.kind != "choices":
        return left[0]
    cells = [row[shape.columns["choices"]] for row in rows]
    if any(isinstance(cell, Mapping) for cell in cells):  # as in ARC and CommonsenseQA
        left = ["name"]  # a column of a data set has one type
    for number, (row, cell) in enumerate(zip(rows, cells, strict=True), start=1):
        with error_context(f"row {number}"):
            choices, answer = _choices(cell), text_of(row[shape.columns["answer"]], "answer")
            if not (answer and choices):
                continue
            fitting = [coding for coding in left if _position(answer, cell, coding) is not None]
            if not fitting:
                raise DataError(
                    f"{answer!r:.40} is none of the choices, or has another form than earlier "
                    "answers; write all as letters from A, as numbers from 0, or as texts"
                )
        left = fitting
    answers = {text_of(row[shape.columns["answer"]], "answer") for row in rows}
    if left[0] == "number" and "0" not in answers and len(rows) > 8 * len(choices):
        raise DataError("no answer is choice 0; count from 0, or write letters from A, or texts")
    return left[0]
