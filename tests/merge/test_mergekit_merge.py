"""mergekit configurations merged: settings of layers, names and slices reach the tensors."""

import numpy as np
import yaml
from merging import arrays

from layerswap.compose.recipe import parse_recipe
from layerswap.merge.api import make_plan
from layerswap.merge.verification import verify


def planned(config, experts):
    """The plan of a configuration whose models are fixture names."""
    text = yaml.safe_dump(config)
    for name, path in experts.items():
        text = text.replace(f"model: {name}\n", f"model: {path}\n")
    return make_plan(parse_recipe(text))


def merged(config, experts, folder):
    """The tensors that layerswap makes of it."""
    result = arrays(planned(config, experts).save(folder))
    assert verify(folder).passed
    return result


def part_of(name, first, stop, **parameters):
    return {"model": name, "layer_range": [first, stop], "parameters": parameters}


def test_gradients_filters_and_slices_reach_the_tensors(experts, tmp_path):
    by_name = [{"filter": "mlp", "value": [0.0, 1.0]}, {"value": 0.5}]
    config = {
        "merge_method": "linear",
        "parameters": {"weight": 1},
        "slices": [
            {"sources": [part_of("task", 0, 3, weight=by_name), part_of("language", 0, 3)]},
            {"sources": [part_of("third", 3, 4), part_of("task", 3, 4, weight=3)]},
        ],
    }
    result = merged(config, experts, tmp_path / "out")
    task, language, third = (arrays(experts[n]) for n in ("task", "language", "third"))
    for name, values in result.items():
        layer = int(name.split(".")[2]) if ".layers." in name else None
        if layer == 3 or name in ("model.norm.weight", "lm_head.weight"):
            expected = (third[name] + 3 * task[name]) / 4
        else:
            weight = (layer or 0) / 2 if "mlp" in name else 0.5
            expected = (weight * task[name] + language[name]) / (weight + 1)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=2e-7, err_msg=name)


def test_a_sum_of_any_weights_is_exact(experts, tmp_path):
    parts = [("task", 0.9), ("language", 0.7), ("third", -0.3)]
    config = {
        "merge_method": "linear",
        "parameters": {"normalize": False},
        "models": [{"model": name, "parameters": {"weight": w}} for name, w in parts],
    }
    result = merged(config, experts, tmp_path / "out")
    assert "the weights of linear add up to 1.3" in "".join(planned(config, experts).notes)
    for name, values in result.items():
        expected = sum(w * arrays(experts[n])[name].astype(np.float64) for n, w in parts)
        np.testing.assert_allclose(values, expected, rtol=3e-7, atol=2e-8, err_msg=name)
