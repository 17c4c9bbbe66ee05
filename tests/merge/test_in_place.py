"""Merges from a local Hub through the real client."""

import json
import time

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from merging import change_config, change_tensors, swap_of, weight_bytes

import layerswap as ls
from layerswap.checkpoint import open_checkpoint
from layerswap.compose.recipe import check_recipe
from layerswap.ground.errors import CheckpointError, MergeError
from layerswap.merge.api import make_plan

TASK, LANGUAGE = "org/task", "org/language"


def swap_plans(experts, **settings):
    """The same swap from the Hub and from the disk."""
    settings = {"bottom": 1, "top": 1, "max_shard_size": "20KB", **settings}
    local = swap_of(experts, **settings)
    return ls.swap(task=TASK, language=LANGUAGE, **settings), local


def test_a_swap_fetches_only_the_spans_that_it_takes(hub, experts, tmp_path):
    plan, local = swap_plans(experts)
    planned = plan.to_dict()["fetched_bytes"]
    whole = {f"org/{n}": (experts[n] / "model.safetensors").stat().st_size for n in experts}
    # The task gives two of four layers, the language the others, and both the embeddings.
    assert planned.keys() == {"task", "language"}
    assert sum(planned.values()) < 0.75 * (whole[TASK] + whole[LANGUAGE])
    out = plan.save(tmp_path / "out")
    assert weight_bytes(out) == weight_bytes(local.save(tmp_path / "local"))
    for name, count in planned.items():
        header = len(plan.experts[name].tensors)  # bytes of it are few hundreds per tensor
        assert count <= hub.sent[f"org/{name}"] <= 1.05 * count + 200 * header
    # No file of weights came to the cache, nor beside the output.
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
    assert {f.name for f in out.iterdir()} == {f.name for f in (tmp_path / "local").iterdir()}
    record = json.loads((out / "layerswap.json").read_text())["sources"]["task"]
    assert record["revision"] == hub.commit(TASK)
    assert record["fingerprints"] == {}
    card = huggingface_hub.ModelCard.load(out / "README.md").data
    assert (card.base_model, card.base_model_relation) == ([TASK, LANGUAGE], "merge")
    assert plan.notes == [
        f"fetches 0.00 of 0.00 GB of {name}" for name in ("task", "language")
    ]  # copies would be named, too
    assert len(record["etags"]["model.safetensors"]) == 64


def in_place_and_local(experts, **merge):
    """The plans of a merge method over models on the Hub, and over the same on the disk."""
    based = {} if merge["method"] == "slerp" else {"base"}
    merge = {"experts": ["task", "language"], **merge}

    def recipe(sources):
        named = {name: str(sources[name]) for name in merge["experts"]}
        data = {"experts": named, "merge": merge, "max_shard_size": "20KB"}
        return check_recipe(data | {name: str(sources[name]) for name in based}, where="test")

    plan = make_plan(recipe({name: f"org/{name}" for name in experts}), in_place=True)
    return plan, make_plan(recipe(experts))


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        {"method": "ties", "density": 0.5},
        {"method": "dare_ties", "density": 0.5},
        {"method": "slerp"},
        {"method": "breadcrumbs"},
    ],
    ids=lambda method: method["method"],
)
def test_methods_fetch_what_they_measure_once(hub, experts, tmp_path, method):
    plan, local = in_place_and_local(experts, **method)
    sent = sum(hub.sent.values())
    out = plan.save(tmp_path / "out")
    assert weight_bytes(out) == weight_bytes(local.save(tmp_path / "local"))
    assert sum(hub.sent.values()) - sent == sum(plan.fetched_bytes.values())


@pytest.mark.slow
def test_methods_over_whole_models_download_them(hub, experts, tmp_path):
    plan, local = in_place_and_local(experts, method="ties", scope="model")
    assert any("downloaded first" in note for note in plan.notes)
    size = (experts["task"] / "model.safetensors").stat().st_size
    assert plan.fetched_bytes["task"] == size
    out = plan.save(tmp_path / "out")
    assert weight_bytes(out) == weight_bytes(local.save(tmp_path / "local"))
    assert len([*(tmp_path / "cache").rglob("*.safetensors")]) == 3


