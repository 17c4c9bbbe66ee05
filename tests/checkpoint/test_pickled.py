"""Pickled weights: only when allowed, only tensors, converted once."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.pickled import MANIFEST, read_pickled
from layerswap.errors import CheckpointError


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("LAYERSWAP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shared = torch.randn(6, 4)
    return {
        "model.embed_tokens.weight": shared,
        "lm_head.weight": shared,
        "model.layers.0.mlp.up_proj.weight": torch.randn(4, 6).T,
        "model.layers.0.mlp.down_proj.weight": torch.randn(3, 5).to(torch.bfloat16),
        "model.layers.0.input_layernorm.weight": torch.randn(4, dtype=torch.float16),
        "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
        "model.layers.0.self_attn.bias": torch.ones(1, 1, 3, 3, dtype=torch.bool).tril(),
        "model.norm.weight": torch.empty(0),
    }


def save(folder: Path, tensors: object, name: str = "pytorch_model.bin", **settings) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"num_hidden_layers": 1}')
    torch.save(tensors, folder / name, **settings)
    return folder


@pytest.mark.parametrize("settings", [{}, {"_use_new_zipfile_serialization": False}])
def test_every_tensor_is_read_bit_for_bit(tmp_path, settings):
    folder = save(tmp_path / "model", weights(), **settings)
    opened = open_checkpoint(str(folder), allow_pickle=True)
    assert list(opened.tensors) == list(weights())
    for name, tensor in weights().items():
        found = opened.read(name)
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)
    assert opened.folder == folder


def test_without_the_flag_it_is_refused(tmp_path):
    folder = save(tmp_path / "model", weights())
    with pytest.raises(CheckpointError, match="pass --allow-pickle to read them as tensors only"):
        open_checkpoint(str(folder))


def test_shards(tmp_path):
    tensors = weights()
    names = list(tensors)
    halves = {
        "pytorch_model-00001-of-00002.bin": names[:4],
        "pytorch_model-00002-of-00002.bin": names[4:],
    }
    folder = tmp_path / "model"
    for file, some in halves.items():
        save(folder, {name: tensors[name] for name in some}, file)
    weight_map = {name: file for file, some in halves.items() for name in some}
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    opened = open_checkpoint(str(folder), allow_pickle=True)
    assert set(opened.tensors) == set(names)
    index.write_text(json.dumps({"weight_map": {**weight_map, "x": "../other.bin"}}))
    with pytest.raises(CheckpointError, match=r"'../other.bin' points outside its folder"):
        open_checkpoint(str(folder), allow_pickle=True)
    index.write_text(json.dumps({"weight_map": {**weight_map, "x": "third.bin"}}))
    with pytest.raises(CheckpointError, match=r"shard third\.bin, named by .* is missing"):
        open_checkpoint(str(folder), allow_pickle=True)


@pytest.mark.parametrize("files", [[["a.bin"]], [{"a.bin": 1}], [3], [None]])
def test_an_index_of_other_things_than_names(tmp_path, files):
    folder = save(tmp_path / "model", weights())
    index = folder / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"x": files[0]}}))
    with pytest.raises(CheckpointError, match="points outside its folder"):
        open_checkpoint(str(folder), allow_pickle=True)
    index.write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match="weight_map lists no files"):
        open_checkpoint(str(folder), allow_pickle=True)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


def test_code_in_a_pickle_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for how in (
        lambda f: torch.save({"w": Evil()}, f),
        lambda f: pickle.dump(Evil(), f.open("wb")),
    ):
        folder = save(tmp_path / "model", {})
        how(folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match="cannot be read as tensors only") as caught:
            open_checkpoint(str(folder), allow_pickle=True)
        assert "\n" not in str(caught.value)
        assert "weights_only" not in str(caught.value)  # torch's advice: load it all the same
        assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "holds no tensors by name"),
        ([torch.zeros(2)], "holds no tensors by name"),
        ({"state_dict": weights()}, "'state_dict' is a dict, not a tensor"),
        ({"step": 3}, "'step' is a int, not a tensor"),
        ({3: torch.zeros(1)}, "3 is a Tensor, not a tensor"),
        ({"w": torch.eye(3).to_sparse()}, "'w' is no plain tensor"),
        ({"w": torch.empty(3, device="meta")}, "'w' is no plain tensor"),
        ({"w": Evil()}, r"tensors only \(it asks for posix.mkdir\)$"),
    ],
)
def test_what_is_not_a_checkpoint(tmp_path, content, message):
    folder = save(tmp_path / "model", content)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(str(folder), allow_pickle=True)


def test_a_conversion_is_reused_until_the_file_changes(tmp_path, cache):
    folder = save(tmp_path / "model", weights())
    first = read_pickled(folder)
    (made,) = (cache / "converted").iterdir()
    inode = next(iter(first.values())).file.stat().st_ino
    assert next(iter(read_pickled(folder).values())).file.stat().st_ino == inode
    changed = weights()
    changed["model.norm.weight"] = torch.ones(4)
    save(folder, changed)
    assert read_pickled(folder)["model.norm.weight"].shape == (4,)
    assert len(list((cache / "converted").iterdir())) == 2
    assert (made / MANIFEST).is_file()


@pytest.mark.parametrize("spoil", ["manifest", "short", "manifest text"])
def test_an_incomplete_conversion_is_repeated(tmp_path, cache, spoil):
    folder = save(tmp_path / "model", weights())
    read_pickled(folder)
    (made,) = (cache / "converted").iterdir()
    if spoil == "manifest text":
        (made / MANIFEST).write_text("{")
    elif spoil == "short":
        os.truncate(made / "pytorch_model.safetensors", 40)
    else:
        (made / "pytorch_model.safetensors").unlink()
    assert torch.equal(
        open_checkpoint(str(folder), allow_pickle=True).read("lm_head.weight"),
        weights()["lm_head.weight"],
    )
