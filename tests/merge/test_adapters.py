"""Merged adapters, loaded by PEFT or compared with the dense computation."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import huggingface_hub
import pytest
import torch
from effort import sampled
from merging import (
    change_config,
    check_equal,
    layer_of,
    recipe_plan,
    refusal,
    save_adapter,
    save_expert,
    save_tokenizer,
    takes,
    tensors_of,
    tiny_llama,
)
from peft import PeftModel
from plain_checkpoints import write_adapter, write_family
from refusals import refused
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config

import layerswap as ls
from layerswap.checkpoint import nf4
from layerswap.compose.recipe import check_recipe
from layerswap.ground.errors import LayerswapError, visible
from layerswap.merge.metadata import for_upload

ZONES = {"bottom": 1, "top": 1, "bottom_transition": 1}
TOKENS = torch.tensor([[3, 7, 11, 2, 9, 30, 31], [5, 5, 8, 1, 40, 2, 0]])
SETTINGS = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "up_proj"]},
    "rslora": {
        "r": 6, "lora_alpha": 12, "use_rslora": True, "target_modules": "all-linear",
        "rank_pattern": {"layers.1.mlp.up_proj": 3}, "alpha_pattern": {"up_proj": 5},
    },
    "partial": {
        "r": 2, "lora_alpha": 1, "target_modules": ["k_proj", "down_proj"],
        "layers_to_transform": [0, 3], "layers_pattern": "layers",
    },
    "with embedding": {"r": 3, "lora_alpha": 3, "target_modules": ["embed_tokens", "o_proj"]},
    "with a trained head": {
        "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["lm_head"],
    },
    "with trained norms": {
        "r": 2, "target_modules": ["q_proj"], "modules_to_save": ["input_layernorm"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters") / "base"
    return save_tokenizer(save_expert(folder, tiny_llama(), 0))


@pytest.fixture(scope="module")
def adapters(base) -> dict[str, Path]:
    return {
        name: save_adapter(base.parent / name.replace(" ", "-"), base, seed, **settings)
        for seed, (name, settings) in enumerate(SETTINGS.items(), start=1)
    }


def dense(base: Path, adapter: Path | None = None) -> dict[str, torch.Tensor]:
    """Every weight of base plus adapter, float64, as PEFT merges them."""
    model = AutoModelForCausalLM.from_pretrained(base).double()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).merge_and_unload()
    return dict(model.state_dict())


def swapped(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The swap of two dense models, with the zones of `ZONES` and blends outside."""
    sources = {name: takes(layer_of(name), 4, 1, 1, 1) for name in a}
    return {
        name: {"task": a[name], "language": b[name]}.get(source, (a[name] + b[name]) / 2)
        for name, source in sources.items()
    }


def logits(base: Path, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base).double()
    model.load_state_dict(weights)
    with torch.no_grad():
        return model(TOKENS).logits


