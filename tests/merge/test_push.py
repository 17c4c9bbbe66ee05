"""Uploads to a local Hub through the real client."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hub_server import Hub, running_hub

from layerswap.checkpoint.remote import check_hub_id
from layerswap.errors import MergeError


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
    return subprocess.run(
        [sys.executable, "-m", "layerswap", *map(str, words)],
        check=False, capture_output=True, text=True, env=environment,
    )  # fmt: skip


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
    stored = {f.name: f.read_bytes() for f in (tmp_path / "out").iterdir()}
    assert hub.files == stored


@pytest.mark.slow
def test_a_refused_upload_leaves_the_folder_whole(experts, tmp_path):
    with running_hub() as hub:
        hub.refuse = True
        done = push(hub, experts, tmp_path / "out")
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: me/merged: the upload failed (HfHubHTTPError: ")
    assert line.endswith(f"upload it with `hf upload me/merged {tmp_path}/out`")
    assert (tmp_path / "out" / "layerswap.json").is_file()


def test_a_wrong_name_is_refused_before_anything_is_written(experts, tmp_path):
    for name in ("merged", "a/b/c", "../x", ""):
        with pytest.raises(MergeError, match="is not a Hub id like 'owner/name'"):
            check_hub_id(name)
