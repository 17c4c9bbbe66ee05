"""Letters as a reader sees them: one form of each, and scripts without spaces between words."""

from __future__ import annotations

import re
import unicodedata
from functools import cache

import regex

INVISIBLE = "\u034f\u0640\u115f\u1160\u17b4\u17b5\u180b-\u180f\u3164\ufe00-\ufe0f\uffa0"
"""Characters that a reader does not see, beside those of category Cf; and tatweel, which spaces."""
_APOSTROPHE = re.compile(
    r"(MODIFIER .*(APOSTROPHE|COMMA|PRIME|VERTICAL LINE|HALF RING|GLOTTAL STOP)|LATIN .*SALTILLO|"
    r"(\S+ )?APOSTROPHE|.*SINGLE .*QUOTATION MARK|PRIME|(GRAVE|ACUTE) ACCENT)$"
)
"""Unicode names of the characters that people write for one apostrophe or glottal stop."""
_VARIANTS = {ord(letter): ord(usual) for usual, others in {"ک": "كڪ", "ی": "يى", "ہ": "ه"}.items()
             for letter in others}  # fmt: skip
"""Letters of the Arabic script that keyboards and fonts exchange, and their usual form."""
_HOMOPHONES = {
    ord(other) + order: ord(usual) + (0 if order == 3 and usual in "ሀአ" else order)
    for usual, others in {"ሀ": "ሀሐኀ", "ሰ": "ሠ", "አ": "አዐ", "ጸ": "ፀ", "ہ": "ةۃ"}.items()
    for other in others for order in range(7 if other >= "ሀ" else 1)
}  # fmt: skip
"""Letters of Amharic, and the end of Arabic nouns, that sound alike and are exchanged."""
_MARKS = regex.compile(
    r"(?V1)[[\p{Mn}&&[\p{Inherited}\p{Arabic}\p{Hebrew}\p{Syriac}]]\p{ccc=Nukta}']"
)
"""Accents, tones, harakat, niqqud, nuktas and apostrophes, which writers leave out."""
_LATIN = regex.compile(r"(?V1)[\p{Latin}--\p{ASCII}]")
_VARIED = re.compile(r"LATIN SMALL (?:LETTER|LIGATURE) (\w\w?)(?: WITH .*)?$")
"""Unicode names of letters that are written as one or two plain ones, as the hooked of Hausa."""
_DIGIT = regex.compile(r"\p{Nd}")
_PUNCTUATION = regex.compile(r"(?:(?![-*/]\s*\d)[\p{P}\p{C}\s])+")
"""Punctuation and spaces, without operators: 3 - 4 is not 3 * 4."""
UNSPACED = regex.compile(r"(?V1)[\p{LB=SA}\p{LB=ID}\p{LB=CJ}\p{LB=AK}\p{LB=AS}&&[\p{L}\p{M}]]")
"""Letters whose lines break within a run of letters (UAX 14), as Thai, Shan, Han and Javanese."""


class _Visible(dict[int, int | None]):
    """Drops invisible characters, unites variants of letters; grows as characters are met."""

    def __missing__(self, code: int) -> int | None:
        letter = chr(code)
        if unicodedata.category(letter) == "Cf" or re.match(f"[{INVISIBLE}]", letter):
            self[code] = None
        elif _APOSTROPHE.match(unicodedata.name(letter, "")):
            self[code] = ord("'")
        else:
            self[code] = _VARIANTS.get(code, code)
        return self[code]


_VISIBLE = _Visible()


def folded(text: str) -> str:
    """Fold a text so that texts which look alike are equal: NFKC, one apostrophe, no case.

    Marks that no reader sees are left out.
    """
    # An apostrophe may decompose, and a presentation form may compose to a variant.
    visible = unicodedata.normalize("NFKC", text.translate(_VISIBLE)).casefold()
    return unicodedata.normalize("NFKC", visible).translate(_VISIBLE)


def unmarked(text: str) -> str:
    """Fold a text, its digits and its optional marks, for comparisons but never for scores."""
    letters: str = folded(text.upper())  # which unites the two letters i of Turkish
    letters = _MARKS.sub("", unicodedata.normalize("NFD", letters)).translate(_HOMOPHONES)
    if letters.isascii():
        return letters
    letters = _LATIN.sub(lambda letter: _plain_letters(letter[0]), letters)
    letters = _DIGIT.sub(lambda digit: str(unicodedata.decimal(digit[0])), letters)
    return unicodedata.normalize("NFC", letters)


@cache
def _plain_letters(letter: str) -> str:
    varied = _VARIED.match(unicodedata.name(letter, ""))
    return varied[1].casefold() if varied else letter


def bare(text: str) -> str:
    """Reduce a text to its letters, digits and symbols, `unmarked` and with single spaces."""
    letters = unmarked(text)
    return _PUNCTUATION.sub(" ", letters).strip() or letters.strip()


def is_unspaced(text: str) -> bool:
    """True if most letters of a text belong to a script without spaces between words."""
    text = unicodedata.normalize("NFKC", text)  # full-width Latin letters break as Han does
    unspaced = len(UNSPACED.findall(text))
    return unspaced > 0 and 0 < sum(map(str.isalpha, text)) < 2 * unspaced
