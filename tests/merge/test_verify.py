"""Findings of `verify` in outputs that differ from their records, and in those that do not."""

import json
import math
import os
from contextlib import contextmanager

import pytest
import torch
from merging import (
    change_tensors,
    copied,
    recipe_plan,
    refusal,
    save_adapter,
    save_expert,
    save_tokenizer,
    swap_of,
    tensors_of,
    tiny_llama,
)

import layerswap as ls
from layerswap.checkpoint import read_header
from layerswap.ground.errors import LayerswapError
from layerswap.merge import compare
from layerswap.merge.metadata import record

UP = "model.layers.{}.mlp.up_proj.weight"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def magnitude_swap(experts, bottom):
    settings = {"weights": "magnitude", "max_shard_size": "20KB"}
    return swap_of(experts, base=experts["base"], bottom=bottom, top=1, **settings)


@pytest.fixture(scope="module")
def whole(experts, tmp_path_factory):
    """A swap of five shards; never to be changed."""
    plan = magnitude_swap(experts, bottom=1)
    out = plan.save(tmp_path_factory.mktemp("verify") / "out")
    assert len(list(out.glob("*.safetensors"))) > 3
    return out


@pytest.fixture
def out(whole, tmp_path):
    """A copy of it, to spoil."""
    return copied(whole, tmp_path / "out")


def findings(folder, **settings):
    report = ls.verify(folder, **settings)
    assert report.passed == (not report.findings and not report.unverified)
    return report.findings


def shard_of(folder, name):
    return next(f for f in sorted(folder.glob("*.safetensors")) if name in read_header(f))


def flip(folder, name, at=0):
    """Flip one bit of a stored tensor."""
    file = shard_of(folder, name)
    with file.open("r+b") as handle:
        handle.seek(read_header(file)[name].offset + at)
        byte = handle.read(1)[0]
        handle.seek(-1, os.SEEK_CUR)
        handle.write(bytes([byte ^ 1]))
    return file


def edit(folder, change, file="layerswap.json"):
    data = json.loads((folder / file).read_text())
    change(data)
    (folder / file).write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n")


def test_an_untouched_output_is_verified(whole):
    report = ls.verify(whole, full=True)
    assert report.passed
    assert report.notes == []
    sizes = {name: t.numel() * t.element_size() for name, t in tensors_of(whole).items()}
    blended = {NORM, HEAD, "model.embed_tokens.weight"}
    assert report.computed.tensors == 3
    assert report.computed.compared == report.computed.nbytes == sum(sizes[n] for n in blended)
    assert report.verbatim.tensors == len(sizes) - 3
    assert report.verbatim.compared == sum(sizes.values()) - report.computed.nbytes


def test_magnitude_weights_are_only_measured_in_full(whole, out):
    note = "magnitude weights are taken from the record; --full measures them"
    assert ls.verify(whole).notes == [note]
    weights = json.loads((out / "layerswap.json").read_text())["magnitude_weights"]
    weights = {name: weight * (1 + 1e-6) for name, weight in weights.items()}
    edit(out, lambda record: record.update(magnitude_weights=weights))
    expected = f"{out}/layerswap.json: magnitude_weights differ from the sources'"
    assert expected in findings(out, full=True)


def test_one_wrong_bit_for_any_threads_and_chunks(out, monkeypatch):
    file, other = flip(out, UP.format(2), at=1234), flip(out, HEAD, at=4799)
    copied_wrong = (
        f"{file}: tensor {UP.format(2)!r} differs from its source, from byte 1234 of 3840 on"
    )
    blended = (
        f"{other}: tensor {HEAD!r} differs from the recipe's result, from byte 4799 of 4800 on"
    )
    assert sorted(findings(out, full=True, threads=1)) == sorted([copied_wrong, blended])
    monkeypatch.setattr(compare, "PIECE_BYTES", 700)
    assert sorted(findings(out, full=True, threads=5)) == sorted([copied_wrong, blended])


@pytest.mark.slow
def test_a_sample_finds_one_bit_as_often_as_it_says(out, monkeypatch):
    monkeypatch.setattr(compare, "BLOCK_BYTES", 100)
    flip(out, HEAD, at=2000)
    share, trials = 0.25, 60
    result = sum(bool(findings(out, share=share, seed=seed)) for seed in range(trials))
    room = 4 * math.sqrt(share * (1 - share) * trials)
    assert abs(result - share * trials) < room
    assert findings(out, full=True)


