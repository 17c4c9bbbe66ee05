"""Each filter on examples that it must drop and must keep, and the pipeline that counts.

Shared n-grams with evaluation items are compared with a direct comparison of word lists.
"""

import unicodedata
from collections import Counter

import pytest
from excerpts import read_jsonl, read_lines, read_mgsm
from hypothesis import given
from hypothesis import strategies as st

from layerswap.ground.errors import DataError
from layerswap.reading.letters import bare, unmarked
from layerswap.training.mix import filters
from layerswap.training.mix.examples import MixExample
from layerswap.training.mix.filters import ItemIndex, is_unspaced, units
from layerswap.training.mix.schema import Filters, Length


def pair(prompt, completion="An answer.", language=None, source="a"):
    return MixExample((("user", prompt), ("assistant", completion)), "", language, source)


def raw(text, language=None):
    return MixExample((), text, language, "a")


def test_length_names_the_bound():
    look = filters.length_filter(Length(min_text=10, max_text=16))
    assert look(pair("123456", "abc")) is None
    assert look(pair("1234", "abcd")) == "9 characters, fewer than 10"
    assert look(pair("123456", "abcdefghij")) == "17 characters, more than 16"
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
    look = filters.mathematics
    chat = (("user", question), ("assistant", answer), ("user", "Asante!"),
            ("assistant", "Karibu."))  # fmt: skip
    for example in (pair(question, answer), raw(question), MixExample(chat)):
        assert look(example).startswith("mathematics (")
    assert look(MixExample(chat[2:])) is None
    assert look(pair("Nani aliandika kitabu hiki?", "Shaaban Robert")) is None


@pytest.mark.parametrize(
    ("code", "language"),
    [("swh_Latn", "sw"), ("ben_Beng", "bn"), ("tel_Telu", "te"), ("jpn_Jpan", "ja")],
)
def test_language_keeps_the_language_and_drops_english(code, language):
    look = filters.language_filter()
    kept = [look(raw(line, language)) for line in read_lines(f"flores.{code}")]
    assert Counter(kept)[None] >= 15
    for line in read_lines("flores.eng_Latn"):
        assert look(raw(line, language)).startswith(f"{language} with probability 0.0")


def test_language_tests_the_completion():
    english, swahili = read_lines("flores.eng_Latn")[0], read_lines("flores.swh_Latn")[0]
    assert filters.language_filter()(pair(english, swahili, "sw")) is None
    assert filters.language_filter()(pair(swahili, english, "sw")) is not None


def test_language_lets_short_texts_and_unknown_languages_pass():
    look = filters.language_filter()
    assert look(pair("Swali?", "12", "sw")) is None
    assert look(pair("Question?", read_lines("flores.eng_Latn")[0])) is None


def test_unknown_language_codes_are_refused():
    for code in ("sw", "bn", "te", "ja"):
        filters.check_language(code)
    with pytest.raises(DataError, match=r"languages\) does not know 'swh'; write sw$"):
        filters.check_language("swh")


def shingles(text):
    words = units(text, "words")
    return {tuple(words[i : i + 5]) for i in range(len(words) - 4)}


def test_near_duplicates_agree_with_jaccard_similarity():
    look = filters.near_duplicate_filter(0.7, seed=0)
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
    look = filters.near_duplicate_filter(0.8, seed=0)
    lines = read_lines("flores.jpn_Jpan")
    longest = max(lines, key=len)
    assert look(raw(longest)) is None
    assert look(raw(longest.replace("。", "！") + "はい")) is not None
    assert look(raw(min(lines, key=len))) is None
    assert look(raw("?!")) is None


def test_the_pipeline_counts_by_filter_and_source_and_a_source_can_skip_one():
    pipeline = filters.build_filters(Filters(length=Length(min_text=15)), None, 0)
    for source, times in (("a", 4), ("b", 2)):
        for i in range(times):
            assert not pipeline.keeps(pair("x", f"text {i}", source=source))
    assert pipeline.keeps(pair("a question", source="b"))
    assert not pipeline.keeps(pair("A question!", source="b"))
    assert pipeline.counts == {"length": Counter(a=4, b=2), "exact_duplicates": Counter(b=1)}
    assert len(pipeline.shown["length"]) == filters.SHOWN
    assert pipeline.shown["exact_duplicates"][0].text == "A question!\nAn answer."
    assert pipeline.keeps(pair("x", "y"), skip=["length"])


def test_the_filters_run_from_cheap_to_expensive():
    settings = Filters.model_validate(
        {"near_duplicates": True, "language": True, "math": True, "length": True}
    )
    assert list(filters.build_filters(settings, ItemIndex(), 0).counts) == [
        "length", "exact_duplicates", "math", "language", "evaluation", "near_duplicates",
    ]  # fmt: skip


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
    look = filters.evaluation_filter(index)
    for question, _ in read_mgsm(language):
        assert index.find(f"Q: {question}\nA:") == (f"mgsm-{language}", question)
        assert look(pair(f"Q: {question}")) == f"shares words with an item of mgsm-{language}"


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
    assert index.find("with only three words1") is None


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


