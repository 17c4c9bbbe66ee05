"""Uploads to a local Hub through the real client."""

from __future__ import annotations

import os
import subprocess

import pytest
from hub_server import Hub, running_hub
from processes import layerswap

from layerswap.checkpoint.hub import check_hub_id
from layerswap.ground.errors import MergeError
from layerswap.merge.metadata import for_upload

SHARDS = ("--max-shard-size", "20KB")


def sent(hub: Hub) -> list[str]:
    """The large files that were sent, by SHA-256, in order."""
    return [line.rpartition("/")[2] for line in hub.requests if line.startswith("PUT ")]


def uploaded(out) -> dict[str, bytes]:
    """The files of a folder as they are uploaded: the record names folders by their last part."""
    stored = {f.name: f.read_bytes() for f in out.iterdir()}
    return stored | {name: text.encode() for name, text in for_upload(out).items()}


def push(hub: Hub, experts, out, *more: str) -> subprocess.CompletedProcess[str]:
    words = [
        "merge", "--task", experts["task"], "--language", experts["language"], "--out", out,
        "--push", "me/merged", *more,
    ]  # fmt: skip
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith("HF_")},
        "HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_test", "HF_HOME": str(out.parent / "home"),
        "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1",
    }  # fmt: skip
    return layerswap(*words, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("public", [False, True])
def test_a_merge_is_uploaded_private_unless_asked(experts, tmp_path, public):
    with running_hub() as hub:
        done = push(hub, experts, tmp_path / "out", *(["--public"] if public else []))
    assert done.returncode == 0, done.stderr
    assert "uploaded to http://127.0.0.1" in done.stdout
    asked = hub.created[0]  # older clients say `private`, newer ones `visibility`
    assert (asked.get("private") or asked.get("visibility") == "private") is not public
    assert hub.created[0]["name"] == "merged"
    assert hub.files == uploaded(tmp_path / "out")
    assert not [name for name, content in hub.files.items() if str(tmp_path).encode() in content]


@pytest.mark.slow
def test_a_refused_upload_leaves_the_folder_whole(experts, tmp_path):
    with running_hub() as hub:
        hub.refuse = True
        done = push(hub, experts, tmp_path / "out")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: me/merged: the upload failed (HfHubHTTPError: ")
    assert line.endswith(
        f"{tmp_path}/out is complete and me/merged unchanged; run the command again with "
        "--overwrite to resume the upload"
    )
    assert (tmp_path / "out" / "layerswap.json").is_file()


@pytest.mark.slow
def test_an_interrupted_upload_shows_nothing_and_resumes(experts, tmp_path):
    out = tmp_path / "out"
    with running_hub() as hub:
        hub.large, hub.accepted = True, 2
        hub.files = {"README.md": b"another model", "model.safetensors": b"its weights"}
        before = dict(hub.files)
        done = push(hub, experts, out, *SHARDS)
        assert done.returncode == 2
        assert "me/merged unchanged" in done.stderr
        assert hub.files == before
        assert hub.commits == []
        arrived = set(hub.objects)
        assert len(arrived) == 2
        hub.accepted = 10**9
        hub.requests.clear()
        done = push(hub, experts, out, *SHARDS, "--overwrite")
    assert done.returncode == 0, done.stderr
    stored = uploaded(out)
    assert len(stored) > 8
    assert hub.commits == [set(stored)]  # one commit, without the other model's weights
    assert hub.files == stored
    weights = {f.name for f in out.glob("*.safetensors")}
    assert len(sent(hub)) == len(weights) - 2
    assert not arrived & set(sent(hub))


def test_a_wrong_name_is_refused_before_anything_is_written(experts, tmp_path):
    for name in ("merged", "a/b/c", "../x", ""):
        with pytest.raises(MergeError, match="is not a Hub id like 'owner/name'"):
            check_hub_id(name)
