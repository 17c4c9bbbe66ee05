"""layerswap against the real mergekit, on the same configurations and checkpoints.

An optional job: set LAYERSWAP_MERGEKIT to a `mergekit-yaml` executable and run with `-m slow`.
The departures that docs/mergekit.md lists have a test each, which fails when one is gone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from merging import save_expert, tensors_of, tiny_llama

from layerswap.compose.recipe import read_recipe
from layerswap.merge import make_plan

MERGEKIT = os.environ.get("LAYERSWAP_MERGEKIT", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not MERGEKIT or shutil.which(MERGEKIT) is None,
        reason="LAYERSWAP_MERGEKIT names no mergekit-yaml executable",
    ),
]
LAYERS = 4


@pytest.fixture(scope="session")
def models(tmp_path_factory) -> Path:
    """A folder with a base and three experts in float32, one of each in bfloat16, and tied ones."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("base", "a", "b", "c")):
        save_expert(root / name, tiny_llama(), seed)
        save_expert(root / f"{name}-bf16", tiny_llama(), seed, dtype=torch.bfloat16)
        save_expert(root / f"{name}-tied", tiny_llama(tie_word_embeddings=True), seed)
    return root


def located(value, models):
    """A configuration whose models are folders in `models`."""
    if isinstance(value, dict):
        return {
            key: str(models / item) if key in ("model", "base_model") else located(item, models)
            for key, item in value.items()
        }
    return [located(item, models) for item in value] if isinstance(value, list) else value


