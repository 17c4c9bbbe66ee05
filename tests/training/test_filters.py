"""Each filter on examples that it must drop and must keep, and the pipeline that counts."""

from __future__ import annotations

from collections import Counter

import pytest
from excerpts import read_jsonl, read_lines, read_mgsm

from layerswap.errors import DataError
from layerswap.training.mix.filters import (
    SHOWN,
    ItemIndex,
    build_filters,
    by_language,
    by_length,
    check_languages,
    evaluation_items,
    exact_duplicates,
    mathematics,
    near_duplicates,
    units,
)
from layerswap.training.mix.mapping import MixExample
from layerswap.training.mix.schema import FILTERS, Filters, LanguageFilter, Length, NearDuplicates


def pair(prompt, completion="An answer.", language=None, source="a"):
    return MixExample((("user", prompt), ("assistant", completion)), "", language, source)


def raw(text, language=None):
    return MixExample((), text, language, "a")


def test_length_says_which_part_is_outside_of_which_bound():
    look = by_length(Length(min_prompt=5, max_prompt=10, max_completion=12, min_text=10))
    assert look(pair("123456", "a b c d")) is None
    assert look(pair("1234", "a b c d e")) == "prompt of 4 characters, fewer than 5"
    assert look(pair("12345678901")) == "prompt of 11 characters, more than 10"
    assert look(pair("123456", "x" * 13)) == "completion of 13 characters, more than 12"
    assert look(raw("short")) == "text of 5 characters, fewer than 10"
    assert look(raw("just long enough")) is None


def test_exact_duplicates_look_past_case_punctuation_and_width():
    look = exact_duplicates()
    assert look(pair("What is this?", "A cat.")) is None
    assert look(pair("what is THIS", "a cat")) == "the same as an earlier example"
    assert look(pair("ｗhat is this？", "a cat。")) == "the same as an earlier example"
    assert look(pair("What is this?", "A dog.")) is None
    assert look(pair("∑ ∏ ?", "∅")) is None
    assert look(pair("∏ ∑ ?", "∅")) is None
    # What the user says and what the model says are not one text.
    assert look(pair("What is", "this? A cat.")) is None


def test_mathematics_goes_by_its_threshold():
    question, answer = read_mgsm("sw")[0]
    assert mathematics(0.5)(pair(question, answer)).startswith("mathematics (")
    assert mathematics(1.0)(pair(question, answer)) is None
    assert mathematics(0.5)(raw(question)).startswith("mathematics (")
    chat = (
        ("user", question),
        ("assistant", answer),
        ("user", "Asante!"),
        ("assistant", "Karibu."),
    )
    assert mathematics(0.5)(MixExample(chat)).startswith("mathematics (")
    assert mathematics(0.5)(MixExample(chat[2:])) is None
    assert mathematics(0.5)(pair("Nani aliandika kitabu hiki?", "Shaaban Robert")) is None


@pytest.mark.parametrize(
    ("code", "language"),
    [("swh_Latn", "sw"), ("ben_Beng", "bn"), ("tel_Telu", "te"), ("jpn_Jpan", "ja")],
)
def test_language_keeps_the_language_and_drops_english(code, language):
    look = by_language(LanguageFilter())
    kept = [look(raw(line, language)) for line in read_lines(f"flores.{code}")]
    assert Counter(kept)[None] >= 15
    for line in read_lines("flores.eng_Latn"):
        assert look(raw(line, language)).startswith(f"{language} with probability 0.0")


def test_language_looks_at_the_completion_unless_told_otherwise():
    english, swahili = read_lines("flores.eng_Latn")[0], read_lines("flores.swh_Latn")[0]
    assert by_language(LanguageFilter())(pair(english, swahili, "sw")) is None
    assert by_language(LanguageFilter(look_at="prompt"))(pair(english, swahili, "sw")) is not None
    assert (
        by_language(LanguageFilter(allow=["en", "sw"], look_at="prompt"))(pair(english, swahili))
        is None
    )


def test_language_says_nothing_of_short_or_unknown_texts():
    look = by_language(LanguageFilter())
    assert look(pair("Swali?", "12", "sw")) is None
    assert look(pair("Question?", read_lines("flores.eng_Latn")[0])) is None


def test_language_codes_are_checked_before_any_row_is_read():
    check_languages(["sw", "bn", "te", "ja"])
    with pytest.raises(DataError, match="py3langid knows no language 'swh'; write an ISO 639-1"):
        check_languages(["swh"])


def test_evaluation_items_are_named():
    index = ItemIndex()
    question = read_mgsm("bn")[3][0]
    index.add("mgsm", [question])
    look = evaluation_items(index)
    assert look(pair(question)) == "shares words with an item of mgsm"
    assert look(pair("প্রশ্ন", f"উত্তর: {question}")) == "shares words with an item of mgsm"
    assert look(pair(read_mgsm("bn")[4][0])) is None


def shingles(text, size=5, unit="words"):
    parts = units(text, unit)
    return {tuple(parts[i : i + size]) for i in range(len(parts) - size + 1)}


def test_near_duplicates_agree_with_jaccard_similarity():
    look = near_duplicates(NearDuplicates(threshold=0.7), seed=0)
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
    look = near_duplicates(NearDuplicates(), seed=0)
    line = max(read_lines("flores.jpn_Jpan"), key=len)
    assert look(raw(line)) is None
    assert look(raw(line.replace("。", "！") + "はい")) is not None
    assert look(raw(min(read_lines("flores.jpn_Jpan"), key=len))) is None
    assert look(raw("?!")) is None


def test_the_pipeline_counts_by_filter_and_keeps_examples():
    pipeline = build_filters(Filters(length=Length(min_prompt=3)), None, 0)
    for source, times in (("a", 4), ("b", 2)):
        for i in range(times):
            assert not pipeline.keeps(pair("x", f"text {i}", source=source))
    assert pipeline.keeps(pair("a question", source="b"))
    assert not pipeline.keeps(pair("A question!", source="b"))
    assert pipeline.counts == {"length": Counter(a=4, b=2), "exact_duplicates": Counter(b=1)}
    assert len(pipeline.shown["length"]) == SHOWN
    assert pipeline.shown["exact_duplicates"][0].text == "A question!\nAn answer."


def test_a_source_can_skip_a_filter():
    pipeline = build_filters(Filters(length=Length(min_prompt=3)), None, 0)
    assert pipeline.keeps(pair("x"), skip=["length"])
    assert not pipeline.keeps(pair("x", "other"))


def test_the_filters_run_in_the_order_that_the_schema_promises():
    filters = Filters.model_validate(
        {"length": True, "math": True, "language": True, "near_duplicates": True}
    )
    pipeline = build_filters(filters, ItemIndex(), 0)
    assert tuple(pipeline.counts) == FILTERS
