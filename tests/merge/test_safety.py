"""Faults around a merge, end to end: races, full disks, sources that change, permissions."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch
from merging import (
    change_config,
    change_tensors,
    copied,
    refusal,
    swap_of,
    tensors_of,
    weight_bytes,
)

import layerswap as ls

ROOT = Path(__file__).parent.parent.parent
UP = "model.layers.{}.mlp.up_proj.weight"


def plan_of(pair, bottom=1, **settings) -> ls.Plan:
    settings = {"max_shard_size": "20KB", **settings}
    return ls.swap(task=pair[0], language=pair[1], bottom=bottom, top=1, **settings)


# --- a disk that is full (F16) ---


def test_a_write_that_fails_at_any_moment_leaves_nothing(pair, tmp_path, monkeypatch):
    plan, out = plan_of(pair), tmp_path / "out"
    real = {name: getattr(os, name) for name in ("pwrite", "copy_file_range", "fsync")}
    calls, fails, one_at_a_time = [0], [None], threading.Lock()

    def counted(name):
        def call(*arguments):
            with one_at_a_time:  # files are flushed by several threads
                calls[0] += 1
                number = calls[0]
            if number == fails[0]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real[name](*arguments)

        return call

    for name in real:
        monkeypatch.setattr(os, name, counted(name))
    plan.save(out, threads=1)
    count, before = calls[0], weight_bytes(out)
    assert count > 20
    other = plan_of(pair, bottom=2)
    for moment in range(1, count - 1):
        calls[0], fails[0] = 0, moment
        message = refusal(other.save, out, threads=1, overwrite=True)
        assert message == f"{out}: cannot be written (No space left on device); nothing was kept"
        assert weight_bytes(out) == before
        assert sorted(f.name for f in tmp_path.iterdir()) == ["out", "spoilt"]


def test_a_tokenizer_that_cannot_be_written_fails_the_whole_merge(pair, tmp_path, monkeypatch):
    """Weights without a tokenizer are not a success (F24)."""

    def fail(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    plan, out = plan_of(pair), tmp_path / "out"
    monkeypatch.setattr(Path, "write_bytes", fail)
    message = refusal(plan.save, out)
    assert message == f"{out}: cannot be written (Input/output error); nothing was kept"
    assert [f.name for f in tmp_path.iterdir()] == ["spoilt"]


# --- sources that go away or change (F7) ---


@pytest.mark.parametrize("size", ["20KB", "5GB"])
def test_a_source_that_is_cut_short_during_a_merge(pair, tmp_path, size):
    plan, file = plan_of(pair, max_shard_size=size), pair[1] / "model.safetensors"
    message = refusal(
        plan.save, tmp_path / "out", threads=1, progress=lambda _: os.truncate(file, 1000)
    )
    assert message == f"{file}: ended while it was being read"
    assert [f.name for f in tmp_path.iterdir()] == ["spoilt"]


def test_a_document_that_changes_after_the_plan(pair, tmp_path):
    plan, file = plan_of(pair), pair[0] / "tokenizer.json"
    file.write_text("{")
    changed = f"{file}: changed since the merge was planned; plan it again"
    assert refusal(plan.save, tmp_path / "out") == changed
    plan, file = plan_of((pair[1], pair[1])), pair[1] / "tokenizer.json"
    (tmp_path / "secret").write_text("{}")

    def plant(_):
        file.unlink()
        file.symlink_to(tmp_path / "secret")

    message = refusal(plan.save, tmp_path / "out", threads=1, progress=plant)
    assert message.startswith(f"{file}: links to {tmp_path}/secret, outside its folder")
    assert not list(tmp_path.glob("out*"))


# --- experts that are not alike (F9, F12, F13) ---


def rename(folder, old, new):
    odd = {name.replace(old, new): tensor for name, tensor in tensors_of(folder).items()}
    change_tensors(folder, {**dict.fromkeys(tensors_of(folder)), **odd})
    change_config(folder, architectures=["OwnModel"])


def test_an_unknown_layout_is_never_guessed(pair):
    rename(pair[1], "model.layers", "model.parts.layers")
    rename(pair[1], "model.parts.layers.3", "model.parts.layers.7")
    message = refusal(plan_of, pair)
    assert message.startswith(
        f"language: {pair[1]}: cannot tell the layer and role of 36 of 39 tensors: "
        "'model.parts.layers.0.input_layernorm.weight', "
    )
    assert "say so in the recipe, as `patterns: [{match: " in message


def test_unknown_roles_are_never_guessed(pair):
    for folder in pair:
        rename(folder, "self_attn", "time_mix")
    recipe = (
        f"{{experts: {{a: {pair[0]}, b: {pair[1]}}}, partition: {{name: A, task: a, language: b}}}}"
    )
    message = refusal(ls.make_plan, ls.parse_recipe(recipe))
    assert message.startswith(
        "the roles of 16 of 39 tensors are unknown, such as 'model.layers.1.time_mix.k_proj.weight'"
        ", and the composition takes b for attention and a for mlp in layer 1; say so in the "
        "recipe, as `patterns: [{match: '"
    )
    assert swap_of(pair).reference.numbered.stack == "model.layers"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_quantised_tensor_is_named(pair, tmp_path, dtype):
    for number, folder in enumerate(pair, start=1):
        change_tensors(folder, {"model.norm.weight": torch.full((24,), number).to(dtype)})
    name = {torch.float8_e4m3fn: "F8_E4M3", torch.int8: "I8"}[dtype]
    message = refusal(lambda: plan_of(pair).save(tmp_path / "out"))
    assert message == (
        f"tensor 'model.norm.weight' is {name} and differs between the experts; only "
        "floating-point tensors of 16 bits and more can be blended"
    )


# --- permissions (F18) and links (F19) ---


def test_a_folder_that_is_replaced_passes_its_mode_on(pair, tmp_path):
    out = plan_of(pair).save(tmp_path / "out")
    out.chmod(0o2710)
    before = os.umask(0o022)
    try:
        plan_of(pair, bottom=2).save(out, overwrite=True)
    finally:
        os.umask(before)
    assert out.stat().st_mode & 0o7777 == 0o2710
    assert {file.stat().st_mode & 0o777 for file in out.iterdir()} == {0o644}


def test_a_private_folder_is_private_while_it_is_replaced(pair, tmp_path):
    out = plan_of(pair).save(tmp_path / "out")
    out.chmod(0o700)
    modes = set()

    def progress(_):
        modes.update(f.stat().st_mode & 0o777 for f in tmp_path.glob("out.partial-*"))

    plan_of(pair, bottom=2).save(out, overwrite=True, progress=progress)
    assert modes == {0o700}


def test_a_source_that_shares_an_inode_keeps_its_bytes(pair, tmp_path):
    out = plan_of(pair, max_shard_size="5GB").save(tmp_path / "out")
    linked = copied(pair[0], tmp_path / "linked")
    (linked / "model.safetensors").unlink()
    (linked / "model.safetensors").hardlink_to(out / "model.safetensors")
    before = (linked / "model.safetensors").read_bytes()
    plan = plan_of((linked, pair[1]), bottom=2, max_shard_size="5GB")
    plan.save(out, overwrite=True)
    assert (linked / "model.safetensors").read_bytes() == before
    assert (out / "model.safetensors").read_bytes() != before
