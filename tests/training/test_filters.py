"""Each filter on examples that it must drop and must keep, and the pipeline that counts."""

from __future__ import annotations

from collections import Counter

import pytest
from excerpts import read_jsonl, read_lines, read_mgsm

from layerswap.errors import DataError
from layerswap.training.mix import filters
from layerswap.training.mix.examples import MixExample
from layerswap.training.mix.filters import ItemIndex, units
from layerswap.training.mix.schema import FILTERS, Filters, LanguageFilter, Length, NearDuplicates


def pair(prompt, completion="An answer.", language=None, source="a"):
    return MixExample((("user", prompt), ("assistant", completion)), "", language, source)


def raw(text, language=None):
    return MixExample((), text, language, "a")


def test_length_names_the_part_and_the_bound():
    look = filters.length_filter(
        Length(min_prompt=5, max_prompt=10, max_completion=12, min_text=10)
    )
    assert look(pair("123456", "a b c d")) is None
    assert look(pair("1234", "a b c d e")) == "prompt of 4 characters, fewer than 5"
    assert look(pair("12345678901")) == "prompt of 11 characters, more than 10"
    assert look(pair("123456", "x" * 13)) == "completion of 13 characters, more than 12"
    assert look(raw("short")) == "text of 5 characters, fewer than 10"
    assert look(raw("just long enough")) is None


def test_exact_duplicates_ignore_case_punctuation_and_width():
    look = filters.exact_duplicate_filter()
    assert look(pair("What is this?", "A cat.")) is None
    assert look(pair("what is THIS", "a cat")) == "the same as an earlier example"
    assert look(pair("ｗhat is this？", "a cat。")) == "the same as an earlier example"
    assert look(pair("What is this?", "A dog.")) is None
    assert look(pair("∑ ∏ ?", "∅")) is None
    assert look(pair("∏ ∑ ?", "∅")) is None
    # Prompt and completion are compared apart.
    assert look(pair("What is", "this? A cat.")) is None


def test_mathematics_above_the_threshold_is_dropped():
    question, answer = read_mgsm("sw")[0]
    look = filters.math_filter(0.5)
    chat = (("user", question), ("assistant", answer), ("user", "Asante!"),
            ("assistant", "Karibu."))  # fmt: skip
    for example in (pair(question, answer), raw(question), MixExample(chat)):
        assert look(example).startswith("mathematics (")
    assert look(MixExample(chat[2:])) is None
    assert look(pair("Nani aliandika kitabu hiki?", "Shaaban Robert")) is None
    assert filters.math_filter(1.0)(pair(question, answer)) is None


@pytest.mark.parametrize(
    ("code", "language"),
    [("swh_Latn", "sw"), ("ben_Beng", "bn"), ("tel_Telu", "te"), ("jpn_Jpan", "ja")],
)
def test_language_keeps_the_language_and_drops_english(code, language):
    look = filters.language_filter(LanguageFilter())
    kept = [look(raw(line, language)) for line in read_lines(f"flores.{code}")]
    assert Counter(kept)[None] >= 15
    for line in read_lines("flores.eng_Latn"):
        assert look(raw(line, language)).startswith(f"{language} with probability 0.0")


def test_language_tests_the_completion_or_the_part_that_is_set():
    english, swahili = read_lines("flores.eng_Latn")[0], read_lines("flores.swh_Latn")[0]
    example = pair(english, swahili, "sw")
    both = LanguageFilter(allow=["en", "sw"], look_at="prompt")
    assert filters.language_filter(LanguageFilter())(example) is None
    assert filters.language_filter(LanguageFilter(look_at="prompt"))(example) is not None
    assert filters.language_filter(both)(example) is None


def test_language_lets_short_texts_and_unknown_languages_pass():
    look = filters.language_filter(LanguageFilter())
    assert look(pair("Swali?", "12", "sw")) is None
    assert look(pair("Question?", read_lines("flores.eng_Latn")[0])) is None


def test_unknown_language_codes_are_refused():
    filters.check_languages(["sw", "bn", "te", "ja"])
    with pytest.raises(DataError, match="py3langid knows no language 'swh'; write an ISO 639-1"):
        filters.check_languages(["swh"])


def test_evaluation_items_are_named():
    index = ItemIndex()
    question = read_mgsm("bn")[3][0]
    index.add("mgsm", [question])
    look = filters.evaluation_filter(index)
    assert look(pair(question)) == "shares words with an item of mgsm"
    assert look(pair("প্রশ্ন", f"উত্তর: {question}")) == "shares words with an item of mgsm"
    assert look(pair(read_mgsm("bn")[4][0])) is None


def shingles(text):
    words = units(text, "words")
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_near_duplicates_agree_with_jaccard_similarity():
    look = filters.near_duplicate_filter(NearDuplicates(threshold=0.7), seed=0)
    question = " ".join(row["question"] for row in read_jsonl("gsm8k.jsonl")[:8])
    words = question.split()
    assert look(raw(question)) is None
    close = " ".join([*words[:50], "other", *words[51:]])
    far = " ".join(word if i % 4 else "other" for i, word in enumerate(words))
    truth = [
        len(shingles(text) & shingles(question)) / len(shingles(text) | shingles(question))
        for text in (close, far)
    ]
    assert truth[0] > 0.9
    assert truth[1] < 0.2
    assert look(raw(close)).startswith("nearly the same as an earlier example (0.9")
    assert look(raw(far)) is None


def test_near_duplicates_work_without_spaces_between_words():
    look = filters.near_duplicate_filter(NearDuplicates(), seed=0)
    lines = read_lines("flores.jpn_Jpan")
    longest = max(lines, key=len)
    assert look(raw(longest)) is None
    assert look(raw(longest.replace("。", "！") + "はい")) is not None
    assert look(raw(min(lines, key=len))) is None
    assert look(raw("?!")) is None


def test_the_pipeline_counts_by_filter_and_source_and_a_source_can_skip_one():
    pipeline = filters.build_filters(Filters(length=Length(min_prompt=3)), None, 0)
    for source, times in (("a", 4), ("b", 2)):
        for i in range(times):
            assert not pipeline.keeps(pair("x", f"text {i}", source=source))
    assert pipeline.keeps(pair("a question", source="b"))
    assert not pipeline.keeps(pair("A question!", source="b"))
    assert pipeline.counts == {"length": Counter(a=4, b=2), "exact_duplicates": Counter(b=1)}
    assert len(pipeline.shown["length"]) == filters.SHOWN
    assert pipeline.shown["exact_duplicates"][0].text == "A question!\nAn answer."
    assert pipeline.keeps(pair("x"), skip=["length"])


def test_the_filters_run_in_the_order_of_the_schema():
    settings = Filters.model_validate(
        {"length": True, "math": True, "language": True, "near_duplicates": True}
    )
    assert tuple(filters.build_filters(settings, ItemIndex(), 0).counts) == FILTERS
