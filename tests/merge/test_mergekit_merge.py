"""mergekit configurations merged: every tensor against mergekit's formulas in float64."""

import numpy as np
import pytest
import yaml
from effort import sampled
from merging import arrays

from layerswap.compose.recipe import parse_recipe
from layerswap.merge import make_plan, verify


def sparse(delta, method, density, gamma):
    """A delta made sparse over the flat tensor, by sorting."""
    if density >= 1 or method == "task_arithmetic":
        return delta
    flat, count = delta.ravel(), delta.size
    order = np.argsort(-np.abs(flat.astype(np.float32)), kind="stable")
    kept = int(density * count)
    outliers = min(int(gamma * count), count - kept) if "breadcrumbs" in method else 0
    mask = np.zeros(count)
    mask[order[outliers : outliers + max(kept, outliers == 0)]] = 1
    return (flat * mask).reshape(delta.shape)


def generalised(method, base, entries, *, normalize, scale=1.0):
    """mergekit's generalised task arithmetic on one tensor.

    `entries` are (tensor, weight, density, gamma).
    """
    deltas = [w * sparse(x - base, method, d, g) for x, w, d, g in entries]
    weights = [np.full(base.shape, w) for _, w, _, _ in entries]
    if method in ("ties", "dare_ties", "breadcrumbs_ties"):
        majority = np.where(sum(deltas) >= 0, 1, -1)
        agree = [np.sign(delta) == majority for delta in deltas]
        deltas = [delta * mask for delta, mask in zip(deltas, agree, strict=True)]
        weights = [weight * mask for weight, mask in zip(weights, agree, strict=True)]
    divisor = sum(weights)
    divisor = np.where(np.abs(divisor) < 1e-8, 1.0, divisor)
    return base + scale * sum(deltas) / (divisor if normalize else 1.0)


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


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(
    "method", ["task_arithmetic", "ties", "dare_ties", "breadcrumbs", "breadcrumbs_ties"]
)
@pytest.mark.parametrize("alike", sampled([True, False], False))
def test_deltas(method, normalize, alike, experts, tmp_path):
    densities = (0.5, 0.5) if alike else (0.3, 0.83)
    densities = (1, 1) if method == "dare_ties" else densities  # layerswap draws its own masks
    config = {
        "merge_method": method,
        "base_model": "base",
        "models": [
            {"model": "task", "parameters": {"weight": 0.7, "density": densities[0]}},
            {"model": "language", "parameters": {"weight": 0.4, "density": densities[1]}},
        ],
        "parameters": {"normalize": normalize, "lambda": 0.9, "gamma": 0.05},
    }
    result = merged(config, experts, tmp_path / "out")
    base, task, language = (arrays(experts[n]) for n in ("base", "task", "language"))
    for name, values in result.items():
        pair = [(task[name], 0.7, densities[0], 0.05), (language[name], 0.4, densities[1], 0.05)]
        expected = generalised(method, base[name], pair, normalize=normalize, scale=0.9)
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=2e-7, err_msg=name)


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
    for name, values in result.items():
        expected = sum(w * arrays(experts[n])[name].astype(np.float64) for n, w in parts)
        np.testing.assert_allclose(values, expected, rtol=3e-7, atol=2e-8, err_msg=name)


def test_the_base_model_of_a_blend_gives_the_configuration(experts, tmp_path):
    config = {
        "merge_method": "slerp",
        "base_model": "language",
        "models": [{"model": "task"}, {"model": "language"}],
        "parameters": {"t": [0.0, 0.5]},
    }
    plan = planned(config, experts)
    assert plan.reference.folder == experts["language"]
    assert list(plan.experts) == ["language", "task"]
