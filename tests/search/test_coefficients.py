"""Learned coefficients against float64 computations, finite differences and the written merge."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from merging import save_expert, save_tokenizer, tensors_of, tiny_llama
from transformers import AutoModelForCausalLM

from layerswap.checkpoint import Place
from layerswap.compose.recipe import check_recipe
from layerswap.errors import EvaluationError
from layerswap.merge import make_plan
from layerswap.search.coefficients import CoefficientModel, LearningSettings, learn_coefficients

PROMPTS = {"task": [[3, 7, 9, 1], [4, 4, 8]], "language": [[11, 2, 30, 5, 6]]}


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """A base, a task expert that changed layers 1 and 2, and a language expert the rest."""
    root = tmp_path_factory.mktemp("trio")
    save_expert(root / "base", tiny_llama(), 0)
    for seed, name in enumerate(("task", "language"), start=1):
        model = AutoModelForCausalLM.from_pretrained(root / "base")
        torch.manual_seed(seed)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                middle = ".layers.1." in key or ".layers.2." in key
                if middle == (name == "task"):
                    parameter.add_(torch.randn(parameter.shape) * 0.1)
        model.save_pretrained(root / name)
        save_tokenizer(root / name)
    save_tokenizer(root / "base")
    return {name: root / name for name in ("base", "task", "language")}


def mixed(stored, name, weights):
    """`base + sum_k a_k (expert_k - base)` in float64."""
    base = stored["base"][name].double()
    return base + sum(w * (stored[expert][name].double() - base) for expert, w in weights.items())


def learn(trio, **settings):
    experts = {name: trio[name] for name in ("task", "language")}
    return learn_coefficients(trio["base"], experts, PROMPTS, settings=LearningSettings(**settings))


def model_of(trio, **settings):
    sources = {name: str(trio[name]) for name in ("task", "language", "base")}
    return CoefficientModel(sources, LearningSettings(**settings))


def test_the_loss_is_the_publication_s(trio):
    """Cross-entropy of softened logits, times T squared, less the entropy; MSE of a layer."""
    merged = model_of(trio, temperature=2.0, hidden=0.3, layer=1)
    generator = torch.Generator().manual_seed(0)
    for logit in merged.logits.values():
        logit.data = torch.randn(2, generator=generator, dtype=torch.float64)
    stored = {name: tensors_of(trio[name]) for name in trio}
    model = AutoModelForCausalLM.from_pretrained(trio["base"]).double()
    by_hand = {}
    for place, named in merged.parameters.items():
        weights = merged.logits[place].detach().sigmoid().tolist()
        for name in named:
            by_hand[name] = mixed(
                stored, name, dict(zip(("task", "language"), weights, strict=True))
            )
    model.load_state_dict(by_hand, strict=False)
    teacher = AutoModelForCausalLM.from_pretrained(trio["task"]).double()
    ids = torch.tensor([PROMPTS["task"][0]])
    with torch.no_grad():
        own, theirs = (m(ids, output_hidden_states=True) for m in (model, teacher))
    p = (theirs.logits[0] / 2).softmax(-1)
    cross = -(p * (own.logits[0] / 2).log_softmax(-1)).sum(-1).mean()
    entropy = -(p * p.log()).sum(-1).mean()
    hidden = ((own.hidden_states[2] - theirs.hidden_states[2]) ** 2).mean()
    expected = 4 * (cross - entropy) + 0.3 * hidden
    found = merged.loss(ids, merged.teach("task", PROMPTS["task"][0]), merged.merged())
    assert found.item() == pytest.approx(float(expected), rel=1e-5)


def test_gradients_are_those_of_finite_differences(trio):
    merged = model_of(trio)
    taught = merged.teach("language", PROMPTS["language"][0])
    ids = torch.tensor([PROMPTS["language"][0]])
    merged.loss(ids, taught, merged.merged()).backward()
    for place in (Place(0, "mlp"), Place(1, "attention"), Place(None, "embedding")):
        logit = merged.logits[place]
        expert = 0 if place.layer == 1 else 1
        with torch.no_grad():
            values = []
            for step in (0.05, -0.05):
                logit[expert] += step
                values.append(merged.loss(ids, taught, merged.merged()).item())
                logit[expert] -= step
        slope = (values[0] - values[1]) / 0.1
        assert float(logit.grad[expert]) == pytest.approx(slope, rel=2e-2, abs=1e-5)
        assert float(logit.grad[1 - expert]) == 0  # it changed nothing there


def test_one_expert_is_followed_where_it_changed_anything(trio):
    asked = {"task": PROMPTS["task"]}
    settings = LearningSettings(steps=30, regularise=0.0, learning_rate=0.3)
    found, again = (
        learn_coefficients(trio["base"], {"task": trio["task"]}, asked, settings=settings)
        for _ in range(2)
    )
    assert found.losses[-1] < found.losses[0] / 20
    assert len(found.losses) == 31
    assert {place.layer for place in found.coefficients} == {1, 2}
    matrices = [by for p, by in found.coefficients.items() if p.role in ("attention", "mlp")]
    assert min(by["task"] for by in matrices) > 0.8
    assert again == found


def test_a_heavy_penalty_keeps_the_start(trio):
    found = learn(trio, steps=15, regularise=1e4, learning_rate=0.01)
    for by in found.coefficients.values():
        assert all(abs(value - 0.5) < 0.02 for value in by.values())


def test_the_recipe_is_the_merge_that_was_learned(trio, tmp_path):
    found = learn(trio, steps=5)
    recipe = yaml.safe_load(yaml.safe_dump(found.recipe()))
    written = tensors_of(make_plan(check_recipe(recipe, where="learned")).save(tmp_path / "out"))
    stored = {name: tensors_of(trio[name]) for name in trio}
    places = make_plan(check_recipe(recipe, where="learned")).reference.places
    for name, tensor in written.items():
        expected = mixed(stored, name, found.coefficients[places[name]])
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-5, atol=1e-6)


def test_wrong_input(trio):
    with pytest.raises(EvaluationError, match="every expert needs prompts"):
        learn_coefficients(trio["base"], {"task": trio["task"]}, {"task": []})
    with pytest.raises(EvaluationError, match="layer 9 is not inside 0-3"):
        model_of(trio, layer=9)
    same = dict.fromkeys(("task", "language", "base"), str(trio["base"]))
    with pytest.raises(EvaluationError, match="do not differ from the base"):
        CoefficientModel(same, LearningSettings())


def test_the_command_writes_a_recipe_that_merges(trio, tmp_path):
    from typer.testing import CliRunner

    from layerswap.cli import app

    (tmp_path / "task.jsonl").write_text('{"prompt": "a b", "completion": " c"}\n{"text": "d e f"}')
    (tmp_path / "language.txt").write_text("f e d c\nb a\n")
    recipe = tmp_path / "learned.yaml"
    given = [f"--{name}-expert={trio[name]}" for name in ("task", "language")]
    given += [f"--base={trio['base']}", f"--task-prompts={tmp_path / 'task.jsonl'}"]
    given += [f"--language-prompts={tmp_path / 'language.txt'}", f"--recipe={recipe}"]
    done = CliRunner().invoke(app, ["learn", *given, "--steps=3", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert len(facts["losses"]) == 4
    merged = CliRunner().invoke(app, ["merge", str(recipe), f"--out={tmp_path / 'merged'}"])
    assert merged.exit_code == 0, merged.output
