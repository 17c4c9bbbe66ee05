"""Balanced accuracy and macro-F1: against scikit-learn, and beside accuracy where they disagree."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import balanced_accuracy_score, f1_score
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.evaluation.metrics import add_labels
from layerswap.evaluation.statistics import classified_of, mean_interval, paired_difference
from layerswap.experiment.answers import ANSWERS_TABLE, Answer, read_answers, write_answers
from layerswap.experiment.runs import compare
from layerswap.experiment.tables import comparison_tables

LABELS = ["sport"] * 80 + ["health"] * 20
MAJORITY = ["sport"] * 100
"""Right in 80 of 100, but for no document about health."""
FAIR = ["sport"] * 56 + ["health"] * 24 + ["health"] * 18 + ["sport"] * 2
"""Right in 74 of 100: 70% of sport and 90% of health."""


def classified(predicted, labels=LABELS):
    return classified_of(list(zip(labels, predicted, strict=True)))


@pytest.mark.parametrize("seed", range(5))
def test_the_measures_are_those_of_scikit_learn(seed):
    rng = np.random.default_rng(seed)
    labels = rng.choice(["a", "bb", "c"], 50, p=[0.7, 0.2, 0.1]).tolist()
    answers = np.where(rng.random(50) < 0.5, labels, rng.choice(["a", "bb", "c", "dd"], 50))
    found = classified(answers.tolist(), labels).balanced
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an answer that is no label
        right = balanced_accuracy_score(labels, answers)
    assert found.balanced_accuracy.mean == pytest.approx(right)
    assert found.macro_f1.mean == pytest.approx(f1_score(labels, answers, average="macro"))
    for interval in vars(found).values():
        assert interval.low < interval.mean < interval.high
        assert interval.n == 50


@pytest.mark.slow
def test_intervals_are_percentiles_over_resampled_documents():
    found = classified(FAIR).balanced.balanced_accuracy
    rng = np.random.default_rng(1)
    labels, answers = np.array(LABELS), np.array(FAIR)
    drawn = []
    for _ in range(1000):
        rows = rng.integers(100, size=100)
        drawn.append(balanced_accuracy_score(labels[rows], answers[rows]))
    assert (found.low, found.high) == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.02)


def test_several_models_are_averaged_and_equal_answers_are_not_proof():
    both = classified(FAIR)
    mean = type(both)(both.labels, np.array([FAIR, MAJORITY]))
    assert mean.balanced.balanced_accuracy.mean == pytest.approx((0.8 + 0.5) / 2)
    right = np.array(FAIR) == LABELS
    assert both.minus(both).macro_f1 == paired_difference(right, right)
    assert classified(LABELS).balanced.macro_f1 == mean_interval(np.ones(100))
    assert classified_of([("", ""), ("sport", "sport")]) is None


def written(folder, answers):
    rows = [
        Answer(model, "topics_sw", document, "acc", "none", float(label == answer), True,
               "topics", "sw", label, answer)
        for model, given in answers.items()
        for document, (label, answer) in enumerate(zip(LABELS, given, strict=True))
    ]  # fmt: skip
    folder.mkdir()
    write_answers(folder / ANSWERS_TABLE, rows)
    return rows


def test_a_language_without_a_name_is_shown_by_its_code(tmp_path):
    written(tmp_path / "run", {"fair": FAIR, "majority": MAJORITY})
    rows = [replace(row, language="nela") for row in read_answers(tmp_path / "run")]
    write_answers(tmp_path / "run" / ANSWERS_TABLE, rows)
    scores, balanced = comparison_tables(compare([tmp_path / "run"]))
    assert list(scores.columns)[:3] == ["model", "n", "nela"]
    assert balanced.caption.startswith("topics, nela: ")


@pytest.mark.slow
def test_compare_has_balanced_accuracy_beside_accuracy(tmp_path):
    written(tmp_path / "run", {"fair": FAIR, "majority": MAJORITY, "again": FAIR})
    asked = ["compare", str(tmp_path / "run")]
    shown = CliRunner().invoke(app, asked, env={"COLUMNS": "200"}).stdout
    assert "macro-F1 minus fair" in shown
    plain = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    rows = {(row["model"], row["metric"]): row for row in plain["scores"]}
    assert rows["majority", "acc"]["score"] == 0.8
    assert rows["majority", "balanced_accuracy"]["score"] == 0.5
    assert rows["again", "balanced_accuracy"]["difference"] == 0
    assert rows["majority", "balanced_accuracy"]["upper"] < 0
    assert "difference" not in rows["fair", "macro_f1"]


@pytest.mark.parametrize(
    ("names", "others", "labelled"),
    [
        (["sport", "health"], ["sport", "health"], True),
        (["sport", "health"], ["sport", "art"], False),
        (["A", "B"], ["A", "B"], False),
        (["(a)", "(b)"], ["(a)", "(b)"], False),
    ],
)
def test_labels_are_the_same_for_every_document_and_no_letters(names, others, labelled):
    samples = [
        {"metrics": ["acc"], "filter": "none", "acc": float(target == 0), "target": target,
         "arguments": [("which?", f" {name}") for name in choices],
         "filtered_resps": [(-1.0, True), (-2.0, False)]}
        for target, choices in enumerate((names, others))
    ]  # fmt: skip
    add_labels({"samples": {"task": samples}})
    assert [sample.get("answered", {}).get("acc") for sample in samples] == (
        [(names[0], names[0]), (names[1], names[0])] if labelled else [None, None]
    )
    samples[0]["acc"] = 1 - samples[0]["acc"]  # it counts otherwise
    for sample in samples:
        sample.pop("answered", None)
    add_labels({"samples": {"task": samples}})
    assert not any("answered" in sample for sample in samples)
