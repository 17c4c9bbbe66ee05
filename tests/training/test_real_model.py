"""A few steps on a real language model, Gemma 3 270M, where LAYERSWAP_GEMMA names its folder."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.recipe import check_recipe
from layerswap.engine.sweep import Sweep
from layerswap.merge import make_plan
from layerswap.training.expert.save import read_training
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

FOLDER = Path(os.environ.get("LAYERSWAP_GEMMA", "missing"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not FOLDER.is_dir(), reason="LAYERSWAP_GEMMA is not set"),
]
TOPICS = {"The team won the match.": " sports", "The doctor treated the fever.": " health"}
TEXTS = ("Timu ilishinda mechi jana.", "Daktari alitibu homa ya mtoto.")
STEPS = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-4, "max_length": 32}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    root = tmp_path_factory.mktemp("experts")
    rows = {
        "task": [{"prompt": f"Text: {text}\nTopic:", "completion": topic}
                 for text, topic in TOPICS.items()],
        "language": [{"text": text} for text in TEXTS],
    }  # fmt: skip
    for name, layers in (("task", "1-17"), ("language", "0-0")):
        file = root / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        spec = {"base": str(FOLDER), "data": {"train": str(file)}, "hyperparameters": STEPS,
                "train": {"places": [{"layers": layers}]}}  # fmt: skip
        train(check_expert(spec), root / name)
    return root


def test_only_the_trained_layers_change(experts):
    base = open_checkpoint(str(FOLDER))
    for name, layers in (("task", set(range(1, 18))), ("language", {0})):
        expert = open_checkpoint(str(experts / name))
        moved = {
            expert.places[tensor].layer
            for tensor in base.tensors
            if not torch.equal(base.read(tensor).float(), expert.read(tensor).float())
        }
        assert moved == layers
        assert read_training(experts / name)["finished"]


def test_the_swap_scores_as_its_checkpoint_in_transformers(experts, tmp_path):
    recipe = {
        "experts": {name: str(experts / name) for name in ("task", "language")},
        "swap": {"bottom": 1, "top": 0, "outside": "task"},
        "dtype": "float32",
    }
    plan = make_plan(check_recipe(recipe, where="test"))
    plan.save(tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "merged")
    words = [" sports", " health", " science/technology"]
    requests = [
        (tokenizer(f"Text: {text}\nTopic:").input_ids,
         tokenizer(word, add_special_tokens=False).input_ids)
        for text in (*TOPICS, *TEXTS) for word in words
    ]  # fmt: skip
    found = Sweep([plan], dtype="float32").loglikelihood(requests)
    expected = []
    for context, continuation in requests:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 :]
        logprobs = logits[:-1].log_softmax(-1)
        expected.append(logprobs.gather(1, torch.tensor(continuation)[:, None]).sum().item())
    assert np.allclose(found.logprob[0], expected, atol=2e-3)
