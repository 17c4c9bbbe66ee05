"""The detector of mathematics, on excerpts it was not fitted on, and its arithmetic."""

import pytest
from excerpts import read_jsonl, read_lines, read_mgsm
from hypothesis import assume, given
from hypothesis import strategies as st

from layerswap.training.mix.mathematics import (
    MATH_THRESHOLD,
    math_features,
    math_probability,
    true_equations,
)


def share_detected(examples):
    return sum(math_probability(*e) >= MATH_THRESHOLD for e in examples) / len(examples)


def test_english_problems_are_detected_with_and_without_solution():
    rows = read_jsonl("gsm8k.jsonl")
    assert share_detected([(row["question"], row["answer"]) for row in rows]) == 1
    assert share_detected([(row["question"],) for row in rows]) >= 0.95


@pytest.mark.parametrize("language", ["en", "sw", "bn", "te", "ja"])
def test_problems_in_the_papers_languages_are_detected(language):
    rows = read_mgsm(language)
    assert share_detected(rows) >= 0.93
    assert share_detected([row[:1] for row in rows]) >= 0.93


def generic():
    tico = read_jsonl("tico19.jsonl")
    yield "translation", [(f"Translate:\n{r['eng']}", r[c]) for r in tico for c in ("swa", "ben")]
    yield "translation back", [(row[code], row["eng"]) for row in tico for code in ("swa", "ben")]
    for code in ("swh_Latn", "ben_Beng", "tel_Telu", "jpn_Jpan"):
        yield f"news, {code}", [(line,) for line in read_lines(f"flores.{code}")]
    yield "questions", [(row["question"], row["answer"]) for row in read_jsonl("afriqa.jsonl")]
    choices = read_jsonl("jcommonsenseqa.jsonl")
    yield "common sense", [(row["question"], row["answer"]) for row in choices]
    yield "grammar", [(row["text"],) for row in read_jsonl("ud_telugu.jsonl")]
    dialogues = [row["utterances"] for row in read_jsonl("instruction_ja.jsonl")]
    yield "dialogues", [(turns[0]["text"], turns[1]["text"]) for turns in dialogues]


@pytest.mark.parametrize(("name", "examples"), list(generic()), ids=lambda v: str(v)[:16])
def test_generic_examples_are_kept(name, examples):
    assert share_detected(examples) <= 0.07, name


def test_a_question_for_a_year_or_a_count_is_not_mathematics():
    assert math_probability("Je, Tanzania ina mikoa mingapi?", "31") < MATH_THRESHOLD
    assert math_probability("When did the second world war end?", "1945") < MATH_THRESHOLD


def test_equations_show_mathematics_in_other_languages():
    problem = "Maria tem 12 caixas com 8 livros. Ela vende 20 livros. Quantos livros restam?"
    assert math_probability(problem, "12 * 8 = 96 livros. 96 - 20 = 76 livros.") > 0.9


def test_digits_of_every_script_are_numbers():
    western = math_features("x 16 y 300 z?", "45")
    for digits in ("০১২৩৪৫৬৭৮৯", "౦౧౨౩౪౫౬౭౮౯", "０１２３４５６７８９"):
        table = str.maketrans("0123456789", digits)
        assert math_features("x 16 y 300 z?".translate(table), "45".translate(table)) == western


operand = st.integers(min_value=1, max_value=9999)


@given(operand, operand, operand, st.sampled_from("+-*/"), st.sampled_from("+-*/"))
def test_an_equation_holds_if_python_agrees(a, b, c, first, second):
    left = f"{a}{first}{b}{second}{c}"
    result = eval(left)  # digits and operators, made above
    assume(result > 0.01)  # a result with a sign, or lost in the rounding, is no equation here
    assert true_equations(f"so {left} = {result:.6f} apples") == 1
    assert true_equations(f"so {left} = {result * 1.1 + 1:.6f} apples") == 0


def test_equations_in_common_notations_are_counted():
    assert true_equations("sold 48/2 = <<48/2=24>>24 clips") == 1  # as GSM8K writes it
    assert true_equations("$1,200 x 3 = $3,600") == 1
    assert true_equations("２×３＝６") == 1
    assert true_equations("20% * 50 = 10") == 1
    assert true_equations("5/0 = 0 and 2 + 2 = 5") == 0


def test_empty_texts_are_not_mathematics():
    assert math_probability("", "") < MATH_THRESHOLD


@pytest.mark.parametrize(
    "text", ["7" * 200_000, "1+" * 100_000, "1,000" * 40_000, "x = " * 50_000, "a. " * 70_000]
)
def test_long_runs_take_time_in_proportion(text):
    assert 0 <= math_probability(text, text) <= 1  # a search that backtracks would never end
