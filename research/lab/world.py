"""The languages of the lab, the same meanings in different words and orders, and their tokenizer.

A world has one *source* language, rich in data; a few *covered* languages, which the base has seen
almost as well; and *scarce* languages, the targets, of which the base has seen little beyond a
common part of the words. Every word is two syllables of one alphabet that all languages share. So
words must be read and spelled, which is work for the outer layers.

The tokenizer has one token per syllable, name, number or mark. A syllable that opens a word carries
the space before it: " kimo" is " ki" + "mo", so decoding gives the text back.

A world follows from its `WorldSettings` alone. No set is iterated, so it does not depend on
`PYTHONHASHSEED`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from layerswap.ground.errors import RecipeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from layerswap.lab.assets import Lab

Coverage = Literal["source", "covered", "scarce"]
Slot = Literal["who", "verb", "number", "noun"]

CONSONANTS = "bdfgklmnprst"
VOWELS = "aeiou"
PEOPLE = ("Ana", "Ben", "Eva", "Ida", "Leo", "Mia", "Noa", "Oto", "Pia", "Tom")

SUBJECT_FIRST: tuple[Slot, ...] = ("who", "verb", "number", "noun")
NUMBER_LAST: tuple[Slot, ...] = ("who", "verb", "noun", "number")
VERB_LAST: tuple[Slot, ...] = ("who", "noun", "number", "verb")

PAD, BOS, EOS, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
MARKS = (".", "?", ":")
MAX_LENGTH = 128

FUNCTION_CONCEPTS = (
    "has",
    "ask.who",
    "ask.what",
    "ask.direction",
    "ask.count",
    "say.gain",
    "say.lose",
)
"""Concepts with one word in every language, always among the common ones."""


@dataclass(frozen=True)
class LanguageSettings:
    """Settings of one language."""

    name: str  # four letters, two syllables; also the word that asks for a translation into it
    coverage: Coverage  # in the base's data; exactly one language is the source
    order: tuple[Slot, ...] = SUBJECT_FIRST  # in a clause
    # Share of the nouns and verbs, in 0..1, with the source language's word. Function words are
    # never shared, so the words of a question identify its language.
    shared: float = 0.0


@dataclass(frozen=True)
class WorldSettings:
    """Settings of a world; equal settings give equal worlds."""

    seed: int = 1  # of the words
    languages: tuple[LanguageSettings, ...] = (
        LanguageSettings("basu", "source"),
        LanguageSettings("deli", "covered", NUMBER_LAST),
        LanguageSettings("koma", "covered", VERB_LAST),
        LanguageSettings("tiga", "covered", SUBJECT_FIRST),
        LanguageSettings("rupo", "covered", NUMBER_LAST),
        LanguageSettings("nela", "scarce", NUMBER_LAST, shared=0.35),
        LanguageSettings("furo", "scarce", NUMBER_LAST, shared=0.2),
    )
    nouns: int = 16
    verbs: int = 6  # of gaining, and as many of losing
    common: float = 0.5  # share of common words among a scarce language's nouns and verbs, in 0..1
    # Share of the base's examples in a scarce language, in 0..1, that draw on all of its words
    # instead of the common ones.
    rare: float = 0.0
    biggest: int = 18  # the largest number of things that a person can have


@dataclass(frozen=True)
class LabLanguage:
    """A language: the first three fields are those of its `LanguageSettings`."""

    name: str
    coverage: Coverage
    order: tuple[Slot, ...]
    words: dict[str, str]  # by concept
    nouns: tuple[str, ...]  # concepts, the common ones first, as in the next two
    gains: tuple[str, ...]
    losses: tuple[str, ...]
    common: float  # share of the common ones in each of these three, in 0..1

    def vocabulary(self, *, common_only: bool) -> Vocabulary:
        """Return the concepts for clauses in this language."""
        if not common_only:
            return Vocabulary(self.nouns, self.gains, self.losses)
        return Vocabulary(*(_head(c, self.common) for c in (self.nouns, self.gains, self.losses)))


@dataclass(frozen=True)
class Vocabulary:
    """Concepts for clauses: things, verbs of gaining, verbs of losing."""

    nouns: tuple[str, ...]
    gains: tuple[str, ...]
    losses: tuple[str, ...]


@dataclass(frozen=True)
class World:
    """Languages over one set of meanings; see `make_world`."""

    settings: WorldSettings
    languages: dict[str, LabLanguage]

    @property
    def source(self) -> LabLanguage:
        """The language rich in data."""
        return next(lang for lang in self.languages.values() if lang.coverage == "source")

    @property
    def rich(self) -> tuple[LabLanguage, ...]:
        """The source and the covered languages, the source first."""
        return tuple(lang for lang in self.languages.values() if lang.coverage != "scarce")

    @property
    def scarce(self) -> tuple[LabLanguage, ...]:
        """The target languages."""
        return tuple(lang for lang in self.languages.values() if lang.coverage == "scarce")

    def language(self, name: str) -> LabLanguage:
        """Return the language with a name."""
        if name not in self.languages:
            known = ", ".join(self.languages)
            raise RecipeError(f"no language {name!r} in the lab; it has {known}")
        return self.languages[name]


def syllables() -> tuple[str, ...]:
    """List the alphabet that all languages share, in order."""
    return tuple(c + v for c in CONSONANTS for v in VOWELS)


@cache
def make_world(settings: WorldSettings | None = None) -> World:
    """Make the world of these settings, by default the shipped lab's."""
    settings = settings or WorldSettings()
    rng = random.Random(f"layerswap-lab/{settings.seed}")
    names = {entry.name for entry in settings.languages}
    pool = [a + b for a in syllables() for b in syllables() if a + b not in names]
    rng.shuffle(pool)
    concepts = _concepts(settings)
    languages: dict[str, LabLanguage] = {}
    source_words: dict[str, str] = {}
    for entry in settings.languages:
        words = {concept: pool.pop() for concept in concepts}
        sharable = concepts[len(FUNCTION_CONCEPTS) :]
        for concept in rng.sample(sharable, round(entry.shared * len(sharable))):
            words[concept] = source_words[concept]
        source_words = source_words or words
        languages[entry.name] = _language(entry, settings, words, rng)
    return World(settings, languages)


