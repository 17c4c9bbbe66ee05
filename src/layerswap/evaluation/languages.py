"""Finds languages by any code or name, and measures the share of an answer in a language.

Benchmarks name languages in different codes; `match` finds theirs for any code or name. A model can
answer right in the wrong language, so the language of an answer is a metric of its own. py3langid
identifies it, without network, on the text without numbers, code, formulas, markup and addresses.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from typing import NamedTuple

from layerswap.ground.errors import EvaluationError
from layerswap.ground.system import unusable_name
from layerswap.versions import install

_MEMBERS = """
ak:twi,tw,fat ar:arb ay:ayr az:azj bal:bcc bua:bxr chm:mhr cr:cwd din:dik doi:dgo
et:ekk fa:pes ff:fuv,fuc fil:tl gn:gug gon:gno hmn:hea ik:esk iu:ike kg:kng
kok:knn,gom kpe:xpe kr:knc ku:kmr kv:kpv lah:pnb lv:lvs man:emk mg:plt mn:khk ms:zsm
ne:npi no:nb,nob oj:ojg om:gaz or:ory ps:pbt,pbu qu:quy,quz raj:mup rom:rmy sc:src
sq:als sw:swh uz:uzn yi:ydd za:zyb zh:cmn zza:diq
"""
MAIN_MEMBERS = {
    member: macro
    for macro, members in (line.split(":") for line in _MEMBERS.split())
    for member in members.split(",")
}
"""Macrolanguage by its main members (CLDR and FLORES-200); `prs`, `swc` or `acm` are others."""
MEMBERS_BY_PLACE = {"fa-AF": "prs", "sw-CD": "swc", "sr-ME": "cnr"}
"""Languages that BCP 47 writes as their macrolanguage in a country."""
NAMES = {"darija": "ary", "egyptian": "arz", "pidgin": "pcm", "pidgin english": "pcm"}
"""Codes of names that langcodes takes for Dari, Ancient Egyptian and Pijin."""


def same_language(first: str, second: str) -> bool:
    """True if two codes or names mean one language; unknown ones are compared as text."""
    try:
        return standard_tag(first) == standard_tag(second)
    except EvaluationError:
        return first == second


@cache
def standard_tag(language: str) -> str:
    """Find the BCP 47 tag of a language by any of its codes, or by its English name.

    Accepts ISO 639-1 and 639-3, BCP 47, and FLORES-200's `xxx_Script`. The main member of a
    macrolanguage gets the macrolanguage's tag (`swh` is `sw`). A language's usual script is left
    out.

    Example: `standard_tag("swh_Latn")`, `standard_tag("Swahili")` and `standard_tag("sw")` are all
    `"sw"`.
    """
    try:
        import langcodes
    except ImportError:
        raise EvaluationError(f"a language needs langcodes; {install('eval')}") from None
    name = language.strip()
    code = NAMES.get(name.casefold(), name).replace("_", "-")
    try:
        if langcodes.tag_is_valid(code):
            tag = str(langcodes.standardize_tag(code))
        else:
            tag = str(langcodes.find(name).to_tag())
    except (LookupError, ValueError):
        raise EvaluationError(
            f"no language {language!r}; write a code such as sw, swh or swh_Latn, or a name"
        ) from None
    if tag in MEMBERS_BY_PLACE:
        return MEMBERS_BY_PLACE[tag]
    main, dash, script = tag.partition("-")
    macro = f"{MAIN_MEMBERS.get(main, main)}{dash}{script}"
    tag = str(langcodes.standardize_tag(macro)) if script else macro
    main, _, script = tag.partition("-")
    tag = main if script == _parts(main)[1] else tag
    # Windows has no file named as Cofán (con), Aurá, Nusa Laut or Prasuni.
    return f"{tag}-001" if unusable_name(tag) else tag


SPOKEN = {"lg": "Luganda", "ny": "Chichewa", "st": "Sesotho", "tn": "Setswana"}
"""Names that speakers and data sets use, where CLDR has another."""


def language_name(language: str) -> str:
    """Return the English name of a language."""
    import langcodes

    tag = standard_tag(language)
    return SPOKEN.get(tag) or str(langcodes.Language.get(tag).language_name())


def match(language: str, supported: Iterable[str]) -> str | None:
    """Find a language among the codes of a benchmark; None if it is not there.

    Of several scripts, the language's usual one matches, unless the language names another.

    Example: `match("zh", ["zho_Hans", "zho_Hant"])` is `"zho_Hans"`.
    """
    tag = standard_tag(language)
    wanted, script = _parts(tag)
    same = {}
    for code in supported:
        with suppress(EvaluationError):  # not every code of a benchmark is a language
            if (parts := _parts(standard_tag(code)))[0] == wanted:
                same[code] = parts
    exact = [code for code, parts in same.items() if parts[1] == script]
    if exact:
        return exact[0]
    plain = not re.search("[-_]", language)
    return next(iter(same)) if len(same) == 1 and plain else None


@cache
def _parts(tag: str) -> tuple[str, str]:
    import langcodes

    whole = langcodes.Language.get(tag, normalize=False).maximize()
    return str(whole.language), str(whole.script)


ANSWER, REASONING = "answer_language_share", "reasoning_language_share"
"""Names of the metrics."""
FEWEST = 20
"""Letters below which a text has no share."""
SEGMENT = 40
"""Smallest number of letters of a piece to identify; shorter ones are often mistaken."""
NO_LANGUAGE = re.compile(
    r"```.*?(?:```|\Z)"  # code
    r"|`[^`\n]*`"
    r"|\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)"  # formulas
    r"|\$(?=\S)[^$\n]*?(?<=\S)\$(?!\d)"
    r"|\\[A-Za-z]+(?:\{[^{}]*\})?"
    r"|<[^<>\n]{1,80}>|https?://\S+",
    re.DOTALL,
)
SENTENCE = re.compile(r"(?<=[.!?:;])\s+|(?<=[。！？।॥])\s*|\n+")
THOUGHT = re.compile(r"\A(.*?)</(?:think|thinking|reasoning)>(.*)\Z", re.DOTALL)


Speaks = Callable[[str], bool]
"""True if a piece of text is in the language."""


def answer_of(text: str) -> str:
    """Return the text after a thought; the whole text if no thought ends in it."""
    thought = THOUGHT.match(text)
    return thought[2].lstrip() if thought else text


def language_shares(text: str, language: str | Speaks) -> dict[str, float]:
    """Measure one generated text, in 0..1; a part with too few letters has no share.

    The part before `</think>` is the reasoning; without that mark, the whole text is the answer.

    Example: `language_shares("<think>We add two and two, which is four.</think>4", "en")` is
    `{"reasoning_language_share": 1.0}`.
    """
    parts = {ANSWER: text}
    thought = THOUGHT.match(text)
    if thought:
        parts = {REASONING: thought[1], ANSWER: thought[2]}
    shares = {name: share_in(part, language) for name, part in parts.items()}
    return {name: share for name, share in shares.items() if share is not None}


def share_in(text: str, language: str | Speaks) -> float | None:
    """Return the share of letters in pieces of a language; None for too few letters.

    py3langid identifies a language that is given by its code.
    """
    if isinstance(language, str):
        code = identified_code(language)
        return share_in(text, lambda piece: _language(piece) == code)
    counts = [(_letters(piece), piece) for piece in _pieces(NO_LANGUAGE.sub(" ", text))]
    total = sum(count for count, _ in counts)
    if total < FEWEST:
        return None
    return sum(count for count, piece in counts if language(piece)) / total


@cache
def identified_code(language: str) -> str:
    """Return py3langid's code of a language; refuse a language that it does not know."""
    from py3langid import rank

    code = match(standard_tag(language).partition("-")[0], [code for code, _ in rank("a")])
    if code is None:
        raise EvaluationError(
            f"answer_language: py3langid cannot identify {language!r}; leave answer_language out, "
            "or give texts to learn it from (`eval --answer-text`, `answer_texts`)"
        )
    return code


