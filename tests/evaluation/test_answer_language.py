"""The language of answers, on real sentences, mixed ones, and what belongs to no language."""

from dataclasses import replace

import pytest

from layerswap.evaluation.languages import (
    ANSWER,
    REASONING,
    identified_code,
    known_language,
    language_shares,
    share_in,
)
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.experiment.answers import Answer, answers_of, write_results
from layerswap.experiment.benchmarks import study_results
from layerswap.experiment.conditions import DEFAULT, TASK_EXPERT
from layerswap.ground.errors import EvaluationError

# Two sentences that say the same, of about as many letters.
SWAHILI = "Bata wa Janet hutaga mayai kumi na sita kila siku, na anakula matatu asubuhi."
ENGLISH = "Janet's ducks lay sixteen eggs every day, and she eats three in the morning."
TELUGU = "జానెట్ బాతులు రోజుకు పదహారు గుడ్లు పెడతాయి, ఆమె ఉదయం మూడు తింటుంది."
JAPANESE = (
    "ジャネットのアヒルは毎日十六個の卵を産み、彼女は毎朝三個を朝食に食べて、残りを市場で売ります。"
)


def letters(text):
    return sum(c.isalpha() for c in text)


@pytest.mark.parametrize(
    ("text", "language"),
    [(SWAHILI, "sw"), (ENGLISH, "English"), (TELUGU, "tel_Telu"), (JAPANESE, "ja")],
)
def test_a_sentence_is_in_its_language_and_in_no_other(text, language):
    assert share_in(text, language) == 1
    others = {"sw", "en", "te", "ja"} - {identified_code(language)}
    assert {share_in(text, other) for other in others} == {0}


def test_a_mixed_text_counts_its_letters():
    both = letters(SWAHILI) + letters(ENGLISH)
    for text in (f"{SWAHILI} {ENGLISH}", f"{ENGLISH}\n\n{SWAHILI}"):
        assert share_in(text, "swh") == pytest.approx(letters(SWAHILI) / both)
        assert share_in(text, "en") == pytest.approx(letters(ENGLISH) / both)
    # A short rest goes with the piece before it.
    assert share_in(f"{SWAHILI} Yes, so.", "sw") == 1


@pytest.mark.parametrize(
    "noise",
    [
        "```python\nfor duck in ducks:\n    total = total + duck.number_of_eggs_per_day\n```",
        "```python\nwhile hungry_ducks_remain: feed_them_with_the_rest_of_the_bread()",
        "`the_number_of_eggs_that_are_left_over_every_day`",
        "$total = \\text{eggs laid} - \\text{eggs eaten in the morning}$",
        "\\[ \\frac{eggs laid per day}{eggs eaten every morning at home} \\]",
        "<answer id='the number of eggs that were sold at the market'>",
        "https://example.org/the/number/of/eggs/that/are/left/over/every/day",
        "16 - 3 = 13, 13 * 2 = 26 " * 8,
    ],
)
def test_code_formulas_markup_and_numbers_are_left_out(noise):
    assert share_in(noise, "en") is None
    assert share_in(f"{SWAHILI}\n{noise}", "sw") == 1
    assert share_in(f"She makes $18 from {ENGLISH} Then she has $5 left.", "en") == 1


def test_reasoning_has_a_share_of_its_own():
    found = language_shares(f"<think>{ENGLISH}</think>\n{SWAHILI}", "sw")
    assert found == {REASONING: 0, ANSWER: 1}
    assert language_shares(f"{ENGLISH}</think>18", "en") == {REASONING: 1}
    assert language_shares(ENGLISH, "en") == {ANSWER: 1}
    assert language_shares("18", "en") == {}


def test_languages_that_cannot_be_identified():
    assert known_language("") is None
    assert known_language("furo") is None
    assert known_language("swh_Latn") == "sw"
    with pytest.raises(EvaluationError, match="py3langid cannot identify 'chr'"):
        identified_code("chr")


def sample(text, number, kind="strict"):
    return {"doc_id": number, "filter": kind, "resps": [[text]], "metrics": ["exact_match"],
            "exact_match": 1.0, "arguments": [["q"]], "target": "13",
            "filtered_resps": [text]}  # fmt: skip


def test_scores_hold_the_share_once_for_each_document():
    texts = [SWAHILI, ENGLISH, "13"]
    samples = [sample(t, i, kind) for i, t in enumerate(texts) for kind in ("strict", "raw")]
    asked = [WrittenTask("mgsm_sw", "mgsm", "sw", ("exact_match", "strict"))]
    scores = answers_of({"m": {"samples": {"mgsm_sw": samples}}}, asked, {})
    shares = [score for score in scores if score.metric == ANSWER]
    shared = {"benchmark": "mgsm", "language": "sw", "question": "q", "text": "q", "target": "13"}
    assert shares == [
        Answer("m", "mgsm_sw", i, ANSWER, "strict", share, answer=texts[i], **shared)
        for i, share in enumerate((1.0, 0.0))
    ]
    assert sum(score.main for score in scores) == 3
    unknown = [WrittenTask("mgsm_sw", "mgsm", "furo", ("exact_match", "strict"))]
    elsewhere = [replace(asked[0], in_language=False)]
    for other in (unknown, elsewhere):
        scores = answers_of({"m": {"samples": {"mgsm_sw": samples}}}, other, {})
        assert ANSWER not in {score.metric for score in scores}


def test_a_study_has_a_table_of_the_languages_that_its_models_wrote(tmp_path):
    conditions = [TASK_EXPERT, replace(DEFAULT, pair="0-0"), replace(DEFAULT, pair="1-1")]
    texts = [[ENGLISH, ENGLISH], [SWAHILI, ENGLISH], [SWAHILI, SWAHILI]]
    results = {
        str(one): {"samples": {"mgsm_sw": [
            {**sample(text, i), "arguments": [["Q"]], "target": "1", "filtered_resps": ["1"]}
            for i, text in enumerate(written)
        ]}}
        for one, written in zip(conditions, texts, strict=True)
    }  # fmt: skip
    asked = [WrittenTask("mgsm_sw", "mgsm", "sw", ("exact_match", "strict"))]
    of_model = {str(one): {"condition": one} for one in conditions}
    write_results(tmp_path / "results", results, asked, of_model=of_model)
    table = study_results({"sw": tmp_path}, 0.5).tables["mgsm, sw: the answers as written"]
    assert table.rows == [["task expert", 0.0], ["swap, default", 0.75]]
    assert list(table.columns) == ["treatment", "letters in the language"]
