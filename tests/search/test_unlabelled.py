"""Signals without labels, each against a direct computation with the models loaded one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tiny_models import grid_of, swap_of

from layerswap.engine.sweep import Sweep
from layerswap.errors import EvaluationError
from layerswap.search.unlabelled import (
    Answers,
    agreement,
    ask,
    combined,
    confidence,
    consensus,
    cross_lingual_similarity,
    fluency,
    self_consistency,
)

PROMPTS = [[5, 9, 11], [7, 3], [12, 40, 41, 8, 6], [9]]
TEXTS = [[3, 7, 11, 2, 9], [5, 8, 1], [30, 31, 2, 4, 4, 17, 9]]
PAIRS = list(zip(TEXTS, [[4, 4, 9], [8, 17, 21, 3], [6, 2]], strict=True))


def read(tokens) -> str:
    return " ".join(map(str, tokens[:1]))


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    return grid_of(swap_of(tmp_path_factory.mktemp("signals")))[::3]


@pytest.fixture(scope="module")
def sweep(plans):
    return Sweep(plans)


def test_answers_are_those_of_each_model_alone(sweep, plans):
    answers = ask(sweep, PROMPTS, read, max_new_tokens=5)
    for row, plan in zip(answers.tokens, plans, strict=True):
        model = plan.load()
        for prompt, tokens in zip(PROMPTS, row, strict=True):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
            assert list(tokens) == out[0, len(prompt) :].tolist()
    assert answers.texts[0] == [read(t) for t in answers.tokens[0]]


def test_agreement_counts_prompts_that_the_reference_answers():
    answers = Answers([0, 1], [], [["7", "3", "9", ""], ["7", "4", "", "2"]])
    assert agreement(answers, ["7", "3", "", "2"]).tolist() == pytest.approx([2 / 3, 2 / 3])
    with pytest.raises(EvaluationError, match="answers none"):
        agreement(answers, [""] * 4)
    with pytest.raises(EvaluationError, match="3 answers to agree with"):
        agreement(answers, ["1"] * 3)


def test_consensus_is_with_the_most_frequent_answer():
    answers = Answers([0, 1, 2], [], [["7", "", "a"], ["7", "", "b"], ["8", "x", "a"]])
    assert consensus(answers).tolist() == pytest.approx([2 / 3, 1 / 3, 2 / 3])


def test_confidence_is_that_of_the_own_text(sweep, plans):
    answers = ask(sweep, PROMPTS, read, max_new_tokens=4)
    found = confidence(sweep, PROMPTS, answers, batch_size=2)
    for value, row, plan in zip(found, answers.tokens, plans, strict=True):
        model, total, count = plan.load(), 0.0, 0
        for prompt, text in zip(PROMPTS, row, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *text]])).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
            total += float(logprobs[range(len(text)), list(text)].sum())
            count += len(text)
        assert value == pytest.approx(total / count, abs=1e-4)


def test_self_consistency_is_one_where_draws_cannot_differ(sweep):
    cold = self_consistency(sweep, PROMPTS, read, temperature=1e-4, max_new_tokens=2)
    assert cold.tolist() == [1.0] * len(sweep)
    warm = self_consistency(sweep, PROMPTS, read, temperature=5.0, max_new_tokens=2)
    assert (warm < 1).any()
    assert (warm >= 1 / 5).all()


def test_fluency_is_minus_the_mean_loss(sweep, plans):
    found = fluency(sweep, TEXTS)
    tokens = sum(len(text) - 1 for text in TEXTS)
    for value, plan in zip(found, plans, strict=True):
        model = plan.load()
        with torch.no_grad():
            losses = [
                float(model(torch.tensor([t]), labels=torch.tensor([t])).loss) * (len(t) - 1)
                for t in TEXTS
            ]
        assert -value == pytest.approx(math.fsum(losses) / tokens, abs=1e-4)


def test_closeness_is_that_of_pooled_hidden_states(sweep, plans):
    found = cross_lingual_similarity(sweep, PAIRS)
    assert found.shape == (len(plans), plans[0].composition.layers)
    for values, plan in zip(found, plans, strict=True):
        model = plan.load()
        model.model.norm = torch.nn.Identity()
        for layer, value in enumerate(values):
            sides = []
            for side in (0, 1):
                with torch.no_grad():
                    states = [
                        model(torch.tensor([p[side]]), output_hidden_states=True)
                        .hidden_states[layer + 1][0].double().mean(0)
                        for p in PAIRS
                    ]  # fmt: skip
                x = torch.stack(states).numpy()
                x = x - x.mean(0)
                sides.append(x / np.linalg.norm(x, axis=1, keepdims=True))
            cosines = sides[0] @ sides[1].T
            off = cosines[~np.eye(3, dtype=bool)].mean()
            assert value == pytest.approx(np.diag(cosines).mean() - off, abs=1e-3)


def test_closeness_of_a_text_with_itself_is_largest(sweep):
    same = cross_lingual_similarity(sweep, [(text, text) for text in TEXTS])
    assert (same > cross_lingual_similarity(sweep, PAIRS)).all()
    with pytest.raises(EvaluationError, match="two pairs"):
        cross_lingual_similarity(sweep, PAIRS[:1])


def test_combination_is_the_mean_of_ranks():
    found = combined({"a": np.array([0.1, 0.3, 0.2]), "b": np.array([5.0, 5.0, 9.0])})
    assert found.tolist() == pytest.approx([(1 + 1.5) / 6, (3 + 1.5) / 6, (2 + 3) / 6])
