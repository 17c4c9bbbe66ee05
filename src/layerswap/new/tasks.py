"""Tasks: one prompt for the training and for the benchmark, labels, and how answers are scored."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layerswap.errors import DataError
from layerswap.evaluation.suites.mgsm import last_number
from layerswap.new.columns import MOST_LABELS, Shape, examples, recognise
from layerswap.new.tables import Table, read_table

PROMPTS = {
    "labels": "Text: {text}\n",  # and the label's noun, as the suites have it
    "pairs": "Premise: {premise}\nHypothesis: {hypothesis}\n",
    "choices": "Question: {question}\nAnswer:",
    "answers": "Question: {question}\nAnswer:",
    "prompts": "{prompt}",
    "messages": "{prompt}",
}
"""Prompts with the roles of the columns; the answer follows after a space."""
NOUNS = {"topic": "Topic", "category": "Topic", "sentiment": "Sentiment", "intent": "Intent"}
LETTERS = "ABCDEFGHIJ"
ENGLISH = re.compile(r"[-_.](?:en|eng|english|train)$", re.IGNORECASE)
Document = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task that a table teaches."""

    table: Table
    shape: Shape

    @cached_property
    def name(self) -> str:
        """The name of its benchmark, from the file's: letters, digits and dashes."""
        stem = ENGLISH.sub("", Path(self.table.name.partition(":")[0]).stem)
        return re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-") or "task"

    @cached_property
    def labelled(self) -> bool:
        """True if each answer is one of a few labels."""
        return "label" in self.shape.columns

    @cached_property
    def labels(self) -> list[str]:
        """The labels, sorted; empty without labels."""
        if not self.labelled:
            return []
        found = sorted({label for row in self.table.rows if (label := self._text(row, "label"))})
        if not 2 <= len(found) <= min(MOST_LABELS, len(self.table.rows) - 1):
            raise DataError(
                f"{self.table.name}: column {self.shape.columns['label']!r} has {len(found):,} "
                f"different labels in {len(self.table.rows):,} rows; a task of labels has 2 to "
                f"{MOST_LABELS}. Name another column by --columns label=COLUMN"
            )
        return found

    @cached_property
    def numeric(self) -> bool:
        """True if every answer ends with a number, which alone is then compared."""
        if self.shape.kind not in ("answers", "prompts", "messages"):
            return False
        answers = [document["answer"] for document in self.documents(self.table)]
        ends = re.compile(r"\d[^\w]*$")
        return all(ends.search(answer) for answer in answers)

    @cached_property
    def prompt(self) -> str:
        """The template of the prompt, with roles in braces."""
        noun = ""
        if self.labelled:
            column = self.shape.columns["label"].casefold()
            usual = "Relation" if self.shape.kind == "pairs" else "Label"
            noun = f"{NOUNS.get(column, usual)}:"
        return PROMPTS[self.shape.kind] + noun

    def documents(self, table: Table, shape: Shape | None = None) -> list[Document]:
        """The rows of a table by the roles of the task, without empty ones."""
        read = shape or self.shape
        made = [self._document(row, read) for row in table.rows]
        return [one for one in made if all(str(value).strip() for value in one.values())]

    def read_test(
        self, given: str, columns: Mapping[str, str], leave_out: Sequence[str], split: str
    ) -> list[Document]:
        """The documents of a test or development file, checked against the task."""
        table = read_table(given, split=split)
        shape = recognise(table, columns, self.shape.kind)
        found = [one for one in self.documents(table, shape) if one.get("label") not in leave_out]
        if not found:
            raise DataError(f"{given}: has no complete row")
        if self.labelled:
            known = set(self.labels) - {*leave_out}
            strange = [one["label"] for one in found if one["label"] not in known]
            if strange:
                names = ", ".join(sorted(set(strange)))
                raise DataError(
                    f"{given}: {len(strange):,} of {len(found):,} rows have labels that "
                    f"{self.table.name} lacks: {names:.100}; correct them, or leave these rows "
                    f"out by --leave-out {','.join(sorted(set(strange)))[:60]}"
                )
        seen = set(map(_key, self.documents(self.table)))
        same = sum(_key(one) in seen for one in found)
        if same > len(found) / 4:
            raise DataError(
                f"{given}: {same:,} of its {len(found):,} rows are in {self.table.name} too, on "
                "which the task expert trains; give other documents"
            )
        return found

    def source(self, folder: Path) -> dict[str, Any]:
        """The keys of the source of the task's mix, for a mix in `folder`."""
        keys = self.table.source(folder)
        kind, names = self.shape.kind, self.shape.columns
        if kind == "messages":
            return {**keys, "messages": {"column": names["messages"]}}
        if kind == "choices":
            first = next(iter(self.table.rows))[names["answer"]]
            answer, choices = names["answer"], names["choices"]
            at = f"{answer}|int" if _is_number(first) else f"'{LETTERS}'.index({answer}|string)"
            right = f"{choices}[{at}]" if _is_index(first) else answer
            return {**keys, "template": "jinja", "completion": f" {{{{ {right} }}}}",
                    "prompt": self.prompt.replace("{question}", f"{{{{ {names['question']} }}}}")}  # fmt: skip
        prompt = re.sub(r"{(\w+)}", lambda match: f"{{{names[match[1]]}}}", self.prompt)
        answer = names["label" if self.labelled else "answer"]
        return {**keys, "prompt": prompt, "completion": f" {{{answer}}}"}

    def rows(self, count: int) -> list[tuple[str, str]]:
        """Prompts and completions of the first rows, as they are trained on."""
        found = self.documents(self.table)[:count]
        return [(self.prompt.format(**one), f" {_answer(one)}") for one in found]

    def benchmark(
        self, languages: Iterable[str], *, count: int, tokens: int, answer_tokens: int
    ) -> dict[str, Any]:
        """The benchmark's keys; `tokens` are those of a prompt, `answer_tokens` the most of one."""
        roles = ["question", "choices", "label"] if self.shape.kind == "choices" else None
        roles = roles or [*re.findall(r"{(\w+)}", self.prompt)]
        roles += [] if "label" in roles else ["label" if self.labelled else "answer"]
        written = 0 if self.labelled or self.shape.kind == "choices" else answer_tokens
        task: dict[str, Any] = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": "{files}"},
            "test_split": "test",
            "num_fewshot": "{shots}",
            "doc_to_text": re.sub(r"{(\w+)}", r"{{\1}}", self.prompt),
            "metadata": {"version": 1},
        }
        found: dict[str, Any] = {
            "title": self.name,
            "source": self.table.name,
            "licence": "not known",
            "languages": [*languages],
            "metric": ["acc", "none"],
            "size": {"documents": count, "read": tokens, "written": written},
            "task_name": f"{self.name}_{{code}}_{{shots}}shot",
            "splits": ["test"],
            "development": "dev",
            "data": {"files": ["../data/{code}.{split}.jsonl"], "columns": roles, "strip": True},
            "task": task,
        }
        if not written:
            choices = "{labels}" if self.labelled else "{{choices}}"
            task |= {"output_type": "multiple_choice", "doc_to_target": "{{label}}",
                     "doc_to_choice": choices,
                     "metric_list": [{"metric": "acc", "aggregation": "mean",
                                      "higher_is_better": True}]}  # fmt: skip
            return {**found, **({"labels": self.labels} if self.labelled else {})}
        task |= {"output_type": "generate_until", "doc_to_target": "{{answer}}",
                 "generation_kwargs": {"until": self._ends, "max_gen_toks": written,
                                       "do_sample": False},
                 "metric_list": [{"metric": "exact_match", "aggregation": "mean",
                                  "higher_is_better": True, "ignore_case": True}]}  # fmt: skip
        take_first = {"function": "take_first"}
        if self.numeric:
            custom = {"function": "custom", "filter_fn": "!function numbers_{code}.numbers"}
            task["filter_list"] = [{"name": "number", "filter": [custom, take_first]}]
            module = ("from layerswap.evaluation.suites.mgsm import number_filter\n\n"
                      "numbers = number_filter('{code}')\n")  # fmt: skip
            return {**found, "metric": ["exact_match", "number"],
                    "modules": {"numbers_{code}": module}}  # fmt: skip
        whole = [{"function": "remove_whitespace"}, take_first]
        task["filter_list"] = [{"name": "whole", "filter": whole}]
        return {**found, "metric": ["exact_match", "whole"]}

    @property
    def _ends(self) -> list[str]:
        several = any("\n" in str(one["answer"]).strip() for one in self.documents(self.table))
        return ["\nQuestion:"] if several else ["\n"]

    def _document(self, row: Mapping[str, Any], shape: Shape) -> Document:
        if shape.kind == "messages":
            return _last_turn(shape.cell(row, "messages"))
        one = {role: self._text(row, role, shape) for role in shape.columns}
        if shape.kind != "choices":
            return one
        choices = shape.cell(row, "choices")
        if not (isinstance(choices, list) and len(choices) > 1):
            raise DataError(f"column {shape.columns['choices']!r}: is not a list of choices")
        texts, answer = [str(choice).strip() for choice in choices], one["answer"]
        at = int(answer) if _is_number(answer) else LETTERS.find(answer) if answer else -1
        at = texts.index(answer) if answer in texts else at
        if not 0 <= at < len(texts):
            raise DataError(f"answer {answer!r:.40} is none of {len(texts)} choices: give a letter "
                            "from A, a number from 0, or the text")  # fmt: skip
        return {"question": one["question"], "choices": texts, "label": at}

    def _text(self, row: Mapping[str, Any], role: str, shape: Shape | None = None) -> str:
        value = (shape or self.shape).cell(row, role)
        return "" if value is None else str(value).strip()


