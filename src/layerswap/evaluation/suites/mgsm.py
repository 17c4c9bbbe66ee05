"""MGSM (Shi et al., 2023): grade-school problems, with answers read in any script."""

from __future__ import annotations

import ast
import csv
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

from layerswap.errors import EvaluationError
from layerswap.evaluation.languages import standard_tag
from layerswap.evaluation.suites.folders import DataFolder, Function, TaskFolder, builtin, hub_rows

SPACES = "\u00a0\u202f\u2009"
"""Spaces that stand inside numbers alone."""
SEPARATORS = {"٬": ",", "٫": ".", "،": ",", "−": "-", "’": "'"}
"""Separators and the minus sign, to what is written for them here; full-width ones are NFKC's."""

Filter = Callable[[Iterable[Sequence[str]], object], list[list[str]]]


def last_number(text: str, language: str) -> str | None:
    """The last number in a text, in plain ASCII: no separators, no trailing zeros.

    Digits of any script are read. A comma or a point is a thousands separator where it stands
    before three digits and is repeated, or is a comma, or is the separator that the language has
    (CLDR, through Babel); otherwise it is a decimal mark. Indian groups (1,00,000) are read too.

    Args:
        text: any text.
        language: any code of its language; see `evaluation.languages`.

    Returns:
        The number, or None where there is none.

    Example: `last_number("৳১,২৫০.৫০", "bn")` is `"1250.5"`; `last_number("1.000 €", "de")` is
    `"1000"`.
    """
    found = _pattern(_group(language) in (" ", *SPACES)).findall(_ascii(text))
    return _value(found[-1], _group(language)) if found else None


def number_filter(language: str) -> Filter:
    """lm-eval's custom filter that leaves the last number of each answer, or nothing."""

    def apply(responses: Iterable[Sequence[str]], docs: object) -> list[list[str]]:
        return [[last_number(one, language) or "" for one in answers] for answers in responses]

    return apply


@cache
def _group(language: str) -> str:
    """The thousands separator of a language; a comma where CLDR does not know it."""
    from babel import Locale, UnknownLocaleError

    try:
        locale = Locale.parse(standard_tag(language), sep="-")
    except (UnknownLocaleError, ValueError):
        return ","
    return str(locale.number_symbols.get("latn", {}).get("group", ","))


@cache
def _pattern(spaced: bool) -> re.Pattern[str]:
    space = f"[{SPACES} ]" if spaced else f"[{SPACES}]"
    groups = rf"(?:(?:[.,']|{space})\d{{3}}(?!\d))+"
    indian = r"(?:,\d{2})+,\d{3}(?!\d)"
    return re.compile(rf"(?:(?<![\w)])-)?\d+(?:{indian}|{groups})?(?:[.,]\d+)?", re.ASCII)


def _ascii(text: str) -> str:
    """The same text with every decimal digit in ASCII, and one sign for each mark."""
    kept = "".join(c if c in SPACES else unicodedata.normalize("NFKC", c) for c in text)
    digits = (str(unicodedata.decimal(c)) if c.isdecimal() else SEPARATORS.get(c, c) for c in kept)
    return "".join(digits)


def _value(written: str, group: str) -> str:
    sign, body = ("-", written[1:]) if written.startswith("-") else ("", written)
    body = re.sub(f"[{SPACES} ']", "", body)
    marks = [c for c in body if c in ".,"]
    whole, fraction = body, ""
    if marks and not _all_thousands(body, marks, group):
        whole, _, fraction = body.rpartition(marks[-1])
    whole = whole.replace(".", "").replace(",", "")
    number = Decimal(f"{sign}{whole or 0}.{fraction or 0}").normalize()
    text = f"{number:f}"
    return "0" if text == "-0" else text


def _all_thousands(body: str, marks: Sequence[str], group: str) -> bool:
    """Whether every mark in a number separates thousands."""
    last = marks[-1]
    head, _, tail = body.rpartition(last)
    if len(set(marks)) > 1:
        return False  # one of each: the last is the decimal mark
    if len(tail) != 3 or head in ("0", ""):
        return False
    return len(marks) > 1 or last in (",", group)


