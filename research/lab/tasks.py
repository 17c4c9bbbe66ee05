"""The skills of the lab: comprehension, translation, and problems.

All three use clauses: a person has, gets or loses a number of things.

- *Comprehension*: a story of one to four clauses and a question: who, what, or did the number go
  up or down each time? The answer is made of words, never a number. The question may be in another
  language than the story; the answer is in the language of the question.
- *Translation*: one clause, or one question, and the name of the language to translate it into.
- *Problems*: a person has a number of things, then gets or loses some, once (`steps=1`), twice or
  three times; how many are left? The answer is a number. Problems of three steps are **the
  task**; those of one and two steps are its easy versions. In another task, which no shipped model
  has learned, the changes come first, then the number left, and the question is the start.

The *meaning* of an example is its clauses in concepts, without a language. A meaning belongs to
exactly one split, by a digest of its text. The splits are therefore disjoint in every language and
skill at once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Literal

from layerswap.ground.errors import RecipeError
from research.lab.world import PEOPLE, LabLanguage, Vocabulary, World

Skill = Literal["comprehension", "translation", "problem"]
LabSplit = Literal["train", "development", "test"]
ProblemKind = Literal["left", "start"]

SPLITS: tuple[LabSplit, ...] = ("train", "development", "test")
TASK_STEPS = 3
"""Changes in a problem of the task."""
TRANSLATED_QUESTIONS = 0.2
"""Share of questions among the translations."""
MOST_AT_ONCE = 9
"""The largest number in a clause."""


@dataclass(frozen=True)
class Clause:
    """A person, a verb concept, a number and a noun concept."""

    who: str
    verb: str
    number: int
    noun: str

    def __str__(self) -> str:
        return f"{self.who} {self.verb} {self.number} {self.noun}"


@dataclass(frozen=True)
class LabExample:
    """A prompt and its completion."""

    prompt: str
    completion: str  # starts with a space
    language: str  # of the prompt; of the question if a problem has several languages
    answer_language: str  # of the completion; the same unless the example crosses languages
    skill: Skill
    steps: int  # changes in a problem, 0 for the other skills
    meaning: str  # the clauses in concepts; equal for the same clauses in any language

    @property
    def answer(self) -> str:
        """The completion without its space."""
        return self.completion.strip()


def split_of(meaning: str) -> LabSplit:
    """Assign a meaning to its split: a tenth of all meanings each is development and test."""
    bucket = blake2b(meaning.encode(), digest_size=4).digest()[0] * 10 // 256
    return {0: SPLITS[1], 1: SPLITS[2]}.get(bucket, SPLITS[0])


def verbalize(language: LabLanguage, clause: Clause) -> str:
    """Write a clause in a language, without the full stop."""
    slots = {
        "who": clause.who,
        "verb": language.words[clause.verb],
        "number": str(clause.number),
        "noun": language.words[clause.noun],
    }
    return " ".join(slots[slot] for slot in language.order)


def comprehension(
    teller: LabLanguage,
    asker: LabLanguage,
    words: Vocabulary,
    split: LabSplit,
    rng: random.Random,
    *,
    biggest: int,
) -> LabExample:
    """Draw a story of one to four clauses in `teller`, with question and answer in `asker`."""
    steps = rng.choice((0, 1, 1, 2, 2, 2, 3))
    clauses, _ = _draw_story(words, split, rng, steps, biggest)
    kind = rng.choice(("who", "what", *("direction",) * 4)[: 6 if steps else 2])
    answer = {
        "who": clauses[-1].who,
        "what": asker.words[clauses[-1].noun],
        "direction": " ".join(_direction(asker, clause) for clause in clauses[1:]),
    }[kind]
    story = " ".join(f"{verbalize(teller, clause)}." for clause in clauses)
    prompt = f"{story} {asker.words[f'ask.{kind}']}?"
    return _example(prompt, answer, (teller, asker), "comprehension", clauses)


def translation(
    source: LabLanguage, target: LabLanguage, words: Vocabulary, split: LabSplit, rng: random.Random
) -> LabExample:
    """Draw one clause, or one question, in `source`, to translate into `target`."""
    if rng.random() < TRANSLATED_QUESTIONS:
        clauses, _ = _draw_story(words, split, rng, 0, MOST_AT_ONCE)
        kind = rng.choice(("count", "count", "who", "what", "direction"))
        asked, answer = (_question(language, kind, clauses[0]) for language in (source, target))
        pair = (source, target)
        return _example(f"{asked} {target.name}:", answer, pair, "translation", clauses)
    clause = _draw_clause(words, split, rng)
    prompt = f"{verbalize(source, clause)}. {target.name}:"
    return _example(
        prompt, f"{verbalize(target, clause)}.", (source, target), "translation", [clause]
    )


def problem(
    languages: Sequence[LabLanguage],
    words: Vocabulary,
    split: LabSplit,
    rng: random.Random,
    *,
    biggest: int,
    asked: ProblemKind = "left",
) -> LabExample:
    """Draw a problem with each clause in the next of `languages`, and the question in the last.

    Two languages make a problem of one step, three one of two; they may all be the same. Every
    intermediate number is in 0..`biggest`. With `asked="start"` the number left comes last.
    """
    clauses, answer = _draw_story(words, split, rng, len(languages) - 1, biggest, asked=asked)
    said = zip(languages, clauses, strict=True)
    story = " ".join(f"{verbalize(language, clause)}." for language, clause in said)
    asker = languages[-1]
    prompt = f"{story} {_how_many(asker, clauses[0])}?"
    return _example(prompt, str(answer), (asker, asker), "problem", clauses)


def examples(
    world: World,
    language: str,
    skill: Skill,
    split: LabSplit,
    n: int,
    *,
    seed: int = 0,
    steps: int = TASK_STEPS,
    asked: ProblemKind = "left",
) -> list[LabExample]:
    """Draw `n` different examples of one skill in one language, over all of its words.

    Comprehension stays within the language, translation goes into the source language, and
    problems have `steps` changes and ask for `asked`. Equal arguments give equal examples. One
    seed gives every language a draw of its own.
    """
    spoken = world.language(language)
    if split not in SPLITS:
        raise RecipeError(f"no split {split!r} in the lab; it has {', '.join(SPLITS)}")
    if n < 1:
        raise RecipeError(f"cannot draw {n} examples; ask for at least 1")
    kind = skill if asked == "left" else f"{skill}/{asked}"
    rng = random.Random(f"examples/{language}/{kind}/{steps}/{split}/{seed}")
    words = spoken.vocabulary(common_only=False)
    biggest = world.settings.biggest
    distinct: dict[str, LabExample] = {}
    while len(distinct) < n:
        if skill == "problem":
            said_in = [spoken] * (steps + 1)
            drawn = problem(said_in, words, split, rng, biggest=biggest, asked=asked)
        elif skill == "translation":
            drawn = translation(spoken, world.source, words, split, rng)
        else:
            drawn = comprehension(spoken, spoken, words, split, rng, biggest=biggest)
        distinct.setdefault(drawn.prompt, drawn)
    return list(distinct.values())


def _direction(asker: LabLanguage, change: Clause) -> str:
    return asker.words["say.gain" if change.verb.startswith("gain") else "say.lose"]


def _question(asker: LabLanguage, kind: str, clause: Clause) -> str:
    words = _how_many(asker, clause) if kind == "count" else asker.words[f"ask.{kind}"]
    return f"{words}?"


def _how_many(asker: LabLanguage, clause: Clause) -> str:
    count, noun = asker.words["ask.count"], asker.words[clause.noun]
    if asker.order[-1] == "verb":
        return f"{noun} {clause.who} {count}"
    return f"{count} {noun} {clause.who}"


def _example(
    prompt: str,
    answer: str,
    languages: tuple[LabLanguage, LabLanguage],
    skill: Skill,
    clauses: list[Clause],
) -> LabExample:
    read, written = languages
    meaning = "; ".join(str(clause) for clause in clauses)
    steps = len(clauses) - 1 if skill == "problem" else 0
    return LabExample(prompt, f" {answer}", read.name, written.name, skill, steps, meaning)


def _draw_clause(words: Vocabulary, split: LabSplit, rng: random.Random) -> Clause:
    while True:
        verb = rng.choice(("has", rng.choice(words.gains), rng.choice(words.losses)))
        clause = Clause(
            rng.choice(PEOPLE), verb, rng.randint(1, MOST_AT_ONCE), rng.choice(words.nouns)
        )
        if split_of(str(clause)) == split:
            return clause


def _draw_story(
    words: Vocabulary,
    split: LabSplit,
    rng: random.Random,
    steps: int,
    biggest: int,
    *,
    asked: ProblemKind = "left",
) -> tuple[list[Clause], int]:
    """Draw the clauses in their order, and the number that is the answer."""
    while True:
        who, noun, start = rng.choice(PEOPLE), rng.choice(words.nouns), rng.randint(1, MOST_AT_ONCE)
        changes, left = [], start
        for _ in range(steps):
            number = rng.randint(1, MOST_AT_ONCE)
            gains = rng.random() < 0.5
            left += number if gains else -number
            verb = rng.choice(words.gains if gains else words.losses)
            changes.append(Clause(who, verb, number, noun))
            if not 0 <= left <= biggest:
                break
        has, answer = Clause(who, "has", start, noun), left
        clauses = [has, *changes]
        if asked == "start":
            clauses, answer = [*changes, replace(has, number=left)], start
        if 0 <= left <= biggest and split_of("; ".join(map(str, clauses))) == split:
            return clauses, answer
