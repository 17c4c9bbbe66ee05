"""Filters of a mix: each returns the reason to drop an example, or None to keep it.

Mathematics, which the language mixes of both papers exclude, is detected by a logistic model over
counts that a person can check by hand. Most are independent of language: numbers, expressions,
equations that hold. The others count words that ask for an amount and words of arithmetic relations
in English, Swahili, Bengali, Telugu and Japanese, and are 0 in other languages.
`bench/math_filter.py` fits the weights and measures them; `docs/data.md` has the table.

Evaluation items are found by shared n-grams, as GPT-3 was decontaminated. Texts are compared in
compatibility form, case-folded, reduced to letters, marks and digits: by words, or by characters in
scripts without spaces. An example is contaminated if it shares one n-gram with an item. n is the
5th percentile of the item lengths of a set, bounded by a minimum and a maximum (8 and 13 words in
Brown et al., 2020, appendix C); an item shorter than n, but not than the minimum, counts if the
example contains all of it.
"""

from __future__ import annotations

import hashlib
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.errors import DataError

if TYPE_CHECKING:
    from layerswap.training.mix.mapping import MixExample
    from layerswap.training.mix.schema import Filters, LanguageFilter, Length, NearDuplicates


LEAST_UNITS = {"words": 8, "characters": 15}
"""The minimum n; a shorter text is indistinguishable from an ordinary phrase."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
)
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts without spaces between words."""


class Indexed(NamedTuple):
    """Statistics of one indexed evaluation set.

    Attributes:
        items: number of its texts.
        too_short: how many of them are shorter than the minimum n.
        unit: `words` or `characters`.
        n: units in an n-gram.
    """

    items: int
    too_short: int
    unit: str
    n: int


