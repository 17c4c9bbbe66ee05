"""The same inputs give the same bytes, for any threads, chunks and copy calls."""

import errno
import json
import os

import pytest
from merging import change_config, copied, recipe_plan, swap_of, weight_bytes

import layerswap as ls
from layerswap.compose.recipe import parse_recipe
from layerswap.ground.errors import CheckpointError
from layerswap.merge import writer as engine


def make(experts, **settings):
    zones = {"bottom": 1, "top": 1, "bottom_transition": 1, "max_shard_size": "20KB"}
    return swap_of(experts, weights={"task": 0.3, "language": 0.7}, **zones, **settings)


@pytest.fixture(scope="module")
def expected(experts, tmp_path_factory):
    result = weight_bytes(make(experts).save(tmp_path_factory.mktemp("bytes") / "out", threads=1))
    assert len(result) > 3
    return result


@pytest.mark.parametrize(("size", "threads"), [(8, 2), (40, 7), (1000, None)])
def test_threads_chunks_and_spans(experts, tmp_path, expected, monkeypatch, size, threads):
    monkeypatch.setattr(engine, "CHUNK_BYTES", size)
    monkeypatch.setattr(engine, "PIECE_BYTES", 3 * size)
    monkeypatch.setattr(engine, "SPAN_BYTES", size + 3)
    assert weight_bytes(make(experts).save(tmp_path / "out", threads=threads)) == expected


@pytest.mark.parametrize(
    "code",
    [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EACCES],
)
def test_without_copies_in_the_kernel(experts, tmp_path, expected, monkeypatch, code):
    calls = []

    def fail(*_):
        calls.append(1)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "copy_file_range", fail)
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(engine, "PIECE_BYTES", 3 * 1000)
    assert weight_bytes(make(experts).save(tmp_path / "out")) == expected
    assert calls


@pytest.mark.parametrize("answer", ["short", "nothing", "nothing at first", "fails half way"])
def test_copies_in_the_kernel_that_do_less(experts, tmp_path, expected, monkeypatch, answer):
    real, calls = os.copy_file_range, []

    def partly(source, output, count, start, offset):
        calls.append(count)
        if answer == "nothing" or (answer == "nothing at first" and len(calls) % 2):
            return 0
        if answer == "fails half way" and len(calls) % 2 == 0:
            raise OSError(errno.EXDEV, "")
        return real(source, output, min(count, 701), start, offset)

    monkeypatch.setattr(os, "copy_file_range", partly)
    monkeypatch.setattr(engine, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(engine, "PIECE_BYTES", 3 * 1000)
    assert weight_bytes(make(experts).save(tmp_path / "out", threads=1)) == expected
    assert len(calls) > 10


def test_short_writes(experts, tmp_path, expected, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, memoryview(data)[:333], at))
    assert weight_bytes(make(experts).save(tmp_path / "out")) == expected


def test_a_copy_past_the_end_of_the_source_raises(tmp_path):
    (tmp_path / "source").write_bytes(b"12345")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "out").open("wb") as out:
        piece = engine.Span(tmp_path / "source", 2, 0, 4)
        with pytest.raises(CheckpointError) as caught:
            engine.copy_span(source.fileno(), out.fileno(), piece)
    assert str(caught.value) == f"{tmp_path}/source: ended while it was being read"


@pytest.mark.parametrize("order", [("task", "language", "third"), ("third", "language", "task")])
def test_the_order_of_the_experts_in_the_recipe(experts, tmp_path, order):
    marked = {
        name: change_config(copied(experts[name], tmp_path / name), eos_token_id=len(name))
        for name in order
    }
    lines = "\n".join(f"  {name}: {marked[name]}" for name in order)
    text = f"experts:\n{lines}\nswap: {{bottom: 1, top: 1}}\nmax_shard_size: 20KB\nplaces:\n"
    text += "- {layers: 2, take: [third, task, language]}\n"
    out = ls.make_plan(parse_recipe(text)).save(tmp_path / "out")
    plan = recipe_plan(
        experts={name: experts[name] for name in sorted(order)}, swap={"bottom": 1, "top": 1},
        max_shard_size="20KB", places=[{"layers": 2, "take": ["language", "task", "third"]}],
    )  # fmt: skip
    other = plan.save(tmp_path / "other")
    assert weight_bytes(out) == weight_bytes(other)
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == len("task")


def test_the_order_of_bytes_in_a_source_is_followed_not_required(experts, tmp_path):
    from merging import tensors_of
    from safetensors.torch import save_file

    other = copied(experts["language"], tmp_path / "other")
    tensors = tensors_of(other)
    half = sorted(tensors)[: len(tensors) // 2]
    (other / "model.safetensors").unlink()
    parts = {"z.safetensors": half, "a.safetensors": [n for n in tensors if n not in half]}
    for file, names in parts.items():
        save_file({name: tensors[name] for name in names}, other / file, {"format": "pt"})
    index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
    (other / "model.safetensors.index.json").write_text(json.dumps(index))
    one = ls.swap(task=experts["task"], language=other).save(tmp_path / "one")
    two = swap_of(experts).save(tmp_path / "two")
    assert weight_bytes(one) == weight_bytes(two)
