"""Conflicts against a direct computation in float64, in memory and from the tables."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

import layerswap as ls
from layerswap.deltas.measure import common_rows

SHAPES = {
    "self_attn.q_proj.weight": (12, 10), "self_attn.o_proj.weight": (10, 12),
    "mlp.down_proj.weight": (10, 30), "input_layernorm.weight": (10,),
}  # fmt: skip


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"num_hidden_layers": 2}')
    return folder


@pytest.fixture(scope="module", params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def trio(request, tmp_path_factory) -> list[Path]:
    root, draws = tmp_path_factory.mktemp("trio"), torch.Generator().manual_seed(0)
    names = [f"model.layers.{layer}.{name}" for layer in range(2) for name in SHAPES]
    base = {n: torch.randn(SHAPES[n.split(".", 3)[3]], generator=draws) for n in names}
    folders = [save(root / "base", {n: v.to(request.param) for n, v in base.items()})]
    for name in ("one", "two"):
        expert = {}
        for tensor, value in base.items():
            delta = torch.randn(value.shape, generator=draws) * 0.05
            expert[tensor] = value + delta * (torch.rand(value.shape, generator=draws) < 0.6)
        expert = {n: v.to(request.param) for n, v in expert.items()}
        folders.append(save(root / name, expert))
    return folders


def deltas(trio: list[Path]) -> list[dict[str, np.ndarray]]:
    base, *experts = (load_file(folder / "model.safetensors") for folder in trio)
    return [{n: (e[n].double() - base[n].double()).numpy() for n in base} for e in experts]


def direct(pairs: list[tuple[np.ndarray, np.ndarray]], share: float) -> dict[str, float]:
    """Everything a conflict says, of all the tensors of one place together."""
    a, b = (np.concatenate([pair[i].ravel() for pair in pairs]) for i in (0, 1))
    both = (a != 0) & (b != 0)
    common = either = compared = 0
    for one, two in pairs:
        if one.ndim == 2:
            count = max(1, round(share * one.shape[1]))
            tops = [set(np.argsort(-np.abs(x).mean(axis=0))[:count]) for x in (one, two)]
            common += len(tops[0] & tops[1])
            either += len(tops[0] | tops[1])
            compared += count
    return {
        "cosine": a @ b / np.linalg.norm(a) / np.linalg.norm(b),
        "disagreement": (np.sign(a) != np.sign(b))[both].mean(),
        "overlap": common / compared if compared else None,
        "jaccard": common / either if either else None,
    }


def by_place(atlas: ls.Atlas, trio: list[Path]) -> dict:
    first, second = deltas(trio)
    found: dict = {}
    for name in first:
        found.setdefault(atlas.places[name], []).append((first[name], second[name]))
    return found


@pytest.mark.parametrize("share", [0.1, 0.3, 1.0])
def test_every_place_has_the_direct_numbers(trio, share):
    atlas = ls.delta(*trio)
    found = atlas.conflict("one", "two", share)
    expected = by_place(atlas, trio)
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for place, conflict in found.items():
        for key, value in direct(expected[place], share).items():
            assert getattr(conflict, key) == pytest.approx(value, abs=1e-5), (place, key)
    assert found[ls.Place(0, "norm")].overlap is None


def test_the_tables_say_the_same(trio, tmp_path):
    atlas = ls.delta(*trio)
    atlas.save(tmp_path)
    expected = by_place(atlas, trio)
    table = pq.read_table(tmp_path / "conflict.parquet").to_pylist()
    assert len(table) == len(expected)
    for row in table:
        want = direct(expected[ls.Place(row["layer"], row["role"])], row["top_rows_compared_share"])
        assert row["cosine"] == pytest.approx(want["cosine"], abs=1e-5)
        assert row["sign_disagreement_share"] == pytest.approx(want["disagreement"], abs=1e-9)
        assert row["top_rows_in_common_share"] == want["overlap"]
        assert row["top_rows_jaccard"] == want["jaccard"]
    assert len(pq.read_table(tmp_path / "conflict_by_tensor.parquet")) == len(atlas.places)
    again = ls.Atlas.load(tmp_path)
    assert again.conflict("one", "two", 0.3) == atlas.conflict("one", "two", 0.3)


def test_an_expert_against_itself_and_its_opposite(trio, tmp_path):
    base, one, _ = trio
    start, end = (load_file(folder / "model.safetensors") for folder in (base, one))
    start = {n: v.float() for n, v in start.items()}
    delta = {n: v.float() - start[n] for n, v in end.items()}
    zero = save(tmp_path / "zero", {n: torch.zeros_like(v) for n, v in start.items()})
    same = save(tmp_path / "same", delta)
    opposite = save(tmp_path / "opposite", {n: -v for n, v in delta.items()})
    atlas = ls.delta(zero, {"a": same, "b": same, "c": opposite})
    for conflict in atlas.conflict("a", "b").values():
        assert conflict.cosine == pytest.approx(1)
        assert conflict.disagreement == 0
        assert conflict.overlap in (1, None)
    for conflict in atlas.conflict("c", "a").values():
        assert conflict.cosine == pytest.approx(-1)
        assert conflict.disagreement == 1
        assert conflict.jaccard in (1, None)


def test_equal_rows_count_from_the_first():
    assert common_rows(np.ones(10), np.ones(10), 0.3) == (3, 3)
    assert common_rows(np.ones(10), np.arange(10.0), 0.3) == (3, 0)
    assert common_rows(np.ones(3), np.ones(3), 0.01) == (1, 1)


def test_nothing_in_common_is_zero(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    made = [torch.zeros(4, 6), torch.zeros(4, 6), torch.zeros(4, 6)]
    made[1][:, :3], made[2][:, 3:] = 1.0, -1.0
    folders = [save(tmp_path / str(i), {name: value}) for i, value in enumerate(made)]
    for folder in folders:
        (folder / "config.json").write_text("{}")
    conflict = ls.delta(*folders).conflict("1", "2", 0.5)[ls.Place(0, "mlp")]
    assert (conflict.cosine, conflict.disagreement, conflict.overlap) == (0, 0, 0)
    assert not math.isnan(conflict.jaccard)
