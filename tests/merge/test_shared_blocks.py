"""Outputs that share blocks with their sources, on XFS and btrfs in loop files."""

import json
import os
import shutil
from collections import namedtuple
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from filesystems import mounted, shared_extents, used_bytes
from gguf_files import LAYERS, add_vocabulary, close, shapes, values_of
from merging import (
    copied,
    recipe_plan,
    refusal,
    same_tensors,
    save_expert,
    save_tokenizer,
    swap_of,
    tensors_of,
    tiny_llama,
    weight_bytes,
)
from processes import layerswap

import layerswap as ls
from layerswap.merge.layout import BLOCK, MOST_FILES, SMALLEST_RUN, spans

WIDE = {"hidden_size": 328, "intermediate_size": 1000, "vocab_size": 4000}
"""Tensors of 0.4 to 5 MB, of which none is a whole number of blocks."""
VERBATIM = {"bottom": 1, "top": 1, "outside": "language"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two experts of 31 MB, on a filesystem that need not share blocks."""
    root = tmp_path_factory.mktemp("models")
    return {
        name: save_tokenizer(save_expert(root / name, tiny_llama(**WIDE), seed))
        for seed, name in enumerate(("task", "language"))
    }


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request, models, tmp_path_factory):
    """A filesystem that shares blocks, with both experts."""
    with mounted(request.param, tmp_path_factory.mktemp(request.param), 400) as folder:
        for name, source in models.items():
            copied(source, folder / name)
        used_bytes(folder)
        yield folder


@pytest.fixture
def experts(disk):
    """The experts on that filesystem, which is left as it was."""
    before = set(disk.iterdir())
    yield {name: disk / name for name in ("task", "language")}
    for path in set(disk.iterdir()) - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    used_bytes(disk)  # btrfs frees blocks only once all is on the disk


def recorded(out):
    return json.loads((out / "layerswap.json").read_text())


def shares_nothing(out):
    return recorded(out)["layout"] == "plain" and "shared_bytes" not in recorded(out)


# --- the layout, on any filesystem ---


def shared(plan):
    return replace(plan, layout="shared")


MOVED = {
    "merge_method": "passthrough",
    "slices": [
        {"sources": [{"model": "task", "layer_range": [0, 3]}]},
        {"sources": [{"model": "language", "layer_range": [1, 4]}]},
    ],
}


@pytest.mark.parametrize(
    ("recipe", "max_shard_size"),
    [
        ({"swap": {"bottom": 1, "top": 1, "outside": "task"}}, "5GB"),
        ({"swap": {"bottom": 1, "top": 1}}, "5GB"),
        ({"swap": {"bottom": 1, "top": 1, "outside": "task"}}, "6MB"),
        ({"partition": {"name": "A"}}, "5GB"),
        ({"soup": {"experts": ["task", "language"]}}, "5GB"),
        ({"mergekit": MOVED}, "5GB"),
    ],
)
def test_every_tensor_is_in_one_file_at_its_sources_position(models, recipe, max_shard_size):
    sources = {name: str(folder) for name, folder in models.items()}
    plan = recipe_plan({"experts": sources, "max_shard_size": max_shard_size, **recipe})
    shards = shared(plan).shards
    placed = [tensor for shard in shards for tensor, _ in shard.tensors]
    assert sorted(t.name for t in placed) == sorted(t.name for t in plan.tensors)
    assert len(shards) <= MOST_FILES + plan.nbytes // 6_000_000 + 1
    for shard in shards:
        assert int.from_bytes(shard.header[:8], "little") == len(shard.header) - 8
        size = sum(tensor.nbytes for tensor, _ in shard.tensors)
        assert len(shard.tensors) == 1 or size <= (6e6 if max_shard_size == "6MB" else 5e9)
    agreeing = [span for shard in shards for span in spans(shard) if span.blocks]
    wanted = sum(tensor.nbytes for tensor in plan.tensors if tensor.verbatim)
    if wanted > SMALLEST_RUN:
        assert sum(span.blocks.nbytes for span in agreeing) > 0.95 * wanted
    for span in agreeing:
        assert span.blocks.offset % BLOCK == span.blocks.source_offset % BLOCK == 0
        assert span.blocks.nbytes % BLOCK == 0
    assert len(agreeing) < len(plan.tensors) / 2 or not wanted


def test_many_small_runs_open_no_file_each(models, monkeypatch):
    """Every second role from another expert: a run is half a layer, and no two need agree."""
    monkeypatch.setattr("layerswap.merge.layout.MOST_FILES", 3)
    plan = shared(ls.partition("A", **models))
    assert len(plan.shards) <= 4
    monkeypatch.setattr("layerswap.merge.layout.SMALLEST_RUN", 1 << 40)
    plan = ls.partition("A", **models)
    assert shared(plan).shards == plan.shards


def test_a_source_file_that_is_taken_whole_stays_a_file(models, tmp_path):
    """The Hub can copy it, because its bytes are the source's."""
    config = tiny_llama(**WIDE)
    pair = [
        save_tokenizer(save_expert(tmp_path / name, config, seed, shard="12MB"))
        for seed, name in enumerate(("task", "language"))
    ]
    plan = shared(swap_of(pair, bottom=1, top=0, outside="task"))
    out = tmp_path / "out"
    plan.write(out, ls.merge.target.MergeOptions())
    theirs, written = (
        {f.read_bytes() for f in folder.glob("*.safetensors")} for folder in (pair[0], out)
    )
    assert len(theirs) == 3
    assert len(theirs & written) == 2
    assert ls.verify(out).passed


def test_the_layout_is_read_and_verified_where_blocks_are_copied(models, tmp_path):
    """A folder with shared blocks may be copied, and its sources moved, to other filesystems."""
    plan = swap_of(models, bottom=1, top=1)
    target = tmp_path / "out"
    shared(plan).write(target, ls.merge.target.MergeOptions())
    assert recorded(target)["layout"] == "shared"
    assert same_tensors(*map(tensors_of, (target, plan.save(tmp_path / "plain", layout="plain"))))
    assert ls.verify(target, full=True).passed


# --- on filesystems that share ---


def test_a_swap_takes_no_disk(disk, experts, tmp_path):
    plan = swap_of(experts, **VERBATIM)
    before = used_bytes(disk)
    out = plan.save(disk / "out")
    new, record = used_bytes(disk) - before, recorded(out)
    assert new < 400_000
    assert record["layout"] == "shared"
    assert record["output_bytes"] == sum(f.stat().st_size for f in out.glob("*.safetensors"))
    assert record["shared_bytes"] > record["output_bytes"] - 200_000
    extents = sum(shared_extents(file) for file in out.glob("*.safetensors"))
    assert extents >= record["shared_bytes"]
    assert same_tensors(*map(tensors_of, (out, plan.save(tmp_path / "plain"))))
    assert shares_nothing(tmp_path / "plain")  # another filesystem
    assert ls.verify(out, full=True).passed
    again = plan.save(disk / "again")
    assert weight_bytes(again) == weight_bytes(out)


def test_transformers_and_our_reader_read_it(disk, experts):
    from transformers import AutoModelForCausalLM

    plan = swap_of(experts, **VERBATIM, max_shard_size="12MB")
    out = plan.save(disk / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out).state_dict()
    in_memory = plan.load().state_dict()
    assert same_tensors(loaded, in_memory)
    opened = ls.open_checkpoint(out)
    assert len({info.file for info in opened.tensors.values()}) > 2
    assert all(torch.equal(opened.read(name), in_memory[name]) for name in opened.tensors)


def test_what_is_computed_is_all_that_is_written(disk, experts, tmp_path):
    plan = swap_of(experts, bottom=1, top=1)
    computed = sum(tensor.nbytes for tensor in plan.tensors if not tensor.verbatim)
    before = used_bytes(disk)
    out = plan.save(disk / "out")
    assert computed < used_bytes(disk) - before < computed + 400_000
    assert same_tensors(*map(tensors_of, (out, plan.save(tmp_path / "plain"))))
    assert ls.verify(out, full=True).passed


def test_plain_is_the_same_on_every_filesystem(disk, experts, tmp_path):
    plan = swap_of(experts, **VERBATIM)
    out = plan.save(disk / "out", layout="plain")
    assert shares_nothing(out)
    assert weight_bytes(out) == weight_bytes(plan.save(tmp_path / "plain"))


def test_a_source_elsewhere_is_copied_and_the_other_shared(disk, experts, models):
    plan = swap_of((models["task"], experts["language"]), **VERBATIM)
    out = plan.save(disk / "out")
    from_language = sum(
        tensor.nbytes for tensor in plan.tensors if str(disk) in str(tensor.copied.file)
    )
    assert 0.95 * from_language < recorded(out)["shared_bytes"] < from_language
    assert ls.verify(out).passed


@pytest.mark.slow
def test_the_command_says_what_is_shared(disk, experts):
    def command(*words):
        zones = ("--bottom", 1, "--outside", "task")
        pair = ("--task", experts["task"], "--language", experts["language"])
        return layerswap(*words, *pair, *zones).stdout.splitlines()[-1]

    out = ["--out", str(disk / "out")]
    sizes = "100% copied bit for bit, 31.4 MB"
    assert command("plan").endswith(f"{sizes} to share where reflinks work (XFS, btrfs)")
    wrote = f"wrote {disk}/out (31.4 MB"
    assert command("merge", *out) == f"{wrote}, 31.4 MB of it shared with the experts)"
    assert command("merge", *out, "--overwrite", "--layout", "plain") == f"{wrote})"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["revert", "instruct"])
