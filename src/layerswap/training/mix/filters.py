"""Filters of a mix: each returns the reason to drop an example, or None to keep it.

Evaluation items are found by shared n-grams, as GPT-3's data was decontaminated (Brown et al.,
2020, appendix C). Texts are compared as a reader sees them: in compatibility form, case-folded,
without invisible characters and accents, reduced to letters and digits: by words, or by characters
in scripts without spaces. An example that shares one n-gram with an item is dropped. n is the 5th
percentile of the item lengths of a set, bounded by a minimum and a maximum. An item shorter than n
counts if the example contains it; one shorter than the minimum, if a line of the example is it.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import regex

from layerswap.evaluation.identifier import NOTABLE
from layerswap.evaluation.languages import known_language
from layerswap.ground.errors import DataError
from layerswap.ground.strict_json import clipped
from layerswap.reading.letters import UNSPACED, folded, is_unspaced, unmarked
from layerswap.training.mix.examples import MixExample
from layerswap.training.mix.mathematics import MATH_THRESHOLD, math_probability
from layerswap.training.mix.schema import Filters, Length

if TYPE_CHECKING:
    from layerswap.evaluation.identifier import Identifier

SHOWN, SHOWN_CHARACTERS = 3, 400
"""Dropped examples of each filter that the card shows, and most characters of one."""
MINIMUM_UNITS = {"words": 8, "characters": 15}
"""The minimum n; within a text, a shorter item is indistinguishable from an ordinary phrase."""
SHORTEST_LINE = {"words": 3, "characters": 6}
"""The shortest item that a line is compared with; a shorter one must be the whole example."""
LIKELY, FEWEST_LETTERS = 0.5, 20
"""Smallest probability of a source's language; shorter texts are not reliable, and pass."""
SHINGLE = 5
"""Words or characters of an n-gram by which near-duplicates are found."""
MAXIMUM_UNITS = {"words": 13, "characters": 20}
"""The largest length of n-grams that are looked up."""
OVERLAP = 5
"""Words in a run that training text and a test item may not share unseen."""
_WORD = regex.compile(r"[\p{L}\p{M}\p{N}]+")
MixFilter = Callable[[MixExample], str | None]
"""Called with one example after another; returns why it is dropped, or None to keep it."""


class Dropped(NamedTuple):
    """A dropped example, for the card."""

    source: str
    why: str
    text: str


class FilterPipeline:
    """The filters of a mix in their order, with the number and the first of the dropped."""

    def __init__(self, filters: dict[str, MixFilter]) -> None:
        self._filters = filters
        self.counts: dict[str, Counter[str]] = {name: Counter() for name in filters}  # by source
        self.shown: dict[str, list[Dropped]] = {name: [] for name in filters}

    def keeps(self, example: MixExample, skip: Iterable[str] = ()) -> bool:
        """Return true if every filter but those in `skip` lets the example pass."""
        for name, reason_to_drop in self._filters.items():
            why = None if name in skip else reason_to_drop(example)
            if why is not None:
                self.counts[name][example.source] += 1
                if len(self.shown[name]) < SHOWN:
                    text = clipped(example.whole, SHOWN_CHARACTERS)
                    self.shown[name].append(Dropped(example.source, why, text))
                return False
        return True


def build_filters(
    settings: Filters, index: ItemIndex | None, seed: int, identifier: Identifier | None = None
) -> FilterPipeline:
    """Build the filters of a mix from its settings, evaluation items and seed (of MinHash).

    A learned `identifier` takes the place of py3langid.
    """
    filters: dict[str, MixFilter] = {}
    if settings.length is not None:
        filters["length"] = length_filter(settings.length)
    if settings.exact_duplicates:
        filters["exact_duplicates"] = exact_duplicate_filter()
    if settings.math:
        filters["math"] = mathematics
    if settings.language is not None:
        filters["language"] = language_filter(identifier)
    if index is not None:
        filters["evaluation"] = evaluation_filter(index)
    if settings.near_duplicates is not None:
        threshold = settings.near_duplicates.threshold
        filters["near_duplicates"] = near_duplicate_filter(threshold, seed)
    return FilterPipeline(filters)


def length_filter(bounds: Length) -> MixFilter:
    """Drop examples whose whole text is out of bounds, in characters."""

    def reason(example: MixExample) -> str | None:
        size = len(example.whole)
        if size < bounds.min_text:
            return f"{size} characters, fewer than {bounds.min_text}"
        if bounds.max_text is not None and size > bounds.max_text:
            return f"{size} characters, more than {bounds.max_text}"
        return None

    return reason