def known_language(language: str) -> str | None:
    """Return py3langid's code of a language; None if it does not know the language."""
    try:
        return identified_code(language) if language else None
    except EvaluationError:
        return None


class Seen(NamedTuple):
    """The languages of texts in words."""

    words: str
    clear: bool  # false if py3langid does not know the language, and sees none in most texts


def languages_seen(texts: Iterable[str], language: str) -> Seen | None:
    """Describe the languages of texts, by py3langid; None if two thirds are in `language`."""
    from py3langid import rank

    found = Counter(_language(text) for text in texts if _letters(text) >= FEWEST)
    known = language if language in dict(rank("a")) else known_language(language)
    if not found or (known is not None and 3 * found[known] >= 2 * found.total()):
        return None
    (most, count), *_ = found.most_common(1)
    is_clear = 3 * count >= 2 * found.total()
    remedy = f"; if they are in {language_name(most)}, give {most} instead of {language}" * is_clear
    shares = (f"{code} {n / found.total():.0%}" for code, n in found.most_common(3))
    verb = "does not know" if known is None else "finds little"
    words = (
        f"py3langid {verb} {language}; it identifies {found.total():,} of these texts as "
        f"{', '.join(shares)}{remedy}"
    )
    return Seen(words, clear=known is not None or is_clear)


def _pieces(text: str) -> Iterator[str]:
    """Split a text into sentences, and join short ones."""
    held = ""
    ready: str | None = None
    for sentence in SENTENCE.split(text):
        held = f"{held} {sentence}" if held else sentence
        if _letters(held) >= SEGMENT:
            if ready is not None:
                yield ready
            ready, held = held, ""
    yield f"{ready} {held}" if ready is not None else held


def _letters(text: str) -> int:
    return sum(map(str.isalpha, text))


@lru_cache(maxsize=1 << 16)
def _language(piece: str) -> str:
    """Identify the language of a piece; cached, because compositions repeat sentences."""
    from py3langid import classify

    return str(classify(" ".join(re.sub(r"\d+", " ", piece).split()))[0])
