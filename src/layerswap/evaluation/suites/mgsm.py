"""MGSM's rules: problems and exemplars from their published files, and numbers in any script."""

from __future__ import annotations

import ast
import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from layerswap.evaluation.languages import standard_tag
from layerswap.evaluation.suites.folders import DataFolder, Rows, hub_rows
from layerswap.ground.errors import EvaluationError
from layerswap.reading.files import Layout, rows_of

SPACES = "\u00a0\u202f\u2009"
"""Spaces that occur only inside numbers."""
SEPARATORS = {"٬": ",", "٫": ".", "،": ",", "−": "-", "–": "-", "‐": "-", "’": "'"}
"""ASCII forms of separators and of the minus sign; NFKC covers the full-width ones."""
PUNCTUATION = ".,;:!?)]}*_\"'»”’।۔。！？"
LATEX = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"(?<=\d)(?:\{,\}|\\text\{,\})(?=\d{3})", ","),
        (r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3})", "\u2009"),
        (r"\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}", r" \1/\2"),
        (r"\\[dtc]?frac\s*(\d)\s*(\d)", r" \1/\2"),
        (r"\\(?:text|mathrm|mbox|textrm)\s*\{[^{}\d]*\}", " "),
        (r"\^\s*(?:\{[^{}]*\}|[-−]?\d+|\\circ)", ""),
        (r"_\s*(?:\{[^{}]*\}|\d+)", ""),
    )
]
"""LaTeX's numbers as plain text; exponents, indices and units go."""
POWER = re.compile(r"\d\s*(?:\^|[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻])")
"""Matches a number with an exponent, such as 10^3 or 10³."""
MOST_DIGITS = 1000
"""Characters of a number; a longer one is compared as text."""

Filter = Callable[[Iterable[Sequence[str]], object], list[list[str]]]


def last_number(text: str, language: str) -> str | None:
    r"""Find the last number in a text, in plain ASCII without separators and trailing zeros.

    Digits of any script count. A comma or a point separates thousands if three digits follow and it
    is repeated, is a comma, or is the language's own separator (CLDR, through Babel). Otherwise it
    is a decimal mark. Indian groups (1,00,000), fractions (5/8, 2½) and LaTeX's spelling
    (9{,}500, \frac{1}{2}) are numbers too. Exponents and indices (m², H₂O) are not; the papers'
    scores, as lm-eval's, count only ASCII digits.

    Example: `last_number("৳১,২৫০.৫০", "bn")` is `"1250.5"`; `last_number("1.000 €", "de")` is
    `"1000"`.
    """
    group = _group(language)
    written = _ascii(_plain(text))
    alone = _pattern(spaced=True).fullmatch(written.strip())
    numbers = [alone] if alone else list(_pattern(group in (" ", *SPACES)).finditer(written))
    return _quotient(numbers[-1], group) if numbers else None


def is_number(text: str, language: str) -> bool:
    """True if the last word of a text is a number alone: no date, time, ratio, code or power."""
    if POWER.search(text):
        return False
    words = _ascii(_plain(text)).split()
    last = words[-1].strip(f"{PUNCTUATION}%‰°€$£¥₦₹৳") if words else ""
    return _pattern(spaced=False).fullmatch(last) is not None


def number_filter(language: str) -> Filter:
    """Make a filter for lm-eval that keeps the last number of each answer, or nothing."""

    def apply(responses: Iterable[Sequence[str]], docs: object) -> list[list[str]]:
        return [[last_number(text, language) or "" for text in texts] for texts in responses]

    return apply


@cache
def _group(language: str) -> str:
    """Return the thousands separator of a language; a comma if CLDR does not have the language."""
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
    number = rf"\d+(?:{indian}|{groups})?(?:[.,]\d+)?|(?<![\w.,)])\.\d+"
    # Neither a date (12/5/2001) nor a fraction with a leading zero (2001/05).
    fraction = r"(?<!/\d)(?<!/\d\d)/[1-9]\d*(?![\d/]|[.,]\d)"
    return re.compile(
        rf"(?P<sign>(?<![\w)])-)?(?:(?P<whole>\d+) +(?=\d+/))?(?P<number>{number})"
        rf"(?P<fraction>{fraction})?",
        re.ASCII,
    )


def _plain(text: str) -> str:
    """Write LaTeX's numbers as plain text writes them."""
    for pattern, plain in LATEX:
        text = pattern.sub(plain, text)
    return text