LANGUAGES = ("bn", "de", "en", "es", "fr", "ja", "ru", "sw", "te", "th", "zh")
MGSM_HUB = "juletxara/mgsm"
EXEMPLARS = 8
NUMBER_FILTER = "number"
"""Name of the filter whose score counts; lm-eval's own two are reported beside it."""
WANTED = (
    "mgsm_{code}.tsv and exemplars.py (or exemplars.json) of "
    "https://github.com/google-research/url-nlp/tree/main/mgsm"
)


def write_mgsm(code: str, shots: int, data: DataFolder, tasks: TaskFolder) -> str:
    """Write the task of one language: lm-eval's prompts, the benchmark's own exemplars in order.

    The answer is the last number of what was written, in any script and with the language's own
    separators.

    Args:
        code: one of `LANGUAGES`.
        shots: exemplars in the prompt, 0 to 8.
        data: where published files may be.
        tasks: where the task goes.

    Raises:
        EvaluationError: the data cannot be had, or there are not so many exemplars.
    """
    if not 0 <= shots <= EXEMPLARS:
        raise EvaluationError(f"MGSM has {EXEMPLARS} exemplars, not {shots}")
    splits = read_mgsm(code, data, shots=shots)
    name = f"mgsm_{code}_{shots}shot"
    tasks.module(
        f"numbers_{code}",
        "from layerswap.evaluation.suites.mgsm import number_filter\n\n"
        f"numbers = number_filter({code!r})\n",
    )
    take = {"function": "take_first"}
    last = {"function": "regex", "group_select": -1,
            "regex_pattern": "(-?[$0-9.,]{2,})|(-?[0-9]+)"}  # fmt: skip
    return tasks.task(
        name,
        {
            "include": builtin(f"mgsm/native_cot/mgsm_native_cot_{code}.yaml"),
            "tag": None,
            **tasks.rows(name, splits),
            "training_split": "train" if "train" in splits else None,
            "fewshot_split": "train" if "train" in splits else None,
            "test_split": "test",
            "num_fewshot": shots,
            "fewshot_config": {"sampler": "first_n"},
            "filter_list": [
                {"name": NUMBER_FILTER, "filter": [
                    {"function": "custom", "filter_fn": Function(f"numbers_{code}.numbers")}, take,
                ]},
                {"name": "flexible-extract", "filter": [last, take]},
            ],
        },
    )  # fmt: skip


def read_mgsm(
    code: str, data: DataFolder, *, shots: int = EXEMPLARS
) -> dict[str, list[dict[str, Any]]]:
    """Exemplars (`train`) and problems (`test`) with the columns that lm-eval's prompts read.

    `question`, `answer` (the worked answer, None for a problem) and `answer_number`, a text
    without separators. Without shots, local problems need no exemplars beside them, and give none.
    """
    problems = data.find(f"mgsm_{code}.tsv")
    if problems is not None:
        shown = {"train": _exemplars(code, data, problems)} if shots else {}
        return {**shown, "test": _problems(problems, code)}
    wanted = WANTED.format(code=code)
    return {
        split: [
            {**row, "answer_number": last_number(str(row["answer_number"]), "en")}
            for row in hub_rows(MGSM_HUB, code, split, data, wanted=wanted)
        ]
        for split in ("train", "test")
    }


def _problems(path: Path, code: str) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    if any(len(row) != 2 for row in rows):
        raise EvaluationError(f"{path}: not MGSM: a line has other than two columns")
    return [
        {"question": question, "answer": None, "answer_number": last_number(answer, "en")}
        for question, answer in rows
    ]


def _exemplars(code: str, data: DataFolder, problems: Path) -> list[dict[str, Any]]:
    path = data.find("exemplars.json", "exemplars.py")
    if path is None:
        raise EvaluationError(f"{problems.parent}: has no exemplars.py (or exemplars.json)")
    table = _read_exemplars(path)
    if code not in table:
        raise EvaluationError(f"{path}: has no exemplars for {code}")
    found = []
    for number in map(str, range(1, EXEMPLARS + 1)):
        one = table[code][number]
        answer = last_number(one["a"], code)
        found.append({"question": one["q"], "answer": one["a"], "answer_number": answer})
    return found


def _read_exemplars(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        return dict(json.loads(text))
    # The published file is Python; its one table is read, and nothing is run.
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "MGSM_EXEMPLARS" for t in targets):
            assert isinstance(node, ast.Assign)
            return dict(ast.literal_eval(node.value))
    raise EvaluationError(f"{path}: has no MGSM_EXEMPLARS")
