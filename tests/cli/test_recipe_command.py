"""`layerswap recipe`, and mergekit configurations where a recipe can be given."""

from __future__ import annotations

import pytest
import yaml
from safetensors.torch import load_file


@pytest.fixture
def recipe(experts, tmp_path):
    path = tmp_path / "recipe.yaml"
    data = {
        "experts": {"task": experts.task, "language": experts.language},
        "swap": {"bottom": 2, "top": 1},
    }
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


@pytest.fixture
def configuration(experts, tmp_path):
    path = tmp_path / "mergekit.yml"
    config = {
        "merge_method": "passthrough",
        "slices": [
            {"sources": [{"model": experts.language, "layer_range": [0, 2]}]},
            {"sources": [{"model": experts.task, "layer_range": [2, 8]}]},
        ],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_check_names_what_it_read(layerswap, recipe, configuration):
    result = layerswap("recipe", "check", recipe)
    assert (result.code, result.out) == (0, f"{recipe}: a recipe: swap of task, language\n")
    result = layerswap("recipe", "check", configuration)
    expected = f"{configuration}: a mergekit configuration: passthrough of language, task\n"
    assert (result.code, result.out) == (0, expected)


def test_check_draws_for_a_number_of_layers(layerswap, configuration):
    result = layerswap("recipe", "check", configuration, "--layers", 8)
    rows = result.out.splitlines()[1:]
    assert rows[0].split() == ["head,", "final", "norm", "░░░░░░░░░░", "task"]
    assert rows[-2].split() == ["0", "██████████"]
    result = layerswap("recipe", "check", configuration, "--layers", 4)
    assert (result.code, result.err) == (
        2,
        "error: layer 7 is taken from models of 4 layers\n",
    )


def test_check_shows_every_mistake(layerswap, tmp_path):
    path = tmp_path / "m.yml"
    path.write_text("merge_method: tise\nmodels:\n- {model: a}\n- {modle: b}\n")
    result = layerswap("recipe", "check", path)
    assert result.code == 2
    assert sorted(result.err.splitlines()) == [
        f"error: {path}, line 1: merge_method: no method 'tise'; did you mean 'ties'?",
        f"error: {path}, line 4: models[1].model: is missing",
        f"error: {path}, line 4: models[1].modle: unknown key; did you mean 'model'?",
    ]


def test_plan_and_merge_take_a_configuration(layerswap, configuration, experts, tmp_path):
    result = layerswap("plan", configuration)
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1].endswith("100% copied bit for bit")
    out = tmp_path / "out"
    result = layerswap("merge", configuration, "--out", out, "--dtype", "bfloat16")
    assert result.code == 0, result.err
    merged, task = (load_file(f"{folder}/model.safetensors") for folder in (out, experts.task))
    name = "model.layers.3.mlp.up_proj.weight"
    assert merged[name].equal(task[name].bfloat16())
    result = layerswap("merge", configuration, "--out", tmp_path / "x", "--base", experts.base)
    assert (result.code, result.err) == (
        2, f"error: --base cannot be given beside a recipe; write it into {configuration}\n"
    )  # fmt: skip