def test_other_merges_share_too(disk, experts, tmp_path, way):
    base = copied(experts["task"], disk / "base")
    if way == "revert":
        plan = ls.revert(base, experts["language"], layers=["0-1"])
    else:
        plan = ls.instruct(
            base=base, instruct=experts["task"], language=experts["language"],
            bottom=1, top=1, outside="language",
        )  # fmt: skip
    copies = sum(tensor.nbytes for tensor in plan.tensors if tensor.verbatim)
    before = used_bytes(disk)
    out = plan.save(disk / "out")
    assert used_bytes(disk) - before < plan.nbytes - copies + 400_000
    assert recorded(out)["shared_bytes"] > 0.98 * copies > 15_000_000
    assert same_tensors(*map(tensors_of, (out, plan.save(tmp_path / "plain"))))
    assert ls.verify(out, full=True).passed


def test_the_space_check_asks_for_what_is_written(disk, experts, monkeypatch):
    plan = swap_of(experts, **VERBATIM)
    usage = namedtuple("usage", "total used free")(10, 9, 400_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    plan.save(disk / "out")
    assert "only 400.0 kB are free" in refusal(plan.save, disk / "two", layout="plain")
    assert "only 400.0 kB are free" in refusal(swap_of(experts).save, disk / "two")


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(disk, experts, monkeypatch):
    with (disk / "full").open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    usage = namedtuple("usage", "total used free")(10, 0, 10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    message = refusal(swap_of(experts, bottom=1).save, disk / "out")
    assert "No space left on device" in message
    assert sorted(path.name for path in disk.iterdir()) == ["full", "language", "task"]


def test_a_source_that_changes_later_does_not_change_the_output(disk, experts, tmp_path):
    task = copied(experts["task"], disk / "changing")
    plan = swap_of((task, experts["language"]), **VERBATIM)
    before = weight_bytes(plan.save(disk / "out"))
    with (task / "model.safetensors").open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(size // 2)
        file.write(bytes(size // 4))
    assert weight_bytes(disk / "out") == before


def test_a_source_that_changes_meanwhile_stops_the_merge(disk, experts):
    task = copied(experts["task"], disk / "changing")
    plan = swap_of((task, experts["language"]), **VERBATIM)

    def change(count):
        with (task / "model.safetensors").open("r+b") as file:
            file.seek(-1000, os.SEEK_END)
            file.write(bytes(1000))

    message = refusal(plan.save, disk / "out", progress=change)
    assert message.endswith("changed since the merge was planned; plan it again")
    assert not (disk / "out").exists()
    assert not list(disk.glob("*.partial-*"))


@pytest.mark.slow
def test_gguf_shares_what_lies_at_the_same_position(disk, experts, tmp_path):
    from gguf import GGUFWriter

    def save(path, seed, alignment):
        writer = GGUFWriter(str(path), "llama")
        writer.add_custom_alignment(alignment)
        writer.add_block_count(LAYERS)
        add_vocabulary(writer, ["a", "b"])
        for name, shape in shapes().items():
            writer.add_tensor(name, values_of(seed, (2 * shape[0], *shape[1:])))
        close(writer)
        return path

    for alignment in (BLOCK, 32):
        pair = [save(disk / f"{seed}-{alignment}.gguf", seed, alignment) for seed in (1, 2)]
        plan = swap_of(pair, bottom=1, top=1, outside="task")
        out, plain = disk / f"out-{alignment}.gguf", tmp_path / f"{alignment}.gguf"
        plan.save(out)
        assert out.read_bytes() == plan.save(plain).read_bytes()
        assert (shared_extents(out) > 0.5 * plan.nbytes) is (alignment == BLOCK)
        assert ls.verify(out, full=True).passed


# --- on filesystems that do not ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["xfs without reflinks", "ext4"])
def test_without_reflinks_the_layout_is_plain(models, tmp_path, kind):
    with mounted(kind, tmp_path / "disk", 400) as disk:
        pair = {name: copied(source, disk / name) for name, source in models.items()}
        plan = swap_of(pair, **VERBATIM)
        out = plan.save(disk / "out")
        assert shares_nothing(out)
        assert weight_bytes(out) == weight_bytes(plan.save(tmp_path / "plain", layout="plain"))


def test_sources_on_another_filesystem_of_the_same_kind(disk, experts, tmp_path):
    with mounted("xfs", tmp_path / "other", 400) as other:
        out = swap_of(experts, **VERBATIM).save(other / "out")
        assert shares_nothing(out)
        assert ls.verify(out).passed
