"""Starts trained on labels: which labels they read, and what is recorded of their answers."""

import json

import numpy as np
import pytest
from sentences import check_sentence

from layerswap.evaluation.classifier import LabelledTexts
from layerswap.evaluation.statistics import paired_over_groups
from layerswap.experiment.conditions import DEFAULT
from layerswap.lab.quickstart import shipped
from research import answers, baselines, labels, markdown, transfer
from research import languages as design

DOCUMENTS = {
    "dev": [(f"habari ya siku {i}", ("travel", "health")[i % 2]) for i in range(12)],
    "test": [(f"siku ya {i} habari", ("travel", "health")[i % 2]) for i in range(6)],
    "train": [(f"day {i}", "travel") for i in range(4)],
}


@pytest.fixture
def documents(monkeypatch):
    monkeypatch.setattr(baselines, "documents", lambda *given: DOCUMENTS[given[-1]])


def test_no_run_is_made_twice():
    names = [run.name for run in labels.runs()]
    assert len(names) == len({*names})
    assert len(names) == len({labels.words(run) + run.code for run in labels.runs()})


def test_a_replicate_reads_the_labels_of_the_linear_classifier(documents, monkeypatch):
    texts, topics = zip(*DOCUMENTS["dev"], *DOCUMENTS["test"], strict=True)
    folds = [(np.arange(12), np.arange(12, 18))]
    taught = []

    def answered(known, rows, asked):
        taught.append(known)
        return np.full(asked.shape[0], "travel")

    monkeypatch.setattr(LabelledTexts, "_answered", staticmethod(answered))
    classifier = LabelledTexts(texts, np.array(topics), folds)
    classifier.predicted(5, 2)
    ((features, _),) = classifier._matrices
    prompts = [f"Text: {text}\nTopic:" for text in texts]
    for code in ("sw", "headlines-sw"):
        drawn = [prompts.index(row["prompt"]) for row in labels.labelled("", code, 5, 2)]
        assert (features[drawn] != taught[0]).nnz == 0


