"""Shared n-grams with evaluation items, against a direct comparison of word lists."""

from __future__ import annotations

import pytest
from excerpts import read_jsonl, read_lines, read_mgsm
from hypothesis import given
from hypothesis import strategies as st

from layerswap.training.mix.filters import ItemIndex, is_unspaced, units

LANGUAGES = {"eng_Latn": "en", "swh_Latn": "sw", "ben_Beng": "bn", "tel_Telu": "te",
             "jpn_Jpan": "ja"}  # fmt: skip


@pytest.fixture(scope="module")
def index():
    index = ItemIndex()
    for code, language in LANGUAGES.items():
        index.add(f"flores-{language}", read_lines(f"flores.{code}"))
        index.add(f"mgsm-{language}", [question for question, _ in read_mgsm(language)])
    return index


@pytest.mark.parametrize("code", LANGUAGES)
def test_every_item_is_found_inside_a_longer_text(index, code):
    language = LANGUAGES[code]
    for line in read_lines(f"flores.{code}"):
        if len(units(line, index.sets[f"flores-{language}"].unit)) >= 13:
            assert index.find(f"Please translate: {line.upper()} -- thank you.")[1]
    for question, _ in read_mgsm(language):
        name, item = index.find(f"Q: {question}\nA:")
        assert (name, item) == (f"mgsm-{language}", question)


def test_other_texts_are_not_found(index):
    texts = [row["swa"] + row["ben"] + row["eng"] for row in read_jsonl("tico19.jsonl")]
    texts += [row["question"] for row in read_jsonl("gsm8k.jsonl")]
    texts += [u["text"] for row in read_jsonl("instruction_ja.jsonl") for u in row["utterances"]]
    assert [text for text in texts if index.find(text)] == []


def test_a_changed_word_in_a_long_item_does_not_hide_it(index):
    question = max((question for question, _ in read_mgsm("sw")), key=len)
    words = question.split()
    words[len(words) // 2] = "kitu"
    assert index.find(" ".join(words))[1] == question


def test_japanese_is_compared_by_characters(index):
    assert index.sets["mgsm-ja"].unit == "characters"
    assert index.sets["mgsm-te"].unit == "words"
    question = read_mgsm("ja")[0][0]
    assert index.find("、".join(question)) is not None
    assert is_unspaced("日本語です")
    assert is_unspaced("ภาษาไทย")
    assert not is_unspaced("বাংলা ভাষা")


def test_letters_marks_and_digits_are_compared_without_case_and_width():
    assert units("Ｈello — WORLD's ½ 7!", "words") == ["hello", "world", "s", "1", "2", "7"]
    assert units("日本、語。", "characters") == ["日", "本", "語"]
    assert units("স্বাস্থ্য, কেন্দ্র!", "words") == ["স্বাস্থ্য", "কেন্দ্র"]
    assert units("ఆరోగ్య-కేంద్రం", "words") == ["ఆరోగ్య", "కేంద్రం"]


def test_n_is_the_fifth_percentile_of_the_lengths_within_bounds():
    index = ItemIndex()
    items = [" ".join(f"w{i}x{j}" for j in range(10 + i)) for i in range(100)]
    assert index.add("wide", items).n == 13
    short = [" ".join(f"v{i}x{j}" for j in range(9 if i < 10 else 30)) for i in range(100)]
    assert index.add("short", short).n == 9
    tiny = [f"only three words{i}" for i in range(5)]
    assert index.add("tiny", tiny) == (5, 5, "words", 8)
    assert index.find("only three words1") is None


def test_an_item_between_the_minimum_and_n_counts_only_whole():
    index = ItemIndex()
    items = [" ".join(f"long{i}x{j}" for j in range(40)) for i in range(40)]
    index.add("set", [*items, "nine words that stand here in one short item"])
    assert index.find("say: nine words that stand here in one short item!") is not None
    assert index.find("say: nine words that stand here in one short thing") is None


word = st.text(alphabet="abcdefgh", min_size=1, max_size=3)


@given(
    st.lists(st.lists(word, min_size=13, max_size=20), min_size=1, max_size=4),
    st.lists(word, max_size=30),
    st.integers(0, 20),
)
def test_the_index_agrees_with_a_direct_comparison(items, noise, at):
    index = ItemIndex()
    n = index.add("set", [" ".join(item) for item in items]).n
    text = noise[:at] + items[0][: n - 1] + noise[at:]

    def grams(words):
        return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}

    expected = bool(grams(text) & set().union(*(grams(item) for item in items)))
    assert (index.find(", ".join(text)) is not None) == expected