def exact_duplicate_filter() -> MixFilter:
    """Drop examples with the words of an earlier one, ignoring case and punctuation."""
    seen: set[bytes] = set()

    def reason(example: MixExample) -> str | None:
        texts = [content for _, content in example.turns] or [example.text]
        # A text without words, such as a formula, is compared verbatim.
        key = "\n".join(" ".join(units(text, "words")) or text for text in texts)
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        if digest in seen:
            return "the same as an earlier example"
        seen.add(digest)
        return None

    return reason


def mathematics(example: MixExample) -> str | None:
    """Drop an example in which a question with its answer is mathematics."""
    probabilities = [
        math_probability(question, answer)
        for (_, question), (role, answer) in pairwise(example.turns)
        if role == "assistant"
    ]
    probability = max(probabilities or [math_probability(example.text)])
    return f"mathematics ({probability:.2f})" if probability >= MATH_THRESHOLD else None


def language_filter(identifier: Identifier | None = None) -> MixFilter:
    """Drop completions in another language, by py3langid or a learned identifier.

    A source without a language passes, and a text that is too short to identify.
    """
    identify = _identification(identifier)

    def reason(example: MixExample) -> str | None:
        text, language = example.completion, example.language
        if language is None or sum(1 for c in text if c.isalpha()) < FEWEST_LETTERS:
            return None
        found = identify(text)
        if found[language] >= LIKELY:
            return None
        like = max(found, key=lambda code: found[code])
        return f"{language} with probability {found[language]:.2f}; most like {like}"

    return reason


def _identification(identifier: Identifier | None) -> Callable[[str], dict[str, float]]:
    """Return a function from a text to the probability of each language."""
    if identifier is not None:
        return lambda text: dict(zip(
            identifier.languages, identifier.probabilities([" ".join(text.split())])[0], strict=True
        ))  # fmt: skip
    from py3langid import rank

    def known(text: str) -> dict[str, float]:
        ranked = rank(text)  # by log-likelihood
        likelihoods = {str(code): math.exp(value - ranked[0][1]) for code, value in ranked}
        total = math.fsum(likelihoods.values())
        return {code: likelihood / total for code, likelihood in likelihoods.items()}

    return known


def evaluation_filter(index: ItemIndex) -> MixFilter:
    """Drop examples that share an n-gram with an evaluation item."""

    def reason(example: MixExample) -> str | None:
        match = index.find(example.whole)
        return f"shares words with an item of {match[0]}" if match else None

    return reason


def near_duplicate_filter(threshold: float, seed: int) -> MixFilter:
    """Drop near-duplicates of an earlier example: MinHash over shingles.

    Shingles are n-grams of words, or of characters in scripts without spaces. A candidate of the
    LSH counts if its estimated Jaccard similarity reaches the threshold.
    """
    from datasketch import MinHash, MinHashLSH

    lsh = MinHashLSH(threshold=threshold)
    sketches: list[Any] = []
    blank = MinHash(seed=seed)

    def reason(example: MixExample) -> str | None:
        unit = "characters" if is_unspaced(example.whole) else "words"
        parts = units(example.whole, unit)
        if not parts:
            return None
        shingles = {*ngrams(parts, min(SHINGLE, len(parts)), unit)}
        sketch = blank.copy()
        sketch.update_batch([shingle.encode() for shingle in sorted(shingles)])
        similarity = max((sketch.jaccard(sketches[i]) for i in lsh.query(sketch)), default=0.0)
        if similarity >= threshold:
            return f"nearly the same as an earlier example ({similarity:.2f})"
        lsh.insert(len(sketches), sketch)
        sketches.append(sketch)
        return None

    return reason


def check_language(code: str, identifier: Identifier | None = None) -> None:
    """Refuse a language code that py3langid, or a learned identifier, does not know.

    Warns of a language of which the learned one takes more than a tenth for another.
    """
    if identifier is not None:
        if code not in identifier.languages:
            raise DataError(f"the language filter learns {', '.join(identifier.languages)} "
                            f"and not {code!r}; add its text to `texts`")  # fmt: skip
        if identifier.error(code) > NOTABLE:
            warnings.warn(f"the language filter drops text in its own language. "
                          f"{identifier.describe(code)}", stacklevel=2)  # fmt: skip
        return
    from py3langid import rank

    known = {language for language, _ in rank("a")}
    if code not in known:
        near = known_language(code)
        other = ("learn it by texts: {CODE: FILE, ...}, or write skip: [language] in the "
                 "source, or language: false")  # fmt: skip
        raise DataError(
            f"the language filter (py3langid, {len(known)} languages) does not know {code!r}; "
            f"{f'write {near}' if near else other}"
        )