def test_a_sample_is_at_least_its_share_and_the_same_twice(whole, monkeypatch):
    monkeypatch.setattr(compare, "BLOCK_BYTES", 100)
    one, two = (ls.verify(whole, share=0.3, seed=1).to_dict() for _ in range(2))
    assert one == two
    counted = one["computed"]
    assert 0.3 <= counted["compared_bytes"] / counted["bytes"] < 0.35
    smallest = ls.verify(whole, share=1e-9).computed
    assert smallest.compared == 100 + 100 + 96  # one block of each tensor


def test_names_that_changed_places_in_a_header(out):
    name, other = (f"model.layers.2.self_attn.{letter}_proj.weight" for letter in "kv")
    file = shard_of(out, name)
    assert other in read_header(file)
    data = file.read_bytes()
    swapped = data.replace(name.encode(), b"X").replace(other.encode(), name.encode(), 1)
    swapped = swapped.replace(b"X", other.encode(), 1)
    file.write_bytes(swapped)
    result = findings(out)
    assert f"{file}: the header is not the one that the merge writes" in result
    assert len(result) == 3


def test_a_truncated_shard(out):
    file = shard_of(out, UP.format(2))
    os.truncate(file, file.stat().st_size - 1)
    (result,) = findings(out)
    assert result.startswith(f"{file}: tensor ")
    assert result.endswith("; the file is cut short")


def test_files_that_the_merge_does_not_write(out):
    for name in ("pytorch_model.bin", "modeling_odd.py", "model-00009-of-00009.safetensors"):
        (out / name).write_bytes(b"")
    (out / "checkpoint-5").mkdir()
    (out / ".gitattributes").write_text("what the Hub adds")
    names = ["checkpoint-5", "model-00009-of-00009.safetensors", "modeling_odd.py"]
    expected = [f"{out}/{name}: not a file that the merge writes" for name in names]
    assert findings(out) == [
        *expected,
        f"{out}/pytorch_model.bin: not a file that the merge writes",
    ]


def test_other_tensors(experts, tmp_path):
    out = swap_of(experts).save(tmp_path / "out")
    changes = {"model.layers.9.extra": torch.ones(2), NORM: None}
    change_tensors(out, {**changes, HEAD: tensors_of(out)[HEAD].bfloat16()})
    file = out / "model.safetensors"
    assert findings(out) == [
        f"{file}: holds 'model.layers.9.extra', which the merge does not write there",
        f"{file}: lacks {NORM!r}, which the merge writes there",
        f"{file}: {HEAD!r}: BF16 [50, 24]; the merge writes F32 [50, 24]",
    ]


def test_documents(out):
    changed = ["config.json", "tokenizer.json", "model.safetensors.index.json"]
    for file in changed:
        edit(out, lambda data: data.update(odd=1), file)
    missing = ["generation_config.json", "model-00002-of-00005.safetensors"]
    for file in missing:
        (out / file).unlink()
    wrong = [f"{out}/{file}: not as the merge writes it" for file in changed]
    wrong += [f"{out}/{file}: is missing" for file in missing]
    assert sorted(findings(out)) == sorted(wrong)


def test_a_configuration_may_have_another_layout_but_no_value_of_another_type(out):
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert findings(out) == []
    for key, value in (("num_hidden_layers", 4.0), ("use_cache", 1)):
        config = json.loads(path.read_text())
        assert config[key] == value  # as Python sees it
        path.write_text(json.dumps({**config, key: value}))
        assert findings(out) == [f"{path}: not as the merge writes it"]
        path.write_text(json.dumps(config))


def test_the_user_may_rewrite_the_card(out):
    (out / "README.md").write_text("# Swahili mathematician")
    assert findings(out) == []


# --- the record ---


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["recipe"]["swap"].update(bottom=2), "the composition differs from the recipe"),
        (lambda r: r["recipe"].update(dtype=None), "the recipe differs from the merge's"),
        (lambda r: r.update(note="mine"), "'note' is not a key that the merge writes"),
        (lambda r: r["sources"].update(math=r["sources"].pop("task")), "the merge has no source"),
    ],
)
def test_an_edited_record(out, change, expected):
    edit(out, change)
    result = findings(out)
    assert any(line.startswith(f"{out}/layerswap.json: {expected}") for line in result)
    assert all("\n" not in line for line in result)


