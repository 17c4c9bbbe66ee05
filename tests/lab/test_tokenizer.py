"""The tokenizer: lossless, small, and loadable without this package."""

import pytest

from layerswap.lab.datasets import base_stream, take
from layerswap.lab.tasks import examples
from layerswap.lab.world import make_tokenizer, make_world, vocabulary

WORLD = make_world()


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
    assert tokenizer.tokenize("Ana kimo 12 basu.") == [
        *("Ana", " ki", "mo", " 12", " ba", "su", ".")
    ]


def test_it_has_the_special_tokens_and_pads_on_the_right(tokenizer):
    assert (tokenizer.pad_token, tokenizer.bos_token, tokenizer.eos_token) == (
        *("<pad>", "<s>", "</s>"),
    )
    batch = tokenizer(["Ana", "Ana kimo"], padding=True)["input_ids"]
    assert batch[0][0] == tokenizer.bos_token_id
    assert batch[0][2:] == [tokenizer.pad_token_id] * 2
    assert len(tokenizer) == len(set(vocabulary(WORLD)))


def test_what_no_lab_text_contains_is_unknown_not_dropped(tokenizer):
    assert tokenizer.unk_token_id in tokenizer("Ana xylophone")["input_ids"]
