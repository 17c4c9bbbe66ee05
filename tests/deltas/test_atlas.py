"""The atlas against direct computations, PEFT, and the published maps."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from merging import (
    change_tensors,
    copied,
    save_adapter,
    save_expert,
    save_near,
    save_tensors,
    tiny_llama,
)
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config

import layerswap as ls
from layerswap.deltas import measure
from layerswap.ground.errors import LayerswapError

PUBLISHED = json.loads((Path(__file__).parent.parent / "data" / "published_maps.json").read_text())
COLUMNS = {
    "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
NAMES = {column: column.split(".")[1] for column in COLUMNS}
CONFIG = tiny_llama(num_hidden_layers=3)


@pytest.fixture(scope="module")
def trio(tmp_path_factory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("trio")
    base = save_expert(root / "base", CONFIG, 0)
    return base, *(save_near(root / n, base, i, share=0.7) for i, n in enumerate(("one", "two"), 1))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict())


@pytest.mark.parametrize("axis", ["input", "output"])
@pytest.mark.parametrize("chunk", [1, 100, 1 << 20])
def test_rows_and_summaries_are_the_direct_ones(trio, monkeypatch, axis, chunk):
    monkeypatch.setattr(measure, "CHUNK_ELEMENTS", chunk)
    base, one, two = trio
    atlas = ls.delta(base, one, two, axis=axis)
    start = weights(base)
    for expert, folder in (("one", one), ("two", two)):
        for name, value in weights(folder).items():
            delta = (value - start[name]).double()
            found = atlas.changes[expert, name]
            rows = delta.abs()
            matrix = delta.dim() == 2
            rows = rows.mean(dim=int(axis != "input")) if matrix else rows.mean().reshape(1)
            np.testing.assert_allclose(found.rows, rows.numpy(), rtol=1e-5, err_msg=name)
            assert found.mean == pytest.approx(float(delta.abs().mean()), rel=1e-5)
            assert found.largest == pytest.approx(float(delta.abs().max()), rel=1e-6)
            assert found.median == pytest.approx(float(delta.abs().quantile(0.5)), rel=1e-4)
            assert found.norm == pytest.approx(float(delta.norm()), rel=1e-5)
            relative = float(delta.norm() / start[name].double().norm())
            assert found.relative_norm == pytest.approx(relative, rel=1e-5)
            assert found.unchanged == float((delta == 0).double().mean())


def test_conv1d_matrices_are_transposed(tmp_path):
    config = GPT2Config(n_layer=2, n_embd=12, n_head=2, n_positions=16, vocab_size=30)
    base = save_expert(tmp_path / "base", config, 0)
    expert = save_near(tmp_path / "expert", base, 1)
    atlas = ls.delta(base, expert)
    name = "transformer.h.0.mlp.c_fc.weight"  # stored [in, out] = [12, 48]
    delta = weights(expert)[name] - weights(base)[name]
    np.testing.assert_allclose(
        atlas.changes["expert", name].rows, delta.abs().mean(dim=1).numpy(), rtol=1e-5
    )
    embedding = "transformer.wte.weight"
    assert len(atlas.changes["expert", embedding].rows) == 12


def test_an_adapter_is_measured_as_the_weights_it_makes(trio, tmp_path):
    base, _, _ = trio
    lora = save_adapter(
        tmp_path / "lora", base, 0, r=3, lora_alpha=6, use_rslora=True,
        target_modules=["q_proj", "down_proj"], layers_to_transform=[1], layers_pattern="layers",
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(base)
    merged = PeftModel.from_pretrained(model, lora).merge_and_unload().state_dict()
    atlas = ls.delta(base, lora)
    for name, start in weights(base).items():
        delta = merged[name] - start
        rows = delta.abs().mean(dim=0) if delta.dim() == 2 else delta.abs().mean().reshape(1)
        found = atlas.changes["lora", name]
        np.testing.assert_allclose(found.rows, rows.numpy(), rtol=1e-3, atol=1e-8)
        adapted = "layers.1." in name and ("q_proj" in name or "down_proj" in name)
        assert (found.unchanged == 1.0) == (not adapted)


def test_it_comes_back_from_disk(trio, tmp_path):
    base, one, two = trio
    atlas = ls.delta(base, one, two)
    atlas.save(tmp_path)
    again = ls.Atlas.load(tmp_path)
    assert (again.base, again.experts, again.axis) == (atlas.base, atlas.experts, atlas.axis)
    assert again.places == atlas.places
    for key, change in atlas.changes.items():
        found = again.changes[key]
        np.testing.assert_array_equal(found.rows, change.rows)
        assert (found.mean, found.lost, found.norm) == (change.mean, change.lost, change.norm)


def test_the_number_of_threads_does_not_change_a_bit(trio):
    base, one, two = trio
    atlases = [ls.delta(base, one, two, threads=threads) for threads in (1, 5)]
    for key, change in atlases[0].changes.items():
        np.testing.assert_array_equal(change.rows, atlases[1].changes[key].rows)


# --- what bfloat16 loses ---


def test_what_bfloat16_would_take_is_measured_on_float32(trio):
    base, one, _ = trio
    atlas = ls.delta(base, one)
    start, end = weights(base), weights(one)
    lost, whole = 0.0, 0.0
    for name, value in end.items():
        delta = (value - start[name]).double()
        rounded = value.bfloat16().double() - start[name].bfloat16().double()
        change = atlas.changes["one", name]
        assert change.lost_is_measured
        assert change.lost == pytest.approx(
            float((rounded - delta).norm() / delta.norm()), rel=1e-4
        )
        lost += float((rounded - delta).square().sum())
        whole += float(delta.square().sum())
    assert atlas.lost("one") == pytest.approx(math.sqrt(lost / whole), rel=1e-4)


def delta_of(folder, **matrices):
    """The changes of checkpoints of one matrix each; the first is the base."""
    return ls.delta(
        *(
            save_tensors(folder / name, {"layers.0.mlp.up_proj.weight": matrix})
            for name, matrix in matrices.items()
        )
    )


def test_what_bfloat16_took_is_expected_from_its_steps(tmp_path):
    # The truth is known here: the float32 expert that was rounded. The base is bfloat16 exactly.
    torch.manual_seed(0)
    start = (torch.randn(400, 300) * 0.02).bfloat16()
    true = start.float() + torch.randn(400, 300) * 3e-4
    atlas = delta_of(tmp_path, base=start, expert=true.bfloat16())
    found = atlas.changes["expert", "layers.0.mlp.up_proj.weight"]
    assert not found.lost_is_measured
    error = float((true.bfloat16().float() - true).norm()) / found.norm
    assert found.lost == pytest.approx(error, rel=0.1)


@pytest.mark.parametrize("size", [1e-3, 1e-4, 1e-5])
def test_rounding_never_removes_more_than_the_bound(tmp_path, size):
    torch.manual_seed(0)
    start = (torch.randn(400, 300) * 0.02).bfloat16()
    true = start.float() + torch.randn(400, 300) * size
    stored = true.bfloat16()
    atlas = delta_of(tmp_path, base=start, expert=stored, whole=true)
    before = float((true.double() - start.double()).abs().sum())
    after = float((stored.double() - start.double()).abs().sum())
    # Half a step of bfloat16: 8 bits below the power of two under the value.
    half = float(torch.exp2(torch.floor(torch.log2(stored.double().abs())) - 8).sum())
    assert atlas.lost_at_most("expert") == pytest.approx(half / (after + half), rel=1e-4)
    assert 1 - after / before <= atlas.lost_at_most("expert")
    # The float32 expert over a bfloat16 base is measured, not estimated.
    error = float((stored.double() - true.double()).norm() / (true - start.float()).norm())
    assert atlas.lost("whole") == pytest.approx(error, rel=1e-4)
    assert atlas.lost_at_most("whole") == 0


# --- the published maps ---


@pytest.mark.parametrize("expert", ["math_1", "swh_1"])
def test_tensors_made_for_a_published_map_give_back_its_numbers(tmp_path, expert):
    """Matrices with 4,096 (w2: 14,336) input features, of which the printed share has changed."""
    layers = PUBLISHED[expert]["layers"]
    for name in ("base", "expert"):
        tensors = {}
        for layer, values in layers.items():
            for column, fraction in zip(PUBLISHED[expert]["columns"], values, strict=True):
                rows = 14336 if column.endswith("w2") else 4096
                changed = round(fraction * rows)
                above = torch.arange(rows) < changed
                delta = torch.where(above, 3e-5, 0.5e-5)[torch.randperm(rows)]
                matrix = torch.zeros(2, rows) if name == "base" else torch.stack([delta, -delta])
                tensors[f"model.layers.{layer}.{COLUMNS[column]}.weight"] = matrix
        save_tensors(tmp_path / name, tensors, num_hidden_layers=32)
    atlas = ls.delta(tmp_path / "base", tmp_path / "expert")
    from layerswap.report.delta_map import map_of

    found = map_of(atlas, "expert", 1.9e-5)
    assert found.columns == ("wq", "wk", "wv", "wo", "w1", "w3", "w2")
    assert found.layers == 32
    misprinted = 0
    for layer, values in layers.items():
        for column, fraction in zip(PUBLISHED[expert]["columns"], values, strict=True):
            value = found.cells[int(layer), NAMES[column]]
            if f"{value:.6f}" != f"{fraction:.6f}":
                misprinted += 1
                assert (expert, layer, column) == ("swh_1", "24", "attention.wo")
    assert misprinted == (1 if expert == "swh_1" else 0)


# --- mistakes ---


def test_experts_that_do_not_fit_are_refused(trio, tmp_path):
    base = trio[0]
    wide = save_expert(tmp_path / "wide", tiny_llama(num_hidden_layers=3, intermediate_size=44), 1)
    with pytest.raises(LayerswapError, match=r"down_proj.weight' has shape \[24, 44\], the base"):
        ls.delta(base, wide)
    deep = save_expert(tmp_path / "deep", tiny_llama(), 1)
    with pytest.raises(LayerswapError, match=r"deep and the base have different tensors: 'model"):
        ls.delta(base, deep)


def test_nan_is_named(trio, tmp_path):
    base, one, _ = trio
    name = "model.layers.1.mlp.up_proj.weight"
    matrix = weights(one)[name]
    matrix[3, 3] = float("nan")
    spoilt = change_tensors(copied(one, tmp_path / "spoilt"), {name: matrix})
    with pytest.raises(LayerswapError, match=r"'model.layers.1.mlp.up_proj.weight' holds NaN"):
        ls.delta(base, spoilt)


def test_what_is_no_atlas(tmp_path):
    with pytest.raises(LayerswapError, match=r"no atlas.json; layerswap delta did not write it"):
        ls.Atlas.load(tmp_path)
    (tmp_path / "atlas.json").write_text('{"base": "b", "experts": [], "axis": "input"}')
    with pytest.raises(LayerswapError, match="damaged"):
        ls.Atlas.load(tmp_path)