class Indexed(NamedTuple):
    """Statistics of one indexed evaluation set."""

    items: int
    too_short: int  # items shorter than the minimum n, which are compared with whole lines
    unit: str  # "words" or "characters"
    n: int  # units in an n-gram


class ItemIndex:
    """The n-grams of evaluation items, each with the item that contains it.

    Example:
        index = ItemIndex()
        index.add("mgsm", ["Janet's ducks lay 16 eggs per day. She eats three for breakfast."])
        index.find("Question: Janet's ducks lay 16 eggs per day. She eats three for breakfast!")
    """

    def __init__(self) -> None:
        """Make an empty index."""
        self._grams: dict[str, dict[int, dict[str, tuple[str, str]]]] = {
            unit: {} for unit in MINIMUM_UNITS
        }
        self._short: dict[str, tuple[str, str]] = {}  # by their letters and digits
        self.sets: dict[str, Indexed] = {}
        self.texts: dict[str, list[str]] = {}  # the items of a set

    def add(self, name: str, items: Iterable[str]) -> Indexed:
        """Index a set of items under `name`, and return its statistics."""
        texts = [item for item in dict.fromkeys(items) if item.strip()]
        unspaced = sum(1 for text in texts if is_unspaced(text))
        unit = "characters" if unspaced * 2 > len(texts) else "words"
        split = [(text, units(text, unit, unmarked)) for text in texts]
        lengths = sorted(len(parts) for _, parts in split)
        percentile = lengths[len(lengths) // 20] if lengths else 0
        minimum = MINIMUM_UNITS[unit]
        n = min(MAXIMUM_UNITS[unit], max(minimum, percentile))
        for text, parts in split:
            size = min(n, len(parts))
            if 0 < size < minimum:
                self._short.setdefault("".join(parts), (name, text))
            elif size:
                grams = self._grams[unit].setdefault(size, {})
                for gram in ngrams(parts, size, unit):
                    grams.setdefault(gram, (name, text))
        short = sum(1 for length in lengths if length < minimum)
        self.sets[name], self.texts[name] = Indexed(len(texts), short, unit, n), texts
        return self.sets[name]

    def find(self, text: str) -> tuple[str, str] | None:
        """Return the set and the item that `text` shares an n-gram or a line with, or None."""
        text = unmarked(text)
        if self._short and (short := self._find_short(text)):
            return short
        for unit, sizes in self._grams.items():
            if not sizes or (unit == "characters" and not UNSPACED.search(text)):
                continue
            parts = units(text, unit, str)
            for size in sorted(sizes, reverse=True):
                grams = sizes[size]
                for gram in ngrams(parts, size, unit):
                    if gram in grams:
                        return grams[gram]
        return None

    def _find_short(self, text: str) -> tuple[str, str] | None:
        """Find a short item that is the text, a line of it, or a line after its label (`Text:`)."""
        pieces = [text]
        for line in text.split("\n"):
            pieces += [line, line.partition(":")[2]]
        for piece in pieces:
            unit = "characters" if is_unspaced(piece) else "words"
            parts = units(piece, unit, str)
            match = self._short.get("".join(parts))
            if match and (piece is text or len(parts) >= SHORTEST_LINE[unit]):
                return match
        return None


def overlap(texts: Iterable[str], items: Iterable[str], words: int = OVERLAP) -> list[int]:
    """Find the items that share a run of words with one of the texts; return their positions.

    In scripts without spaces a run has two characters for each word. An item that is shorter than a
    run has none.

    Example: `overlap(["He saw a red house on the hill."], ["A red house on the left"])` is `[0]`.
    """
    runs: dict[str, dict[str, set[int]]] = {"words": {}, "characters": {}}
    length = {"words": words, "characters": 2 * words}
    for position, item in enumerate(items):
        unit = "characters" if is_unspaced(item) else "words"
        for run in ngrams(units(item, unit, unmarked), length[unit], unit):
            runs[unit].setdefault(run, set()).add(position)
    shared: set[int] = set()
    for text in texts:
        for unit, known in runs.items():
            if known:
                parts = units(text, unit, unmarked)
                common = known.keys() & set(ngrams(parts, length[unit], unit))
                shared.update(*(known[run] for run in common))
    return sorted(shared)


def units(text: str, unit: str, fold: Callable[[str], str] = folded) -> list[str]:
    """Split a text into normalised words, or into normalised characters without spaces."""
    words = _WORD.findall(fold(text))
    return words if unit == "words" else list("".join(words))


def ngrams(parts: list[str], n: int, unit: str = "words") -> Iterable[str]:
    """Yield every n-gram of a text's units, joined to one text."""
    joint = " " if unit == "words" else ""
    return (joint.join(parts[i : i + n]) for i in range(len(parts) - n + 1))
