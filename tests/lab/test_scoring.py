"""Scoring by one forward pass is greedy generation, compared token for token."""

import numpy as np
import pytest
from effort import sampled

from layerswap.checkpoint.loading import load_causal_lm, load_tokenizer
from layerswap.engine import Sweep
from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions
from layerswap.lab.scoring import sweep_correct, sweep_written
from layerswap.merge.api import soup

LAB = shipped()


@pytest.fixture(scope="module")
def expert():
    folder = LAB.task_experts[0]
    return load_causal_lm(folder, dtype="float32"), load_tokenizer(folder)


def generated(model, tokenizer, example):
    import torch

    prompt = tokenizer(example.prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        out = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False
        )
    return out[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("skill", sampled(("problem", "comprehension"), "problem"))
def test_correct_is_exact_match_of_what_generate_writes(expert, skill):
    model, tokenizer = expert
    asked = questions(skill, "furo", "test")[:24]
    gold = [
        [*tokenizer(f" {e.answer}", add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
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
