"""Deltas that the output's dtype loses: measured, reported, recorded, and avoided by default."""

import json

import pytest
import torch
from merging import (
    change_tensors,
    copied,
    recipe_plan,
    save_adapter,
    save_expert,
    save_tokenizer,
    tensors_of,
    tiny_llama,
)

import layerswap as ls


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A bfloat16 base, and two float32 experts with deltas near the step of bfloat16."""
    root = tmp_path_factory.mktemp("trained")
    base = save_tokenizer(save_expert(root / "base", tiny_llama(), 0, dtype=torch.bfloat16))
    result = {"base": base}
    for seed, name in enumerate(("task", "language"), 1):
        torch.manual_seed(seed)
        result[name] = copied(base, root / name)
        changes = {
            key: tensor.float()
            + torch.randn(tensor.shape) * 1e-4 * (torch.rand(tensor.shape) > 0.2)
            for key, tensor in tensors_of(base).items()
        }
        change_tensors(result[name], changes)
    return result


def ties_of(trained, **settings):
    merge = {"method": "ties", "density": 0.5, "experts": ["task", "language"]}
    experts = {name: trained[name] for name in merge["experts"]}
    return recipe_plan(experts=experts, base=trained["base"], merge=merge, **settings)


def expected_loss(exact, rounded, base):
    changed = lost = 0
    norm = error = 0.0
    for name, value in exact.items():
        start = base[name].float()
        delta = value - start
        changed += int((delta != 0).sum())
        lost += int(((delta != 0) & (rounded[name] == base[name])).sum())
        norm += float((delta.double() ** 2).sum())
        error += float(((rounded[name].float() - start - delta).double() ** 2).sum())
    return lost / changed, (error / norm) ** 0.5


def test_the_lost_share_is_that_of_the_whole_output(trained, tmp_path):
    logged = []
    exact = ties_of(trained, dtype="float32").save(tmp_path / "exact", log=logged.append)
    assert logged == []
    assert "lost_to_dtype" not in json.loads((exact / "layerswap.json").read_text())
    out = ties_of(trained, dtype="bfloat16").save(tmp_path / "out", log=logged.append)
    result = json.loads((out / "layerswap.json").read_text())["lost_to_dtype"]
    parts = tensors_of(exact), tensors_of(out), tensors_of(trained["base"])
    share, error = expected_loss(*parts)
    assert result["share"] == pytest.approx(share, abs=1e-4)
    assert result["error"] == pytest.approx(error, abs=1e-4)
    assert 0.1 < share < 0.99
    assert result["dtype"] == "bfloat16"
    (line,) = logged
    assert line.startswith(f"bfloat16 loses {share:.0%} of the changed elements")
    assert line in (out / "README.md").read_text()
    verified = ls.verify(out, full=True)
    assert verified.passed
    assert verified.notes == []


def test_threads_and_shards_do_not_change_it(trained, tmp_path):
    records = []
    for threads in (1, 3):
        plan = ties_of(trained, dtype="float16", max_shard_size="20KB")
        out = plan.save(tmp_path / str(threads), threads=threads)
        records.append(json.loads((out / "layerswap.json").read_text()))
    assert records[0] == records[1]
    assert records[0]["lost_to_dtype"]["dtype"] == "float16"


def test_no_warning_for_copies_and_deltas_that_fit(trained, tmp_path, experts):
    logged = []
    plan = ls.swap(task=trained["task"], language=trained["language"], base=trained["base"])
    out = plan.save(tmp_path / "swap", log=logged.append)
    merge = {"method": "task_arithmetic", "experts": {"task": 1}, "scale": 1}
    data = {"experts": {"task": experts["task"]}, "base": experts["base"]}
    large = recipe_plan(data, merge=merge, dtype="bfloat16")
    large.save(tmp_path / "large", log=logged.append)
    assert logged == []
    assert "lost_to_dtype" not in json.loads((out / "layerswap.json").read_text())


def test_baked_adapters_are_written_as_they_were_trained(trained, tmp_path):
    adapters = {
        name: save_adapter(tmp_path / name, trained["base"], seed, r=2, target_modules=["q_proj"])
        for seed, name in enumerate(("task", "language"))
    }
    plan = ls.swap(**adapters, bake=True)
    assert {tensor.dtype for tensor in plan.tensors} == {"F32"}
    assert any(note.startswith("writes float32, the adapters' dtype") for note in plan.notes)
    out = plan.save(tmp_path / "out")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    logged = []
    short = ls.swap(**adapters, bake=True, dtype="bfloat16")
    assert not any("adapters' dtype" in note for note in short.notes)
    result = short.save(tmp_path / "short", log=logged.append)
    measured = json.loads((result / "layerswap.json").read_text())["lost_to_dtype"]
    parts = tensors_of(out), tensors_of(result), tensors_of(trained["base"])
    share, error = expected_loss(*parts)
    assert measured["share"] == pytest.approx(share, abs=1e-4)
    assert measured["error"] == pytest.approx(error, abs=1e-4)