class ItemIndex:
    """The n-grams of evaluation items, and which item each belongs to.

    Example:
        index = ItemIndex()
        index.add("mgsm", ["Janet's ducks lay 16 eggs per day. She eats three for breakfast."])
        index.find("Question: Janet's ducks lay 16 eggs per day. She eats three for breakfast!")
    """

    def __init__(self, words: int = 13, characters: int = 20) -> None:
        """An empty index; `words` and `characters` are the maxima of n."""
        self._most = {"words": words, "characters": characters}
        self._grams: dict[str, dict[int, dict[str, tuple[str, str]]]] = {
            unit: {} for unit in LEAST_UNITS
        }
        self.sets: dict[str, Indexed] = {}

    def add(self, name: str, items: Iterable[str]) -> Indexed:
        """Index a set of items under `name`, and return its statistics."""
        texts = [item for item in dict.fromkeys(items) if item.strip()]
        unspaced = sum(1 for text in texts if is_unspaced(text))
        unit = "characters" if unspaced * 2 > len(texts) else "words"
        split = [(text, units(text, unit)) for text in texts]
        lengths = sorted(len(parts) for _, parts in split)
        percentile = lengths[len(lengths) // 20] if lengths else 0
        least = LEAST_UNITS[unit]
        n = min(self._most[unit], max(least, percentile))
        for text, parts in split:
            size = min(n, len(parts))
            if size >= least:
                grams = self._grams[unit].setdefault(size, {})
                for gram in ngrams(parts, size, unit):
                    grams.setdefault(gram, (name, text))
        short = sum(1 for length in lengths if length < least)
        self.sets[name] = Indexed(len(texts), short, unit, n)
        return self.sets[name]

    def find(self, text: str) -> tuple[str, str] | None:
        """The set and the item that `text` shares an n-gram with, or None."""
        for unit, sizes in self._grams.items():
            if not sizes or (unit == "characters" and not _UNSPACED.search(text)):
                continue
            parts = units(text, unit)
            for size in sorted(sizes, reverse=True):
                grams = sizes[size]
                for gram in ngrams(parts, size, unit):
                    if gram in grams:
                        return grams[gram]
        return None


def units(text: str, unit: str) -> list[str]:
    """A text's normalised words, or its normalised characters without spaces."""
    words = unicodedata.normalize("NFKC", text).casefold().translate(_SPACES).split()
    return words if unit == "words" else list("".join(words))


def ngrams(parts: list[str], n: int, unit: str = "words") -> Iterable[str]:
    """Every n-gram of a text's units, joined to one text."""
    joint = " " if unit == "words" else ""
    return (joint.join(parts[i : i + n]) for i in range(len(parts) - n + 1))


def is_unspaced(text: str) -> bool:
    """True if most letters of a text belong to a script without spaces between words."""
    letters = sum(1 for character in text if character.isalpha())
    return letters > 0 and 2 * len(_UNSPACED.findall(text)) > letters


class _Spaces(dict[int, int]):
    """Maps all but letters, marks and digits to a space; grows as characters are met."""

    def __missing__(self, code: int) -> int:
        keep = unicodedata.category(chr(code))[0] in "LMN"
        self[code] = code if keep else 0x20
        return self[code]


_SPACES = _Spaces()


MATH_THRESHOLD = 0.5
"""Minimum probability of an example that counts as mathematics."""


class MathFeatures(NamedTuple):
    """Features of one example; every count is capped so that length alone cannot decide."""

    numbers: float  # log(1 + numbers in the prompt that are not years)
    no_numbers: float  # 1 if there is none, and no expression in the prompt either
    density: float  # those numbers per 100 characters, at most 4; 0 for a single one
    years: float  # whole numbers from 1500 to 2100 in the prompt, at most 3
    asks: float  # 1 if the prompt's last sentence, before choices, is a question
    asks_of_numbers: float  # 1 if it is and gives two or more numbers
    asks_amount: float  # 1 if that sentence asks for an amount or orders a calculation
    asks_amount_of_numbers: float  # 1 if it does and gives two or more numbers
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


MATH_WEIGHTS = MathFeatures(
    numbers=-1.07, no_numbers=-3.05, density=0.79, years=-2.02, asks=2.37, asks_of_numbers=1.87,
    asks_amount=1.89, asks_amount_of_numbers=2.10, relations=1.12, asks_amount_of_relations=0.35,
    options=1.23, answer_is_number=1.09, answer_is_words=-4.56, answer_is_quoted=-3.96,
    equations=1.88, symbols=2.11, characters=-0.39, code=-0.65,
)  # fmt: skip
MATH_BIAS = -1.75


def math_probability(prompt: str, completion: str = "") -> float:
    """The probability, from 0 to 1, that an example is mathematics.

    Args:
        prompt: the instruction or question; for raw text, the text.
        completion: the answer, if there is one.
    """
    found = math_features(prompt, completion)
    score = MATH_BIAS + sum(
        weight * value for weight, value in zip(MATH_WEIGHTS, found, strict=True)
    )
    return 1 / (1 + math.exp(-score))


def math_features(prompt: str, completion: str = "") -> MathFeatures:
    """The features of one example."""
    ask, answer = _plain(prompt).strip(), _plain(completion).strip()
    body = _CHOICE.sub("", ask).strip()
    numbers = _NUMBER.findall(body)
    years = sum(1 for number in numbers if _is_year(number))
    given = len(numbers) - years
    asked = _last_sentence(body)
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
    """Number of equations in a text that hold: two to six numbers, `+ - * x / =`, one result.

    Example: `true_equations("2 x 3 = 6 and 2 + 2 = 5")` is 1.
    """
    return sum(1 for match in _EQUATION.finditer(_plain(text)) if _holds(match[1], match[2]))


def _plain(text: str) -> str:
    """Compatibility forms folded, the digits of every script as 0-9, lower case."""
    folded = unicodedata.normalize("NFKC", text).lower()
    if folded.isascii():
        return folded
    return _DIGIT.sub(lambda match: str(unicodedata.digit(match[0])), folded)


def _last_sentence(text: str) -> str:
    return next((part for part in reversed(_SENTENCES.split(text)) if part.strip()), "").strip()


def _is_year(number: str) -> bool:
    return len(number) == 4 and number.isdecimal() and 1500 <= int(number) <= 2100


def _holds(left: str, right: str) -> bool:
    total = term = 0.0
    for operator, number, per_cent in _PART.findall(left):
        value = _value(number) / (100 if per_cent else 1)
        if operator in "+-":  # the first number has no operator, and begins a term too
            total, term = total + term, -value if operator == "-" else value
        elif operator in "/÷":
            if not value:
                return False
            term /= value
        else:
            term *= value
    return math.isclose(total + term, _value(right), rel_tol=1e-2, abs_tol=1e-9)


def _value(number: str) -> float:
    return float(number.replace(",", ""))


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
_AMOUNT = re.compile(
    r"\bhow (?:many|much|old|far|long|tall|fast|heavy|big)\b|\bwhat (?:is|was|will be) (?:the|his|"
    r"her|their) (?:\w+ ){0,3}(?:total|sum|cost|price|average|number|amount|difference|percentage|"
    r"probability|value|area|volume|length|profit|age|salary|speed|distance)\b|\bwhat percent|"
    r"\bcalculate\b|\bsolve\b|\bfind the (?:\w+ ){0,2}(?:number|value|sum|total|area|average)|"
    r"\b(?:\w{0,3}ngapi|kiasi gani|hesabu|kokotoa|umri gani|asilimia gani)\b|"
    r"কত|কয়টি|কয়টা|কয়জন|কয় |কয়টি|কয়টা|কয়জন|নির্ণয়|গণনা|হিসা?ব কর|হিসেব কর|বের কর|"
    r"ఎన్ని|ఎంత|ఎంతమంది|లెక్కించ|"
    r"いくら|いくつ|何(?:個|人|本|枚|冊|匹|台|回|時間|分|日間|週間|か月|ヶ月|年間|歳|ドル|円|セント|キロ|メートル|"
    r"マイル|フィート|インチ|ポンド|グラム|リットル|ガロン|オンス|ページ|点|杯|足|着|箱|袋|切れ|羽|頭|"
    r"パーセント|%|通り|倍|歩|階|問|つ)|どれ(?:だけ|くらい|ぐらい)|計算|求め"
)
_RELATION = re.compile(
    r"\b(?:half|twice|double|triple|thirds?|quarter|each|every|per|total|altogether|left|remain\w*|"
    r"more than|less than|fewer|times|percent|average|sum|combined|dozen|cost|costs|price|sold|"
    r"bought|spends?|earns?|pays?|paid)\b|"
    r"\b(?:nusu|mara|robo|kila|jumla|asilimia|zaidi ya|chini ya|wastani|salia\w*|yaliyosalia|"
    r"aliyebaki|baki\w*|bei|gharama|hugharimu|uza|ananunua|alinunua|pesa|thuluthi|theluthi)\b|"
    r"অর্ধেক|তৃতীয়াংশ|তৃতীয়াংশ|চতুর্থাংশ|দ্বিগুণ|তিনগুণ|গুণ|প্রতিটি|প্রতি|মোট|বাকি|অবশিষ্ট|শতাংশ|চেয়ে|চেয়ে|গড়|গড়|দাম|খরচ|"
    r"বিক্রি|কেনে|কিনে|আয় |"
    r"మూడింట|నాలుగింట|వంతు|సగం|సగ|రెట్టింపు|రెట్లు|ప్రతి|మొత్తం|మిగిలి|మిగతా|శాతం|కంటే|సగటు|ధర|ఖర్చు|అమ్మ|కొన|సంపాద|"
    r"半分|2倍|3倍|倍|毎|ずつ|あたり|合計|残り|パーセント|より|平均|値段|価格|費用|売|買|稼|支払|割引"
)


SHOWN = 3
"""Number of dropped examples of each filter that the card shows."""


MixFilter = Callable[["MixExample"], str | None]
"""Called with one example after another; returns why it is dropped, or None to keep it."""


class Dropped(NamedTuple):
    """A dropped example, for the card."""

    source: str
    why: str
    text: str


class FilterPipeline:
    """The filters of a mix in their order.

    Attributes:
        counts: number of dropped examples, by filter and source.
        shown: the first dropped examples, by filter.
    """

    def __init__(self, filters: dict[str, MixFilter]) -> None:
        self._filters = filters
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in filters}
        self.shown: dict[str, list[Dropped]] = {name: [] for name in filters}

    def keeps(self, example: MixExample, skip: Iterable[str] = ()) -> bool:
        """True if every filter but those in `skip` lets the example pass."""
        for name, look in self._filters.items():
            why = None if name in skip else look(example)
            if why is not None:
                self.counts[name][example.source] += 1
                if len(self.shown[name]) < SHOWN:
                    self.shown[name].append(Dropped(example.source, why, example.whole))
                return False
        return True


