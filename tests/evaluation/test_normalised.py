"""Exact match without case, punctuation, Unicode variants and white space."""

import pytest

from layerswap.evaluation.metrics import NORMALISED, add_normalised, normalised


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [("Dar es Salaam.", "dar  es salaam", True), ("\uff11\uff12", "12", True),
     ("cafe\u0301", "caf\u00e9", True), ("STRASSE", "stra\u00dfe", True),
     ("\u0661", "1", False), ("12", "13", False), ("a-b", "a b", True), ("-3", "3", False),
     ("\u22123.", "-3", True), ("1.5", "15", False), ("", "", True),
     ("mba'e", "mbaꞌe", True), ("ng'ombe", "ngʼombe", True), ("ʻyanci", "'yanci", True),
     ("neno", "ne\u00adno", True)],
)  # fmt: skip
def test_texts_that_differ_in_form_alone_are_equal(one, other, same):
    assert (normalised(one) == normalised(other)) is same


def sample(answer, target, metrics=("exact_match",), name="strict"):
    return {"filter": name, "metrics": list(metrics), "filtered_resps": [answer], "target": target}


def test_the_metric_is_added_for_each_filter_of_generated_answers():
    samples = [sample("Moja.", "moja"), sample("mbili", ["tatu", "Mbili"]), sample("x", "y"),
               sample("x", "X", name="raw")]  # fmt: skip
    other = [sample((-1.0, True), "a", ("acc",))]
    result = {"samples": {"t": samples, "u": other}, "results": {"t": {}, "u": {}}}
    add_normalised(result)
    assert [one[NORMALISED] for one in samples] == [1.0, 1.0, 0.0, 1.0]
    assert samples[0]["metrics"] == ["exact_match", NORMALISED]
    assert result["results"]["t"] == {
        f"{NORMALISED},strict": pytest.approx(2 / 3), f"{NORMALISED},raw": 1.0,
    }  # fmt: skip
    assert result["results"]["u"] == {}
    assert NORMALISED not in other[0]
