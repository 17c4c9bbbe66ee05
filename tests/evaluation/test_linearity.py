"""Linearity against losses computed by transformers, and cases where the answer is known."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from merging import save_expert, save_near, tiny_llama
from transformers import AutoModelForCausalLM

from layerswap.evaluation.examples import Tokens
from layerswap.evaluation.linearity import Line, additivity, connectivity

TEXTS = [[3, 7, 11, 2, 9], [5, 8, 1], [30, 31, 2, 4, 4, 17, 9]]
READ = [Tokens(tuple(text), range(1, len(text))) for text in TEXTS]
PROMPTS = [1, 2, 4]
"""Tokens of each text that are not to be predicted, in the test that asks for it."""


@pytest.fixture(scope="module")
def trio(tmp_path_factory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("linearity")
    base = save_expert(root / "base", tiny_llama(num_hidden_layers=3), 0)
    return base, save_near(root / "task", base, 1, 0.05), save_near(root / "language", base, 2, 0.1)


def loss(
    weights: dict[str, torch.Tensor], folder: Path, prompts: tuple[int, ...] = (1, 1, 1)
) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.load_state_dict(weights)
    total = count = 0.0
    with torch.no_grad():
        for text, prompt in zip(TEXTS, prompts, strict=True):
            ids = torch.tensor([text])
            labels = ids.clone()
            labels[0, :prompt] = -100
            total += float(model(ids, labels=labels).loss) * (len(text) - prompt)
            count += len(text) - prompt
    return total / count


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())


def test_the_barrier_is_the_rise_above_the_straight_line():
    assert Line((0.0, 0.5, 1.0), (1.0, 2.5, 2.0)).barrier == pytest.approx(1.0)
    assert Line((0.0, 0.5, 1.0), (1.0, 1.0, 2.0)).barrier == 0.0


def interpolated(a, b, other, at, layer):
    """Position `at` in one layer (everywhere when None), and `other` outside it."""
    return {
        name: (1 - at) * a[name] + at * b[name]
        if layer is None or f"layers.{layer}." in name
        else other[name]
        for name in a
    }


def test_the_loss_along_the_line_is_that_of_the_blended_models(trio):
    base, task, language = trio
    found = connectivity(task, language, READ, steps=2, batch_size=2)
    assert found.whole.positions == (0.0, 0.5, 1.0)
    a, b = weights(task), weights(language)
    for layer, line in ((None, found.whole), *enumerate(found.layers)):
        for at, value in zip(line.positions, line.losses, strict=True):
            between = interpolated(a, b, a, at, layer)
            assert value == pytest.approx(loss(between, base), abs=1e-5), (layer, at)


def test_only_predicted_tokens_count(trio):
    base, task, language = trio
    texts = [
        Tokens(tuple(text), range(prompt, len(text)))
        for text, prompt in zip(TEXTS, PROMPTS, strict=True)
    ]
    found = connectivity(task, language, texts, steps=1).whole.losses
    expected = [loss(weights(folder), base, tuple(PROMPTS)) for folder in (task, language)]
    assert found == pytest.approx(expected, abs=1e-5)
    assert found != pytest.approx([loss(weights(f), base) for f in (task, language)], abs=1e-3)


def test_checkpoints_of_half_precision_are_measured_in_float32(trio, tmp_path):
    """Rounding the blend would be a nonlinearity of the format, not of the experts."""
    base, *experts = trio
    small = []
    for folder in experts:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / folder.name)
        small.append(tmp_path / folder.name)
    found = connectivity(*small, READ, steps=3)
    a, b = ({n: t.float() for n, t in weights(folder).items()} for folder in small)
    for at, value in zip(found.whole.positions, found.whole.losses, strict=True):
        between = interpolated(a, b, a, at, None)
        assert value == pytest.approx(loss(between, base), abs=1e-5)


def states(model, ids) -> list[torch.Tensor]:
    """What leaves each layer, before the final norm, and the logits; float64."""
    model = copy.deepcopy(model)
    model.model.norm = torch.nn.Identity()
    output = model(torch.tensor([ids]), output_hidden_states=True)
    return [state[0].double() for state in output.hidden_states[1:]]


def test_departure_is_that_of_the_four_models(trio):
    found = additivity(*trio, READ, batch_size=2)
    computed = []
    b, t, g = (weights(folder) for folder in trio)
    both = {name: t[name] + g[name] - b[name] for name in b}
    for one in (both, t, g, b):
        model = AutoModelForCausalLM.from_pretrained(trio[0])
        model.load_state_dict(one)
        with torch.no_grad():
            read = [
                [*states(model, ids), model(torch.tensor([ids])).logits[0].double()]
                for ids in TEXTS
            ]
        computed.append([torch.cat(parts) for parts in zip(*read, strict=True)])
    for value, *four in zip((*found.layers, found.logits), *computed, strict=True):
        s, x, y, z = four
        assert value == pytest.approx(float((s - x - y + z).norm() / (s - z).norm()), rel=1e-3)