def read_task(given: str, columns: Mapping[str, str]) -> Task:
    """The task of a table; errors name the file."""
    table = read_table(given)
    task = Task(table, recognise(table, columns))
    if not (task.labels or task.documents(table)):
        raise DataError(f"{given}: has no complete row")
    return task


def found_in(task: Task) -> list[str]:
    """What was recognised, in lines: the kind, the columns and two examples."""
    pairs = ", ".join(f"{role}={column}" for role, column in task.shape.columns.items())
    scored = f"labels {', '.join(task.labels)}" if task.labels else (
        "the right one of several choices" if task.shape.kind == "choices"
        else "the last number of the answer" if task.numeric else "the text of the answer"
    )  # fmt: skip
    lines = [f"{task.table.name}: {len(task.table.rows):,} rows, columns {pairs}; {scored}"]
    return lines + [f"  {line}" for line in examples(task.table, task.shape)]


def target(task: Task, document: Document, language: str) -> Document:
    """A document as the benchmark's file has it: of a numeric answer, the number alone."""
    if not task.numeric:
        return document
    number = last_number(str(document["answer"]), language)
    return {**document, "answer": number or document["answer"]}


def _answer(document: Document) -> str:
    if "choices" in document:
        return str(document["choices"][document["label"]])
    return str(document.get("label", document.get("answer")))


def _key(document: Document) -> str:
    return " ".join(str(value) for key, value in document.items() if key not in ("label", "answer"))


def _last_turn(turns: Any) -> Document:
    try:
        texts = [str(turn.get("content", turn.get("value", ""))) for turn in turns]
    except (TypeError, AttributeError):
        raise DataError("messages: is not a list of mappings with role and content") from None
    return {"prompt": "\n".join(texts[:-1]), "answer": texts[-1] if texts else ""}


def _is_number(value: Any) -> bool:
    return str(value).strip().isdigit()


def _is_index(value: Any) -> bool:
    return _is_number(value) or str(value).strip() in LETTERS
