"""Running programs that a model wrote: a process of their own, walled off from the machine.

No network, no other processes, no signals, no files but an empty temporary folder, and bounds on
memory and time; see `evaluate.confined` for how. Where the system cannot do that (not Linux, or a
kernel without Landlock or seccomp), nothing is run.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from layerswap.errors import EvaluationError
from layerswap.evaluation import _sandbox_child as confined

Outcome = Literal["passed", "failed", "timeout"]
READ_BYTES = 4096
"""How much of what a program writes is kept."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Attributes:
        seconds: of wall-clock and of processor time, each.
        memory_bytes: of address space.
        file_bytes: of any one file.
    """

    seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


@dataclass(frozen=True)
class Ran:
    """How a program ended.

    Attributes:
        outcome: `passed` if it came to its end without an exception.
        said: the last of what it wrote to standard error.
    """

    outcome: Outcome
    said: str


def run_program(source: str, limits: Limits | None = None) -> Ran:
    """Run a Python program, walled off; standard library only.

    Args:
        source: the program, with its tests.
        limits: what it may use.

    Raises:
        EvaluationError: this system cannot wall a program off.

    Example: `run_program("assert 1 + 1 == 2").outcome` is `"passed"`.
    """
    limits = limits or Limits()
    if sys.platform != "linux":
        raise EvaluationError("programs that a model wrote are run on Linux only")
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="layerswap-") as name:
        folder = Path(name)
        program = folder / "program.py"
        program.write_text(source, "utf-8", errors="replace")
        outputs = folder / "out", folder / "err"
        with outputs[0].open("wb") as out, outputs[1].open("wb") as err:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-B", confined.__file__, str(program),
                 json.dumps(vars(limits))],
                cwd=folder, stdin=subprocess.PIPE, stdout=out, stderr=err,
                env={"HOME": name, "PATH": "", "LC_ALL": "C.UTF-8"}, start_new_session=True,
            )  # fmt: skip
            late = _wait(process, token, limits.seconds)
        said = _tail(outputs[1])
        if process.returncode == confined.UNCONFINED:
            raise EvaluationError(f"programs cannot be walled off on this system: {said.strip()}")
        passed = process.returncode == 0 and token in _tail(outputs[0])
        return Ran("timeout" if late else "passed" if passed else "failed", said)


def _wait(process: subprocess.Popen[bytes], token: str, seconds: float) -> bool:
    """Wait for the end, or make it; whether it took too long."""
    try:
        process.communicate(token.encode() + b"\n", timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True
    return process.returncode == -signal.SIGXCPU


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - READ_BYTES))
        return file.read().decode("utf-8", errors="replace")