def test_overlap_finds_items_that_share_a_run_of_words():
    texts = ["He saw: a RED house, on the hill.", "東京の大きな赤い家を見ました"]
    items = ["A red house on the left", "red house on the", "a red house by the hill",
             "大きな赤い家を見た", "大きな家", ""]  # fmt: skip
    assert filters.overlap(texts, items) == [0]
    assert filters.overlap(texts, items, words=4) == [0, 1, 3]
    assert filters.overlap([], items) == filters.overlap(texts, []) == []


HIDDEN = ["\u200d", "\u200c", "\u00ad", "\u2060", "\u0640", "\ufe0f", "\u200b"]


@pytest.mark.parametrize("hidden", HIDDEN)
def test_characters_that_no_reader_sees_hide_no_item(hidden):
    item = "Die Bundesregierung hat gestern ein neues Gesetz zur Förderung beschlossen"
    other = unicodedata.normalize("NFD", item.replace("ung", f"u{hidden}ng"))
    index = ItemIndex()
    index.add("test", [other])
    assert index.find(f"Text: {item}.") == ("test", other)
    assert units(item, "words") == units(other, "words")


@pytest.mark.parametrize("mark", "’ʼʻꞌ`´ˈ\u2018ʾʹ＇")
def test_an_apostrophe_that_is_written_otherwise_hides_no_item(mark):
    item = "Che sy omba'apo heta ko'ãgagua ára ha'e ohayhu ñande retãme ko'ẽ guive"
    index = ItemIndex()
    index.add("test", [item])
    assert index.find(item.replace("'", mark)) is not None
    assert units(item.replace("'", mark), "words") == units(item, "words")


ARABIC = "كَتَبَ الطَّالِبُ رِسَالَةً طَوِيلَةً إِلَى صَدِيقِهِ فِي سَنَةِ ١٩٩٠"
SPELLINGS = [
    (ARABIC, "كتب الطالب رسالة طويلة الي صديقه فى سنة ۱۹۹۰"),
    ("این کتاب را برای کودکان در یک مدرسه نوشتند", "اين كتاب را براي كودكان در يك مدرسه نوشتند"),
    ("בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם", "בראשית ברא אלהים את השמים"),
    ("Ọ̀rọ̀ àwọn ọmọdé ní ilé ìwé gíga ti Ìbàdàn", "Oro awon omode ni ile iwe giga ti Ibadan"),
    ("Orașul și țara sunt frumoase", "Oraşul şi ţara sunt frumoase"),
    ("Ɓarayi sun sace ƙarfen ɗakin ƴan gari", "Barayi sun sace karfen dakin yan gari"),
    ("Işıklı kapı kırıldı, le cœur", "IŞIKLI KAPI KIRILDI, LE COEUR"),
    ("ሀገራችን ኢትዮጵያ ሰላም ዓለም ፀሐይ", "ሃገራችን ኢትዮጵያ ሠላም አለም ጸሀይ"),
    ("ज़ोर से ख़बर लड़का पढ़कर", "जोर से खबर लडका पढकर"), ("هذه المدينة الكبيرة", "هذه المدينه الكبيره"),
    ("ɗalibai suna ƙoƙari", "'dalibai suna k'ok'ari"), ("ng'ombe wa Ng'ang'a", "ngombe wa nganga"),
    ("The fox jumps over 7.", "Ｔｈｅ　ｆｏｘ　ｊｕｍｐｓ　ｏｖｅｒ　７．"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "other"), SPELLINGS)
def test_letters_that_are_written_otherwise_hide_no_item(one, other):
    for item, text in ((one, other), (other, one)):
        index = ItemIndex()
        index.add("test", [item])
        assert index.find(f"{text}!"), text
        assert filters.overlap([text], [item], 3) == [0]
    assert bare(f"«{one}»?") == bare(other)
    assert bare("3 - 4 =") != bare("3 * 4 =")


def test_only_a_comparison_drops_marks():
    assert units(ARABIC, "words") != units(unicodedata.normalize("NFD", SPELLINGS[0][1]), "words")
    assert unmarked("हिन्दी में लिखी") == "हिन्दी में लिखी"
    assert bare("?!") == "?!"


@pytest.mark.parametrize("text", ["မိူင်းတႆးပဵၼ်မိူင်း", "ᥖᥭᥰ ᥖᥬᥲ ᥑᥨᥒᥰ", "ꦧꦱꦗꦮꦲꦶꦏꦸ", "ᬩᬲᬩᬮᬶ", "ភាសាខ្មែរ"])
def test_scripts_without_spaces_are_known_by_unicode(text):
    assert is_unspaced(text)
    assert not is_unspaced(f"{text} and many more letters of another script")


def test_short_items_are_found_where_a_line_is_one():
    index = ItemIndex()
    index.add("test", ["Simba yashinda mechi kubwa", "Habari!", "大会で優勝した"])
    assert index.sets["test"].too_short == 3
    for text in ("simba yashinda mechi kubwa.", "Text: Simba yashinda mechi kubwa\nTopic: sports",
                 "Leo.\nSimba yashinda mechi kubwa\nKesho.", "habari",
                 "大会で優勝した。"):  # fmt: skip
        assert index.find(text), text
    for text in ("Leo Simba yashinda mechi kubwa mjini", "Sema:\nHabari!\nKaribu.", "", "大会"):
        assert index.find(text) is None, text
