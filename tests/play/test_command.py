"""`layerswap play` as a process, and its mistakes."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from processes import layerswap


@contextmanager
def running(folder, *arguments):
    """A server, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "layerswap", *arguments], cwd=folder, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=90)


@pytest.mark.slow
@pytest.mark.parametrize("leaves", [False, True], ids=["Ctrl-C", "the client leaves"])
def test_half_a_body_leaves_no_traceback(tmp_path, leaves):
    with running(tmp_path, "play", "--no-browser") as (process, url):
        host, _, port = url[7:-1].partition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                f"POST /api/ask HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 99\r\n"
                "Content-Type: application/json\r\n\r\n{".encode()
            )
            time.sleep(1)
            if not leaves:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=30)
        time.sleep(1)
    assert process.stderr.read().splitlines() == ["Ctrl-C stops the page", "stopped"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--prompts", "none.jsonl"), "none.jsonl: cannot be read (No such file or directory)"),
        (("--task-expert", "./nope", "--language-expert", "./no"), "nope"),
        (("--target-language", "elvish"), "no target language 'elvish' in the lab"),
    ],
)
def test_what_is_wrong_is_one_line_before_anything_is_served(tmp_path, arguments, line):
    done = layerswap("play", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
