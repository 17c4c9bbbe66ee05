"""The modules that `layerswap sweep` runs through, from command line to result."""

from __future__ import annotations

import subprocess
import sys

import pytest
from lm_eval_world import write_sweep

MOST = 60
WALK = """
import inspect, sys, threading
from layerswap.cli import main

seen = set()

def note(frame, event, arg):
    code = frame.f_code
    # Only functions: a module's own frame and a class's body run whenever they are imported.
    if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
        _, ours, module = code.co_filename.rpartition("/layerswap/")
        if ours and module.endswith(".py"):
            seen.add(module)

threading.setprofile(note)
sys.setprofile(note)
sys.argv = ["layerswap", "sweep", *sys.argv[1:]]
try:
    main()
finally:
    sys.setprofile(None)
    print("walked", *sorted(seen))
"""


@pytest.mark.slow
def test_a_sweep_touches_few_modules(world, tmp_path):
    spec = write_sweep(world, tmp_path / "sweep.yaml")
    done = subprocess.run(
        [sys.executable, "-c", WALK, str(spec), "--out", str(tmp_path / "out")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not done.returncode, done.stderr[-3000:]
    walked = done.stdout.rpartition("walked ")[2].split()
    assert len(walked) <= MOST, "\n".join(walked)
