"""Numbers as the world writes them: every script's digits, every language's separators."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import cache

from layerswap.evaluate.languages import standard_tag

SPACES = "\u00a0\u202f\u2009"
"""Spaces that stand inside numbers alone."""
MARKS = {"٬": ",", "٫": ".", "،": ",", "−": "-", "’": "'"}
"""Separators and the minus sign, to what is written for them here; full-width ones are NFKC's."""

Filter = Callable[[Iterable[Sequence[str]], object], list[list[str]]]


def last_number(text: str, language: str) -> str | None:
    """The last number in a text, in plain ASCII: no separators, no trailing zeros.

    Digits of any script are read. A comma or a point is a thousands separator where it stands
    before three digits and is repeated, or is a comma, or is the separator that the language has
    (CLDR, through Babel); otherwise it is a decimal mark. Indian groups (1,00,000) are read too.

    Args:
        text: any text.
        language: any code of its language; see `evaluate.languages`.

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
    digits = (str(unicodedata.decimal(c)) if c.isdecimal() else MARKS.get(c, c) for c in kept)
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
