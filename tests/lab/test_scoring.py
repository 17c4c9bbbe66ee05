"""Scoring by one forward pass is greedy generation, compared token for token."""

import numpy as np
import pytest
from effort import mostly_slow

from layerswap.engine import Sweep
from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import shipped
from layerswap.lab.scoring import (
    MEASURES,
    load,
    questions,
    sweep_correct,
    sweep_written,
)
from layerswap.merge import soup

LAB = shipped()


@pytest.fixture(scope="module")
def expert():
    return load(LAB.task_experts[0])


def generated(model, tokenizer, example):
    import torch

    prompt = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
    return out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("measure", mostly_slow(MEASURES, "task_target"))
def test_correct_is_exact_match_of_what_generate_writes(expert, measure):
    model, tokenizer = expert
    asked = questions(measure, "furo", "development", 24, seed=8, world=LAB.world)
    gold = [
        [*tokenizer(e.completion, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        for e in asked
    ]
    exact = [generated(model, tokenizer, e) == g for e, g in zip(asked, gold, strict=True)]
    alone = Sweep([soup({"task": LAB.task_experts[0]})], dtype="float32")
    np.testing.assert_array_equal(sweep_correct(alone, tokenizer, asked), [exact])
    texts = [
        tokenizer.decode(generated(model, tokenizer, e), skip_special_tokens=True).strip()
        for e in asked
    ]
    for text, shown in zip(texts, sweep_written(alone, tokenizer, asked)[0], strict=True):
        assert text.startswith(shown)  # which ends after fewer tokens, if neither has ended
        assert shown == text or len(shown.split()) >= 4


@pytest.mark.slow
def test_neither_the_batch_size_nor_the_order_changes_an_answer(expert):
    _, tokenizer = expert
    sweep = Sweep([soup({"task": LAB.task_experts[0]})], dtype="float32")
    asked = questions("task_target", "nela", "development", 90, world=LAB.world)
    whole = sweep_correct(sweep, tokenizer, asked)
    np.testing.assert_array_equal(whole, sweep_correct(sweep, tokenizer, asked, batch_size=7))
    np.testing.assert_array_equal(whole[:, ::-1], sweep_correct(sweep, tokenizer, asked[::-1]))
    assert (whole.dtype, whole.shape) == (np.bool_, (1, 90))


def test_two_models_are_asked_the_same_questions():
    first = questions("task_target", "furo", "test", 50, seed=2)
    assert first == questions("task_target", "furo", "test", 50, seed=2)
    assert {e.language for e in first} == {"furo"}
    assert {e.language for e in questions("task_source", "furo", "test", 5)} == {"basu"}


def test_what_cannot_be_scored_is_refused(expert):
    with pytest.raises(RecipeError, match="no measure 'speed'"):
        questions("speed", "furo", "test", 5)
    sweep = Sweep([soup({"task": LAB.task_experts[0]})])
    with pytest.raises(RecipeError, match="no examples"):
        sweep_correct(sweep, expert[1], [])
