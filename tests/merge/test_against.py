"""`verify --against`: a plan against merges that other programs wrote."""

import shutil

import pytest
import torch
from merging import layer_of, save_expert, swap_of, tensors_of, tiny_llama
from safetensors.torch import save_file

import layerswap as ls
from layerswap.ground.errors import LayerswapError

LAYERS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    config = tiny_llama(num_hidden_layers=LAYERS)
    return {
        name: save_expert(root / name, config, seed)
        for seed, name in enumerate(("task", "language", "base"))
    }


def written(tensors, like, out):
    shutil.copytree(like, out)
    save_file({name: value.contiguous() for name, value in tensors.items()},
              out / "model.safetensors", {"format": "pt"})  # fmt: skip
    return out


@pytest.mark.parametrize(("first", "last"), [(2, 3), (1, 2), (2, 4)])
def test_both_readings_of_layers_are_told_apart(models, tmp_path, first, last):
    """The card says "layers 2 to 3": from 0, from 1, or with one more."""
    found, task = (tensors_of(models[name]) for name in ("language", "task"))
    for name in found:
        if (layer := layer_of(name)) is not None and first <= layer <= last:
            found[name] = task[name]
    model = written(found, models["language"], tmp_path / "model")
    plan = swap_of(models, bottom=2, top=2, outside="language")
    origins = ls.verify_against(plan, model, share=1)
    planned = (first, last) == (2, 3)
    assert origins.passed is planned
    assert origins.problems == []
    for name, place in origins.places.items():
        inside = place.layer is not None and first <= place.layer <= last
        assert origins.found[name] == ("task" if inside else "language")
    text = str(origins)
    assert f"layers {first} to {last}: task" in text or not planned
    assert f"of {len(origins.planned)} tensors as planned (whole)" in text
    if not planned:
        assert "task (the plan: language)" in text


def test_the_origins_of_a_model_that_nobody_described(models, tmp_path):
    found = tensors_of(models["base"])
    task, language = (tensors_of(models[name]) for name in ("task", "language"))
    for name in found:
        if "layers.0." in name:
            found[name] = language[name]
        elif "layers.4.self_attn" in name:
            found[name] = task[name]
        elif "layers.5." in name:
            found[name] = (task[name] + language[name]) / 2
    model = written(found, models["base"], tmp_path / "model")
    plan = swap_of(models, base=models["base"], bottom=0, top=0, outside="task")
    origins = ls.verify_against(plan, model)
    lines = str(origins).splitlines()
    assert lines[0] == "layer 0: language (the plan: task)"
    assert lines[1] == "layers 1 to 3: base (the plan: task)"
    assert lines[2] == "layer 4: attention: task; mlp, norm: base (the plan: task)"
    assert lines[3] == "layer 5: none of the sources (the plan: task)"
    assert lines[4] == "embedding, head, final_norm: base (the plan: task)"
    assert lines[5].endswith("4 of 57 tensors as planned (10% of each compared)")


def test_one_wrong_number_is_found_when_all_is_compared(models, tmp_path):
    plan = swap_of(models, bottom=1, top=1)
    out = plan.save(tmp_path / "out")
    assert ls.verify_against(plan, out, share=1).passed
    tensors = tensors_of(out)
    name = "model.embed_tokens.weight"  # which the plan blends
    assert ls.verify_against(plan, out).planned[name] == "the planned blend"
    tensors[name][3, 3] += 1e-3
    model = written(tensors, out, tmp_path / "model")
    origins = ls.verify_against(plan, model, share=1)
    assert origins.different == [name]
    assert origins.found[name] == "none of the sources"


def test_what_cannot_be_compared_is_named(models, tmp_path):
    plan = swap_of(models, bottom=1, top=1)
    tensors = tensors_of(models["task"])
    del tensors["model.norm.weight"]
    tensors["model.layers.0.mlp.extra_proj.weight"] = torch.zeros(4)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.bfloat16)
    origins = ls.verify_against(plan, written(tensors, models["task"], tmp_path / "model"))
    text = "\n".join(origins.problems)
    assert not origins.passed
    assert "'lm_head.weight': BF16 [50, 24]; the merge writes F32 [50, 24]" in text
    assert "lacks 'model.norm.weight'" in text
    assert "holds 'model.layers.0.mlp.extra_proj.weight', which the merge does not" in text
    with pytest.raises(LayerswapError, match="share is 2; write a number above 0"):
        ls.verify_against(plan, models["task"], share=2)
