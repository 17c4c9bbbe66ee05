"""layerswap against the real mergekit, on the same configurations and checkpoints.

An optional job: set LAYERSWAP_MERGEKIT to a `mergekit-yaml` executable and run with `-m slow`;
`install_mergekit` in bench/merge.py makes one. The departures that docs/mergekit.md lists have
a test each where they change numbers, which fails when one is gone.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from merging import save_adapter, save_expert, tensors_of, tiny_llama
from safetensors.torch import save_file

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
SEEDS = 60
"""How many configurations are drawn."""


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


def run_mergekit(path, out, *options):
    """Every tensor that mergekit makes of a configuration."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [MERGEKIT, str(path), str(out), "--quiet", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return tensors_of(out)


def merge_with_both(config, models, folder):
    """Every tensor that layerswap and mergekit make of a configuration."""
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(located(config, models), sort_keys=False))
    output = tensors_of(make_plan(read_recipe(path)).save(folder / "output"))
    return output, run_mergekit(path, folder / "reference")


def steps(output, reference):
    """How many representable bfloat16 values apart two tensors are, element by element."""

    def ordered(tensor):
        bits = tensor.view(torch.int16).int()
        return torch.where(bits >= 0, bits, -(bits & 0x7FFF))

    return (ordered(output) - ordered(reference)).abs()


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
CASES = {
    "linear with weights as they are": {
        "merge_method": "linear", "parameters": {"normalize": False},
        "models": [model("a", weight=0.9), model("b", weight=-0.4)],
    },
    "linear slices of different layers": {
        "merge_method": "linear", "parameters": {"weight": 1},
        "slices": [
            {"sources": [part("a", 0, 2), part("b", 2, 4, weight=[0.2, 0.9])]},
            {
                "sources": [
                    part("c", 1, 3, weight=[{"filter": "layers.2.", "value": 3}, {"value": 0.5}]),
                    part("a", 0, 2, weight=[{"filter": "layers.1.", "value": 2}, {"value": 0.1}]),
                ],
            },
        ],
    },
    "ties slices of different layers": {
        "merge_method": "ties", "base_model": "base", "parameters": {"density": 0.4, "weight": 1},
        "slices": [
            {"sources": [part("a", 1, 3), part("b", 0, 2, weight=0.4), part("base", 2, 4)]},
            {"sources": [part("base", 3, 4), part("b", 0, 1, density=0.7), part("a", 1, 2)]},
        ],
    },
    "slerp slices of different layers": {
        "merge_method": "slerp", "base_model": "b", "parameters": {"t": SPLIT},
        "slices": [{"sources": [part("a", 0, 3), part("b", 1, 4)]}],
    },
    "ties, rounded down": {
        "merge_method": "ties", "base_model": "base",
        "models": [model("a", weight=1, density=0.29), model("b", weight=1, density=0.29)],
    },
    "dare_linear, everything kept": {
        "merge_method": "dare_linear", "base_model": "base",
        "models": [model("a", weight=0.5), model("b", weight=0.25)],
    },
    "breadcrumbs, density first": {
        "merge_method": "breadcrumbs", "base_model": "base",
        "models": [model("a", weight=1, density=0.9, gamma=0.3)],
    },
    "model_stock": {
        "merge_method": "model_stock", "base_model": "base",
        "models": [model("a"), model("b"), model("c")],
    },
    "della, everything kept": {
        "merge_method": "della", "base_model": "base",
        "models": [model("a", weight=0.5), model("b", weight=0.25)],
    },
    "ties, rescaled": {
        "merge_method": "ties", "base_model": "base", "models": PAIR,
        "parameters": {"rescale": True},
    },
    "breadcrumbs, rescaled": {
        "merge_method": "breadcrumbs", "base_model": "base",
        "models": [model("a", weight=0.5, density=0.7, gamma=0.05), model("b", weight=0.3)],
        "parameters": {"rescale": True},
    },
    "breadcrumbs_ties, rescaled": {
        "merge_method": "breadcrumbs_ties", "base_model": "base",
        "models": [model("a", weight=0.5, density=0.7), model("b", weight=0.3, density=0.5)],
        "parameters": {"rescale": True},
    },
    "model_stock, by rows": {
        "merge_method": "model_stock", "base_model": "base",
        "models": [model("a"), model("b"), model("c")], "parameters": {"filter_wise": True},
    },
    "sce": {
        "merge_method": "sce", "base_model": "base", "models": [model("a"), model("b"), model("c")],
        "parameters": {"select_topk": 0.3},
    },
    "ram": {
        "merge_method": "ram", "base_model": "base", "models": [model("a"), model("b")],
        "parameters": {"epsilon": 0.02},
    },
    "ramplus_tl": {
        "merge_method": "ramplus_tl", "base_model": "base",
        "models": [model("a"), model("b"), model("c")],
        "parameters": {"epsilon": 0.02, "r": 0.3, "alpha": 0.9},
    },
    "nearswap": {
        "merge_method": "nearswap", "base_model": "base", "models": [model("a")],
        "parameters": {"t": 0.01},
    },
    "arcee_fusion": {
        "merge_method": "arcee_fusion", "base_model": "base", "models": [model("a")],
    },
    "nuslerp": {
        "merge_method": "nuslerp", "models": [model("a", weight=1), model("b", weight=0.4)],
    },
    "nuslerp of deltas, by rows": {
        "merge_method": "nuslerp", "base_model": "base",
        "models": [model("a", weight=[1, 0.3]), model("b", weight=0.4)],
        "parameters": {"nuslerp_flatten": False},
    },
    "nuslerp of deltas, by columns": {
        "merge_method": "nuslerp", "base_model": "base",
        "models": [model("a", weight=1), model("b", weight=0.4)],
        "parameters": {"nuslerp_flatten": False, "nuslerp_row_wise": True},
    },
    "multislerp": {
        "merge_method": "multislerp",
        "models": [model("a", weight=1), model("b", weight=0.4), model("c", weight=0.7)],
    },
    "multislerp of deltas, weights as they are": {
        "merge_method": "multislerp", "base_model": "base",
        "models": [model("a", weight=1), model("b", weight=0.4)],
        "parameters": {"normalize_weights": False},
    },
    "karcher": {
        "merge_method": "karcher", "models": [model("a"), model("b"), model("c")],
        "parameters": {"max_iter": 20},
    },
    "passthrough, scaled": {
        "merge_method": "passthrough", "models": [model("a", scale=0.5)],
    },
}  # fmt: skip


