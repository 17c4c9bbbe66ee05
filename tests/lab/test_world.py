"""The languages, as far apart as the settings say, and a tokenizer that loses nothing."""

import subprocess
import sys
from dataclasses import replace
from hashlib import sha256

import pytest

from layerswap.ground.errors import RecipeError
from layerswap.lab.datasets import base_stream, take
from layerswap.lab.tasks import examples
from layerswap.lab.world import (
    FUNCTION_CONCEPTS,
    WorldSettings,
    make_tokenizer,
    make_world,
    syllables,
)

WORLD = make_world()

DIGEST = """
from hashlib import sha256
from layerswap.lab.tasks import examples
from layerswap.lab.datasets import base_stream, take
from layerswap.lab.world import make_world
world = make_world()
text = repr(world) + repr(take(base_stream(world, seed=3), 50))
text += repr(examples(world, "furo", "problem", "test", 5))
print(sha256(text.encode()).hexdigest())
"""


def test_the_world_does_not_depend_on_the_hash_seed():
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("0", "12345")
    }  # fmt: skip
    assert len(digests) == 1


def test_another_seed_makes_another_world():
    other = make_world(replace(WorldSettings(), seed=2))
    assert sha256(repr(other).encode()).digest() != sha256(repr(WORLD).encode()).digest()


def test_every_word_is_two_syllables_of_the_shared_alphabet():
    for language in WORLD.languages.values():
        for word in language.words.values():
            assert word[:2] in syllables()
            assert word[2:] in syllables()
        assert len(set(language.words.values())) == len(language.words)


def test_only_the_near_language_shares_words_with_another():
    for entry in WORLD.settings.languages[1:]:
        source, words = WORLD.source.words, WORLD.language(entry.name).words
        same = [c for c in source if source[c] == words[c]]
        assert len(same) == round(entry.shared * (len(source) - len(FUNCTION_CONCEPTS)))
        assert not set(same) & set(FUNCTION_CONCEPTS)
        assert len(set(source.values()) & set(words.values())) == len(same)


def test_common_words_of_a_scarce_language_are_among_its_words():
    for language in WORLD.scarce:
        common, every = (language.vocabulary(common_only=c) for c in (True, False))
        assert set(common.gains) < set(every.gains)
        assert len(common.nouns) == round(WORLD.settings.common * len(every.nouns))
    assert WORLD.source.vocabulary(common_only=True) == WORLD.source.vocabulary(common_only=False)


def test_an_unknown_language_is_refused():
    with pytest.raises(RecipeError, match=r"no language 'klingon'.*basu"):
        WORLD.language("klingon")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(WORLD).save_pretrained(folder)
    assert sum(f.stat().st_size for f in folder.iterdir()) < 10_000
    return AutoTokenizer.from_pretrained(folder)


def test_decoding_gives_every_text_back(tokenizer):
    for example in take(base_stream(WORLD, seed=0), 500):
        text = example.prompt + example.completion
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_prompt_and_completion_meet_on_a_token_boundary(tokenizer):
    for example in examples(WORLD, "furo", "problem", "test", 50):
        apart = tokenizer(example.prompt)["input_ids"]
        apart = apart + tokenizer(example.completion, add_special_tokens=False)["input_ids"]
        assert apart == tokenizer(example.prompt + example.completion)["input_ids"]


def test_a_syllable_that_opens_a_word_carries_the_space(tokenizer):
    pieces = ["Ana", " ki", "mo", " 12", " ba", "su", "."]
    assert tokenizer.tokenize("Ana kimo 12 basu.") == pieces
    assert tokenizer.unk_token_id in tokenizer("Ana xylophone")["input_ids"]
