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
        f"error: {path}, line 1: merge_method: layerswap has no 'tise'; did you mean 'ties'?",
        f"error: {path}, line 4: models[1].model: is missing",
        f"error: {path}, line 4: models[1].modle: unknown key; did you mean 'model'?",
    ]


def test_export_reads_the_depth_and_the_dtype_of_the_experts(layerswap, recipe, experts):
    result = layerswap("recipe", "export", recipe, "--format", "mergekit")
    assert result.code == 0, result.err
    config = yaml.safe_load(result.out)
    assert [s["sources"][0]["layer_range"] for s in config["slices"]] == [[0, 2], [2, 7], [7, 8]]
    assert (config["merge_method"], config["dtype"]) == ("linear", "float32")
    assert {s["model"] for s in config["slices"][0]["sources"]} == {experts.task, experts.language}


def test_export_opens_nothing_when_the_layers_are_given(layerswap, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("experts: {task: org/a, language: org/b}\nswap: {outside: task}\n")
    result = layerswap("recipe", "export", path)
    assert (result.code, result.err) == (
        2, "error: the number of layers is not known; give --layers\n"
    )  # fmt: skip
    result = layerswap("recipe", "export", path, "--layers", 32)
    slices = yaml.safe_load(result.out)["slices"]
    assert [s["sources"][0]["layer_range"] for s in slices] == [[0, 5], [5, 30], [30, 32]]


def test_export_to_a_file(layerswap, recipe, tmp_path):
    out = tmp_path / "mergekit-out.yml"
    result = layerswap("recipe", "export", recipe, "--out", out)
    assert (result.code, result.out) == (0, f"wrote {out}\n")
    again = layerswap("recipe", "export", recipe, "--out", out)
    assert (again.code, again.err) == (
        2,
        f"error: {out}: is there already; give --overwrite to replace it\n",
    )
    assert layerswap("recipe", "export", recipe, "--out", out, "--overwrite").code == 0
    missing = tmp_path / "none" / "x.yml"
    result = layerswap("recipe", "export", recipe, "--out", missing)
    expected = f"error: {missing}: cannot be written (No such file or directory)\n"
    assert (result.code, result.err) == (2, expected)


def test_an_unknown_format(layerswap, recipe):
    result = layerswap("recipe", "export", recipe, "--format", "yaml")
    assert result.code == 2
    assert "'yaml' is not" in result.err


def test_the_way_through_mergekit_s_form_merges_the_same(layerswap, recipe, tmp_path):
    config = tmp_path / "mergekit.yml"
    assert layerswap("recipe", "export", recipe, "--out", config).code == 0
    for source, out in ((recipe, "one"), (config, "two")):
        result = layerswap("merge", source, "--out", tmp_path / out)
        assert result.code == 0, result.err
    one, two = (load_file(tmp_path / out / "model.safetensors") for out in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(one[name].equal(two[name]) for name in one)


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
