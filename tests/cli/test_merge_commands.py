"""`layerswap instruct`, `revert` and `verify`."""

import json
import shutil

import pytest
import torch
from merging import layer_of, tensors_of

import layerswap as ls


@pytest.mark.parametrize("option", ["--language", "--language-expert"])
def test_the_chat_vector_is_added_where_the_options_say(layerswap, experts, tmp_path, option):
    out = tmp_path / "out"
    models = ("--base", experts.base, "--instruct", experts.task, option, experts.language)
    places = ("--weight", "0.5", "--bottom", 2, "--outside", "language")
    result = layerswap.done("instruct", *models, *places, "--out", out)
    assert f"wrote {out}" in result.out
    base, task, language = map(tensors_of, (experts.base, experts.task, experts.language))
    for name, tensor in tensors_of(out).items():
        if (layer_of(name) or 0) < 2:
            assert torch.equal(tensor, language[name]), name
        else:
            expected = language[name] + 0.5 * (task[name] - base[name])
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
    recipe = json.loads((out / "layerswap.json").read_text())["recipe"]
    assert recipe["instruct"]["weight"] == 0.5


def revert(experts, out, *more):
    return ("revert", "--base", experts.base, "--expert", experts.task, "--out", out, *more)


WAYS = {
    "layers": (
        ("--layers", "0-2, 7", "--roles", "attention,norm"),
        {"layers": ["0-2", 7], "roles": ["attention", "norm"]},
    ),
    "rows": (
        ("--keep", 0.25, "--scope", "model", "--axis", "output"),
        {"keep": 0.25, "scope": "model", "axis": "output"},
    ),
    "partition": (
        ("--partition", "C", "--part", "task", "--dtype", "bfloat16"),
        {"partition": "C", "part": "task", "dtype": "bfloat16"},
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_part_goes_back_to_the_base(layerswap, experts, tmp_path, way):
    arguments, settings = WAYS[way]
    result = layerswap.done(*revert(experts, tmp_path / "out", *arguments))
    assert f"wrote {tmp_path / 'out'}" in result.out
    wanted = tensors_of(ls.revert(experts.base, experts.task, **settings).save(tmp_path / "same"))
    task, reverted = tensors_of(experts.task), tensors_of(tmp_path / "out")
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in reverted.items())
    assert not all(torch.equal(tensor, task[name]) for name, tensor in reverted.items())


def test_an_expert_that_is_its_base_is_named(layerswap, experts, tmp_path):
    given = ("revert", "--base", experts.base, "--out", tmp_path / "out", "--layers", "0")
    result = layerswap.done(*given, "--task", experts.base)
    assert "note: expert has the weights of its base: its training changed nothing" in result.out
    for more, count in (((), 0), (("--expert", experts.base, "--language", experts.task), 2)):
        refused = layerswap(*given, *more)
        message = f"error: give one expert with --expert; {count} are given\n"
        assert (refused.code, refused.err) == (2, message)


def test_revert_refuses_in_one_line(layerswap, experts, tmp_path):
    result = layerswap(*revert(experts, tmp_path / "out", "--layers", "0-2,"))
    message = "revert: places[1].layers: '' is not a number, a range like 3-7, all or outside"
    assert (result.code, result.err) == (2, f"error: {message}\n")
    assert not (tmp_path / "out").exists()


@pytest.fixture
def merged(layerswap, experts, tmp_path):
    """A merge of copies of the experts, and the folder that the copies lie in."""
    for name in ("task", "language"):
        shutil.copytree(getattr(experts, name), tmp_path / name)
    out = tmp_path / "merged"
    pair = ("--task", tmp_path / "task", "--language", tmp_path / "language")
    layerswap.done("merge", *pair, "--out", out)
    return out


def spoil(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_verify_a_good_merge(layerswap, merged):
    result = layerswap("verify", merged)
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "72 verbatim tensors (70.7 kB), all compared with their source",
        "3 computed tensors (4.2 kB), all computed again",
        f"{merged}: verified",
    ]


def test_verify_has_a_line_for_each_finding(layerswap, merged):
    file = spoil(merged)
    (merged / "extra.bin").write_bytes(b"")
    result = layerswap.refused("verify", merged, "--full")
    assert result.out.splitlines()[-1] == f"{merged}: not verified"
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: {merged}/extra.bin: not a file that the merge writes",
        f"error: {file}: tensor 'model.norm.weight' differs from the recipe's result, from byte "
        "63 of 64 on",
    ]


def test_verify_for_machines(layerswap, merged):
    spoil(merged)
    result = layerswap.refused("verify", merged, "--json")
    facts = json.loads(result.out)
    assert facts["passed"] is False
    assert len(facts["findings"]) == 1
    assert facts["unverified"] == []
    assert facts["verbatim"]["tensors"] == 72
    assert facts["computed"]["compared_bytes"] == facts["computed"]["bytes"] == 4160


def test_verify_a_source_that_moved(layerswap, merged, tmp_path):
    (tmp_path / "task").rename(tmp_path / "moved")
    gone = layerswap.refused("verify", merged)
    assert (
        f"error: not verified: task: {tmp_path}/task: no such folder, and not a Hub id like "
        "'owner/name'; give its new location with --source NAME=PATH\n"
    ) in gone.err
    layerswap.done("verify", merged, "--source", f"task={tmp_path}/moved")


BAD = {
    "no folder": (("none",), "none: no such folder"),
    "a recipe": (("r.yaml",), "r.yaml: a recipe; give a merged folder, or --against MODEL with it"),
    "share": (("{merged}", "--sample", "0"), "share is 0; write a number above 0 and at most 1"),
    "pair": (("{merged}", "--source", "task"), "--source: 'task' is not NAME=PATH"),
    "twice": (("{merged}", "--source", "a=b", "--source", "a=c"), "--source: 'a' is given twice"),
    "name": (("{merged}", "--source", "tusk=b"), "no source 'tusk'; did you mean 'task'?"),
    "a source": (("{task}",), "{task}: has no layerswap.json, so layerswap did not write it"),
}


@pytest.mark.parametrize("case", BAD)
def test_verify_refuses_in_one_line(layerswap, merged, case, tmp_path):
    arguments, message = BAD[case]
    known = {"merged": merged, "task": tmp_path / "task"}
    result = layerswap("verify", *(argument.format(**known) for argument in arguments))
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: {message.format(**known)}\n"
