"""Detects mathematics, which the language mixes of both papers exclude.

The detector is a logistic model over 18 counts that a person can check by hand. Most counts are
independent of language: numbers, expressions, equations that hold. The others count words that ask
for an amount and words of arithmetic relations in five languages (`mathematics.yaml`).
`bench/math_filter.py` fits the weights and measures them; `docs/training.md` has the results.
"""

from __future__ import annotations

import math
import re
import unicodedata
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from layerswap.ground.yaml_file import parse_yaml, read_text

MATH_THRESHOLD = 0.5
"""Minimum probability of an example that counts as mathematics."""


class MathFeatures(NamedTuple):
    """Features of one example; every count is capped so that length alone cannot decide."""

    numbers: float  # log(1 + numbers in the prompt that are not years)
    no_numbers: float  # 1 if the prompt has no such number and no expression
    density: float  # those numbers per 100 characters, at most 4; 0 for a single one
    years: float  # whole numbers from 1500 to 2100 in the prompt, at most 3
    asks: float  # 1 if the prompt's last sentence, before choices, is a question
    asks_of_numbers: float  # 1 if it is a question and gives two or more numbers
    asks_amount: float  # 1 if that sentence asks for an amount or orders a calculation
    asks_amount_of_numbers: float  # 1 if it asks so and gives two or more numbers
    relations: float  # words of arithmetic relations in the prompt (half, each, left), at most 4
    asks_amount_of_relations: float  # the same words, if it asks for an amount and gives a number
    options: float  # choices that are only a number, at most 4, if the prompt gives a number
    answer_is_number: float  # 1 if the completion is only a number, with at most a short unit
    answer_is_words: float  # 1 if the completion has no number, and is no choice's letter
    answer_is_quoted: float  # 1 if the prompt contains the completion, as passages do
    equations: float  # equations that hold, as in `48/2=24`, at most 3
    symbols: float  # expressions with variables or LaTeX, at most 3
    characters: float  # log(1 + characters in the prompt)
    code: float  # 1 if the example contains code


_FILE = Path(__file__).with_name("mathematics.yaml")
_DATA = parse_yaml(read_text(_FILE), str(_FILE))[0]
MATH_WEIGHTS = MathFeatures(**_DATA["weights"])
MATH_BIAS: float = _DATA["bias"]


def math_probability(prompt: str, completion: str = "") -> float:
    """Compute the probability that a question with its answer, or a text, is mathematics."""
    features = math_features(prompt, completion)
    score = MATH_BIAS + sum(
        weight * value for weight, value in zip(MATH_WEIGHTS, features, strict=True)
    )
    return 1 / (1 + math.exp(-score))


def math_features(prompt: str, completion: str = "") -> MathFeatures:
    """Count the features of one example."""
    ask, answer = _plain(prompt).strip(), _plain(completion).strip()
    body = _CHOICE.sub("", ask).strip()
    numbers = _NUMBER.findall(body)
    years = sum(
        len(number) == 4 and number.isdecimal() and 1500 <= int(number) <= 2100
        for number in numbers
    )
    given = len(numbers) - years
    asked = next((part for part in reversed(_SENTENCES.split(body)) if part.strip()), "").strip()
    question, amount = asked.endswith(_QUESTION_MARKS), bool(_AMOUNT.search(asked))
    relations = min(len(_RELATION.findall(body)), 4)
    return MathFeatures(
        numbers=math.log1p(given),
        no_numbers=float(given == 0 and not _SYMBOLS.search(ask)),
        density=min(100 * given / max(1, len(body)), 4.0) if given >= 2 else 0.0,
        years=min(years, 3),
        asks=float(question),
        asks_of_numbers=float(question and given >= 2),
        asks_amount=float(amount),
        asks_amount_of_numbers=float(amount and given >= 2),
        relations=relations,
        asks_amount_of_relations=relations if amount and given else 0,
        options=min(len(_OPTION.findall(ask)), 4) if given else 0,
        answer_is_number=float(bool(_BARE_NUMBER.fullmatch(answer))),
        answer_is_words=float(len(answer) > 1 and not _NUMBER.search(answer)),
        answer_is_quoted=float(len(answer) > 1 and answer in body),
        equations=min(true_equations(ask) + true_equations(answer), 3),
        symbols=min(len(_SYMBOLS.findall(ask)) + len(_SYMBOLS.findall(answer)), 3),
        characters=math.log1p(len(body)),
        code=float(bool(_CODE.search(ask) or _CODE.search(answer))),
    )


def true_equations(text: str) -> int:
    """Count the equations in a text that hold: two to six numbers, `+ - * x / =`, one result.

    Example: `true_equations("2 x 3 = 6 and 2 + 2 = 5")` is 1.
    """
    return sum(1 for match in _EQUATION.finditer(_plain(text)) if _holds(match[1], match[2]))


def _plain(text: str) -> str:
    """Fold a text: compatibility forms, the digits of every script as 0-9, lower case."""
    folded = unicodedata.normalize("NFKC", text).lower()
    if folded.isascii():
        return folded
    return _DIGIT.sub(lambda match: str(unicodedata.digit(match[0])), folded)


def _holds(left: str, right: str) -> bool:
    total = term = 0.0
    for operator, number, per_cent in _PART.findall(left):
        value = float(number.replace(",", "")) / (100 if per_cent else 1)
        if operator in "+-":  # the first number has no operator, and begins a term too
            total, term = total + term, -value if operator == "-" else value
        elif operator in "/÷":
            if not value:
                return False
            term /= value
        else:
            term *= value
    result = float(right.replace(",", ""))
    return math.isclose(total + term, result, rel_tol=1e-2, abs_tol=1e-9)


_DIGIT = re.compile(r"(?![0-9])\d")
_N = r"\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBER = re.compile(rf"(?<![a-z第])(?<!\d[.,]){_N}")
_BARE_NUMBER = re.compile(rf"(?:\w|[$€£¥#]){{0,3}}\s*[-+]?{_N}\s*\D{{0,12}}")
_OPERATOR = r"\s*(?:[-+*/×÷]|x(?=[\s\d$]))\s*"
_EQUATION = re.compile(
    rf"(?<![\d.,])([$€£¥]?{_N}%?(?:{_OPERATOR}[$€£¥]?{_N}%?){{1,5}})\s*=\s*(?:<<[^>]*>>)?[$€£¥]?({_N})"
)
_PART = re.compile(rf"([-+*/×÷x]?)\s*[$€£¥]?({_N})(%?)")
_SYMBOLS = re.compile(
    r"\\(?:frac|sqrt|boxed|times|cdot|sum|int)|\b[a-z]\s*\^\s*\d|\b\d*[a-z]\s*[-+*/]\s*\d+\s*=|"
    r"\b[a-z]\s*=\s*[-+]?\d"
)
_OPTION = re.compile(rf"(?m)^\W?(?:\w|\d)[.):]\W?\s*[-+$]?\s*{_N}\D{{0,10}}$")
_CHOICE = re.compile(r"(?m)^\W?\w[.):].*$")
_SENTENCES = re.compile(r"(?<=[.!?।。！？])(?![\d.])|\n")
_QUESTION_MARKS = ("?", "？", "؟", "か。", "か")
_CODE = re.compile(r"\bdef \w+\(|\breturn\b.*\n|#include|\bfunction\b|print\(|\bimport \w+\n")
_AMOUNT, _RELATION = (
    re.compile("|".join(chain.from_iterable(_DATA[words].values())))
    for words in ("amount", "relation")
)