def far_apart(output, reference, models):
    """The elements of each tensor that are more than one step apart, where there are any.

    Where a sum nearly cancels, float32's own rounding of its terms is more than a step of the
    little that is left.
    """
    assert output.keys() == reference.keys()
    sources = [tensors_of(models / name) for name in ("base", "a", "b", "c")]
    result = {}
    for name in output:
        size = torch.stack([source[name].abs() for source in sources]).amax(0)
        gap = (output[name].float() - reference[name].float()).abs()
        result[name] = (steps(output[name], reference[name]) > 1) & (gap > 2.0**-21 * size)
    return {name: far for name, far in result.items() if far.any()}


@pytest.mark.parametrize("case", CASES)
def test_equal_within_one_rounding(case, models, tmp_path):
    config = {**CASES[case], "dtype": "float32", "out_dtype": "bfloat16"}
    output, reference = merge_with_both(config, models, tmp_path)
    assert far_apart(output, reference, models) == {}
    equal = sum(int((steps(output[n], reference[n]) == 0).sum()) for n in output)
    assert equal > 0.99 * sum(tensor.numel() for tensor in output.values())


FILTERS = [
    "self_attn", "mlp", "norm", "layernorm", "embed_tokens", "lm_head", "model.norm", "layers.1.",
    "*",
]  # fmt: skip


class Random:
    """Draws configurations that both can read, whatever their keys and levels."""

    def __init__(self, seed):
        self.draw = random.Random(seed)

    def gradient(self, low, high):
        numbers = [round(self.draw.uniform(low, high), 3) for _ in range(self.draw.randint(1, 5))]
        return numbers if self.draw.random() < 0.5 else numbers[0]

    def setting(self, low, high, *, last=True):
        if self.draw.random() < 0.5:
            return self.gradient(low, high)
        conditions = [
            {"filter": word, "value": self.gradient(low, high)}
            for word in self.draw.sample(FILTERS, self.draw.randint(1, 3))
        ]
        return conditions + [{"value": self.gradient(low, high)}] * last

    def settings(self, ranges, chance, *, last=False):
        names = [name for name in ranges if self.draw.random() < chance]
        return {name: self.setting(*ranges[name], last=last) for name in names}

    def configuration(self):
        method = self.draw.choice(["linear", "slerp", "task_arithmetic", "ties", "breadcrumbs"])
        own, shared = {"weight": (0.1, 2.0)}, {}
        if method == "slerp":
            own, shared = {}, {"t": (0.0, 1.0)}
        elif method != "linear":
            own["density"], shared["lambda"] = (0.2, 1.0), (0.5, 1.5)
        if method == "breadcrumbs":
            own["gamma"] = (0.0, 0.3)
        normalize = self.draw.random() < 0.5
        if method in ("task_arithmetic", "breadcrumbs") and not normalize:
            own["weight"] = (-1.0, 2.0)
        top = {name: self.setting(*values) for name, values in (own | shared).items()}
        if method in ("task_arithmetic", "ties", "breadcrumbs"):
            top["normalize"] = normalize
        config = {"merge_method": method, "parameters": top}
        if method != "linear":
            config["base_model"] = "base"
        cuts = sorted({0, LAYERS, *self.draw.sample(range(1, LAYERS), self.draw.randint(0, 2))})
        slices = []
        for first, stop in itertools.pairwise(cuts):
            count = 1 if method == "slerp" else self.draw.randint(1, 3)
            names = ["base"] * ("base_model" in config) + self.draw.sample("abc", count)
            sources = [part(name, first, stop, **self.settings(own, 0.5)) for name in names]
            slices.append({"sources": sources, "parameters": self.settings(own | shared, 0.3)})
        if len(slices) > 1:
            return {**config, "slices": slices}
        models = [{k: v for k, v in s.items() if k != "layer_range"} for s in slices[0]["sources"]]
        return {**config, "models": models}


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


