"""Magnitude weights against the formula computed once more, in float64."""

import numpy as np
import pytest
import torch
from merging import change_tensors, copied, save_expert, save_tensors, tensors_of, tiny_llama
from refusals import refused

import layerswap as ls
from layerswap.checkpoint import open_checkpoint
from layerswap.deltas import measure
from layerswap.ground.errors import CheckpointError
from layerswap.methods.rows import Rows

NORM, HEAD = "model.norm.weight", "lm_head.weight"


def direct(base, expert, conv1d=()):
    """1 / mean MAV: one entry per row (input feature) of every delta."""
    mavs = []
    for name, tensor in tensors_of(base).items():
        delta = tensors_of(expert)[name].double().numpy() - tensor.double().numpy()
        size = np.abs(delta)
        if size.ndim == 1:
            mavs.append([size.mean()])
        else:
            mavs.append(size.mean(axis=1 if name.endswith(tuple(conv1d)) else 0))
    return 1 / np.concatenate(mavs).mean()


def make(root, config, dtype=torch.float32):
    return [save_expert(root / str(seed), config, seed, dtype=dtype) for seed in range(3)]


@pytest.mark.parametrize(("dtype", "chunk"), [(torch.float32, 17), (torch.bfloat16, 1 << 22)])
def test_the_weight_is_one_over_the_mean_mav_of_all_rows(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr(measure, "SUMMED", chunk)
    base, *experts = make(tmp_path, tiny_llama(), dtype)
    opened = open_checkpoint(str(base))
    for expert in experts:
        found = measure.magnitude_weight(opened, [(open_checkpoint(str(expert)), 1.0)])
        assert found == pytest.approx(direct(base, expert), rel=1e-6)


def test_conv1d_layers_are_transposed_but_embeddings_are_not(tmp_path):
    from transformers import GPT2Config

    config = GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    base, expert, _ = make(tmp_path, config)
    base_opened, expert_opened = (open_checkpoint(str(folder)) for folder in (base, expert))
    found = measure.magnitude_weight(base_opened, [(expert_opened, 1.0)])
    conv1d = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    assert found == pytest.approx(direct(base, expert, conv1d), rel=1e-6)
    assert found != pytest.approx(direct(base, expert), rel=1e-3), "the case tells nothing"


@pytest.mark.parametrize(
    ("shape", "transposed", "rows"),
    [
        ((7,), False, 1),
        ((), True, 1),
        ((3, 5), False, 5),
        ((3, 5), True, 3),
        ((2, 3, 5), False, 10),
    ],
)
def test_rows_are_input_features(shape, transposed, rows):
    assert Rows.of(shape, transposed=transposed).count == rows


def test_the_weights_reach_the_blend_over_a_base_without_the_prefix_of_names(tmp_path):
    base, task, language = make(tmp_path, tiny_llama())
    w = {"task": direct(base, task), "language": direct(base, language)}
    bare = {n.removeprefix("model."): t for n, t in tensors_of(base).items()}
    change_tensors(base, {**dict.fromkeys(tensors_of(base)), **bare})
    plan = ls.swap(task=task, language=language, base=base, weights="magnitude")
    blend = dict(plan.composition[ls.Place(None, "embedding")].weights)
    for name, weight in w.items():
        assert blend[name] == pytest.approx(weight / sum(w.values()), rel=1e-6)
        assert plan.magnitude[name] == pytest.approx(weight / sum(w.values()), rel=1e-6)


def test_the_number_of_threads_does_not_change_a_bit(tmp_path):
    for seed, name in enumerate(("base", "expert")):
        torch.manual_seed(seed)
        change = {f"layers.{i}.mlp.up_proj.weight": torch.randn(1_000_003) for i in range(4)}
        save_tensors(tmp_path / name, change)
    base, expert = (open_checkpoint(str(tmp_path / name)) for name in ("base", "expert"))
    found = []
    for threads in (2, 1):
        torch.set_num_threads(threads)
        found.append([measure.mean_absolute_delta(base, [(expert, 1.0)], n) for n in base.tensors])
    assert found[0] == found[1]


def test_a_soup_of_experts_is_measured_as_their_blend(tmp_path):
    base, one, two = (open_checkpoint(str(f)) for f in make(tmp_path, tiny_llama()))
    found = measure.magnitude_weight(base, [(one, 0.25), (two, 0.75)])
    mavs = []
    for name, tensor in tensors_of(base.folder).items():
        a, b = (tensors_of(c.folder)[name].double() for c in (one, two))
        size = (0.25 * a + 0.75 * b - tensor.double()).abs().numpy()
        mavs.append(size.mean(axis=0) if size.ndim > 1 else [size.mean()])
    assert found == pytest.approx(1 / np.concatenate(mavs).mean(), rel=1e-6)


def test_stored_copies_of_tied_heads_do_not_count_twice(tmp_path):
    config = tiny_llama(tie_word_embeddings=True)
    base, task, language = make(tmp_path, config)
    expected = ls.swap(task=task, language=language, base=base, weights="magnitude").magnitude
    for stored in (base, task):
        change_tensors(stored, {HEAD: tensors_of(stored)["model.embed_tokens.weight"].clone()})
    found = ls.swap(task=task, language=language, base=base, weights="magnitude").magnitude
    assert found == expected


def test_an_expert_equal_to_the_base_has_no_weight(tmp_path):
    base = save_expert(tmp_path / "base", tiny_llama(), 0)
    same, other = copied(base, tmp_path / "same"), save_expert(tmp_path / "o", tiny_llama(), 1)
    given = {"task": same, "language": other, "base": base, "weights": "magnitude"}
    assert refused(CheckpointError, ls.swap, **given) == f"{same}: no tensor differs from {base}"


def test_nan_in_a_measured_tensor_is_named(tmp_path):
    base, task, language = make(tmp_path, tiny_llama())
    change_tensors(task, {NORM: torch.full((24,), float("nan"))})
    given = {"task": task, "language": language, "base": base, "weights": "magnitude"}
    files = f"{base}/model.safetensors or {task}/model.safetensors"
    message = f"tensor {NORM!r} holds NaN or infinity in {files}"
    assert refused(CheckpointError, ls.swap, **given) == message
