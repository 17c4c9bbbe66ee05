"""Runs programs that a model writes, and their tests, in a sandbox.

The program runs in one process, its tests in another that the program cannot reach. The tests ask
the program for values, compare them, and give the verdict. `_sandbox_child` isolates both: no
network, other processes or signals, no files but a small folder in memory, and limits on memory
and time. On a system without the means (not Linux, or a kernel without Landlock or seccomp),
nothing runs.
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
import threading
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from layerswap.errors import EvaluationError
from layerswap.evaluation import _sandbox_child as child

Outcome = Literal["passed", "failed", "timeout"]
READY = child.READY.decode()
READ_BYTES = 1 << 15
"""Largest part of a program's standard error that is kept."""
WAITING = 3
"""Wall-clock time of a program in units of its processor time, for a busy machine."""
START_SECONDS = 30
"""Time for two interpreters to start and isolate themselves, on a busy machine."""


@dataclass(frozen=True)
class Limits:
    """Limits of a program."""

    seconds: int = 10  # processor time of each process; the wall-clock time is WAITING times that
    memory_bytes: int = 1 << 30  # address space of each process
    file_bytes: int = 1 << 20  # size of one file


@dataclass(frozen=True)
class Ran:
    """Result of a program."""

    outcome: Outcome  # `passed` if the program finished and every test passed
    said: str  # reason of a failed test, and the end of standard error


def run_program(
    source: str,
    limits: Limits | None = None,
    *,
    tests: Sequence[str] = (),
    tested: Sequence[str] | None = None,
) -> Ran:
    """Run a Python program and its tests in the sandbox; standard library only.

    Args:
        source: the program.
        limits: limits of the program.
        tests: statements over the names of the program, usually assertions. Plain values come by
            content; other objects come by reference, and equal no plain value.
        tested: names that the tests take from the program although Python has such a name, too;
            None takes the function that a test calls first if it asks for no other name.

    Example: `run_program("def f(x): return x + 1", tests=["assert f(1) == 2"]).outcome` is
        `"passed"`.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise EvaluationError("programs that a model writes run on Linux only")
    text = source.encode("utf-8", errors="replace").decode("utf-8")
    task = json.dumps({"source": text, "tests": list(tests), "tested": tested}).encode()
    with contextlib.ExitStack() as stack:
        to_program, to_tests, ready, verdict = (_pipe(stack) for _ in range(4))
        # Each side sees the end of a file when the other exits, so no other process may keep an
        # end of a pipe open.
        program = _start(
            stack, "program", limits, reader=to_program[0], writer=to_tests[1], ready=ready[1]
        )
        tester = _start(
            stack, "tests", limits, reader=to_tests[0], writer=to_program[1], ready=ready[1],
            verdict=verdict[1],
        )  # fmt: skip
        for end in (*to_program, *to_tests, ready[1], verdict[1]):
            end.close()
        errors = _Tail(program.stderr)
        _feed(tester, task)
        up = _read(ready[0], time.monotonic() + START_SECONDS).decode("utf-8", errors="replace")
        said = [line.removeprefix(READY) for line in up.splitlines() if line.startswith(READY)]
        if len(said) != 2:
            reason = next((line for line in up.splitlines() if not line.startswith(READY)), "")
            raise EvaluationError(
                f"programs cannot be isolated on this system: {reason or 'no answer in time'}"
            )
        if said[0] or said[1]:
            _warn(said[0] or said[1])
        received = _read(verdict[0], time.monotonic() + WAITING * limits.seconds)
        late = not received and tester.poll() is None
        if received:  # both sides exit by themselves, and the exit code shows a time limit
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1)
        # The kernel kills a process that has used up its time; the keeper of a namespace says so.
        killed = {sign - number for sign in (0, 256) for number in (signal.SIGKILL, signal.SIGXCPU)}
        spent = bool({program.poll(), tester.poll()} & killed)
        _end(program)
        _end(tester)
        stderr = errors.text()
    answer: dict[str, Any] = {"passed": False, "said": ""}
    with contextlib.suppress(ValueError):  # an incomplete verdict is a failure
        answer = json.loads(received or b"{}") or answer
    outcome: Outcome = "passed" if answer["passed"] else "timeout" if late or spent else "failed"
    return Ran(outcome, "\n".join(filter(None, [answer["said"], stderr]))[:READ_BYTES])


@functools.cache
def _warn(missing: str) -> None:
    """Name the weaker sandbox, once."""
    warnings.warn(
        f"programs run in a weaker sandbox, without namespaces ({missing}): only seccomp and "
        "Landlock limit system calls and files; allow unprivileged user namespaces for the rest",
        stacklevel=3,
    )


def _pipe(stack: contextlib.ExitStack) -> tuple[IO[bytes], IO[bytes]]:
    reader, writer = os.pipe()
    return (
        stack.enter_context(os.fdopen(reader, "rb", 0)),
        stack.enter_context(os.fdopen(writer, "wb", 0)),
    )


def _start(
    stack: contextlib.ExitStack, role: str, limits: Limits, **ends: IO[bytes]
) -> subprocess.Popen[bytes]:
    numbers = {name: end.fileno() for name, end in ends.items()}
    program = role == "program"
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", child.__file__, role,
         json.dumps({**asdict(limits), **numbers})],
        cwd="/", env={"PATH": "", "LC_ALL": "C.UTF-8"}, start_new_session=True,
        stdin=subprocess.DEVNULL if program else subprocess.PIPE, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if program else subprocess.DEVNULL,
        pass_fds=tuple(numbers.values()),
    )  # fmt: skip
    stack.callback(_end, process)
    return process


def _feed(process: subprocess.Popen[bytes], data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(data)


def _read(pipe: IO[bytes], deadline: float) -> bytes:
    """Read a pipe until its writers close it or the deadline passes."""
    contents = b""
    while len(contents) < READ_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        data = pipe.read(READ_BYTES)
        if not data:
            break
        contents += data
    return contents


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Tail:
    """The last bytes of a pipe, read in a thread so that no writer waits."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe, self._last = pipe, b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while data := os.read(self._pipe.fileno(), 1 << 16):
            self._last = (self._last + data)[-READ_BYTES:]

    def text(self) -> str:
        """Return the last bytes, after all writers have closed the pipe."""
        self._thread.join()
        self._pipe.close()
        return self._last.decode("utf-8", errors="replace").strip()