def build_filters(filters: Filters, index: ItemIndex | None, seed: int) -> FilterPipeline:
    """The filters of a mix; `index` holds its evaluation items, and `seed` is MinHash's."""
    made: dict[str, MixFilter] = {}
    if filters.length is not None:
        made["length"] = by_length(filters.length)
    if filters.exact_duplicates:
        made["exact_duplicates"] = exact_duplicates()
    if filters.math is not None:
        made["math"] = mathematics(filters.math.threshold)
    if filters.language is not None:
        made["language"] = by_language(filters.language)
    if index is not None:
        made["evaluation"] = evaluation_items(index)
    if filters.near_duplicates is not None:
        made["near_duplicates"] = near_duplicates(filters.near_duplicates, seed)
    return FilterPipeline(made)


def by_length(bounds: Length) -> MixFilter:
    """Drops examples whose prompt, completion or whole text is out of bounds, in characters."""

    def look(example: MixExample) -> str | None:
        parts = [("text", len(example.whole), bounds.min_text, bounds.max_text)]
        if example.turns:
            parts += [
                ("prompt", len(example.prompt), bounds.min_prompt, bounds.max_prompt),
                ("completion", len(example.completion), bounds.min_completion,
                 bounds.max_completion),
            ]  # fmt: skip
        for part, size, least, most in parts:
            if size < least:
                return f"{part} of {size} characters, fewer than {least}"
            if most is not None and size > most:
                return f"{part} of {size} characters, more than {most}"
        return None

    return look


