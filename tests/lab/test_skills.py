"""Examples say what they mean, and the splits do not touch."""

import random

import pytest

from layerswap.ground.errors import RecipeError
from layerswap.lab.tasks import SPLITS, Clause, examples, split_of, verbalize
from layerswap.lab.world import make_world

WORLD = make_world()


@pytest.mark.parametrize("language", list(WORLD.languages))
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_the_answer_of_a_problem_is_what_its_clauses_leave(language, steps):
    for example in examples(WORLD, language, "problem", "test", 200, steps=steps):
        left = 0
        for clause in example.meaning.split("; "):
            _, verb, number, _ = clause.split()
            left += -int(number) if verb.startswith("lose") else int(number)
            assert 0 <= left <= WORLD.settings.biggest
        assert example.completion == f" {left}"
        assert len(example.meaning.split("; ")) == steps + 1
        assert (example.skill, example.steps) == ("problem", steps)


@pytest.mark.parametrize("language", ["basu", "furo"])
def test_asked_for_the_start_a_problem_tells_what_is_left_last(language):
    drawn = examples(WORLD, language, "problem", "test", 200, asked="start")
    for example in drawn:
        *changes, last = (clause.split() for clause in example.meaning.split("; "))
        assert len(changes) == 3
        number = int(last[2])
        assert last[1] == "has"
        for _, verb, change, _ in reversed(changes):
            number += int(change) if verb.startswith("lose") else -int(change)
            assert 0 <= number <= WORLD.settings.biggest
        assert example.completion == f" {number}"
        assert split_of(example.meaning) == "test"


def test_a_clause_follows_the_order_of_its_language():
    rng = random.Random(0)
    for language in WORLD.languages.values():
        drawn = examples(WORLD, language.name, "translation", "test", 20)
        example = rng.choice([one for one in drawn if "?" not in one.prompt])
        who, verb, number, noun = example.meaning.split()
        words = {"who": who, "verb": language.words[verb], "number": number}
        words["noun"] = language.words[noun]
        said = example.prompt.split(".")[0].split()
        assert said == [words[slot] for slot in language.order]


def test_a_translation_says_the_same_in_the_source_language():
    drawn = examples(WORLD, "furo", "translation", "test", 50)
    asked = [one for one in drawn if "?" in one.prompt]
    assert 0.08 < len(asked) / len(drawn) < 0.4
    words, source = WORLD.language("furo").words, WORLD.source.words
    for example in asked:
        question, answer = example.prompt.rpartition("?")[0], example.completion.strip(" ?")
        nouns = {words[f"noun.{i}"]: source[f"noun.{i}"] for i in range(WORLD.settings.nouns)}
        asks = {words[c]: source[c] for c in words if c.startswith("ask.")}
        said = [{**nouns, **asks}.get(word, word) for word in question.split()]
        assert sorted(said) == sorted(answer.split())
    for example in set(drawn) - set(asked):
        who, verb, number, noun = example.meaning.split()
        words = WORLD.source.words
        assert example.completion == f" {who} {words[verb]} {number} {words[noun]}."


def test_comprehension_never_asks_for_a_number():
    for language in WORLD.languages:
        for example in examples(WORLD, language, "comprehension", "test", 300):
            assert not any(c.isdigit() for c in example.completion)


@pytest.mark.slow
@pytest.mark.parametrize("skill", ["comprehension", "translation", "problem"])
def test_the_splits_share_no_meaning_in_any_language(skill):
    meanings = {
        split: {
            example.meaning
            for language in WORLD.languages
            for example in examples(WORLD, language, skill, split, 300)
        }
        for split in SPLITS
    }
    assert len(set().union(*meanings.values())) == sum(map(len, meanings.values()))
    assert all(split_of(m) == split for split, found in meanings.items() for m in found)


def test_equal_arguments_draw_equal_examples_none_twice():
    first = examples(WORLD, "nela", "problem", "development", 400, seed=4)
    assert first == examples(WORLD, "nela", "problem", "development", 400, seed=4)
    assert first != examples(WORLD, "nela", "problem", "development", 400, seed=5)
    assert len({example.prompt for example in first}) == 400


def test_problems_use_words_that_are_not_common():
    language = WORLD.language("furo")
    common = set(language.vocabulary(common_only=True).gains)
    text = " ".join(e.meaning for e in examples(WORLD, "furo", "problem", "test", 300))
    assert all(gain in text for gain in set(language.gains) - common)
    koma = WORLD.language("koma")
    clause = Clause("Ana", "has", 3, "noun.0")
    assert verbalize(koma, clause) == f"Ana {koma.words['noun.0']} 3 {koma.words['has']}"


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(RecipeError, match="no split 'dev'"):
        examples(WORLD, "furo", "problem", "dev", 3)
    with pytest.raises(RecipeError, match="at least 1"):
        examples(WORLD, "furo", "problem", "test", 0)
