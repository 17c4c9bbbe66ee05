"""Signals without labels, each against a direct computation with the models loaded one by one."""

from __future__ import annotations

import pytest
import torch
from tiny_models import grid_of, swap_of

from layerswap.engine.sweep import Sweep
from layerswap.ground.errors import EvaluationError
from layerswap.search.unlabelled import agreement, answers, consensus

PROMPTS = [[5, 9, 11], [7, 3], [12, 40, 41, 8, 6], [9]]


def test_answers_are_those_of_each_model_alone(tmp_path):
    plans = grid_of(swap_of(tmp_path))[::3]
    texts = answers(Sweep(plans), PROMPTS, lambda tokens: str(list(tokens)), max_new_tokens=5)
    for row, plan in zip(texts, plans, strict=True):
        model = plan.load()
        for prompt, text in zip(PROMPTS, row, strict=True):
            out = model.generate(torch.tensor([prompt]), max_new_tokens=5, do_sample=False)
            assert text == str(out[0, len(prompt) :].tolist())


def test_agreement_counts_prompts_that_the_reference_answers():
    texts = [["7", "3", "9", ""], ["7", "4", "", "2"]]
    found = agreement(texts, ["7", "3", "", "2"])
    assert [row.tolist() for row in found] == [[1, 1, 0], [1, 0, 1]]
    with pytest.raises(EvaluationError, match="answers none"):
        agreement(texts, [""] * 4)
    with pytest.raises(EvaluationError, match="the reference has 3 answers"):
        agreement(texts, ["1"] * 3)


def test_consensus_is_with_the_most_frequent_answer():
    found = consensus([["7", "", "a"], ["7", "", "b"], ["8", "x", "a"]])
    assert [row.tolist() for row in found] == [[1, 0, 1], [1, 0, 0], [0, 1, 1]]
