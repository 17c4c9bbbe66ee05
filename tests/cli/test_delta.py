"""`layerswap delta`, from checkpoints to files and back."""

from __future__ import annotations

import json
import shutil

import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

import layerswap as ls


def both(experts):
    return ("--base", experts.base, "--expert", experts.task, "--expert", experts.language)


@pytest.fixture
def measured(layerswap, experts, tmp_path):
    result = layerswap("delta", *both(experts), "--out", tmp_path / "atlas")
    assert result.code == 0, result.err
    return tmp_path / "atlas", result


def test_delta_writes_tables_maps_and_the_page(measured, experts):
    folder, result = measured
    assert {f.name for f in folder.iterdir()} == {
        "atlas.json", "rows.parquet", "tensors.parquet", "conflict.parquet",
        "conflict_by_tensor.parquet", "map.svg", "map.pdf", "map.png", "map.html",
    }  # fmt: skip
    lines = result.out.splitlines()
    assert lines[0].startswith("task: deltas of up to ")
    assert "saved in bfloat16 it would lose " in lines[0]
    assert lines[-2].startswith("task against language: cosine ")
    assert lines[-1] == f"wrote {folder}; open {folder / 'map.html'}"
    delta = load_file(f"{experts.task}/model.safetensors")
    start = load_file(f"{experts.base}/model.safetensors")
    name = "model.layers.3.mlp.down_proj.weight"
    rows = (delta[name] - start[name]).abs().mean(dim=0)
    table = pq.read_table(folder / "rows.parquet").to_pylist()
    (row,) = [r for r in table if (r["expert"], r["tensor"]) == ("task", name)]
    assert (row["layer"], row["role"], row["matrix"]) == (3, "mlp", "w2")
    assert row["row_mav"] == pytest.approx(rows.tolist(), rel=1e-5)


def test_any_threshold_comes_from_the_files_alone(measured, experts):
    folder, _ = measured
    atlas, fresh = ls.Atlas.load(folder), ls.delta(experts.base, experts.task, experts.language)
    for threshold in (0.001, 0.008, 0.02):
        for tensor in fresh.places:
            found = atlas.fraction("task", tensor, threshold)
            assert found == fresh.fraction("task", tensor, threshold)


def test_delta_refuses_before_it_reads(layerswap, experts, tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "notes.txt").write_text("mine")
    result = layerswap("delta", *both(experts), "--out", tmp_path / "here", "--overwrite")
    assert result.code == 2
    assert (tmp_path / "here" / "notes.txt").read_text() == "mine"
    result = layerswap("delta", *both(experts), "--out", tmp_path / "x", "--axis", "diagonal")
    assert result.err == "error: --axis: 'diagonal' is neither input nor output\n"
    assert not (tmp_path / "x").exists()


def test_delta_warns_in_one_line_where_bfloat16_has_taken_much(layerswap, experts, tmp_path):
    """Deltas a tenth of bfloat16's steps: nearly all of them round away."""
    import shutil

    for name, scale in (("base", 0.0), ("expert", 0.003)):
        folder = shutil.copytree(experts.base, tmp_path / name)
        start = load_file(f"{experts.base}/model.safetensors")
        end = load_file(f"{experts.task}/model.safetensors")
        made = {n: v.bfloat16().float() + scale * (end[n] - v) for n, v in start.items()}
        path = folder / "model.safetensors"
        save_file({n: v.bfloat16() for n, v in made.items()}, path, metadata={"format": "pt"})
    result = layerswap(
        "delta", "--base", tmp_path / "base", "--expert", tmp_path / "expert",
        "--out", tmp_path / "out",
    )  # fmt: skip
    assert result.code == 0, result.err
    warnings = [line for line in result.out.splitlines() if line.startswith("warning")]
    assert warnings == [
        "warning: much of the delta of expert is lost to bfloat16; save experts in float32"
    ]


def test_other_tokens_are_noted(layerswap, experts, tmp_path):
    for name, vocabulary in (("base", {"a": 0, "b": 1}), ("language", {"b": 0, "a": 1})):
        shutil.copytree(getattr(experts, name), tmp_path / name)
        content = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": []}})
        (tmp_path / name / "tokenizer.json").write_text(content)
    given = ("delta", "--base", tmp_path / "base", "--expert")
    noted = layerswap(*given, tmp_path / "language", "--out", tmp_path / "noted")
    assert noted.code == 0, noted.err
    assert "note: tokenizers of base and language differ" in noted.err
    alike = layerswap(*given, experts.language, "--out", tmp_path / "alike")
    assert "tokenizers" not in alike.err


def test_delta_does_not_write_into_a_checkpoint(layerswap, experts):
    out = f"{experts.base}/atlas"
    result = layerswap("delta", *both(experts), "--out", out)
    assert result.code == 2
    assert result.err == f"error: {out}: would write into the checkpoint of the base\n"