def adapted_logits(base: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(base).double()
    with torch.no_grad():
        return PeftModel.from_pretrained(model, adapter).double()(TOKENS).logits


PAIRS = [
    ("plain", "rslora"),
    ("rslora", "plain"),
    ("rslora", "rslora"),
    ("partial", "plain"),
    ("with embedding", "rslora"),
    ("with a trained head", "plain"),
    ("plain", "with a trained head"),
    ("plain", "with trained norms"),
]


@pytest.mark.parametrize(("task", "language"), sampled(PAIRS, *PAIRS[3:6], PAIRS[-1]))
def test_adapters_compose_to_an_adapter_that_peft_loads(base, adapters, tmp_path, task, language):
    plan = ls.swap(task=adapters[task], language=adapters[language], **ZONES)
    plan.save(tmp_path / "out")
    want = logits(base, swapped(dense(base, adapters[task]), dense(base, adapters[language])))
    result = adapted_logits(base, tmp_path / "out")
    assert torch.allclose(result, want, rtol=0, atol=2e-6)
    assert not torch.allclose(result, logits(base, dense(base)), rtol=0, atol=1e-2)
    with torch.no_grad():
        assert torch.allclose(plan.load()(TOKENS).logits.double(), want, rtol=0, atol=2e-5)
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert sum(tensor.nbytes for tensor in stored.values()) == plan.nbytes
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    # For readers that know no patterns, the scaling is one.
    assert config["lora_alpha"] == config["r"] >= max([1, *config["rank_pattern"].values()])
    assert config["alpha_pattern"] == config["rank_pattern"]
    assert not config["use_rslora"]
    assert config["base_model_name_or_path"] == str(base)


@pytest.mark.parametrize(("task", "language"), sampled(PAIRS, *PAIRS[3:5]))
def test_adapters_bake_into_full_weights(base, adapters, tmp_path, task, language):
    experts = {"task": adapters[task], "language": adapters[language]}
    recipe_plan(experts=experts, swap=ZONES, bake=True).save(tmp_path / "out")
    want = swapped(dense(base, adapters[task]), dense(base, adapters[language]))
    for name, tensor in tensors_of(tmp_path / "out").items():
        assert torch.allclose(tensor.double(), want[name], rtol=0, atol=1e-6), name
    assert (tmp_path / "out" / "config.json").is_file()


def test_an_adapter_with_a_full_expert(base, adapters, tmp_path):
    full = save_tokenizer(save_expert(tmp_path / "full", tiny_llama(), 9))
    ls.swap(task=full, language=adapters["rslora"], **ZONES).save(tmp_path / "out")
    want = swapped(dense(full), dense(base, adapters["rslora"]))
    for name, tensor in tensors_of(tmp_path / "out").items():
        assert torch.allclose(tensor.double(), want[name], rtol=0, atol=1e-6), name


def test_ties_of_adapters_works_on_baked_deltas(base, adapters, tmp_path):
    names = ("plain", "rslora")
    merge = {"method": "task_arithmetic", "experts": dict.fromkeys(names, 0.7)}
    recipe = {"experts": {n: adapters[n] for n in names}, "base": base, "merge": merge}
    with pytest.raises(LayerswapError, match="task_arithmetic of adapters is not low-rank; ask"):
        recipe_plan(recipe)
    recipe_plan(recipe, bake=True).save(tmp_path / "out")
    start, one, two = dense(base), *(dense(base, adapters[name]) for name in names)
    for name, tensor in tensors_of(tmp_path / "out").items():
        want = start[name] + 0.7 * (one[name] - start[name]) + 0.7 * (two[name] - start[name])
        assert torch.allclose(tensor.double(), want, rtol=0, atol=2e-6), name


def test_a_smaller_rank_is_the_nearest_one(base, adapters, tmp_path):
    experts = {"one": adapters["plain"], "two": adapters["rslora"]}
    recipe_plan(experts=experts, soup={"experts": [*experts]}, rank=3).save(tmp_path / "out")
    start, one, two = dense(base), dense(base, adapters["plain"]), dense(base, adapters["rslora"])
    result = dense(base, tmp_path / "out")
    worst = 0.0
    for name in start:
        delta = (one[name] + two[name]) / 2 - start[name]
        if delta.dim() < 2 or not delta.any():
            continue
        u, sizes, v = torch.linalg.svd(delta, full_matrices=False)
        best = (u[:, :3] * sizes[:3]) @ v[:3]
        assert torch.allclose(result[name] - start[name], best, rtol=0, atol=1e-5), name
        worst = max(worst, float((delta - best).norm() / delta.norm()))
    record = json.loads((tmp_path / "out" / "layerswap.json").read_text())
    assert record["largest_share_lost_to_rank"] == pytest.approx(worst, rel=1e-5)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == 3
    assert not config["rank_pattern"]


@pytest.mark.parametrize(
    ("family", "targets", "right"),
    [
        ("gpt2", ["c_attn", "c_proj", "c_fc"], True),
        ("gpt2", ["c_proj"], False),
        ("llama", ["q_proj", "o_proj"], False),
    ],
)
def test_the_layers_of_the_base_decide_how_a_delta_is_stored(family, targets, right, tmp_path):
    """A `fan_in_fan_out` that does not fit a square delta is corrected, as PEFT does."""
    config = tiny_llama() if family == "llama" else GPT2Config(
        n_layer=4, n_embd=16, n_head=2, n_positions=32, vocab_size=50
    )  # fmt: skip
    base = save_expert(tmp_path / "base", config, 0)
    fits = family == "gpt2"
    settings = {"r": 3, "lora_alpha": 6, "target_modules": targets, "fan_in_fan_out": fits}
    one = save_adapter(tmp_path / "one", base, 1, **settings)
    two = save_adapter(tmp_path / "two", base, 2, use_rslora=True, **settings)
    want = swapped(dense(base, one), dense(base, two))
    for folder in (one, two):
        change_config(folder, file="adapter_config.json", fan_in_fan_out=fits is right)
    ls.swap(task=one, language=two, bake=True, **ZONES).save(tmp_path / "full")
    for name, tensor in tensors_of(tmp_path / "full").items():
        assert torch.allclose(tensor.double(), want[name], rtol=0, atol=1e-6), name
    if right:
        ls.swap(task=one, language=two, **ZONES).save(tmp_path / "out")
        assert torch.allclose(adapted_logits(base, tmp_path / "out"), logits(base, want), atol=1e-5)


def test_magnitude_weights_of_adapters_are_of_dense_deltas(base, adapters):
    names = ("plain", "rslora")
    recipe = {"experts": {n: adapters[n] for n in names}, "soup": {"experts": names}}
    result = recipe_plan(recipe, base=base, weights="magnitude").magnitude
    start = dense(base)
    weights = {}
    for name in names:
        rows = []
        for tensor, value in dense(base, adapters[name]).items():
            delta = (value - start[tensor]).abs()
            rows.append(delta.mean(dim=0) if delta.dim() == 2 else delta.mean().reshape(1))
        weights[name] = 1 / float(torch.cat(rows).mean())
    total = sum(weights.values())
    assert result == pytest.approx({n: w / total for n, w in weights.items()}, rel=1e-5)


def test_a_hub_base_needs_no_weights_to_compose_adapters(base, adapters, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text((base / "config.json").read_text())
    plan = ls.swap(task=adapters["plain"], language=adapters["rslora"], base=bare, **ZONES)
    plan.save(tmp_path / "out")
    ls.swap(task=adapters["plain"], language=adapters["rslora"], **ZONES).save(tmp_path / "too")
    bare_made, made = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("out", "too")
    )
    for name, tensor in made.items():
        check_equal(bare_made[name], tensor, name)


def name_base(adapter, base):
    change_config(adapter, file="adapter_config.json", base_model_name_or_path=base)


def test_adapters_of_two_bases(base, adapters, tmp_path):
    other = save_adapter(tmp_path / "other", base, 3, **SETTINGS["plain"])
    name_base(other, "org/other")
    assert refusal(ls.swap, task=adapters["plain"], language=other) == (
        f"task adapts {base} and language adapts org/other; if they are the same model, choose "
        "one with `base` (--base)"
    )
    name_base(other, None)
    with pytest.raises(LayerswapError, match="language: the adapter names no base; give one with"):
        ls.swap(task=adapters["plain"], language=other)


@pytest.mark.parametrize(
    "name",
    [
        "http://127.0.0.1:{port}/x", "simplecache::http://127.0.0.1:{port}/x", "s3://bucket/x",
        "~nobody/no/such", "/no/such/folder", "a/b/c", "http://127.0.0.1:{port}/a@b", "\n",
    ],
)  # fmt: skip
def test_a_base_that_an_adapter_may_not_choose(base, adapters, tmp_path, monkeypatch, name):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        named = name.format(port=server.getsockname()[1])
        one = save_adapter(tmp_path / "one", base, 3, **SETTINGS["plain"])
        name_base(one, named)
        recipe = {"experts": {"one": str(one)}, "soup": {"experts": ["one"]}}
        for more in ({}, {"bake": True}):
            asked = check_recipe({**recipe, **more}, where="r")
            assert refused(LayerswapError, ls.make_plan, asked, in_place=True) == visible(
                f"one: the adapter names the base {named!r}, which is neither a Hub id nor a "
                "folder here; give the base with `base` (--base)"
            )
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()
    assert recipe_plan(recipe, base=base).base.source == str(base)


def test_an_adapter_with_nan(base, adapters, tmp_path):
    spoilt = save_adapter(tmp_path / "spoilt", base, 3, **SETTINGS["plain"])
    path = spoilt / "adapter_model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "layers.2" in name)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path)
    with pytest.raises(LayerswapError, match=r"of the adapter holds NaN or infinity"):
        ls.swap(task=spoilt, language=adapters["plain"], **ZONES).save(tmp_path / "out")
    recipe = {"experts": {"one": spoilt}, "soup": {"experts": ["one"]}}
    with pytest.raises(LayerswapError, match=r"adapter_model.safetensors: tensor .* holds NaN"):
        recipe_plan(recipe, bake=True).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bake", [True, False])
def test_a_rank_where_the_output_is_no_adapter(base, adapters, bake):
    other = adapters["rslora"] if bake else base
    with pytest.raises(LayerswapError, match="rank: applies only when adapters merge into an"):
        ls.swap(task=adapters["plain"], language=other, rank=4, bake=bake)


def test_a_model_with_an_adapter_of_its_own_is_one_expert(base, adapters, tmp_path):
    """As mergekit's `model+adapter`: the adapter is added to the model that the recipe names."""
    model = save_tokenizer(save_expert(tmp_path / "model", tiny_llama(), 9))
    experts = {"adapted": {"source": model, "adapter": adapters["plain"]}, "plain": base}
    plan = recipe_plan(experts=experts, soup={"experts": [*experts]})
    out = plan.save(tmp_path / "out")
    result, expected, other = tensors_of(out), dense(model, adapters["plain"]), dense(base)
    for name, tensor in result.items():
        wanted = (expected[name] + other[name]) / 2
        torch.testing.assert_close(tensor.double(), wanted, rtol=1e-5, atol=1e-6)
    assert ls.verify(out).passed
    assert any(str(adapters["plain"]) in str(file) for file in plan.experts["adapted"].files)
    uploaded = [*for_upload(out).values(), (out / "README.md").read_text()]
    assert not [text for text in uploaded if "/plain" in text.replace("./plain", "")]


def test_an_adapter_needs_a_model_to_be_added_to(adapters):
    both = {"source": adapters["plain"], "adapter": adapters["rslora"]}
    with pytest.raises(LayerswapError, match=r"a: adapter: .*plain is an adapter itself; give"):
        recipe_plan(experts={"a": both}, soup={"experts": ["a"]})


# --- QLoRA ---


@pytest.fixture(scope="module")
def bf16(tmp_path_factory):
    root = tmp_path_factory.mktemp("bf16")
    family = write_family(root / "family", "BF16")
    return family, {n: write_adapter(root / n, family["base"], i, 4) for i, n in enumerate("ab")}


@pytest.mark.parametrize("form", ["nf4", "nf4-double"])
@pytest.mark.parametrize("full", [False, True])
def test_adapters_over_the_base_in_4_bits(bf16, tmp_path, form, full):
    """Against the base that `nf4` gives back, and the product of the adapter's matrices."""
    family, adapters = bf16
    language = family["language"] if full else adapters["b"]
    settings = {"bottom": 1, "top": 1, "outside": "task", "base": family["base"], "bake": True}
    plan = ls.swap(task=adapters["a"], language=language, base_as=form, **settings)
    found = load_file(plan.save(tmp_path / "out") / "model.safetensors")
    assert ls.verify(tmp_path / "out").passed
    base = load_file(family["base"] / "model.safetensors")
    for name in ("model.layers.1.mlp.down_proj", "model.layers.1.mlp.up_proj"):
        values = base[f"{name}.weight"].float().numpy().reshape(-1)
        scales = nf4.block_scales(values)
        scales = nf4.double_quantised(scales) if form == "nf4-double" else scales
        expected = torch.from_numpy(nf4.given_back(values, scales)).bfloat16().double()
        expected = expected.reshape(base[f"{name}.weight"].shape)
        low = load_file(adapters["a"] / "adapter_model.safetensors")
        if f"base_model.model.{name}.lora_A.weight" in low:
            left, right = (low[f"base_model.model.{name}.lora_{s}.weight"].double() for s in "BA")
            expected += 2 * left @ right
        assert (found[f"{name}.weight"].double() - expected).abs().max() < 1e-6
    for name in ("model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"):
        assert torch.equal(found[name], base[name].to(found[name].dtype))


def test_a_base_in_4_bits_needs_full_weights_and_an_adapter(bf16):
    family, adapters = bf16
    with pytest.raises(LayerswapError, match="give bake: true"):
        ls.swap(task=adapters["a"], language=adapters["b"], base_as="nf4")
    experts = {"task": family["task"], "language": family["language"]}
    for base in (None, family["base"]):
        with pytest.raises(LayerswapError, match="base_as: no expert is an adapter"):
            ls.swap(**experts, base=base, base_as="nf4")
