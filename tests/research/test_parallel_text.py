"""Translation and labels from parallel text: what is trained and asked, and what pages say."""

import re

import numpy as np
import pytest
from sentences import check_sentence

from layerswap.training.expert.spec import check_expert
from research import answers, distilled, translation

DOCS = answers.FIGURE.parents[1]


def page(name):
    return " ".join((DOCS / f"{name}.md").read_text("utf-8").split())


def test_pairs_are_read_both_ways_in_turn():
    pairs = [translation.Pair("The house is far.", "Nyumba iko mbali.")] * 2
    rows = [translation.row(*one) for one in enumerate(pairs)]
    assert rows == [
        {"prompt": "English: The house is far.\nSwahili:", "completion": " Nyumba iko mbali."},
        {"prompt": "Swahili: Nyumba iko mbali.\nEnglish:", "completion": " The house is far."},
    ]


def test_what_is_asked_is_not_trained_on(tmp_path, monkeypatch):
    folder = tmp_path / "flores200_devtest"
    folder.mkdir()
    (tmp_path / "lafand_mt").mkdir()
    for code, name in translation.FLORES.items():
        lines = [f"{code} one two three four five {i}\n" for i in range(9)]
        (folder / f"{name}.devtest").write_text("".join(lines))
    own = [f"a sentence of its own, number {i}\n" for i in range(4)]
    for name, mine in (
        ("en", "en one two three four five more\n"),
        ("swa", "mwingine kabisa hapa\n"),
    ):
        (tmp_path / "lafand_mt" / f"en-swa.train.{name}").write_text("".join([mine, *own]))
    monkeypatch.setattr(translation, "TESTS", 3)
    monkeypatch.setattr(answers, "articles", lambda *given: ([], [answers.Article("x", "y")]))
    assert len(translation.asked(tmp_path)) == 3
    assert len(translation.known(tmp_path, tmp_path)) == 4


def test_every_model_is_a_composition_of_trainings(tmp_path):
    training = check_expert(answers.spec("joint-sw-1", "base"))
    assert training.hyperparameters["per_device_train_batch_size"] == answers.BATCHES["joint"]
    for recipe in translation.recipes(tmp_path, tmp_path / "base").values():
        assert {*recipe["experts"]} == {"task", "language"}


def test_topics_are_balanced_and_as_uncertain_as_the_teacher():
    rng = np.random.default_rng(0)
    teacher = rng.normal(0, 2, (3000, 7))
    teacher[:, 0] += 3  # one topic prevails
    drawn = distilled.drawn(teacher)
    assert np.bincount([topic for _, topic in drawn]).tolist() == [100] * 7
    assert len({number for number, _ in drawn}) == 700
    # A drawn topic is likelier to the teacher than on average, and not always its first.
    given = np.exp(teacher - np.logaddexp.reduce(teacher, axis=1)[:, None])
    own = np.array([[topic, given[number, topic]] for number, topic in drawn])
    for topic, overall in enumerate(given.mean(0)[1:], 1):
        assert own[own[:, 0] == topic, 1].mean() > 1.5 * overall
    assert any(teacher[number].argmax() != topic for number, topic in drawn)


def test_what_was_tried_is_what_was_recorded():
    tried = (DOCS / "tables" / "tried.csv").read_text("utf-8")
    for start, words in ((answers.TASK, "2.5 points lower [-10.3, +5.4]"),
                         (answers.SWAP, "2.0 lower [-9.8, +5.9]")):  # fmt: skip
        apart = distilled.gain("sw", start, distilled.START)
        shown = [f"{100 * one:.1f}" for one in (-apart.mean, apart.low, apart.high)]
        assert re.findall(r"-?\d+\.\d+", words) == shown
        assert words in tried
    assert len(distilled.tables()["distilled"].rows) == len(distilled.STARTS)


@pytest.mark.slow
def test_words_are_those_of_the_recorded_answers():
    pairs, task = translation.PARALLEL, answers.TASK
    swap, soup = answers.SWAP, answers.SOUP
    into, back, headlines = "en-sw", "sw-en", translation.HEADLINES
    own = translation.recorded()[swap, into]
    assert f"in Swahili {own['language'].sum():.0f} times in {len(own['language'])}" in page(
        "answers"
    )
    assert f"copies {own['copied'].sum():.0f} sentences" in page("answers")
    soups = translation.recorded()[soup, into]
    assert f"The average does {soups['language'].sum():.0f} times" in page("answers")
    said = (
        (translation.apart(soup, pairs, into), "1.8 chrF++ above the expert of parallel text [0.4, "
                                               "3.2]"),
        (translation.apart(swap, pairs, back), "8.9 chrF++ below that expert [7.1, 10.7]"),
        (translation.apart(soup, pairs, back), "level with it, -0.1 [-1.5, +1.4]"),
        (translation.apart(soup, task, headlines), "3.1 chrF++ above it [1.4, 4.7]"),
        (translation.apart(swap, task, headlines), "the task expert, -1.0 chrF++ [-2.6, +0.6]"),
        (translation.apart(soup, task, headlines, "copied"), "copies 17.5 points more often [5.0, "
                                                             "30.0]"),
    )  # fmt: skip
    for apart, sentence in said:
        check_sentence(sentence, apart, page("answers"))
