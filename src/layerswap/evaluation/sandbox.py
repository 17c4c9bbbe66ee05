"""Runs programs that a model writes, with their tests, in a sandbox.

A program and its tests run in two processes that `_sandbox_child` isolates: no network, other
processes or signals, no files but a small folder in memory, and limits on memory and time. The
program never holds the expected values. On a system without the means (not Linux, or a kernel
without Landlock or seccomp), nothing runs.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import IO, Literal

from layerswap.ground import system
from layerswap.ground.errors import EvaluationError

_ALLOWED = ContextVar("allowed", default=False)
Outcome = Literal["passed", "failed", "timeout"]
READ_BYTES = 1 << 15
"""Most that is read from a program."""
WAITING = 3
"""Wall-clock time of a program in units of its processor time, for a busy machine."""
START_SECONDS = 30
"""Time for an interpreter to start and isolate itself, on a busy machine."""
KILLED = {sign - number for sign in (0, 256) for number in (9, 24)}
"""Exit codes of a process that has used up its time, or of the keeper of its namespace: Linux'
SIGKILL and SIGXCPU."""
LIMITS = {"seconds": 10, "memory_bytes": 1 << 30, "file_bytes": 1 << 20}
"""Limits of a program: processor time (`WAITING` has the wall-clock time), address space, and the
size of one file."""


@dataclass(frozen=True)
class Ran:
    """Result of a program."""

    outcome: Outcome  # `passed` if the program finished and every test passed
    said: str  # the exception that ended it


@contextlib.contextmanager
def programs_allowed(allowed: bool = True) -> Iterator[None]:
    """Let `run_program` run programs; only the user's own command or call may say so."""
    token = _ALLOWED.set(allowed)
    try:
        yield
    finally:
        _ALLOWED.reset(token)


def run_program(
    source: str, limits: Mapping[str, int] = LIMITS, *, tests: Sequence[str] = ()
) -> Ran:
    """Run a Python program and its tests in the sandbox; standard library only.

    Args:
        source: the program.
        limits: as `LIMITS`.
        tests: statements to run after the program, usually assertions. They may use its names;
            values between the two are copied.

    Example: `run_program("def f(x): return x + 1", tests=["assert f(1) == 2"]).outcome` is
        `"passed"`.
    """
    if not _ALLOWED.get():
        raise EvaluationError("programs that a model writes run only with --allow-code")
    if not system.LINUX:
        raise EvaluationError("programs that a model writes run on Linux only")
    from layerswap.evaluation import _sandbox_child as child

    text = source.encode("utf-8", errors="replace").decode("utf-8")
    task, judge = (
        json.dumps(part).encode() + b"\n"
        for part in ({"source": text, **limits}, {"tests": "\n".join(tests)})
    )
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", child.__file__],
        cwd="/", env={"PATH": "", "LC_ALL": "C.UTF-8"}, start_new_session=True, bufsize=0,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.ExitStack() as stack:
        stack.callback(_end, process)
        stack.enter_context(process.stdout)
        stack.enter_context(process.stdin)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(task)
        first, rest = _read(process.stdout, START_SECONDS, until=b"\n")
        if not first.startswith(child.READY):
            reason = first.decode("utf-8", errors="replace") or "no answer in time"
            raise EvaluationError(f"programs cannot be isolated on this system: {reason}")
        if missing := first.removeprefix(child.READY).decode("utf-8", errors="replace"):
            _warn(missing)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(judge)
        said = rest + _read(process.stdout, WAITING * limits["seconds"])[0]
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        ended = process.poll()
    if said == child.PASSED:
        return Ran("passed", "")
    late = ended is None or ended in KILLED
    return Ran("timeout" if late else "failed", said.decode("utf-8", errors="replace"))


@functools.cache
def _warn(missing: str) -> None:
    """Name the weaker sandbox, once."""
    warnings.warn(
        f"programs run in a weaker sandbox, without namespaces ({missing}): only seccomp and "
        "Landlock limit system calls and files; allow unprivileged user namespaces for the rest",
        stacklevel=3,
    )


def _read(pipe: IO[bytes], seconds: float, until: bytes = b"\0") -> tuple[bytes, bytes]:
    """Read until a mark, the end or the time limit; return the bytes around the mark."""
    contents, deadline = b"", time.monotonic() + seconds
    while until not in contents and len(contents) < READ_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        data = pipe.read(READ_BYTES)
        if not data:
            break
        contents += data
    before, _, after = contents.partition(until)
    return before, after


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
