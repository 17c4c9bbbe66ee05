from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file


def weights(folder):
    return load_file(f"{folder}/model.safetensors")


def layer_of(name):
    return int(name.split(".")[2]) if ".layers." in name else None


def given(experts, out, *arguments):
    return ("revert", "--base", experts.base, "--expert", experts.task, "--out", out, *arguments)


def test_layers_go_back_to_the_base(layerswap, experts, tmp_path):
    out = tmp_path / "out"
    result = layerswap(*given(experts, out, "--layers", "0-2, 7", "--roles", "attention,norm"))
    assert result.code == 0, result.err
    assert "base" in result.out.splitlines()[1]
    assert f"wrote {out}" in result.out
    base, task = weights(experts.base), weights(experts.task)
    for name, tensor in weights(out).items():
        back = layer_of(name) in (0, 1, 2, 7) and ("self_attn" in name or "norm" in name)
        assert torch.equal(tensor, (base if back else task)[name]), name


def test_an_expert_that_is_its_base_is_named(layerswap, experts, tmp_path):
    out = tmp_path / "out"
    result = layerswap(
        "revert", "--base", experts.base, "--expert", experts.base, "--out", out, "--layers", "0"
    )
    assert result.code == 0, result.err
    assert "note: expert has the weights of its base: its training changed nothing" in result.out


@pytest.mark.parametrize("scope", ["tensor", "model"])
def test_rows_that_changed_little_go_back(layerswap, experts, tmp_path, scope):
    out = tmp_path / "out"
    result = layerswap(*given(experts, out, "--keep", 0.25, "--scope", scope, "--axis", "output"))
    assert result.code == 0, result.err
    base, task, found = weights(experts.base), weights(experts.task), weights(out)
    mav = {n: (task[n].double() - base[n].double()).abs().mean(dim=-1).reshape(-1) for n in base}
    every = torch.cat(list(mav.values())).sort(descending=True).values
    for name, tensor in found.items():
        ranked = every if scope == "model" else mav[name].sort(descending=True).values
        count = round(0.25 * len(ranked))
        kept = mav[name] >= (ranked[count - 1] if count else float("inf"))
        kept = kept.reshape(-1, *[1] * (tensor.dim() - 1)) if tensor.dim() > 1 else kept
        assert torch.equal(tensor, torch.where(kept, task[name], base[name])), name


def test_a_part_of_a_partition_stays(layerswap, experts, tmp_path):
    out = tmp_path / "out"
    result = layerswap(*given(experts, out, "--partition", "C", "--part", "task"))
    assert result.code == 0, result.err
    base, task = weights(experts.base), weights(experts.task)
    for name, tensor in weights(out).items():
        language = layer_of(name) in (0, 1, 7)  # 6 and 2 of 32 to 36 layers are 2 and 1 of 8
        assert torch.equal(tensor, (base if language else task)[name]), name


TWO_WAYS = "error: choose one way to revert: keep or threshold; layers or roles; or partition\n"
REFUSED = {
    "nothing said": ((), TWO_WAYS),
    "said twice": (("--keep", 0.5, "--roles", "mlp"), TWO_WAYS),
    "percent": (
        ("--keep", 20),
        "error: revert: merge: keep: 20.0 is not a number from 0 to 1\n",
    ),
    "empty range": (
        ("--layers", "0-2,"),
        "error: revert: places[1].layers: '' is not a number, a range like 3-7, all or outside\n",
    ),
    "role": (
        ("--roles", "attn"),
        "error: revert: places[0].roles[0]: 'attn' is not allowed; did you mean 'attention'?\n",
    ),
    "no part": (
        ("--partition", "A"),
        "error: `partition` needs the part that the expert keeps: task or language\n",
    ),
    "part of nothing": (
        ("--keep", 0.5, "--part", "task"),
        "error: `part` needs `partition`; give the name of a partition\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(layerswap, experts, tmp_path, case):
    arguments, message = REFUSED[case]
    result = layerswap(*given(experts, tmp_path / "out", *arguments))
    assert (result.code, result.err) == (2, message)
    assert not (tmp_path / "out").exists()
