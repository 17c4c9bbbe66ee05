"""The training data of the lab's models: endless streams of examples.

The models meet the papers' zero-shot condition:

- **base**: comprehension and translation in all languages, and problems of *one* and *two* steps
  in all languages, most of them in the rich ones (the source and the covered ones). In a scarce
  language the base sees mostly the common words, and in problems those alone.
- **task expert**: problems of *three* steps in the source language, and nothing else.
- **language expert**: comprehension in its scarce language, alone and with the rich ones, and
  translation between it and them, over all of its words, and nothing else. No answer is a number.
- **joint model**: the examples of the task expert and of one language expert, mixed.

So the base has seen the task in no language, and no training data have the task in a scarce
language. The tests check every stream. Training examples come from the `"train"` split only.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from layerswap.ground.errors import RecipeError
from research.lab.tasks import (
    TASK_STEPS,
    LabExample,
    ProblemKind,
    comprehension,
    problem,
    translation,
)
from research.lab.world import LabLanguage, Vocabulary, World


@dataclass(frozen=True)
class BaseMix:
    """Shares of the base's training examples; each in 0..1."""

    translation: float = 0.28  # of all examples; comprehension has the rest of the three shares
    one: float = 0.12  # problems of one step
    two: float = 0.28  # problems of two steps
    source: float = 0.25  # share of the source language among the examples in the rich languages
    # Share of each scarce language among comprehension examples and translations.
    scarce: float = 0.13
    # Share of each scarce language among the problems, over common words.
    scarce_problems: float = 0.08
    crossing: float = 0.40  # share of comprehension examples with the question in another language
    # Share of problems whose clauses are each in the main language or, as often, in a rich language
    # drawn anew.
    mixed: float = 0.40


@dataclass(frozen=True)
class LanguageMix:
    """Shares of a language expert's training examples; each in 0..1."""

    translation: float = 0.25  # of all examples, half of them each way; the rest is comprehension
    # Share of comprehension examples whose question or story is in a partner language.
    crossing: float = 0.5
    partners: int = 5  # number of rich languages that it is paired with, the source language first


def base_stream(world: World, mix: BaseMix | None = None, *, seed: int) -> Iterator[LabExample]:
    """Draw the base's training examples; equal seeds give equal streams."""
    mix = mix or BaseMix()
    rng = random.Random(f"base/{seed}")
    while True:
        yield _base_example(world, mix, rng)


def task_stream(world: World, *, seed: int, asked: ProblemKind = "left") -> Iterator[LabExample]:
    """Draw a task expert's training examples: problems in the source language."""
    rng = random.Random(f"task/{seed}")
    words = world.source.vocabulary(common_only=False)
    languages = [world.source] * (TASK_STEPS + 1)
    while True:
        yield problem(languages, words, "train", rng, biggest=world.settings.biggest, asked=asked)


def language_stream(
    world: World, language: str, mix: LanguageMix | None = None, *, seed: int
) -> Iterator[LabExample]:
    """Draw a language expert's training examples; no answer is a number."""
    mix = mix or LanguageMix()
    target = world.language(language)
    if target.coverage != "scarce":
        raise RecipeError(f"{language!r} is not one of the lab's scarce languages")
    return _language_examples(world, target, mix, random.Random(f"{language}/{seed}"))


def joint_stream(
    world: World, language: str, mix: LanguageMix | None = None, *, task: float, seed: int
) -> Iterator[LabExample]:
    """Draw a joint model's training examples, those of experts with the same seed.

    `task` is the share of the task expert's examples, in 0..1.
    """
    streams = task_stream(world, seed=seed), language_stream(world, language, mix, seed=seed)
    rng = random.Random(f"joint/{language}/{seed}")
    while True:
        yield next(streams[0] if rng.random() < task else streams[1])


def take(stream: Iterator[LabExample], n: int) -> list[LabExample]:
    """Draw the next `n` examples of a stream."""
    return list(islice(stream, n))


def _language_examples(
    world: World, target: LabLanguage, mix: LanguageMix, rng: random.Random
) -> Iterator[LabExample]:
    words = target.vocabulary(common_only=False)
    biggest = world.settings.biggest
    while True:
        pair = [target, rng.choice(world.rich[: mix.partners])]
        rng.shuffle(pair)
        if rng.random() < mix.translation:
            yield translation(pair[0], pair[1], words, "train", rng)
        elif rng.random() < mix.crossing:
            yield comprehension(pair[0], pair[1], words, "train", rng, biggest=biggest)
        else:
            yield comprehension(target, target, words, "train", rng, biggest=biggest)


def _base_example(world: World, mix: BaseMix, rng: random.Random) -> LabExample:
    kind = rng.random()
    biggest = world.settings.biggest
    if kind < mix.one + mix.two:
        return _easy_problem(world, mix, rng, steps=1 if kind < mix.one else 2)
    first = _draw_any(world, mix, rng)
    second = rng.choice([lang for lang in world.rich if lang is not first])
    words = _seen(world, first, rng)
    pair = [first, second]
    rng.shuffle(pair)
    if kind < mix.one + mix.two + mix.translation:
        return translation(pair[0], pair[1], words, "train", rng)
    if rng.random() < mix.crossing:
        return comprehension(pair[0], pair[1], words, "train", rng, biggest=biggest)
    return comprehension(first, first, words, "train", rng, biggest=biggest)


def _easy_problem(world: World, mix: BaseMix, rng: random.Random, *, steps: int) -> LabExample:
    scarce = rng.random() < mix.scarce_problems * len(world.scarce)
    main = rng.choice(world.scarce) if scarce else _draw_rich(world, mix, rng)
    languages = [main] * (steps + 1)
    if rng.random() < mix.mixed:
        languages = [main if rng.random() < 0.5 else _draw_rich(world, mix, rng) for _ in languages]
    words = main.vocabulary(common_only=scarce)
    return problem(languages, words, "train", rng, biggest=world.settings.biggest)


def _draw_rich(world: World, mix: BaseMix, rng: random.Random) -> LabLanguage:
    return world.source if rng.random() < mix.source else rng.choice(world.rich[1:])


def _draw_any(world: World, mix: BaseMix, rng: random.Random) -> LabLanguage:
    if rng.random() < mix.scarce * len(world.scarce):
        return rng.choice(world.scarce)
    return _draw_rich(world, mix, rng)


def _seen(world: World, language: LabLanguage, rng: random.Random) -> Vocabulary:
    common_only = language.coverage == "scarce" and rng.random() >= world.settings.rare
    return language.vocabulary(common_only=common_only)
