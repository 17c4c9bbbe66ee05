"""Baselines without a model stand beside every model, and a report says when one of them wins."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np
import pytest

from layerswap.evaluation.classifier import LabelledTexts, cross_validation, worth
from layerswap.evaluation.statistics import Classified
from layerswap.experiment.baselines import baselines
from layerswap.experiment.benchmarks import BenchmarkScores, benchmark_result
from layerswap.experiment.cautions import cautions_on
from layerswap.experiment.compare import Compared, split_documents
from layerswap.experiment.conditions import (
    BASE,
    CHANCE,
    COMMONEST,
    CROSS_VALIDATED,
    DEFAULT,
    LANGUAGE_EXPERT,
    ON_LABELS,
    SOUP,
    TASK_EXPERT,
    TRANSLATE_TEST,
    finished,
)
from layerswap.experiment.results import Results
from layerswap.experiment.verdict import (
    opening,
    verdict_facts,
    verdict_in_words,
    verdicts_in_words,
)

TOPICS = {
    "sport": "mchezo mpira timu bao kocha", "health": "daktari hospitali dawa ugonjwa afya",
    "trade": "soko bei biashara pesa benki",
}  # fmt: skip


def headlines(count, *, noise=0.0, seed=0):
    """Headlines of three topics, as texts and labels; `noise` is the share with a random label."""
    rng = np.random.default_rng(seed)
    names = list(TOPICS)
    topics = [names[i] for i in rng.choice(3, size=count, p=[0.5, 0.3, 0.2])]
    texts = [" ".join(rng.choice(TOPICS[topic].split(), 3)) for topic in topics]
    drawn = rng.random(count) < noise
    labels = [names[rng.integers(3)] if d else t for t, d in zip(topics, drawn, strict=True)]
    return texts, np.array(labels)


def answered(labels, share, seed):
    """Answers of which a share is right."""
    rng = np.random.default_rng(seed)
    others = np.array(list(TOPICS))[rng.integers(3, size=len(labels))]
    return np.where(rng.random(len(labels)) < share, labels, others)


def study(count=600, *, noise=0.0, development=0.5, **shares):
    """One language on headlines; `shares` are of right answers, by condition."""
    texts, labels = headlines(count, noise=noise)
    models = {"task": TASK_EXPERT, "language": LANGUAGE_EXPERT, "base": BASE, "soup": SOUP,
              "swap": DEFAULT, "translated": TRANSLATE_TEST,
              "finished": finished("swap", chosen=True),
              "rejected": finished("base", chosen=False)}  # fmt: skip
    answers = {replace(models[name], pair="0-0"): answered(labels, share, i)
               for i, (name, share) in enumerate(shares.items())}  # fmt: skip
    scores = {model: (given == labels).astype(float) for model, given in answers.items()}
    found = BenchmarkScores(scores, 0, labels, answers, texts, np.full(count, 3))
    return benchmark_result("sw", "news", found, development)


def test_baselines_are_rows_of_the_test_documents_and_are_never_saved():
    found = study(task=0.6, swap=0.7)
    by = found.intervals
    assert {COMMONEST, CHANCE, ON_LABELS} < set(by)
    assert by[CHANCE].mean == pytest.approx(1 / 3)
    assert by[COMMONEST].mean == pytest.approx(0.5, abs=0.08)
    assert by[ON_LABELS].mean > 0.95  # better than every model
    assert found.selected in (DEFAULT, TASK_EXPERT)
    assert not set(next(iter(found.choice.competed.values()))) & {COMMONEST, CHANCE, ON_LABELS}
    assert CHANCE not in found.classified


def test_the_classifier_learns_from_the_development_documents_alone():
    texts, labels = headlines(200)
    split = split_documents(200, 0.5)
    shifted = labels.copy()
    shifted[split.test] = "never seen"
    found = baselines(shifted, texts, None, split)
    assert found.scores[ON_LABELS].sum() == 0
    assert len(found.scores[ON_LABELS]) == len(split.test)


def test_without_development_documents_no_text_is_answered_by_a_classifier_that_saw_it():
    texts = [f"{number:07d}" * 3 for number in range(120)]  # no two share a 3-gram but by chance
    labels = np.array(["a", "b"])[np.random.default_rng(0).integers(2, size=120)]
    split = split_documents(120, 0.5)
    found = baselines(labels, texts, None, split._replace(development=np.arange(0),
                                                          test=np.arange(120)))  # fmt: skip
    assert 0.3 < found.scores[CROSS_VALIDATED].mean() < 0.7
    folds = cross_validation(texts, labels)
    assert sorted(np.concatenate([asked for _, asked in folds])) == list(range(120))
    assert all(not set(known) & set(asked) for known, asked in folds)


@pytest.mark.parametrize("share", [0, 0.5], ids=["cross-validated", "on a development split"])
def test_documents_in_another_order_give_the_classifier_the_same_answers(share):
    texts, labels = headlines(240, noise=0.5)
    texts[:30], labels[:20] = texts[30:60], labels[30:50]  # repeated, ten with two labels
    split = split_documents(240, share) if share else split_documents(240, 0.5)._replace(
        development=np.arange(0), test=np.arange(240))  # fmt: skip
    order = np.random.default_rng(1).permutation(240)
    moved = split._replace(**{part: np.flatnonzero(np.isin(order, documents))
                              for part, documents in split._asdict().items()})  # fmt: skip
    as_given = baselines(labels, texts, None, split).labelled
    shuffled = baselines(labels[order], [texts[i] for i in order], None, moved).labelled
    for size, answers in as_given.curve.items():
        by_document = dict(zip(split.test, answers.predicted.T, strict=True))
        moved_to = dict(zip(order[moved.test], shuffled.curve[size].predicted.T, strict=True))
        assert all((by_document[i] == moved_to[i]).all() for i in split.test), size


def test_each_fold_has_every_label_and_all_copies_of_a_text():
    texts = [f"text {number // 2}" for number in range(120)]
    labels = np.array(["rare" if number < 20 else "common" for number in range(120)])
    for _, asked in cross_validation(texts, labels):
        assert (labels[asked] == "rare").sum() == 4
        assert len({texts[i] for i in asked}) == len(asked) / 2


@pytest.mark.parametrize(
    ("labels", "texts"),
    [(["a"] * 60, ["t"] * 60), (["a", "b"] * 9, ["t"] * 18), (["a", "b"] * 30, [""] * 60)],
    ids=["one label", "too few", "no texts"],
)
def test_no_classifier_without_texts_of_two_labels(labels, texts):
    split = split_documents(len(labels), 0.5)
    assert baselines(np.array(labels), texts, None, split).labelled is None
    assert not baselines(None, texts, np.zeros(len(texts), int), split).scores, "free answers"


def test_more_labels_are_worth_more_and_the_crossing_is_where_the_curve_has_the_score():
    texts, labels = headlines(500, noise=0.3)
    labelled = LabelledTexts(texts, labels, [(np.arange(200), np.arange(200, 500))])
    curve = labelled.curve
    assert list(curve) == [10, 25, 50, 100, 200]
    assert curve[10].predicted.shape == (5, 300)
    right = {size: answers.right.mean() for size, answers in curve.items()}
    assert right[10] < right[50] < 0.85
    found = worth(Classified(labels[200:], curve[50].predicted), curve)
    assert found.labels == pytest.approx(50)
    assert found.low == pytest.approx(found.high)  # equal answers, in every resample
    best, worst = (Classified(labels[200:], np.array([answers]))
                   for answers in (labels[200:], np.full(300, "none")))  # fmt: skip
    assert str(worth(best, curve)) == "more than 200 labels"
    assert str(worth(worst, curve)) == "fewer than 10 labels"
    assert worth(best, curve, balanced=True).labels == np.inf


WINNERS = {
    "the classifier": ({"task": 0.3, "swap": 0.6}, {}, "labels", "Do not merge: a linear"),
    "the classifier, level": (
        {"task": 0.3, "swap": 0.88}, {"noise": 0.1}, "labels", "No merge is needed: a linear"),
    "the task expert": (
        {"task": 0.86, "swap": 0.89}, {"noise": 1.0}, "no merge", "No merge is needed: the task"),
    "the base": ({"base": 0.9, "task": 0.4, "swap": 0.9}, {"noise": 1.0}, "no merge",
                 "No merge is needed: the base"),
    "the classifier, when the swap is below the commonest label": (
        {"task": 0.0, "swap": 0.1}, {}, "labels", "Do not merge: a linear"),
    "the commonest label": (
        {"task": 0.0, "swap": 0.1}, {"noise": 1.0}, "no model", "Do not use the default swap"),
    "nobody can tell": (
        {"task": 0.2, "swap": 0.4}, {"count": 70, "noise": 1.0}, "too few documents",
        "The test is too small"),
    "a translator": (
        {"task": 0.3, "swap": 0.6, "translated": 0.9}, {"noise": 1.0}, "translator",
        "Do not merge: the task expert on the translated test"),
    "a translator, above the selected task expert": (
        {"task": 0.6, "swap": 0.3, "translated": 0.9}, {"noise": 1.0}, "translator",
        "Do not merge: the task expert on the translated test"),
    "the task expert, level with a translator": (
        {"task": 0.9, "swap": 0.3, "translated": 0.9}, {"noise": 1.0}, "no merge", "Do not merge"),
    "a merge that is finished on labels": (
        {"task": 0.4, "swap": 0.6, "finished": 0.9}, {"noise": 1.0}, "finished",
        "Use the model finished from the swap, "),
    "the merge, level with the finished one, though one is above that the labels rejected": (
        {"task": 0.4, "swap": 0.9, "finished": 0.9, "rejected": 1.0}, {"noise": 1.0}, "merge",
        "The model finished from the swap is not needed: the default swap reaches "),
    "the classifier, above a finished model": (
        {"task": 0.3, "swap": 0.6, "finished": 0.95}, {}, "labels",
        "Do not use the model finished from the swap: a linear"),
    "the merge": (
        {"task": 0.4, "swap": 0.9}, {"noise": 1.0}, "merge", "Use the default swap, "),
}  # fmt: skip


@pytest.mark.parametrize(
    ("shares", "settings", "kind", "words"), WINNERS.values(), ids=WINNERS.keys()
)
def test_the_verdict_names_the_road_even_if_it_is_none_of_ours(shares, settings, kind, words):
    result = study(**settings, **shares)
    assert result.verdict.kind == kind
    assert verdict_in_words(result).startswith(words)


def test_few_documents_are_enough_if_their_interval_excludes_zero():
    scores = {COMMONEST: np.arange(20) < 9, DEFAULT: np.zeros(20)}
    assert Compared(scores=scores, selected=DEFAULT).verdict.kind == "no model"


def test_no_merge_is_chosen_on_the_test_documents():
    """Of two merges the selected one is recommended, though the test shows the other above it."""
    right = {DEFAULT: 0.6, SOUP: 0.9, TASK_EXPERT: 0.2}
    scores = {model: (np.random.default_rng(i).random(400) < share).astype(float)
              for i, (model, share) in enumerate(right.items())}  # fmt: skip
    result = Compared(scores=scores, selected=DEFAULT)
    assert result.verdict.road == DEFAULT
    assert result.above == [SOUP]


def test_results_of_several_languages_are_counted_by_road():
    found = [study(task=0.3, swap=0.6),
             replace(study(task=0.0, swap=0.1, noise=1.0), language="ha")]  # fmt: skip
    assert verdicts_in_words(found) == (
        "The road to take, of 2 results: linear classifier on the development labels in 1 "
        "(news, sw); no model in 1 (news, ha)."
    )


def test_a_model_with_one_answer_and_labels_that_development_lacks_are_cautions():
    texts, labels = headlines(600)
    split = split_documents(600, 0.5)
    labels[split.test[:3]] = "rare"
    models = {TASK_EXPERT: answered(labels, 0.6, 0), DEFAULT: np.full(600, "sport"),
              SOUP: np.where(np.arange(600) % 12, "sport", "trade")}  # fmt: skip
    answers = {replace(model, pair="0-0"): given for model, given in models.items()}
    scores = {model: (given == labels).astype(float) for model, given in answers.items()}

    def found(**changes):
        given = {"labels": labels, **changes}
        result = benchmark_result(
            "sw", "news", BenchmarkScores(scores, 0, given["labels"], answers, texts), 0.5
        )
        assert [asdict(one) for one in cautions_on(result)] == verdict_facts(result)["cautions"]
        return [str(one) for one in cautions_on(result)]

    one = ("One answer to at least 95% of the test documents of news, sw, whatever they ask: "
           "swap, default.")  # fmt: skip
    assert found() == [one, "The development documents of news, sw lack labels of the test (rare): "
                            "choices and training on them ignore these labels."]  # fmt: skip
    other = labels.copy()
    other[split.development] = "of another task"
    assert found(labels=other)[1].startswith("The development documents of news, sw have no label")
    assert found(labels=np.full(600, "sport")) == [
        "On the test documents of news, sw, no language model is above the commonest label."
    ]
    assert [str(one) for one in cautions_on(study(90, task=0.6, swap=0.7))] == [
        "Only 45 development documents of news, sw chose: others may choose another model."
    ]
    lacking = study(200, task=0.6, swap=0.7)
    constant = Classified(lacking.classified[DEFAULT].labels, np.full((1, 100), "sport"))
    one = replace(lacking, classified={"merged": constant, "a/commonest label": constant},
                  baselines=frozenset({"a/commonest label"}))  # fmt: skip
    said = ("One answer to at least 95% of the test documents of news, sw, whatever they ask: "
            "merged.")  # fmt: skip
    assert Results([one], ["merged"], ["a note"]).said[:2] == ["a note", said]
    assert opening([replace(one, selected="merged", scores={})]) == [said]