def test_a_record_whose_recipe_and_composition_were_edited_alike(experts, out):
    other = magnitude_swap(experts, bottom=2)
    (out / "layerswap.json").write_text(json.dumps(record(other)))
    result = findings(out)
    assert len(result) == 9
    assert all("model.layers.1." in line for line in result)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "{out}/layerswap.json: has no recipe"),
        ('{"recipe": {"a": 1, "a": 1}}', "{out}/layerswap.json: key 'a' is given twice"),
    ],
)
def test_without_a_record_there_is_nothing_to_verify(out, content, message):
    (out / "layerswap.json").write_text(content)
    assert refusal(ls.verify, out) == message.format(out=out)


def test_an_unfinished_merge(out):
    partial = out.rename(out.with_name("out.partial-host-1-ab"))
    with pytest.raises(LayerswapError, match=r"an unfinished merge; merge it again$"):
        ls.verify(partial)


def test_another_version_is_noted(out):
    edit(out, lambda record: record.update(layerswap_version="0.0.1", odd=1))
    report = ls.verify(out)
    assert report.passed
    assert report.notes[0] == f"written by layerswap 0.0.1; this is {ls.__version__}"


# --- sources ---


@pytest.fixture
def movable(experts, tmp_path):
    """An output whose sources are copies that can be moved and spoilt."""
    root = tmp_path / "sources"
    pair = {name: copied(experts[name], root / name) for name in ("task", "language")}
    plan = ls.swap(**pair, bottom=1, top=1, max_shard_size="20KB")
    return plan.save(tmp_path / "out"), pair


def test_a_changed_source(movable):
    out, pair = movable
    change_tensors(pair["language"], {UP.format(0): torch.zeros(40, 24)})
    result = findings(out)
    assert result[0] == "language: model.safetensors changed since the merge"
    assert any(UP.format(0) in line for line in result[1:])


def test_files_of_a_source_that_came_and_went(movable):
    out, pair = movable
    file = pair["language"] / "model.safetensors"
    shard = file.rename(file.with_name("model-00001-of-00001.safetensors"))
    index = {"metadata": {}, "weight_map": dict.fromkeys(read_header(shard), shard.name)}
    file.with_name("model.safetensors.index.json").write_text(json.dumps(index))
    assert findings(out)[:2] == [
        f"language: {shard.name} came after the merge",
        "language: model.safetensors is gone since the merge",
    ]


# --- all kinds of merges ---


@pytest.fixture(scope="module")
def adapters(experts, tmp_path_factory):
    settings = {"lora_alpha": 8, "target_modules": ["q_proj", "up_proj"]}
    root = tmp_path_factory.mktemp("adapters")
    pair = zip(("task", "language"), (2, 3), strict=True)
    return {n: save_adapter(root / n, experts["base"], r, r=r, **settings) for n, r in pair}


def test_a_merged_adapter(adapters, tmp_path):
    plan = recipe_plan(experts=adapters, soup={"experts": [*adapters]}, rank=2)
    out = plan.save(tmp_path / "out")
    report = ls.verify(out)
    assert report.passed
    assert report.computed.tensors == 16
    data = bytearray((out / "adapter_model.safetensors").read_bytes())
    data[-1] ^= 1
    (out / "adapter_model.safetensors").write_bytes(data)
    (out / "stray").touch()
    assert findings(out) == [
        f"{out}/adapter_model.safetensors: not as the merge writes it",
        f"{out}/stray: not a file that the merge writes",
    ]


def test_vocabularies_that_were_aligned(tmp_path):
    pair = {}
    for seed, (name, words) in enumerate({"task": "a b c", "language": "c b e f"}.items()):
        folder = save_expert(tmp_path / name, tiny_llama(vocab_size=8), seed)
        pair[name] = save_tokenizer(folder, words)
    plan = recipe_plan(experts=pair, swap={"bottom": 1, "top": 1}, tokenizer="union")
    out = plan.save(tmp_path / "out")
    assert ls.verify(out, full=True).passed
    file = flip(out, HEAD)
    assert [line.split(":")[0] for line in findings(out, full=True)] == [str(file)]
    edit(out, lambda data: data.update(added_tokens=[]), "tokenizer.json")
    assert f"{out}/tokenizer.json: not as the merge writes it" in findings(out)


def test_progress_adds_up(out):
    logged = {}

    @contextmanager
    def bars(label, total, unit):
        assert unit == "bytes"
        done = []
        yield done.append
        logged[label] = (total, sum(done))

    report = ls.verify(out, progress=bars)
    assert set(logged) == {"verifying"}
    assert all(total == done > 0 for total, done in logged.values())
    assert logged["verifying"][0] == report.verbatim.compared + report.computed.compared