def test_the_local_cache_comes_first(hub, experts, tmp_path):
    open_checkpoint(TASK)  # downloads it
    sent = hub.sent[TASK]
    plan, local = swap_plans(experts)
    assert plan.fetched_bytes.keys() == {"language"}
    out = plan.save(tmp_path / "out")
    assert hub.sent[TASK] == sent
    assert weight_bytes(out) == weight_bytes(local.save(tmp_path / "local"))


def test_offline_only_the_cache_is_asked(hub, experts, monkeypatch):
    open_checkpoint(TASK)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="language: no such local folder, not whole in"):
        swap_plans(experts)
    hub.asked.clear()
    assert open_checkpoint(TASK, in_place=True).revision == hub.commit(TASK)
    assert hub.asked == {}


def test_a_stored_copy_of_a_tied_head_is_read_in_samples(hub, pair):
    table = torch.randn(4000, 24)
    weights = {"model.embed_tokens.weight": table, "lm_head.weight": table.clone()}
    for name, folder in zip((TASK, LANGUAGE), pair, strict=True):
        change_config(change_tensors(folder, weights), tie_word_embeddings=True, vocab_size=4000)
        hub.repositories[name] = folder
    plan = ls.swap(task=TASK, language=LANGUAGE, bottom=1, top=1)
    assert plan.drop == {"lm_head.weight"}
    assert sum(hub.sent.values()) < 2 * table.nbytes
    weights["lm_head.weight"][-1] += 1
    change_tensors(pair[0], weights)
    with pytest.raises(MergeError, match="task has a head of its own"):
        ls.swap(task=TASK, language=LANGUAGE, bottom=1, top=1)


def test_nan_in_a_tensor_that_is_fetched_is_found_before_the_output_appears(hub, pair, tmp_path):
    name = "model.layers.2.mlp.up_proj.weight"  # copied
    change_tensors(pair[0], {name: torch.full((40, 24), float("nan"))})
    hub.repositories[TASK] = pair[0]
    plan = ls.swap(task=TASK, language=LANGUAGE, bottom=1, top=1, max_shard_size="20KB")
    with pytest.raises(MergeError, match=f"model.safetensors: tensor '{name}' holds NaN or inf"):
        plan.save(tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["drop", "503"])
def test_a_connection_that_fails_once_is_tried_again_by_the_library(hub, experts, tmp_path, fault):
    plan, local = swap_plans(experts)
    hub.faults = [fault]
    out = plan.save(tmp_path / "out")
    assert hub.faults == []
    assert weight_bytes(out) == weight_bytes(local.save(tmp_path / "local"))


def test_a_server_that_sends_whole_files_is_refused_in_one_line(hub, experts, tmp_path):
    plan, _ = swap_plans(experts)
    hub.faults = ["whole"] * 400
    with pytest.raises(CheckpointError, match=r"the server sent .* bytes for .*; download"):
        plan.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_hub_that_stays_down_is_one_line(hub, experts, tmp_path, monkeypatch):
    plan, _ = swap_plans(experts)
    hub.faults = ["503"] * 400
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # the client's pauses
    with pytest.raises(CheckpointError, match=r"^hf://org/.*: cannot be fetched \(HfHub"):
        plan.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_loading_downloads(hub, experts):
    plan, local = swap_plans(experts)
    assert plan.fetched_bytes
    assert plan.downloaded().fetched_bytes == {}
    for name, tensor in plan.load().state_dict().items():
        assert tensor.equal(local.load().state_dict()[name])


@pytest.mark.slow
def test_verify_reads_in_place_too(hub, experts, tmp_path):
    plan, _ = swap_plans(experts)
    out = plan.save(tmp_path / "out")
    assert ls.verify(out, full=True).passed
    open_checkpoint(TASK)  # now in the cache, where it was read in place
    result = ls.verify(out, full=True)
    assert result.passed, result.findings


def test_a_swap_on_the_hub_is_compared_by_ranges(hub, experts, tmp_path):
    plan, local = swap_plans(experts)
    hub.repositories["org/swapped"] = local.save(tmp_path / "swapped")
    origins = ls.verify_against(plan, "org/swapped", share=1)
    assert origins.passed
    assert not [*(tmp_path / "cache").rglob("*.safetensors")]