def exact_duplicates() -> MixFilter:
    """Drops examples with the words of an earlier one, ignoring case and punctuation."""
    seen: set[bytes] = set()

    def look(example: MixExample) -> str | None:
        # A text without words, such as a formula, is compared verbatim.
        key = "\n".join(" ".join(units(part, "words")) or part for part in _parts(example))
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        if digest in seen:
            return "the same as an earlier example"
        seen.add(digest)
        return None

    return look


def mathematics(threshold: float) -> MixFilter:
    """Drops examples of which any question with its answer is mathematics."""

    def look(example: MixExample) -> str | None:
        found = [
            math_probability(ask, answer)
            for (_, ask), (role, answer) in pairwise(example.turns)
            if role == "assistant"
        ]
        probability = max(found or [math_probability(example.text)])
        return f"mathematics ({probability:.2f})" if probability >= threshold else None

    return look


def by_language(wanted: LanguageFilter) -> MixFilter:
    """Drops examples that py3langid does not detect as one of the languages.

    A source without a language passes if the filter itself names none.
    """
    from py3langid import rank

    def look(example: MixExample) -> str | None:
        allow = wanted.allow or ([example.language] if example.language else None)
        text = {
            "prompt": example.prompt, "completion": example.completion, "all": example.whole
        }[wanted.look_at]  # fmt: skip
        if allow is None or sum(1 for c in text if c.isalpha()) < wanted.min_letters:
            return None
        ranked = rank(text)
        share = _share(ranked, allow)
        if share >= wanted.min_probability:
            return None
        return f"{' or '.join(allow)} with probability {share:.2f}; most like {ranked[0][0]}"

    return look


def evaluation_items(index: ItemIndex) -> MixFilter:
    """Drops examples that share an n-gram with an evaluation item."""

    def look(example: MixExample) -> str | None:
        found = index.find(example.whole)
        return f"shares words with an item of {found[0]}" if found else None

    return look


def near_duplicates(wanted: NearDuplicates, seed: int) -> MixFilter:
    """Drops near-duplicates of an earlier example: MinHash over shingles.

    Shingles are n-grams of words, or of characters in scripts without spaces. A candidate of the
    LSH counts if its estimated Jaccard similarity reaches the threshold.
    """
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=wanted.threshold, num_perm=wanted.permutations)
    sketches: list[Any] = []
    blank = MinHash(num_perm=wanted.permutations, seed=seed)

    def look(example: MixExample) -> str | None:
        shingles = _shingles(example.whole, wanted.shingle)
        if not shingles:
            return None
        sketch = blank.copy()
        sketch.update_batch([shingle.encode() for shingle in sorted(shingles)])
        similar = max((sketch.jaccard(sketches[i]) for i in lsh.query(sketch)), default=0.0)
        if similar >= wanted.threshold:
            return f"nearly the same as an earlier example ({similar:.2f})"
        lsh.insert(len(sketches), sketch)
        sketches.append(sketch)
        return None

    return look


def check_languages(codes: Iterable[str]) -> None:
    """Refuse language codes that py3langid does not know.

    Raises:
        DataError: naming the first such code.
    """
    from py3langid import rank

    known = {language for language, _ in rank("a")}
    for code in codes:
        if code not in known:
            raise DataError(
                f"filters.language: py3langid knows no language {code!r}; "
                "write an ISO 639-1 code such as sw, or skip the filter for this source"
            )


def _parts(example: MixExample) -> list[str]:
    return [content for _, content in example.turns] or [example.text]


def _share(ranked: list[tuple[str, float]], allow: Iterable[str]) -> float:
    """Joint probability of some languages, from py3langid's log-likelihoods."""
    best = ranked[0][1]
    likelihoods = {language: math.exp(value - best) for language, value in ranked}
    total = math.fsum(likelihoods.values())
    return math.fsum(likelihoods[language] for language in set(allow)) / total


def _shingles(text: str, size: int) -> set[str]:
    unit = "characters" if is_unspaced(text) else "words"
    parts = units(text, unit)
    return set(ngrams(parts, min(size, len(parts)), unit)) if parts else set()
