"""Filters of a mix: each returns the reason to drop an example, or None to keep it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.errors import DataError
from layerswap.training.mix.contamination import ItemIndex, is_unspaced, ngrams, units
from layerswap.training.mix.math_filter import math_probability

if TYPE_CHECKING:
    from layerswap.training.mix.mapping import MixExample
    from layerswap.training.mix.schema import Filters, LanguageFilter, Length, NearDuplicates

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
