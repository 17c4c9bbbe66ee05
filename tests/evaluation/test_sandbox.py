"""Hostile programs: none passes, none leaves a trace, and none lasts."""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from layerswap.errors import EvaluationError
from layerswap.evaluation import _sandbox_child as confined
from layerswap.evaluation import sandbox
from layerswap.evaluation.sandbox import Limits, run_program

QUICK = Limits(seconds=3, memory_bytes=512 << 20)


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 2",
        "import math, re, collections, itertools, heapq, random, json, datetime, decimal\n"
        "assert math.isclose(math.sqrt(4), 2)",
        "open('notes.txt', 'w').write('x'); assert open('notes.txt').read() == 'x'",
        "import cmath, bisect, string, functools, operator, fractions, statistics, copy",
        "import sys\nsys.setrecursionlimit(5000)\ndef f(n): return n and f(n - 1)\nf(2000)",
        "print('é', '数')",
    ],
)
def test_ordinary_programs_pass(program):
    ran = run_program(program, QUICK)
    assert ran.outcome == "passed", ran.said


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 + 1 == 3",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "def f(:\n",
        "import sys; sys.exit()",
        "raise KeyboardInterrupt",
    ],
)
def test_programs_that_end_early_or_wrong_fail(program):
    assert run_program(program, QUICK).outcome == "failed"


HOSTILE = {
    "fork": "import os\nos.fork()",
    "fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: raise",
    "threads": "import threading\nthreading.Thread(target=print).start()",
    "subprocess": "import subprocess\nsubprocess.run(['/bin/true'])",
    "system": "import os\nassert os.system('true') == 0",
    "exec": "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'pass'])",
    "memory": "x = bytearray(10**10)",
    "memory by parts": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "disk": "f = open('big', 'wb')\nwhile True: f.write(b'0' * (1 << 20))",
    "socket": "import socket\nsocket.socket()",
    "unix socket": "import socket\nsocket.socket(socket.AF_UNIX)",
    "socketpair": "import socket\nsocket.socketpair()",
    "web": "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:1')",
    "kill the parent": "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)",
    "kill everything": "import os, signal\nos.kill(-1, signal.SIGTERM)",
    "ctypes fork": "import ctypes\nassert ctypes.CDLL(None).fork() >= 0",
    "raise limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
    "read secrets": "open('/etc/passwd').read()",
    "read the home": "import os\nos.listdir(os.path.expanduser('~root'))",
    "leave the folder": "open('../x', 'w')",
    "remove the interpreter": "import os, sys\nos.remove(sys.executable)",
    "chmod": "import os\nos.chmod('/tmp', 0o777)",
    "link out": "import os\nos.symlink('/etc/passwd', 'p')\nopen('p').read()",
    "mount": "import ctypes\nassert ctypes.CDLL(None).mount(b'a', b'/', b'tmpfs', 0, None) == 0",
    "proc": "open('/proc/self/mem', 'rb').read(1)",
    "environ": "import os\nassert any('TOKEN' in k or 'KEY' in k for k in os.environ)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_programs_fail(name):
    started = time.monotonic()
    assert run_program(HOSTILE[name], QUICK).outcome == "failed"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass",
        "import os\nos.setsid() if os.getpid() != os.getsid(0) else None\nwhile True: pass",
    ],
)
def test_endless_programs_are_ended(program):
    assert run_program(program, Limits(seconds=1)).outcome in ("timeout", "failed")


def test_nothing_is_written_outside(tmp_path):
    target = tmp_path / "stolen"
    program = f"open({str(target)!r}, 'w').write('x')"
    ran = run_program(program, QUICK)
    assert ran.outcome == "failed"
    assert "PermissionError" in ran.said
    assert not target.exists()
    victim = tmp_path / "victim"
    victim.write_text("whole")
    for how in (
        f"import os; os.truncate({str(victim)!r}, 0)",
        f"import os; os.remove({str(victim)!r})",
    ):
        assert run_program(how, QUICK).outcome == "failed"
    assert victim.read_text() == "whole"


def test_a_server_that_listens_is_never_reached():
    server = socket.create_server(("127.0.0.1", 0))
    reached = []

    def listen():
        try:
            reached.append(server.accept())
        except OSError:
            return

    thread = threading.Thread(target=listen, daemon=True)
    thread.start()
    port = server.getsockname()[1]
    program = f"import socket\nsocket.create_connection(('127.0.0.1', {port}))"
    assert run_program(program, QUICK).outcome == "failed"
    server.close()
    assert not reached


def test_nothing_is_left_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    run_program("open('a', 'w').write('b')", QUICK)
    run_program("while True: pass", Limits(seconds=1))
    assert not list(tmp_path.iterdir())
    children = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "args="],
        check=False,
        capture_output=True,
        text=True,
    )
    assert "confined.py" not in children.stdout


def test_where_there_are_no_walls_nothing_is_run(monkeypatch, tmp_path):
    copy = tmp_path / "confined.py"
    text = Path(confined.__file__).read_text()
    copy.write_text(text.replace('"x86_64"', '"z80"').replace('"aarch64"', '"6502"'))
    monkeypatch.setattr(confined, "__file__", str(copy))
    with pytest.raises(EvaluationError, match="cannot be walled off on this system: no list"):
        run_program("open('ran', 'w')", QUICK)
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(EvaluationError, match="on Linux only"):
        run_program("pass")


def test_the_numbers_of_the_calls_are_the_kernels():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if sys.platform != "linux" or not header.exists():
        pytest.skip("no kernel headers here")
    numbers = dict(line.split()[1:3] for line in header.read_text().splitlines() if "__NR_" in line)
    checked = 0
    for group in confined.WALLS.values():
        for name, (number, _) in group.items():
            if number is not None and f"__NR_{name}" in numbers:
                assert int(numbers[f"__NR_{name}"]) == number
                checked += 1
    assert checked > 60