def merge_with_both(config, models, folder):
    """Every tensor that layerswap and mergekit make of a configuration."""
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(located(config, models), sort_keys=False))
    ours = tensors_of(make_plan(read_recipe(path)).save(folder / "ours"))
    command = [MERGEKIT, str(path), str(folder / "theirs"), "--quiet"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return ours, tensors_of(folder / "theirs")


def steps(ours, theirs):
    """How many representable bfloat16 values apart two tensors are, element by element."""

    def ordered(tensor):
        bits = tensor.view(torch.int16).int()
        return torch.where(bits >= 0, bits, -(bits & 0x7FFF))

    return (ordered(ours) - ordered(theirs)).abs()


def model(name, **parameters):
    return {"model": name, **({"parameters": parameters} if parameters else {})}


def part(name, first, stop, **parameters):
    return {**model(name, **parameters), "layer_range": [first, stop]}


SPLIT = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5, 0.7, 0.3, 0]},
    {"value": 0.5},
]
PAIR = [model("a", weight=1.0, density=0.5), model("b", weight=0.5, density=0.5)]
MIXED = [
    model("a", weight=1.0, density=[1, 0.7, 0.25]),
    model("b", weight=[0, 0.3, 0.7, 1], density=0.5),
    model("c", weight=[{"filter": "mlp", "value": 0.5}, {"value": 0}], density=0.25),
]
CASES = {
    "linear": {"merge_method": "linear", "models": [model("a", weight=0.3), model("b", weight=1)]},
    "linear, not normalised": {
        "merge_method": "linear", "parameters": {"normalize": False},
        "models": [model("a", weight=0.25), model("b", weight=0.75)],
    },
    "linear, gradients": {
        "merge_method": "linear",
        "models": [model("a", weight=[1, 0.2, 0]), model("b", weight=[0, 0.5]), model("c", weight=1)],
    },
    "linear, base and filters": {
        "merge_method": "linear", "base_model": "base", "parameters": {"weight": 0.4},
        "models": [model("a", weight=[{"filter": "embed_tokens", "value": 2}, {"value": 1}])],
    },
    "linear slices": {
        "merge_method": "linear",
        "slices": [
            {"sources": [part("a", 0, 2, weight=[0.2, 0.9]), part("b", 0, 2, weight=0.5)]},
            {"sources": [part("b", 2, 3, weight=[3, 1])]},
            {
                "sources": [part("c", 3, 4), part("a", 3, 4, weight=0.3), part("b", 3, 4)],
                "parameters": {"weight": 0.7},
            },
        ],
    },
    "slerp": {
        "merge_method": "slerp", "base_model": "a", "models": [model("a"), model("b")],
        "parameters": {"t": SPLIT},
    },
    "slerp slices": {
        "merge_method": "slerp", "base_model": "b", "parameters": {"t": 0.3},
        "slices": [
            {"sources": [part("a", 0, 1), part("b", 0, 1)], "parameters": {"t": SPLIT}},
            {"sources": [part("b", 1, 4), part("a", 1, 4)]},
        ],
    },
    "task_arithmetic": {
        "merge_method": "task_arithmetic", "base_model": "base", "parameters": {"lambda": 0.7},
        "models": [model("a", weight=0.6), model("b", weight=-0.3)],
    },
    "task_arithmetic, normalised": {
        "merge_method": "task_arithmetic", "base_model": "base", "parameters": {"normalize": True},
        "models": [model("base"), model("a", weight=0.6), model("b", weight=0.9)],
    },
    "ties": {
        "merge_method": "ties", "base_model": "base", "models": PAIR, "parameters": {"lambda": 0.8},
    },
    "ties, rounded down": {
        "merge_method": "ties", "base_model": "base",
        "models": [model("a", weight=1, density=0.29), model("b", weight=1, density=0.29)],
    },
    "ties of three, all mixed": {"merge_method": "ties", "base_model": "base", "models": MIXED},
    "ties, summed": {
        "merge_method": "ties", "base_model": "base", "models": PAIR,
        "parameters": {"normalize": False, "int8_mask": True},
    },
    "ties slices": {
        "merge_method": "ties", "base_model": "base", "parameters": {"density": 0.4, "weight": 1},
        "slices": [
            {"sources": [part("base", 0, 1), part("a", 0, 1)], "parameters": {"density": 1}},
            {"sources": [part("a", 1, 3), part("b", 1, 3), part("base", 1, 3)]},
            {"sources": [part("base", 3, 4), part("b", 3, 4)]},
        ],
    },
    "dare_linear, everything kept": {
        "merge_method": "dare_linear", "base_model": "base",
        "models": [model("a", weight=0.5), model("b", weight=0.25)],
    },
    "dare_ties, everything kept": {
        "merge_method": "dare_ties", "base_model": "base",
        "models": [model("a", weight=0.5), model("b", weight=0.25)],
    },
    "breadcrumbs": {
        "merge_method": "breadcrumbs", "base_model": "base",
        "models": [model("a", weight=0.5, density=0.7, gamma=0.05), model("b", weight=0.3)],
    },
    "breadcrumbs of two alike": {
        "merge_method": "breadcrumbs", "base_model": "base",
        "models": [model("a", weight=0.5), model("b", weight=0.3)],
        "parameters": {"density": 0.83, "gamma": 0.07, "normalize": True},
    },
    "breadcrumbs, density first": {
        "merge_method": "breadcrumbs", "base_model": "base",
        "models": [model("a", weight=1, density=0.9, gamma=0.3)],
    },
    "breadcrumbs_ties": {
        "merge_method": "breadcrumbs_ties", "base_model": "base",
        "models": [model("a", weight=0.5, density=0.7, gamma=0.05), model("b", weight=0.3)],
    },
    "model_stock": {
        "merge_method": "model_stock", "base_model": "base",
        "models": [model("a"), model("b"), model("c")],
    },
    "modules": {
        "merge_method": "linear", "parameters": {"weight": 1},
        "modules": {
            "default": {"models": [model("a"), model("b")], "parameters": {"weight": [0, 1]}}
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_equal_within_one_rounding(case, models, tmp_path):
    config = {**CASES[case], "dtype": "float32", "out_dtype": "bfloat16"}
    ours, theirs = merge_with_both(config, models, tmp_path)
    assert ours.keys() == theirs.keys()
    apart = {name: steps(ours[name], theirs[name]) for name in ours}
    assert {name: int(a.max()) for name, a in apart.items() if a.max() > 1} == {}
    equal = sum(int((a == 0).sum()) for a in apart.values())
    assert equal > 0.99 * sum(a.numel() for a in apart.values())
