from __future__ import annotations

import json
import shutil

import pytest


@pytest.fixture
def merged(layerswap, experts, tmp_path):
    """A merge of copies of the experts, and the folder that the copies lie in."""
    for name in ("task", "language"):
        shutil.copytree(getattr(experts, name), tmp_path / name)
    out = tmp_path / "merged"
    pair = ("--task", tmp_path / "task", "--language", tmp_path / "language")
    assert layerswap("merge", *pair, "--out", out).code == 0
    return out


def spoil(folder):
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file


def test_a_good_merge(layerswap, merged):
    result = layerswap("verify", merged)
    assert result.code == 0
    assert result.out.splitlines() == [
        "72 verbatim tensors (70.7 kB), all compared with their source",
        "3 computed tensors (4.2 kB), all computed again",
        f"{merged}: verified",
    ]
    assert "error" not in result.err


def test_a_bad_merge_is_code_2_with_a_line_for_each_finding(layerswap, merged):
    file = spoil(merged)
    (merged / "extra.bin").write_bytes(b"")
    result = layerswap("verify", merged, "--full")
    assert result.code == 2
    assert result.out.splitlines()[-1] == f"{merged}: not verified"
    errors = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert errors == [
        f"error: {merged}/extra.bin: not a file that the merge writes",
        f"error: {file}: tensor 'model.norm.weight' is not what the recipe gives, from byte 63 of "
        "64 on",
    ]


def test_for_machines(layerswap, merged):
    spoil(merged)
    result = layerswap("verify", merged, "--json")
    assert result.code == 2
    facts = json.loads(result.out)
    assert facts["passed"] is False
    assert len(facts["findings"]) == 1
    assert facts["unverified"] == []
    assert facts["verbatim"]["tensors"] == 72
    assert facts["computed"]["compared_bytes"] == facts["computed"]["bytes"] == 4160


def test_a_source_that_moved(layerswap, merged, tmp_path):
    (tmp_path / "task").rename(tmp_path / "moved")
    gone = layerswap("verify", merged)
    assert gone.code == 2
    assert (
        f"error: not verified: task: {tmp_path}/task: no such folder, and not a Hub id like "
        "'owner/name'; give its new location with --source NAME=PATH\n"
    ) in gone.err
    assert layerswap("verify", merged, "--source", f"task={tmp_path}/moved").code == 0


def test_hashes(layerswap, merged):
    kept = layerswap("verify", merged, "--record")
    assert "note: recorded the SHA-256 of 4 files" in kept.out.splitlines()
    again = layerswap("verify", merged)
    assert again.code == 0
    assert "4 files match their recorded SHA-256" in again.out.splitlines()


BAD = {
    "no folder": (("none",), "none/layerswap.json: cannot be read (No such file or directory)"),
    "share": (
        ("{merged}", "--sample", "0"), "share is 0; write a number above 0 and at most 1"
    ),
    "pair": (("{merged}", "--source", "task"), "--source: 'task' is not NAME=PATH"),
    "twice": (
        ("{merged}", "--source", "a=b", "--source", "a=c"),
        "--source: 'a' is given twice",
    ),
    "name": (("{merged}", "--source", "tusk=b"), "no source 'tusk'; did you mean 'task'?"),
    "a source": (("{task}",), "{task}: has no layerswap.json, so layerswap did not write it"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_refusals_are_one_line(layerswap, merged, case, tmp_path):
    arguments, message = BAD[case]
    known = {"merged": merged, "task": tmp_path / "task"}
    result = layerswap("verify", *(argument.format(**known) for argument in arguments))
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: {message.format(**known)}\n"
