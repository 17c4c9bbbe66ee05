"""Commits outputs in a process that tests can kill.

    python committer.py steps FOLDER FALLBACK   kills a fork at every line that a commit runs
    python committer.py fresh FOLDER 0          the same, where there is no old output

FALLBACK is 1 to commit as on a system that cannot exchange two folders in one step.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from layerswap.ground import commit, system

MARKER = "layerswap.json"
PARTS = 4


def write_output(folder: Path, version: int, size: int = 20_000) -> None:
    """An output whose every file holds its version, with the marker last."""
    (folder / "shards").mkdir()
    for part in range(PARTS):
        (folder / "shards" / f"{part}").write_bytes(f"{version:08}".encode() * size)
    (folder / MARKER).write_text(str(version))


def whole_version(folder: Path, size: int = 20_000) -> int:
    """The version of an output; asserts that it is neither a mixture nor unfinished."""
    version = int((folder / MARKER).read_text())
    assert sorted(path.name for path in folder.iterdir()) == [MARKER, "shards"]
    parts = sorted((folder / "shards").iterdir())
    assert [path.name for path in parts] == [str(part) for part in range(PARTS)]
    for path in parts:
        assert path.read_bytes() == f"{version:08}".encode() * size, path
    return version


def commit_version(target: Path, version: int, *, size: int = 20_000):
    with commit.atomic_folder(target, marker=MARKER, overwrite=True) as folder:
        write_output(folder, version, size)


def check_after_kill(target: Path, size: int = 20_000) -> str:
    """Check the leftover of a killed commit; return "old or new", "set aside" or "nothing"."""
    others = [path for path in target.parent.iterdir() if path != target]
    partial, replaced = f"{target.name}{commit.PARTIAL}", f"{target.name}{commit.REPLACED}"
    assert all(path.name.startswith((partial, replaced)) for path in others), others
    if target.exists():
        whole_version(target, size)
        return "old or new"
    aside = [path for path in others if path.name.startswith(replaced)]
    assert len(aside) <= 1, others
    for path in aside:
        whole_version(path, size)
    return "set aside" if aside else "nothing"


def kill_at_line(count: int) -> None:
    """From here on, kill this process at the `count`-th line of the commit or of `shutil`."""
    watched, left = {commit.__file__, system.__file__, shutil.__file__, __file__}, count

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename not in watched:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


def steps(parent: Path, *, fresh: bool) -> None:
    system.os.fsync = lambda _: None  # the kernel outlives the process: not what is tested here
    target, seen = parent / "out", {"old or new": 0, "set aside": 0, "nothing": 0}
    commit_version(target, 1, size=10)
    for count in itertools.count(1):
        if fresh:
            shutil.rmtree(target, ignore_errors=True)
        child = os.fork()
        if child == 0:
            kill_at_line(count)
            commit_version(target, count + 1, size=10)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        seen[check_after_kill(target, size=10)] += 1
        if not killed:
            break
        if not target.exists() and not fresh:
            commit_version(target, 1, size=10)
    commit_version(target, 1, size=10)
    commit_version(target, 1, size=10)
    assert [path.name for path in parent.iterdir()] == ["out"]
    sys.stdout.write(json.dumps(seen | {"lines": count}))


if __name__ == "__main__":
    verb, where, argument = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if verb == "steps" and argument == "1":
        system.exchange = lambda *_: False
    steps(where, fresh=verb == "fresh")