def test_headlines_have_their_own_experts_files_and_topics(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(baselines, "documents", lambda *given: asked.append(given[1:]) or [])
    monkeypatch.setattr(answers, "is_trained", lambda out, name: asked.append(name) or True)
    assert labels.labelled("", "headlines-yo", 3, 0) == []
    assert labels.start_of(labels.Run("headlines-yo", labels.TASK, 0, 0), tmp_path, tmp_path)
    assert asked == [("headlines", "yor", "dev"), "headlines-1"]
    assert labels.choices("headlines-yo") == labels.HEADLINE_TOPICS != labels.choices("yo")


@pytest.mark.slow
def test_a_start_is_trained_and_its_answers_are_recorded(tmp_path, documents, monkeypatch):
    """The lab's models stand for Gemma's; answers are those of transformers."""
    lab = shipped()
    monkeypatch.setattr(labels, "DTYPE", "float32")
    monkeypatch.setattr(labels, "TOPICS", ("travel", "health"))
    monkeypatch.setattr(labels, "HEADLINE_TOPICS", labels.TOPICS)
    monkeypatch.setattr(labels, "RECORDED", tmp_path / "recorded")
    monkeypatch.setattr(design, "ALL_LAYERS", [{"layers": "0"}])
    made = [labels.Run("sw", labels.BASE, size, 0) for size in (0, 4)]
    monkeypatch.setattr(labels, "runs", lambda: iter([*made, labels.Run("sw", labels.TASK, 0, 0)]))
    labels.finish("", tmp_path, lab.base, ["sw"])
    labels.finish("", tmp_path, lab.base, ["sw"])
    labels.record("", tmp_path)
    labels.recorded.cache_clear()
    right, found = labels.recorded("sw")
    labels.recorded.cache_clear()
    assert right == "010101"
    assert [*found] == [labels.words(run) for run in made]  # the task expert is not trained
    rows = (tmp_path / "runs" / f"{made[1].name}.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(row) for row in rows] == labels.labelled("", "sw", 4, 0)

    import torch
    from transformers import AutoModelForCausalLM

    model, read = AutoModelForCausalLM.from_pretrained(lab.base), answers.tokenizer(lab.base)
    best = []
    for text, _ in DOCUMENTS["test"]:
        prompt = read(f"Text: {text}\nTopic:")["input_ids"]
        scores = []
        for topic in labels.TOPICS:
            own = read(f" {topic}", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                logs = model(torch.tensor([prompt + own])).logits[0].log_softmax(-1)
            places = range(len(prompt) - 1, len(prompt) - 1 + len(own))
            scores.append(sum(float(logs[i, token]) for i, token in zip(places, own, strict=True)))
        best.append(str(int(np.argmax(scores))))
    assert found[labels.words(made[0])] == "".join(best)


@pytest.mark.slow
def test_words_are_those_of_the_recorded_answers():
    labels.recorded.cache_clear()
    page = " ".join(labels.FIGURE.parents[1].joinpath("when.md").read_text("utf-8").split())
    task, swap, soup = labels.TASK, labels.SWAP, labels.SOUP
    encoder = [baselines.right("sentences", code, baselines.ENCODER) for code in labels.LANGUAGES]
    own = [labels.classified(code, swap, labels.ALL).right for code in labels.LANGUAGES]
    counted = [labels.classified(code, labels.CLASSIFIER, labels.ALL).right
               for code in labels.LANGUAGES]  # fmt: skip
    headlines = [*labels.HEADLINES]
    own_headlines, counted_headlines = (
        [labels.classified(code, start, labels.HUNDRED).right for code in headlines]
        for start in (swap, labels.CLASSIFIER)
    )
    both = [baselines.right("headlines", code, f"{baselines.VECTORS}, both")
            for code in labels.LANGUAGES]  # fmt: skip
    longer = paired_over_groups(*(
        [labels.classified(code, start, labels.ALL, labels.LONGER).right
         for code in labels.LANGUAGES] for start in (swap, task)
    ))  # fmt: skip
    tweets = {by.language: by.scores[DEFAULT] for by in transfer.results("sentiment-transfer")}
    by_encoder, by_labels = (
        paired_over_groups([baselines.right("tweets", code, name) for code in tweets],
                           [*tweets.values()])
        for name in (baselines.ENCODER, baselines.LABELS)
    )  # fmt: skip
    ceiling = markdown.per_cent(labels.in_english()).replace(" ", "% ", 1)
    assert f"two task experts answer {ceiling} of our" in page
    said = (
        (by_encoder, "English rows is 5.9 points above the swap [2.6, 9.3]"),
        (by_labels, "the linear classifier on 99 labels 9.6 [5.9, 13.5]"),
        (
            labels.gain(swap, task, 100, codes=headlines),
            "the swap is 2.7 points above the task expert [1.5, 4.0]",
        ),
        (labels.gain(soup, task, 100, codes=headlines), "the average 1.8 [0.5, 3.0]"),
        (labels.gain(swap, task, labels.ALL), "the difference of the swap is -0.3 [-2.8, +2.1]"),
        (
            labels.gain(labels.SEQUENCE, task, labels.ALL),
            "the task learned on the language expert is 3.0 points above it [-0.2, +6.0]",
        ),
        (labels.gain(labels.SEQUENCE, swap, labels.ALL), "2.8 above the swap [0.2, 5.2]"),
        (labels.gain(labels.JOINT, swap, labels.ALL), "minus the swap -2.5 [-6.4, +1.3]"),
        (labels.gain(labels.JOINT, task, labels.ALL), "minus the task expert -1.5 [-4.9, +2.0]"),
        (labels.gain(swap, task, 0), "the swap is 2.5 points below the task expert [0.2, 4.7]"),
        (labels.gain(swap, task, 0, codes=headlines), "on headlines 3.5 above it [1.4, 5.6]"),
        (labels.gain_of_labels(soup, labels.ALL), "the average gains 9.0 points"),
        (labels.gain_of_labels(swap, labels.ALL), "the swap 6.5,"),
        (labels.gain_of_labels(task, labels.ALL), "the task expert 4.2 [1.0, 7.6]"),
        (labels.gain(swap, task, 10), "-0.7 [-4.1, +2.6]"),
        (labels.gain(swap, task, 25), "0.7 [-1.5, +3.0]"),
        (labels.gain(swap, task, 50), "1.1 [-2.1, +4.4]"),
        (labels.gain_of_labels(task, 10), "7.0 [2.9, 11.3]"),
        (labels.gain(labels.BASE, task, 50), "7.2 points below the task expert [3.4, 10.9]"),
        (labels.gain_of_labels(task, 25), "4.9 [1.7, 8.1]"),
        (labels.gain(labels.BASE, task, labels.ALL), "-2.3 [-4.8, +0.2]"),
        (labels.gain(labels.BASE, task, 100, codes=headlines), "-0.8 [-2.3, +0.7]"),
        (paired_over_groups(counted, own), "the classifier minus the swap is -4.8 [-9.5, +0.1]"),
        (
            paired_over_groups(counted_headlines, own_headlines),
            "it is 10.0 points below the swap [7.6, 12.5]",
        ),
        (paired_over_groups(encoder, own), "is 11.5 above it [7.2, 15.9]"),
        (paired_over_groups(both, own_headlines), "is 2.4 above the swap [0.1, 4.7]"),
        (longer, "the swap is 2.6 above the task expert [-0.4, +5.6]"),
    )
    for apart, sentence in said:
        check_sentence(sentence, apart, page)
