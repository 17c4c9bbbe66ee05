"""Runs programs that a model wrote, and the tests that decide about them, apart from the machine.

The program runs in one sandboxed process, its tests in another: the program gives values, and the
tests, in a process that it cannot reach, compare them and give the verdict. `_sandbox_child` has
the walls: no network, no other processes, no signals, no files but a small folder in memory, and
bounds on memory and time. Where the system cannot do that (not Linux, or a kernel without Landlock
or seccomp), nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, Literal

from layerswap.errors import EvaluationError
from layerswap.evaluation import _sandbox_child as child

Outcome = Literal["passed", "failed", "timeout"]
READ_BYTES = 1 << 15
"""How much of what a program writes to standard error is kept."""
START_SECONDS = 30
"""For two interpreters to start and put their walls up, on a busy machine."""


@dataclass(frozen=True)
class Limits:
    """Bounds on a program.

    Attributes:
        seconds: of wall-clock time in all, and of processor time for either process.
        memory_bytes: of address space, for either process.
        file_bytes: of any one file.
    """

    seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a program did.

    Attributes:
        outcome: `passed` if the program came to its end and every test passed.
        said: why a test failed, and the last of what the program wrote to standard error.
    """

    outcome: Outcome
    said: str


def run_program(source: str, limits: Limits | None = None, *, tests: Sequence[str] = ()) -> Ran:
    """Run a Python program and its tests in the sandbox; standard library only.

    Args:
        source: the program.
        limits: what it may use.
        tests: statements over what the program defines, usually assertions. They see the
            program's objects through references: plain values come by content, and nothing else
            is equal to a plain value.

    Raises:
        EvaluationError: this system cannot isolate a program.

    Example: `run_program("def f(x): return x + 1", tests=["assert f(1) == 2"]).outcome` is
        `"passed"`.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise EvaluationError("programs that a model wrote are run on Linux only")
    text = source.encode("utf-8", errors="replace").decode("utf-8")
    task = json.dumps({"source": text, "tests": list(tests)}).encode()
    with contextlib.ExitStack() as stack:
        to_program, to_tests, ready, verdict = (_pipe(stack) for _ in range(4))
        # Neither side's ends may stay open in the other, or in this process: an end of file is
        # how each learns that the other has ended.
        program = _start(
            stack, "program", limits, reader=to_program[0], writer=to_tests[1], ready=ready[1]
        )
        judge = _start(
            stack, "tests", limits, reader=to_tests[0], writer=to_program[1], ready=ready[1],
            verdict=verdict[1],
        )  # fmt: skip
        for end in (*to_program, *to_tests, ready[1], verdict[1]):
            end.close()
        errors = _Tail(program.stderr)
        _feed(judge, task)
        deadline = time.monotonic() + limits.seconds + START_SECONDS
        up = _read(ready[0], deadline)
        if up != child.READY * 2:
            reason = up.replace(child.READY, b"").decode("utf-8", errors="replace")
            raise EvaluationError(f"programs cannot be isolated on this system: {reason}")
        told = _read(verdict[0], time.monotonic() + limits.seconds)
        late = not told and judge.poll() is None
        if told:  # both sides end by themselves, and how the program did says what it was
            with contextlib.suppress(subprocess.TimeoutExpired):
                program.wait(1)
        _end(program)
        _end(judge)
        stderr = errors.text()
    spent = program.returncode in (-signal.SIGXCPU, 128 + signal.SIGXCPU, 256 - signal.SIGXCPU)
    answer: dict[str, Any] = {"passed": False, "said": ""}
    with contextlib.suppress(ValueError):  # cut short by its end: it did not pass
        answer = json.loads(told or b"{}") or answer
    outcome: Outcome = "passed" if answer["passed"] else "timeout" if late or spent else "failed"
    return Ran(outcome, "\n".join(filter(None, [answer["said"], stderr])))


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
    """Everything from a pipe until its writers are gone or the deadline has passed."""
    found = b""
    while len(found) < READ_BYTES:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([pipe], [], [], left)[0]:
            break
        data = pipe.read(READ_BYTES)
        if not data:
            break
        found += data
    return found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process and what it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Tail:
    """The last bytes of a pipe, read in a thread so that no writer ever waits."""

    def __init__(self, pipe: IO[bytes] | None) -> None:
        assert pipe is not None
        self._pipe, self._last = pipe, b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        while data := os.read(self._pipe.fileno(), 1 << 16):
            self._last = (self._last + data)[-READ_BYTES:]

    def text(self) -> str:
        """What was written last, once its writers are gone."""
        self._thread.join()
        self._pipe.close()
        return self._last.decode("utf-8", errors="replace").strip()