def test_random_configurations(models, tmp_path):
    drawn = {f"{seed:02}": Random(seed).configuration() for seed in range(SEEDS)}
    for name, config in drawn.items():
        whole = {**located(config, models), "dtype": "float32", "out_dtype": "bfloat16"}
        (tmp_path / f"{name}.yml").write_text(yaml.safe_dump(whole, sort_keys=False))
    python = Path(shutil.which(MERGEKIT)).parent / "python"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(python), "-c", MERGE_ALL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = {}
    for name, config in drawn.items():
        plan = make_plan(read_recipe(tmp_path / f"{name}.yml"))
        output = tensors_of(plan.save(tmp_path / f"{name}-output"))
        far = far_apart(output, tensors_of(tmp_path / name), models)
        wrong |= {name: (config, list(far))} if far else {}
    assert wrong == {}


@pytest.mark.parametrize("kind", ["-bf16", "-tied", ""])
def test_layers_passed_through_are_the_same_bits(kind, models, tmp_path):
    slices = [("a", 0, 1), ("b", 1, 3), ("c", 3, 4)]
    if not kind:  # repeated, dropped and moved
        slices = [("a", 0, 3), ("b", 1, 3), ("a", 2, 3), ("c", 0, 1)]
    config = {
        "merge_method": "passthrough",
        "slices": [{"sources": [part(name + kind, *layers)]} for name, *layers in slices],
    }
    output, reference = merge_with_both(config, models, tmp_path)
    assert output.keys() == reference.keys()
    assert all(torch.equal(output[name], reference[name]) for name in output)
    assert ("lm_head.weight" in output) == (kind != "-tied")
    configs = [
        json.loads((tmp_path / out / "config.json").read_text()) for out in ("output", "reference")
    ]
    assert len({result["num_hidden_layers"] for result in configs}) == 1


def test_a_model_with_an_adapter_added_to_it(models, tmp_path):
    save_adapter(tmp_path / "lora", models / "a", 7, r=4, target_modules=["q_proj", "down_proj"])
    config = {
        "merge_method": "linear", "dtype": "float32", "out_dtype": "bfloat16",
        "models": [
            {"model": f"{models / 'a'}+{tmp_path / 'lora'}", "parameters": {"weight": 0.6}},
            {"model": str(models / "b"), "parameters": {"weight": 0.4}},
        ],
    }  # fmt: skip
    path = tmp_path / "config.yml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    output = tensors_of(make_plan(read_recipe(path)).save(tmp_path / "output"))
    cache = f"--lora-merge-cache={tmp_path / 'cache'}"
    reference = run_mergekit(path, tmp_path / "reference", cache)
    assert far_apart(output, reference, models) == {}
    plain = tensors_of(models / "a")["model.layers.0.self_attn.q_proj.weight"]
    other = tensors_of(models / "b")["model.layers.0.self_attn.q_proj.weight"]
    without = (0.6 * plain + 0.4 * other).bfloat16()
    assert not torch.equal(output["model.layers.0.self_attn.q_proj.weight"], without)


def deltas(models, names, tensor, kind="-bf16"):
    base = tensors_of(models / f"base{kind}")[tensor].float()
    return [tensors_of(models / f"{name}{kind}")[tensor].float() - base for name in names]


def test_departure_equal_magnitudes_and_cancellation_in_ties(models, tmp_path):
    """mergekit keeps some of several equal magnitudes, and counts a sum of 0 as positive."""
    names = [f"{name}-bf16" for name in "ab"]
    config = {
        "merge_method": "ties", "base_model": "base-bf16", "dtype": "float32",
        "out_dtype": "bfloat16", "models": [model(n, weight=1, density=0.5) for n in names],
    }  # fmt: skip
    result = far_apart(*merge_with_both(config, models, tmp_path), models)
    for tensor, far in result.items():
        total, at_threshold = torch.zeros(far.shape), torch.zeros(far.shape, dtype=torch.bool)
        for delta in deltas(models, "ab", tensor):
            size = delta.abs()
            threshold = size.flatten().sort(descending=True).values[int(0.5 * delta.numel()) - 1]
            at_threshold |= size == threshold
            total += torch.where(size >= threshold, delta, 0.0)
        assert not (far & ~at_threshold & (total != 0)).any(), tensor