def _quotient(match: re.Match[str], group: str) -> str:
    """Return the value of a number or of a fraction, which stays one if it has no last decimal."""
    if len(match[0]) > MOST_DIGITS:
        return match[0]
    top = Fraction(_value(match["number"], group))
    if match["fraction"]:
        top = Fraction(match["whole"] or 0) + top / int(match["fraction"][1:])
    top = -top if match["sign"] else top
    rest = top.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        return str(top)
    with localcontext() as context:
        context.prec = MOST_DIGITS
        text = f"{(Decimal(top.numerator) / Decimal(top.denominator)).normalize():f}"
    return "0" if text == "-0" else text


def _ascii(text: str) -> str:
    """Write a text with ASCII digits, and one sign for each kind of separator."""
    kept = "".join(c if c in SPACES else _compatible(c) for c in text)
    digits = (str(unicodedata.decimal(c)) if c.isdecimal() else SEPARATORS.get(c, c) for c in kept)
    return "".join(digits)


def _compatible(character: str) -> str:
    """Return the compatibility form of a character; drop exponents, indices, invisible marks."""
    if unicodedata.category(character) == "Cf":  # as between the sign and digits of Persian
        return ""
    how = unicodedata.decomposition(character).partition(" ")[0]
    plain = unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    return "" if how in ("<super>", "<sub>") else f" {plain}" if how == "<fraction>" else plain


def _value(written: str, group: str) -> str:
    body = re.sub(f"[{SPACES} ']", "", written)
    marks = [c for c in body if c in ".,"]
    whole, fraction = body, ""
    if marks and not _all_thousands(body, marks, group):
        whole, _, fraction = body.rpartition(marks[-1])
    whole = whole.replace(".", "").replace(",", "")
    return f"{whole or 0}.{fraction or 0}"


def _all_thousands(body: str, marks: Sequence[str], group: str) -> bool:
    last = marks[-1]
    head, _, tail = body.rpartition(last)
    if len(set(marks)) > 1:
        return False  # one of each: the last is the decimal mark
    if len(tail) != 3 or head in ("0", ""):
        return False
    return len(marks) > 1 or last in (",", group)


HUB = "juletxara/mgsm"
WANTED = (
    "mgsm_{code}.tsv and exemplars.py (or exemplars.json) of "
    "https://github.com/google-research/url-nlp/tree/main/mgsm"
)


def rows(values: Mapping[str, Any], data: DataFolder) -> dict[str, Rows]:
    """Read exemplars (`train`) and problems (`test`) with the columns of lm-eval's prompts.

    These are `question`, `answer` (the worked answer; None for a problem) and `answer_number`, in
    plain ASCII. Published problems without shots need no exemplars, and have none.
    """
    code = values["code"]
    problems = data.find(f"mgsm_{code}.tsv")
    if problems is not None:
        exemplars = {"train": _exemplars(code, data, problems)} if values["shots"] else {}
        return {**exemplars, "test": _problems(problems)}
    wanted = WANTED.format(code=code)
    return {
        split: [
            {**row, "answer_number": last_number(str(row["answer_number"]), "en")}
            for row in hub_rows(HUB, code, split, data, wanted=wanted)
        ]
        for split in ("train", "test")
    }


def _problems(path: Path) -> Rows:
    layout = Layout("\t", header=["question", "answer"], quotes=False)
    problems = [
        {"question": row["question"], "answer": None,
         "answer_number": last_number(row["answer"], "en")}
        for row in rows_of(path, layout)
    ]  # fmt: skip
    if unanswered := [n for n, row in enumerate(problems, start=1) if not row["answer_number"]]:
        raise EvaluationError(
            f"{path}: not a file of MGSM: problem {unanswered[0]} has no number in a second column"
        )
    return problems


def _exemplars(code: str, data: DataFolder, problems: Path) -> Rows:
    path = data.find("exemplars.json", "exemplars.py")
    if path is None:
        raise EvaluationError(f"{problems.parent}: has no exemplars.py (or exemplars.json)")
    table = _read_exemplars(path)
    if code not in table:
        raise EvaluationError(f"{path}: has no exemplars for {code}")
    # By number, "1" to "8"; the file may have them in another order.
    return [
        {"question": shot["q"], "answer": shot["a"], "answer_number": last_number(shot["a"], code)}
        for _, shot in sorted(table[code].items(), key=lambda item: int(item[0]))
    ]


def _read_exemplars(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    if path.suffix == ".json":
        return dict(json.loads(text))
    # The published file is Python. Only its one table is read; nothing runs.
    for node in ast.parse(text).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "MGSM_EXEMPLARS" for t in targets):
            assert isinstance(node, ast.Assign)
            return dict(ast.literal_eval(node.value))
    raise EvaluationError(f"{path}: has no MGSM_EXEMPLARS")
