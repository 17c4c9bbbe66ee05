"""The zero-shot condition, held over the streams that the models are really trained on."""

import pytest

from layerswap.ground.errors import RecipeError
from layerswap.lab.datasets import base_stream, joint_stream, language_stream, take, task_stream
from layerswap.lab.tasks import TASK_STEPS, examples, split_of
from layerswap.lab.train import Trainings
from layerswap.lab.world import make_world

WORLD = make_world()
RECIPES = Trainings()
SCARCE = {language.name for language in WORLD.scarce}
N = 30_000


def is_task(example):
    return example.skill == "problem" and example.steps == TASK_STEPS


@pytest.fixture(scope="module")
def streams():
    return {
        "base": take(base_stream(WORLD, RECIPES.base_mix, seed=0), N),
        "task": take(task_stream(WORLD, seed=1), N // 3),
        **{
            name: take(language_stream(WORLD, name, RECIPES.language_mix, seed=1), N // 3)
            for name in sorted(SCARCE)
        },
    }


def test_only_the_task_expert_trains_on_the_tested_problems(streams):
    for name, stream in streams.items():
        if name != "task":
            assert not [e for e in stream if is_task(e)]
    scarce_words = _words(SCARCE) - _words(set(WORLD.languages) - SCARCE)
    for example in streams["task"]:
        assert not scarce_words & set(example.prompt.replace("?", "").replace(".", "").split())


def test_easier_problems_of_a_scarce_language_are_few_and_common(streams):
    problems = [e for e in streams["base"] if e.skill == "problem"]
    for name in SCARCE:
        asked = [e for e in problems if e.language == name]
        assert 0 < len(asked) / len(problems) < 0.08
        rare = _rare_words(name)
        for example in problems:
            said = set(example.prompt.replace("?", "").replace(".", "").split())
            assert not rare & said


def test_the_task_expert_sees_only_the_task_in_the_source(streams):
    assert {e.language for e in streams["task"]} == {WORLD.source.name}
    assert all(is_task(e) for e in streams["task"])


@pytest.mark.parametrize("name", sorted(SCARCE))
def test_a_language_expert_never_answers_with_a_number(streams, name):
    for example in streams[name]:
        assert example.skill in ("comprehension", "translation")
        assert name in (example.language, example.answer_language)
        rich = {language.name for language in WORLD.rich}
        assert {example.language, example.answer_language} <= {name} | rich
        assert not example.completion.strip().isdigit()


def test_no_tested_problem_is_in_any_training_stream(streams):
    trained = {e.meaning for stream in streams.values() for e in stream}
    for language in WORLD.languages:
        for split in ("development", "test"):
            tested = examples(WORLD, language, "problem", split, 500)
            assert not trained & {e.meaning for e in tested}
    assert {split_of(meaning) for meaning in trained} == {"train"}


def test_the_base_sees_a_scarce_language_in_common_words(streams):
    for name in SCARCE:
        seen = [e for e in streams["base"] if name in (e.language, e.answer_language)]
        common = set(WORLD.language(name).vocabulary(common_only=True).nouns)
        rare = [e for e in seen if e.meaning.split("; ")[0].split()[3] not in common]
        assert 0.05 < len(seen) / N < 0.2
        assert len(rare) / len(seen) <= WORLD.settings.rare


def test_the_base_sees_the_mix_that_its_recipe_asks_for(streams):
    mix, base = RECIPES.base_mix, streams["base"]
    shares = {
        "one": [e for e in base if e.skill == "problem" and e.steps == 1],
        "two": [e for e in base if e.skill == "problem" and e.steps == 2],
        "translation": [e for e in base if e.skill == "translation"],
    }
    for name, found in shares.items():
        assert len(found) / N == pytest.approx(getattr(mix, name), abs=0.015)


def test_a_joint_model_sees_what_both_experts_see(streams):
    found = take(joint_stream(WORLD, "furo", RECIPES.language_mix, task=0.6, seed=1), 5000)
    tasks = [one for one in found if is_task(one)]
    assert len(tasks) / len(found) == pytest.approx(0.6, abs=0.03)
    assert tasks == streams["task"][: len(tasks)]
    rest = [one for one in found if not is_task(one)]
    assert rest == streams["furo"][: len(rest)]


def test_a_stream_depends_on_its_seed_and_is_of_a_scarce_language():
    first, again, other = (take(base_stream(WORLD, seed=s), 100) for s in (1, 1, 2))
    assert first == again
    assert first != other
    with pytest.raises(RecipeError, match="'koma' is not one of the lab's scarce languages"):
        language_stream(WORLD, "koma", seed=0)


def _words(names):
    return {word for name in names for word in WORLD.language(name).words.values()}


def _rare_words(name):
    """Words that only this language has, for concepts that are not common in it."""
    language = WORLD.language(name)
    known = language.vocabulary(common_only=True)
    common = {*known.nouns, *known.gains, *known.losses}
    rare = {*language.nouns, *language.gains, *language.losses} - common
    others = _words(set(WORLD.languages) - {name})
    return {language.words[concept] for concept in rare} - others