def test_departure_without_a_dtype_mergekit_rounds_every_step(models, tmp_path):
    config = {
        "merge_method": "task_arithmetic", "base_model": "base-bf16",
        "models": [model("a-bf16", weight=0.6), model("b-bf16", weight=0.7)],
    }  # fmt: skip
    output, reference = merge_with_both(config, models, tmp_path)
    assert far_apart(output, reference, models)
    for name, tensor in output.items():
        base = tensors_of(models / "base-bf16")[name].float()
        a, b = deltas(models, "ab", name)
        exact = base + 0.6 * a + 0.7 * b
        assert (tensor.float() - exact).abs().max() <= (reference[name].float() - exact).abs().max()


def test_departure_model_stock_of_deltas_that_disagree(models, tmp_path):
    """layerswap keeps the base where the mean cosine is negative; mergekit extrapolates."""
    base, a = tensors_of(models / "base"), tensors_of(models / "a")
    for name in ("base", "a"):
        shutil.copytree(models / name, tmp_path / name)

    def opposed(name, tensor):
        return tensor - 0.5 * (a[name] - tensor) + 0.1 * a[name].flip(0)

    changed(models / "base", tmp_path / "against", opposed)
    config = {
        "merge_method": "model_stock", "base_model": "base", "dtype": "float32",
        "models": [model("a"), model("against")],
    }  # fmt: skip
    output, reference = merge_with_both(config, tmp_path, tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(output[name], base[name])
    assert not torch.allclose(reference[name], base[name], atol=1e-3)


def changed(source, folder, change):
    """A copy of a float32 model with other weights."""
    shutil.copytree(source, folder)
    tensors = {name: change(name, tensor) for name, tensor in tensors_of(source).items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_departure_slerp_with_nothing(models, tmp_path):
    """Nothing has no direction: mergekit takes it to be at right angles."""
    name = "model.layers.1.self_attn.k_proj.weight"
    changed(models / "b", tmp_path / "b", lambda n, t: torch.zeros_like(t) if n == name else t)
    shutil.copytree(models / "a", tmp_path / "a")
    config = {
        "merge_method": "slerp", "base_model": "a", "models": [model("b")],
        "parameters": {"t": 0.25}, "dtype": "float32",
    }  # fmt: skip
    output, reference = merge_with_both(config, tmp_path, tmp_path)
    a = tensors_of(models / "a")[name]
    torch.testing.assert_close(output[name], 0.75 * a)
    torch.testing.assert_close(reference[name], a * math.sin(0.75 * math.pi / 2))


def test_departure_sources_are_not_rounded_first(models, tmp_path):
    config = {
        "merge_method": "passthrough", "models": [model("a")],
        "dtype": "float16", "out_dtype": "float32",
    }  # fmt: skip
    output, reference = merge_with_both(config, models, tmp_path)
    for name, tensor in tensors_of(models / "a").items():
        assert torch.equal(output[name], tensor)
        assert torch.equal(reference[name], tensor.half().float())


@pytest.mark.parametrize("rescale", [True, False])
def test_departure_dare_draws_other_masks(rescale, models, tmp_path):
    """The same share is kept; mergekit scales to the delta's L1 norm, layerswap by the density."""
    config = {
        "merge_method": "dare_linear", "base_model": "base", "dtype": "float32",
        "models": [model("a", weight=1, density=0.25)], "parameters": {"rescale": rescale},
    }  # fmt: skip
    output, reference = merge_with_both(config, models, tmp_path)
    base, a = tensors_of(models / "base"), tensors_of(models / "a")
    kept = []
    for merged in (output, reference):
        changed = {n: (t - base[n]).abs() > 1e-9 for n, t in merged.items()}
        count = sum(mask.sum() for mask in changed.values())
        kept.append(float(count / sum(t.numel() for t in base.values())))
    assert kept == pytest.approx([0.25, 0.25], abs=0.01)
    name = "model.layers.0.mlp.up_proj.weight"
    delta = a[name] - base[name]
    kept_by_mergekit = (reference[name] - base[name]).abs() > 1e-9
    reference_factor = float(delta.abs().sum() / delta[kept_by_mergekit].abs().sum())
    for merged, factor in ((output, 4.0), (reference, reference_factor)):
        change = merged[name] - base[name]
        ratio = (change / delta)[change.abs() > 1e-6]
        expected = torch.full_like(ratio, factor if rescale else 1.0)
        torch.testing.assert_close(ratio, expected, rtol=1e-2, atol=0)
