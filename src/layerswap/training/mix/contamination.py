"""Finds evaluation items in training text by shared n-grams, as GPT-3's data was decontaminated.

Texts are compared in compatibility form, case-folded, reduced to letters, marks and digits. They
are compared by words, or by characters in scripts without spaces. An example is contaminated if it
shares one n-gram with an item. n is the 5th percentile of the item lengths of a set, bounded by a
minimum and a maximum (8 and 13 words in Brown et al., 2020, appendix C). An item shorter than n,
but not than the minimum, counts if the example contains all of it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from typing import NamedTuple

MINIMUM_UNITS = {"words": 8, "characters": 15}
"""The minimum n; a shorter text is indistinguishable from an ordinary phrase."""
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff]"
)
"""Thai, Lao, Burmese, Khmer, kana and Han: scripts without spaces between words."""


class Indexed(NamedTuple):
    """Statistics of one indexed evaluation set."""

    items: int
    too_short: int  # items shorter than the minimum n
    unit: str  # "words" or "characters"
    n: int  # units in an n-gram


class ItemIndex:
    """The n-grams of evaluation items, each with the item that contains it.

    Example:
        index = ItemIndex()
        index.add("mgsm", ["Janet's ducks lay 16 eggs per day. She eats three for breakfast."])
        index.find("Question: Janet's ducks lay 16 eggs per day. She eats three for breakfast!")
    """

    def __init__(self, words: int = 13, characters: int = 20) -> None:
        """Make an empty index; `words` and `characters` are the maxima of n."""
        self._maximum = {"words": words, "characters": characters}
        self._grams: dict[str, dict[int, dict[str, tuple[str, str]]]] = {
            unit: {} for unit in MINIMUM_UNITS
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
        minimum = MINIMUM_UNITS[unit]
        n = min(self._maximum[unit], max(minimum, percentile))
        for text, parts in split:
            size = min(n, len(parts))
            if size >= minimum:
                grams = self._grams[unit].setdefault(size, {})
                for gram in ngrams(parts, size, unit):
                    grams.setdefault(gram, (name, text))
        short = sum(1 for length in lengths if length < minimum)
        self.sets[name] = Indexed(len(texts), short, unit, n)
        return self.sets[name]

    def find(self, text: str) -> tuple[str, str] | None:
        """Return the set and the item that `text` shares an n-gram with, or None."""
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
    """Split a text into normalised words, or into normalised characters without spaces."""
    words = unicodedata.normalize("NFKC", text).casefold().translate(_SPACES).split()
    return words if unit == "words" else list("".join(words))


def ngrams(parts: list[str], n: int, unit: str = "words") -> Iterable[str]:
    """Yield every n-gram of a text's units, joined to one text."""
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
