"""`layerswap play` as a process: its address, its token, and the image's instructions."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
IMAGE = (ROOT / "Dockerfile.play").read_text("utf-8")


@contextmanager
def running(folder, *arguments, **environment):
    """A server, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "layerswap", *arguments], cwd=folder, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment}, stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=90)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.slow
def test_the_instructions_of_the_image_serve_the_lab_with_a_token(tmp_path):
    command, *arguments = json.loads(re.search(r"^CMD (.*)$", IMAGE, re.MULTILINE)[1])
    assert command == "layerswap"
    port = free_port()
    arguments[arguments.index("7860")] = port
    with running(tmp_path, *arguments, LAYERSWAP_TOKEN="secret") as (process, url):
        assert url == f"http://0.0.0.0:{port}/?token=secret"
        here = f"http://127.0.0.1:{port}/"
        with httpx.Client(transport=httpx.HTTPTransport(retries=5)) as client:
            assert client.get(here).status_code == 403
            page = client.get(f"{here}?token=secret", follow_redirects=True)
        assert (page.status_code, "layerswap <em>play</em>" in page.text) == (200, True)
    assert process.returncode in (0, 130)


def test_the_image_copies_what_the_build_needs():
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", IMAGE, re.MULTILINE)).split()
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt", "src"} == {*copied}
    assert all((ROOT / name).exists() for name in copied)
    assert re.findall(r"^USER (\S+)$", IMAGE, re.MULTILINE)[-1] != "root"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--documents", "none.jsonl"), "none.jsonl: cannot be read (No such file or directory)"),
        (("--suite", "mgsm"), "--suite needs --target-language"),
        (("--task-expert", "./nope", "--language-expert", "./no"), "nope"),
        (("--target-language", "elvish"), "no target language 'elvish' in the lab"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_served(tmp_path, arguments, line):
    done = subprocess.run(
        [sys.executable, "-m", "layerswap", "play", *arguments], cwd=tmp_path, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
