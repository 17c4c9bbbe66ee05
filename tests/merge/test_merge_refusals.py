"""Merges that are refused: their messages, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import shutil
from collections import namedtuple

import pytest
import torch
from merging import (
    change_config,
    change_tensors,
    check_equal,
    refusal,
    save_expert,
    save_tokenizer,
    swap_of,
    tensors_of,
    tiny_llama,
    weight_bytes,
)

import layerswap as ls
from layerswap.merge import writer
from layerswap.merge.target import check_space

NON_FINITE = "holds NaN or infinity; take an earlier checkpoint"
UP = "model.layers.{}.mlp.up_proj.weight"


def refused_together(pair) -> str:
    return refusal(ls.swap, task=pair[0], language=pair[1])


def refused_save(plan, out, **kwargs) -> str:
    """The message of a merge that fails, having left its surroundings as they were."""
    before = sorted(os.listdir(out.parent)), weight_bytes(out)  # noqa: PTH208
    message = refusal(plan.save, out, **kwargs)
    assert (sorted(os.listdir(out.parent)), weight_bytes(out)) == before  # noqa: PTH208
    return message


# --- experts that do not belong together ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48, "head_dim": 6}, "hidden_size differs: 24 in task, 48 in language"),
        ({"num_hidden_layers": 3}, "number of layers differs: 4 in task, 3 in language"),
        ({"vocab_size": 51}, None),
        ({"intermediate_size": 48}, "intermediate_size differs: 40 in task, 48 in language"),
        ({"num_key_value_heads": 1}, "num_key_value_heads differs: 2 in task, 1 in language"),
        ({"num_attention_heads": 2, "head_dim": 6}, "num_attention_heads differs: 4 in task, 2"),
        ({"hidden_act": "relu"}, "hidden_act differs: silu in task, relu in language"),
        ({"rms_norm_eps": 0.1}, "rms_norm_eps differs: 1e-06 in task, 0.1 in language"),
    ],
)
def test_another_shape_of_model_is_refused(experts, tmp_path, changes, message):
    other = save_expert(tmp_path / "other", tiny_llama(**changes), 1)
    message = message or (
        "vocabularies differ: 50 rows in task, 51 rows in language; language has no "
        "tokenizer.json to align its rows by"
    )
    assert refused_together((experts["task"], other)).startswith(message)


def test_another_architecture_is_refused(pair):
    change_config(pair[1], model_type="mistral", architectures=["MistralForCausalLM"])
    for folder, words in zip(pair, ("a b", "b a"), strict=True):  # a choice would not mend it
        save_tokenizer(folder, words)
    assert refused_together(pair) == "model_type differs: llama in task, mistral in language"
    change_config(pair[1], model_type="seeing", text_config={"model_type": "llama"})
    assert refused_together(pair) == (
        "model_type differs: llama in task, seeing in language; save the multimodal one's "
        "model.language_model by itself, and give that"
    )


def test_an_expert_called_base_does_not_hide_the_base(experts, tmp_path):
    other = save_expert(tmp_path / "other", tiny_llama(rms_norm_eps=0.5), 1)
    sources = {"base": experts["base"], "math": experts["task"]}
    message = refusal(ls.soup, sources, base=other)
    assert message == "rms_norm_eps differs: 1e-06 in base, 0.5 in the base"
    plan = ls.soup(sources, base=experts["third"])
    assert {name: c.folder for name, c in plan.sources.items()} == {
        "base": experts["base"], "math": experts["task"], "the base": experts["third"],
    }  # fmt: skip


ROPE_4 = {"rope_theta": 10000.0, "rope_scaling": None}
YARN_4 = {"rope_theta": 10000.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}
ROPE_5 = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}
FLAT = {**ROPE_4, "model_type": "qwen2_vl"}
NESTED = {**FLAT, "text_config": {**tiny_llama().to_dict(), "model_type": "qwen2_vl_text"}}


@pytest.mark.parametrize(
    ("task", "language", "message"),
    [
        (ROPE_4, {"rope_theta": 5e5}, "rope_theta differs: 10000.0 in task, 500000.0 in language"),
        (ROPE_4, ROPE_5, None),
        (FLAT, NESTED, None),
        (YARN_4, {"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4}}, None),
        (YARN_4, ROPE_4, "rope_type differs: yarn in task, default in language"),
        (  # as a card of Qwen advises, in a file that transformers 5 wrote
            {**ROPE_5, **YARN_4}, ROPE_5,
            "rope_type differs: yarn in task, default in language; task gives rope_scaling",
        ),
        (
            {"model_type": "gemma3_text", "rope_theta": 1e6, "rope_local_base_freq": 1e4},
            {"model_type": "gemma3_text", "rope_parameters": {
                "full_attention": {"rope_theta": 1e6, "rope_type": "default"},
                "sliding_attention": {"rope_theta": 2e4, "rope_type": "default"}}},
            "sliding_attention rope_theta differs: 10000.0 in task, 20000.0 in language",
        ),
    ],
)  # fmt: skip
def test_rope_is_compared_whichever_version_wrote_it(pair, task, language, message):
    for folder, changes in zip(pair, (task, language), strict=True):
        change_config(folder, drop="rope_parameters")
        change_config(folder, **changes)
    assert refused_together(pair).startswith(message) if message else swap_of(pair).nbytes > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_dropout": 0.1}, {"torch_dtype": "float32"}, {"transformers_version": "4.40.0"},
        {"pretraining_tp": 8}, {"use_cache": False}, {"eos_token_id": [1, 2]},
        {"max_position_embeddings": 9999}, {"unknown_key_of_a_trainer": True},
    ],
)  # fmt: skip
def test_settings_that_compute_nothing_may_differ(pair, changes):
    change_config(pair[0], attention_dropout=0.0, pretraining_tp=1)
    change_config(pair[1], **changes)
    assert swap_of(pair).nbytes > 0


def test_missing_tensors_are_counted(pair):
    change_tensors(pair[1], {"model.norm.weight": None, UP.format(1): None})
    assert refused_together(pair).startswith(
        "language lacks 'model.layers.1.mlp.up_proj.weight' and 1 more tensors that task has; "
        "they are not one model"
    )


# --- tokenizers ---

CHOOSE = "; choose one with `tokenizer: task`, `language` or `union` (--tokenizer)"


@pytest.mark.parametrize(
    ("words", "difference"),
    [
        ("a c b d e f", "2 tokens of 7 and 7 ('b' is id 2 and id 3, 'c' is id 3 and id 2)"),
        ("a b c d e f g", "1 token of 7 and 8 ('g' is missing and id 7)"),
    ],
)
def test_other_tokens_are_refused(pair, words, difference):
    save_tokenizer(pair[1], words)
    expected = f"tokenizers of task and language differ: {difference}{CHOOSE}"
    assert refused_together(pair) == expected


def bpe(folder, **model):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = {"<unk>": 0, "a": 1, "b": 2, "ab": 3, "ba": 4}
    content["model"] = {"type": "BPE", "vocab": vocab, "merges": [], **model}
    path.write_text(json.dumps(content))


def test_other_merges_are_refused_but_not_other_spellings(pair):
    bpe(pair[0], merges=[["a", "b"], ["b", "a"]])
    bpe(pair[1], merges=["a b", "b a"])
    assert swap_of(pair).nbytes > 0
    bpe(pair[1], merges=["b a", "a b"])
    assert refused_together(pair) == (
        "tokenizers of task and language differ: the model is not the same" + CHOOSE
    )


def test_other_parts_of_a_tokenizer_are_refused(pair):
    path = pair[1] / "tokenizer.json"
    content = json.loads(path.read_text()) | {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    path.write_text(json.dumps(content))
    differ = "tokenizers of task and language differ: {} is not the same" + CHOOSE
    assert refused_together(pair) == differ.format("the pre-tokenizer")
    for folder, data in zip(pair, (b"one", b"two"), strict=True):
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_bytes(data)
    assert refused_together(pair).partition("; ")[2].startswith("task has no tokenizer.json to")


def test_a_missing_tokenizer_is_taken_whole_from_the_other(pair, tmp_path):
    for file in pair[0].glob("tokenizer*"):
        file.unlink()
    out = swap_of(pair).save(tmp_path / "out")
    assert (out / "tokenizer.json").read_bytes() == (pair[1] / "tokenizer.json").read_bytes()


def test_halves_of_two_tokenizers_are_not_put_together(pair, tmp_path):
    (pair[1] / "chat_template.jinja").write_text("the language expert's")
    out = swap_of(pair).save(tmp_path / "out")
    assert not (out / "chat_template.jinja").exists()


# --- NaN, infinity, overflow ---


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_source_of_a_blend_must_be_finite(pair, tmp_path, value):
    spoilt = tensors_of(pair[1])["model.norm.weight"].clone()
    spoilt[-1] = value
    change_tensors(pair[1], {"model.norm.weight": spoilt})
    plan = swap_of(pair)
    assert refused_save(plan, tmp_path / "out") == (
        f"{pair[1]}/model.safetensors: tensor 'model.norm.weight' {NON_FINITE}"
    )


def test_nan_in_a_verbatim_source_is_refused(pair, tmp_path):
    odd_nan = torch.tensor([0x7FC00001, -1] * 480, dtype=torch.int32).view(torch.float32)
    odd_nan = odd_nan.reshape(40, 24)  # every other element
    change_tensors(pair[0], {UP.format(2): odd_nan})
    plan = swap_of(pair)
    assert refused_save(plan, tmp_path / "out").endswith(
        f"model.safetensors: tensor {UP.format(2)!r} {NON_FINITE}"
    )
    assert not list(tmp_path.glob("*out*"))


def test_nan_behind_the_probed_bytes_is_copied_bit_for_bit(pair, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PROBED_BYTES", 64)
    late = torch.zeros(40, 24)
    late[-1] = torch.tensor([0x7FC00001] * 24, dtype=torch.int32).view(torch.float32)
    change_tensors(pair[0], {UP.format(2): late})
    plan = swap_of(pair)
    out = plan.save(tmp_path / "out")
    check_equal(tensors_of(out)[UP.format(2)], late)
    verified = ls.verify(out)
    assert verified.passed
    assert verified.notes == [f"NaN or infinity in {UP.format(2)!r}, as in the source"]


def test_overflow_is_refused(pair, tmp_path):
    change_tensors(pair[0], {UP.format(2): torch.full((40, 24), 7e4)})
    plan = swap_of(pair, dtype="float16")
    assert refused_save(plan, tmp_path / "out") == (
        f"tensor {UP.format(2)!r} overflows F16; choose a wider --dtype"
    )


# --- the output ---


@pytest.fixture
def plan(pair):
    return swap_of(pair)


def test_an_output_in_over_or_around_a_source_is_refused(experts, plan, pair, tmp_path):
    (tmp_path / "link").symlink_to(pair[1])
    for folder in (pair[0], pair[0].parent):
        (folder / "layerswap.json").write_text("{}")
    based = swap_of(experts, base=pair[0], outside="task", bottom=0, top=0)
    for chosen, out, name in (
        (plan, pair[1] / "merged", "language"),
        (plan, tmp_path / "link" / "merged", "language"),
        (plan, pair[0], "task"),
        (plan, pair[0].parent, "task"),
        (based, pair[0] / "out", "base"),
    ):
        expected = f"{out}: would write into the checkpoint of {name}"
        assert refused_save(chosen, out, overwrite=True) == expected
    assert (pair[0] / "model.safetensors").is_file()


def test_an_output_that_a_sources_files_link_to_is_refused(plan, pair, tmp_path):
    blobs = tmp_path / "models--org--name" / "blobs"
    out = plan.save(blobs / "out")
    snapshot = shutil.copytree(pair[0], blobs.parent / "snapshots" / "commit")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../blobs/out/model.safetensors")
    linked = swap_of([snapshot, pair[1]])
    expected = f"{out}: would write into the checkpoint of task"
    assert refused_save(linked, out, overwrite=True) == expected


@pytest.mark.parametrize(
    ("need", "free", "said"),
    [
        (12, 0, "needs 12 bytes, only 0 bytes"),
        (5_040_000, 5_010_000, "needs 5,040,000 bytes, only 5,010,000 bytes"),
        (5 * 10**9, 4_900_000_000, "needs 5.0 GB, only 4.9 GB"),
    ],
)
def test_missing_space_is_reported_with_distinct_numbers(tmp_path, monkeypatch, need, free, said):
    usage = namedtuple("usage", "total used free")(10, 9, free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert refusal(check_space, tmp_path, need) == f"{tmp_path}: {said} are free"


def test_a_full_disk_is_refused_before_writing(plan, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")(10, 9, plan.nbytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert refused_save(plan, tmp_path / "out") == (
        f"{tmp_path}: needs {plan.nbytes:,} bytes, only {plan.nbytes - 1:,} bytes are free"
    )


# --- sources that change ---


CHANGED = "{}: changed since the merge was planned; plan it again"
CHANGES = [
    (lambda file: os.utime(file, ns=(1, 1)), CHANGED),
    (lambda file: file.unlink(), "{}: vanished (No such file or directory)"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_source_that_changes_before_the_merge_is_noticed(plan, pair, tmp_path, change, message):
    file = pair[1] / "model.safetensors"
    change(file)
    assert refused_save(plan, tmp_path / "out") == message.format(file)
    assert refusal(plan.load) == message.format(file)


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_source_that_changes_during_the_merge_is_noticed(plan, pair, tmp_path, change, message):
    file, logged = pair[1] / "model.safetensors", []

    def progress(count):
        if not logged:
            change(file)
        logged.append(count)

    out = tmp_path / "out"
    assert refused_save(plan, out, threads=1, progress=progress) == message.format(file)
    assert sum(logged) == plan.nbytes, "noticed only because the merge itself failed"


# --- sources that are no checkpoints ---


def test_an_unfinished_merge_is_no_source(pair, tmp_path):
    unfinished = pair[0].rename(pair[0].with_name("out.partial-host-1-abc"))
    expected = "task: {}: an unfinished merge; merge it again"
    assert refused_together((unfinished, pair[1])) == expected.format(unfinished)
    (tmp_path / "link").symlink_to(unfinished)
    result = refused_together((tmp_path / "link", pair[1]))
    assert result == expected.format(tmp_path / "link")
