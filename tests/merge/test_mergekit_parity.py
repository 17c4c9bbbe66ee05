"""layerswap against the real mergekit, on the same configurations and checkpoints, once a week.

LAYERSWAP_MERGEKIT names a Python with mergekit: `pip install mergekit` in an environment of its
own. docs/mergekit.md lists where the results differ; no case here meets those places.
"""

import os
import subprocess

import pytest
import yaml
from merging import save_expert, tensors_of, tiny_llama

from layerswap.compose.recipe import read_recipe
from layerswap.merge.api import make_plan

PYTHON = os.environ.get("LAYERSWAP_MERGEKIT")
MERGE_ALL = """
import sys
from pathlib import Path
import yaml
from mergekit.config import MergeConfiguration
from mergekit.merge import MergeOptions, run_merge
for path in sorted(Path(sys.argv[1]).glob("*.yml")):
    config = MergeConfiguration.model_validate(yaml.safe_load(path.read_text()))
    run_merge(config, str(path.with_suffix("")), MergeOptions(quiet=True))
"""
SPLIT = [{"filter": "self_attn", "value": [0, 0.5, 0.3, 1]}, {"filter": "mlp", "value": [1, 0.2]},
         {"value": 0.5}]  # fmt: skip
LAYER = [{"filter": "layers.2.", "value": 3}, {"value": 0.5}]


def model(name, **parameters):
    return {"model": name, "parameters": parameters}


def layers(name, first, stop, **parameters):
    return {**model(name, **parameters), "layer_range": [first, stop]}


def case(method, *models, base="base", **parameters):
    return {"merge_method": method, "models": [*models], "parameters": parameters,
            **({"base_model": base} if base else {})}  # fmt: skip


def sliced(method, *slices, base=None, **parameters):
    return {"merge_method": method, "slices": [{"sources": sources} for sources in slices],
            "parameters": parameters, **({"base_model": base} if base else {})}  # fmt: skip


A, B, C = (model(name) for name in "abc")
AB = [model("a", weight=1.0, density=0.5), model("b", weight=0.5, density=0.7)]
ROWS = {"nuslerp_flatten": False}
CASES = {
    "linear": case("linear", model("a", weight=0.9), model("b", weight=-0.4), base=None,
                   normalize=False),
    "linear slices": sliced(
        "linear", [layers("a", 0, 2), layers("b", 0, 2, weight=[0.2, 0.9])],
        [layers("c", 2, 4, weight=LAYER), layers("a", 2, 4, weight=0.1)], weight=1,
    ),
    "slerp": sliced("slerp", [layers("a", 0, 4), layers("b", 0, 4)], base="b", t=SPLIT),
    "moved layers": sliced("passthrough", [layers("a", 0, 3)], [layers("b", 1, 3)],
                           [layers("a", 2, 3)]),
    "scaled": case("passthrough", model("a", scale=0.5), base=None),
    "task_arithmetic": case("task_arithmetic", model("a", weight=[1, -0.5]), B, weight=0.4,
                            **{"lambda": 1.2}),
    "ties": case("ties", *AB), "ties, rescaled": case("ties", *AB, rescale=True),
    "ties, summed": case("ties", *AB, normalize=False),
    "dare_linear, all kept": case("dare_linear", A, B, weight=0.5, density=1.0),
    "della, all kept": case("della", A, B, weight=0.5, density=1.0),
    "breadcrumbs": case("breadcrumbs", *AB, gamma=0.3),
    "breadcrumbs_ties": case("breadcrumbs_ties", *AB, rescale=True),
    "model_stock": case("model_stock", A, B, C),
    "model_stock, by rows": case("model_stock", A, B, C, filter_wise=True),
    "sce": case("sce", A, B, C, select_topk=0.3),
    "ram": case("ram", A, B, epsilon=0.02),
    "ramplus_tl": case("ramplus_tl", A, B, C, epsilon=0.02, r=0.3, alpha=0.9),
    "nearswap": case("nearswap", A, t=0.01), "arcee_fusion": case("arcee_fusion", A),
    "nuslerp": case("nuslerp", *AB, base=None),
    "nuslerp, by rows": case("nuslerp", *AB, **ROWS),
    "nuslerp, by columns": case("nuslerp", *AB, **ROWS, nuslerp_row_wise=True),
    "multislerp": case("multislerp", *AB, model("c", weight=0.7), base=None),
    "multislerp of deltas": case("multislerp", *AB, normalize_weights=False),
    "karcher": case("karcher", A, B, C, base=None, max_iter=20),
}  # fmt: skip


def located(value, folder):
    """A configuration whose models are folders."""
    if isinstance(value, dict):
        return {
            key: str(folder / item) if key in ("model", "base_model") else located(item, folder)
            for key, item in value.items()
        }
    return [located(item, folder) for item in value] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="LAYERSWAP_MERGEKIT names no Python with mergekit")
def test_every_method_equals_mergekits_within_one_rounding(tmp_path):
    models = {name: save_expert(tmp_path / name, tiny_llama(), seed)
              for seed, name in enumerate(("base", "a", "b", "c"))}  # fmt: skip
    for name, config in CASES.items():
        whole = {**located(config, tmp_path), "dtype": "float32", "out_dtype": "bfloat16"}
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(whole, sort_keys=False))
    environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [PYTHON, "-c", MERGE_ALL, tmp_path], check=False, capture_output=True, text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    sources = [tensors_of(folder) for folder in models.values()]
    largest = max(float(tensor.abs().max()) for source in sources for tensor in source.values())
    wrong = {}
    for name in CASES:
        plan = make_plan(read_recipe(tmp_path / f"{name}.yml"))
        ours, theirs = tensors_of(plan.save(tmp_path / f"{name}-ours")), tensors_of(tmp_path / name)
        assert ours.keys() == theirs.keys(), name
        for tensor, expected in theirs.items():
            # One step of bfloat16, and float32's own rounding where a sum nearly cancels.
            room = 2.0**-7 * expected.float().abs() + 2.0**-21 * largest
            far = int(((ours[tensor].float() - expected.float()).abs() > room).sum())
            differing = int((ours[tensor] != expected).sum())
            if far or differing > 0.01 * expected.numel():
                wrong[name, tensor] = far, differing
    assert wrong == {}
