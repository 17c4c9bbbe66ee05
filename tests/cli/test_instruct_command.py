"""`layerswap instruct`."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file


def test_the_chat_vector_is_added_where_the_options_say(layerswap, experts, tmp_path):
    out = tmp_path / "out"
    result = layerswap(
        "instruct", "--base", experts.base, "--instruct", experts.task, "--language",
        experts.language, "--weight", "0.5", "--bottom", 2, "--outside", "language", "--out", out,
    )  # fmt: skip
    assert result.code == 0, result.err
    assert f"wrote {out}" in result.out
    base, task, language, found = (
        load_file(f"{folder}/model.safetensors")
        for folder in (experts.base, experts.task, experts.language, out)
    )
    for name, tensor in found.items():
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        if layer < 2:
            assert torch.equal(tensor, language[name]), name
        else:
            expected = language[name] + 0.5 * (task[name] - base[name])
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
    recipe = json.loads((out / "layerswap.json").read_text())["recipe"]
    assert recipe["instruct"]["weight"] == [0.5]


def test_a_weight_that_is_none(layerswap, experts, tmp_path):
    refused = layerswap(
        "instruct", "--base", experts.base, "--instruct", experts.task, "--language",
        experts.language, "--weight", "much", "--out", tmp_path / "x",
    )  # fmt: skip
    assert refused.code == 2
    assert refused.err == "error: --weight is 'much'; write a number, or numbers with commas\n"
