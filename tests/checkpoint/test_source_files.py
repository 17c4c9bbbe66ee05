"""Files of sources that never end, lead elsewhere, or are too large."""

import os
import time

import pytest
from handmade import EMBEDDING, NORM, QUERY, framed, write_config, write_index, write_weights
from refusals import refused

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.header import MAX_TENSORS, read_header
from layerswap.checkpoint.hub import BESIDE_WEIGHTS
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import MAX_JSON_BYTES, read_source

SECRET = "the key of the house"
BESIDE = [name for name in BESIDE_WEIGHTS if name != "model.safetensors.index.json"]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint, beside a file that is no part of it."""
    (tmp_path / "secret").write_text(SECRET)
    folder = tmp_path / "model"
    folder.mkdir()
    write_weights(folder / "model.safetensors", EMBEDDING, QUERY, NORM)
    write_config(folder)
    return folder


def refusal(folder):
    return refused(CheckpointError, open_checkpoint, str(folder))


@pytest.mark.parametrize("name", [*BESIDE, "model.safetensors"])
def test_a_link_that_leads_out_of_a_source_is_refused(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    assert refusal(folder) == (
        f"{folder / name}: links to {folder.parent / 'secret'}, outside its folder; replace "
        "the link by a copy"
    )


def test_a_link_over_other_links_is_followed_to_its_end(folder):
    (folder / "by").symlink_to("..")
    (folder / "vocab.txt").symlink_to("by/secret")
    assert "outside its folder" in refusal(folder)
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to("by/model/config.json")
    assert open_checkpoint(str(folder)).layers == 1


@pytest.mark.parametrize("blobs", ["models--a--b/blobs/abc", "blobs/ab/abc"])
def test_links_of_the_hubs_cache(folder, tmp_path, blobs):
    """The blobs of a repository, and those that several share."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    folder.rename(snapshot)
    blob = tmp_path / blobs
    blob.parent.mkdir(parents=True)
    (snapshot / "config.json").rename(blob)
    (snapshot / "config.json").symlink_to(os.path.relpath(blob, snapshot))
    assert open_checkpoint(str(snapshot)).layers == 1
    (snapshot / "1_Pooling").mkdir()
    inner = snapshot / "1_Pooling" / "config.json"
    inner.symlink_to(os.path.relpath(blob, inner.parent))
    assert read_source(inner) == blob.read_bytes()
    (snapshot / "vocab.txt").symlink_to("../../../secret")
    assert "outside its folder" in refusal(snapshot)


@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_file_that_never_ends_is_not_read(folder, name, kind):
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    message = refusal(folder)
    missing = f"{folder}: no config.json; not a Hugging Face checkpoint"
    assert message in (f"{folder / name}: not a regular file", missing)


def test_a_file_beside_the_weights_is_bounded(folder):
    with (folder / "vocab.txt").open("wb") as file:
        file.truncate(MAX_JSON_BYTES + 1)
    assert refusal(folder) == f"{folder}/vocab.txt: larger than {MAX_JSON_BYTES} bytes"


def many_tensors(count, first=0):
    entry = '"{}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'
    return framed(f"{{{','.join(entry.format(first + i) for i in range(count))}}}".encode())


def test_a_header_of_a_million_tensors_is_refused_before_it_is_parsed(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(many_tensors(1_000_000))
    start = time.process_time()
    message = refused(CheckpointError, read_header, path)
    assert time.process_time() - start < 5  # parsing and checking it takes a minute
    assert message == f"{path}: holds more than 200,000 tensors"
    path.write_bytes(many_tensors(MAX_TENSORS // 100))
    assert len(read_header(path)) == MAX_TENSORS // 100


def test_shards_with_tensors_that_the_index_lacks_are_refused_one_by_one(folder):
    """No headers are collected that are far larger than the index."""
    (folder / "model.safetensors").unlink()
    names = [f"model-{i}.safetensors" for i in range(3)]
    for i, name in enumerate(names):
        (folder / name).write_bytes(many_tensors(10, 10 * i) if i < 2 else b"not read")
    write_index(folder, {str(10 * i): name for i, name in enumerate(names)})
    holds = f"{folder}/{names[0]}: holds '1', which model.safetensors.index.json lacks"
    assert refusal(folder) == holds


@pytest.mark.slow
def test_an_index_of_too_many_tensors_is_refused(folder):
    (folder / "model.safetensors").unlink()
    write_index(folder, {str(i): "model.safetensors" for i in range(500_001)})
    assert refusal(folder).endswith("index.json: lists more than 500,000 tensors")