def settings_of(record: dict[str, Any]) -> WorldSettings:
    """Read the settings of a record's world."""
    fields = dict(record["settings"])
    fields["languages"] = tuple(
        LanguageSettings(**{**entry, "order": tuple(entry["order"])})
        for entry in fields["languages"]
    )
    return WorldSettings(**fields)


def world_of(lab: Lab) -> World:
    """Make the world that a lab was built in."""
    return make_world(settings_of(lab.record))


def _language(
    entry: LanguageSettings, settings: WorldSettings, words: dict[str, str], rng: random.Random
) -> LabLanguage:
    def shuffled(kind: str, count: int) -> tuple[str, ...]:
        concepts = [f"{kind}.{i}" for i in range(count)]
        rng.shuffle(concepts)
        return tuple(concepts)

    return LabLanguage(
        name=entry.name,
        coverage=entry.coverage,
        order=entry.order,
        words=words,
        nouns=shuffled("noun", settings.nouns),
        gains=shuffled("gain", settings.verbs),
        losses=shuffled("lose", settings.verbs),
        common=settings.common if entry.coverage == "scarce" else 1.0,
    )


def _concepts(settings: WorldSettings) -> list[str]:
    verbs = [f"{kind}.{i}" for kind in ("gain", "lose") for i in range(settings.verbs)]
    return [*FUNCTION_CONCEPTS, *verbs, *(f"noun.{i}" for i in range(settings.nouns))]


def _head(concepts: tuple[str, ...], share: float) -> tuple[str, ...]:
    return concepts[: max(1, round(share * len(concepts)))]


def vocabulary(world: World) -> list[str]:
    """List every token in the order of its id, the special ones first."""
    opening = [*syllables(), *PEOPLE, *map(str, range(world.settings.biggest + 1))]
    return [
        *(PAD, BOS, EOS, UNKNOWN),
        *MARKS,
        *(f" {token}" for token in opening),
        *syllables(),
        *PEOPLE,
    ]


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Make the tokenizer of a world, with padding on the right.

    It puts `<s>` before every text and never adds `</s>`; training does. `save_pretrained`
    writes files that `AutoTokenizer` loads without this package.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate(vocabulary(world))}
    core = Tokenizer(models.WordLevel(vocab=ids, unk_token=UNKNOWN))
    pattern = Regex(rf" ?[{CONSONANTS}][{VOWELS}]| ?[A-Z][a-z]+| ?[0-9]+|[.?:]")
    core.pre_tokenizer = pre_tokenizers.Split(pattern, behavior="isolated")
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, ids[BOS])]
    )
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="right",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )
