"""Linearity against losses computed by transformers, and cases where the answer is known."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from layerswap.errors import EvaluationError
from layerswap.evaluate.linearity import Line, additivity, connectivity

WHOLE = [[3, 7, 11, 2, 9], [5, 8, 1], [30, 31, 2, 4, 4, 17, 9]]
TEXTS = [(text[:1], text[1:]) for text in WHOLE]


@pytest.fixture(scope="module")
def trio(tmp_path_factory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("linearity")
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, vocab_size=40,
        num_attention_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    folders = []
    for seed, name in enumerate(("base", "task", "language")):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * 0.05 * seed)
        model.save_pretrained(root / name)
        folders.append(root / name)
    return tuple(folders)


def loss(weights: dict[str, torch.Tensor], folder: Path) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(weights)
    total = count = 0.0
    with torch.no_grad():
        for text in WHOLE:
            ids = torch.tensor([text])
            total += float(model(ids, labels=ids).loss) * (len(text) - 1)
            count += len(text) - 1
    return total / count


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_the_loss_along_the_line_is_that_of_the_blended_models(trio):
    base, task, language = trio
    found = connectivity(task, language, TEXTS, steps=4)
    a, b = weights(task), weights(language)
    for at, value in zip(found.whole.positions, found.whole.losses, strict=True):
        between = {name: (1 - at) * a[name] + at * b[name] for name in a}
        assert value == pytest.approx(loss(between, base), abs=1e-5)
    for layer, line in enumerate(found.layers):
        for at, value in zip(line.positions, line.losses, strict=True):
            between = {
                name: (1 - at) * a[name] + at * b[name] if f"layers.{layer}." in name else a[name]
                for name in a
            }
            assert value == pytest.approx(loss(between, base), abs=1e-5)


def test_the_barrier_is_the_rise_above_the_straight_line():
    assert Line((0.0, 0.5, 1.0), (1.0, 2.5, 2.0)).barrier == pytest.approx(1.0)
    assert Line((0.0, 0.5, 1.0), (1.0, 1.0, 2.0)).barrier == 0.0


def test_departure_is_that_of_the_four_models(trio):
    base, task, language = trio
    found = additivity(base, task, language, TEXTS)
    b, t, g = (weights(folder) for folder in trio)
    both = {name: t[name] + g[name] - b[name] for name in b}
    states = []
    for one in (both, t, g, b):
        model = AutoModelForCausalLM.from_pretrained(base)
        model.load_state_dict(one)
        with torch.no_grad():
            outputs = [model(torch.tensor([x]), output_hidden_states=True) for x in WHOLE]
        states.append(
            [torch.cat([o.hidden_states[i + 1][0] for o in outputs]).double() for i in range(3)]
            + [torch.cat([o.logits[0] for o in outputs]).double()]
        )
    for i, value in enumerate((*found.layers, found.logits)):
        s, x, y, z = (state[i] for state in states)
        assert value == pytest.approx(float((s - x - y + z).norm() / (s - z).norm()), rel=1e-3)


def test_deltas_that_do_not_meet_add_up_exactly(trio, tmp_path):
    """An expert that changed only the head: the logits are linear in it, the layers untouched."""
    base, _, _ = trio
    head = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        head.lm_head.weight.add_(0.1)
    head.save_pretrained(tmp_path / "head")
    other = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        other.lm_head.weight.mul_(1.2)
    other.save_pretrained(tmp_path / "other")
    found = additivity(base, tmp_path / "head", tmp_path / "other", TEXTS)
    assert found.layers == (0.0, 0.0, 0.0)
    assert found.logits < 1e-5


@pytest.mark.parametrize("texts", [[], [([3], [])], [([1], [2]), ([], [3])]])
def test_texts_that_are_too_short(trio, texts):
    with pytest.raises(EvaluationError, match="linearity needs texts of two tokens and more"):
        connectivity(trio[1], trio[2], texts)
