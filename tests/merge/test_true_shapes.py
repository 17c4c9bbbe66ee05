"""Plans over the true shapes of published checkpoints: their names and sizes, without data."""

import re
import shlex
from pathlib import Path

import pytest
import true_shapes as true
from merging import recipe_plan, refusal

import layerswap as ls

PAGE = Path(__file__).parents[2] / "docs/gpu.md"
SHAPES = {
    "byol": "gemma-3-1b", "Sailor": "Qwen1.5-1.8B", "Swallow": "gemma-2-2b",
    "AfriqueQwen": "Qwen3-4B", "ug-cpt": "gemma-3-4b", "xelm": "gemma-3-4b-text",
    "eu_Qwen3": "Qwen3-8B", "Kimu": "gemma-2-9b", "sea-lion": "gemma-2-9b",
    "AfriqueLlama": "Llama-3.1-8B", "Qwen3-8B-SW": "Qwen3-8B",
}  # fmt: skip
"""The shape of each language expert of the page, which its base and its partner share."""


@pytest.mark.slow
@pytest.mark.parametrize("word", SHAPES)
def test_a_published_language_expert_is_planned_by_the_command_of_the_page(word, tmp_path):
    section = PAGE.read_text("utf-8").partition("## Without training")[2].partition("\n## ")[0]
    (command,) = re.findall(rf"^layerswap .*{word}.*", section, re.M)
    (row,) = re.findall(rf"^\| .*{word}.*", section, re.M)
    _, name, *words = shlex.split(command)
    given = {key.strip("-").replace("-", "_"): int(value) if value.isdigit() else value
             for key, value in zip(words[::2], words[1::2], strict=True)}  # fmt: skip
    model = true.model_of(SHAPES[word])
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    del given["out"]
    for mark, role in enumerate(given.keys() - {"bottom", "top", "outside"}):
        given[role] = true.write_model(tmp_path / role, config, true.published(model), mark)
    if name == "instruct":
        plan = ls.instruct(**given)
    else:
        plan = ls.swap(**{key.removesuffix("_expert"): each for key, each in given.items()})
    assert {t.name for t in plan.tensors} == true.published(model).keys()
    assert f"{plan.nbytes / 1e9:.1f}" in row


@pytest.mark.slow
@pytest.mark.parametrize("name", true.NAMES)
def test_a_published_checkpoint_is_planned(tmp_path, name):
    model = true.model_of(name)
    tensors, method = true.published(model), true.QUANTISED.get(name)
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    if method:
        tensors = true.quantised(tensors, method)
        config["quantization_config"] = {"quant_method": method}
    base, task, language = (
        true.write_model(tmp_path / n, config, tensors, mark)
        for mark, n in enumerate(("base", "task", "language"))
    )
    layers = model.config.get_text_config().num_hidden_layers

    plan = ls.swap(task=task, language=language, bottom=2, top=1, outside="task")
    assert plan.composition.layers == layers
    assert {t.name for t in plan.tensors} == tensors.keys()
    outer = {0, 1, layers - 1}
    for tensor in plan.tensors:
        number = re.search(r"(?<!vision_tower)\.layers\.(\d+)\.", tensor.name)
        of_tower = re.search("vision|visual", tensor.name)
        inside = number and not of_tower and int(number[1]) in outer
        assert tensor.verbatim
        assert tensor.copied.file.parent == (language if inside else task), tensor.name
    assert plan.nbytes >= sum(t.nbytes for t in plan.tensors)

    merge = {"method": "ties", "experts": ["a", "b"], "density": 0.2}
    ties = recipe_plan(experts={"a": task, "b": language}, base=base, merge=merge)
    modules = true.linear_modules(model)
    adapters = {
        n: true.write_lora(tmp_path / f"lora-{n}", base, modules, mark)
        for mark, n in enumerate(("task", "language"), start=1)
    }
    if method:
        assert f"is quantised ({method})" in refusal(lambda: ties.tensors)
        assert "is quantised" in refusal(lambda: ls.swap(**adapters, bake=True))
    else:
        assert sum(t.verbatim for t in ties.tensors) == 0
        baked = ls.swap(**adapters, base=base, bottom=2, top=1, outside="task", bake=True)
        assert sum(not t.verbatim for t in baked.tensors) >= len(modules)
    plan = ls.swap(**adapters, bottom=2, top=1, outside="task")
    assert plan.to_dict()["tensors"] == 2 * len(modules)
    assert len(modules) >= 2 * layers
