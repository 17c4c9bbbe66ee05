"""A second device of PyTorch, as a GPU would be: its results equal those on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CAN_BE_BUILT = """
import shutil, os
assert shutil.which(os.environ.get("CXX", "c++")), "no C++ compiler is here"
assert shutil.which("ninja"), "Ninja is not here"
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("float64", "checks"),
    [("1", ""), ("0", "found or generation or linearity or full")],
    ids=["with float64", "without float64"],
)
def test_a_second_device(float64, checks, tmp_path):
    """The build takes a minute, once for a machine."""
    known = subprocess.run(
        [sys.executable, "-c", CAN_BE_BUILT], check=False, capture_output=True, text=True
    )
    if known.returncode:
        pytest.skip(known.stderr.strip().splitlines()[-1])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, f"--basetemp={tmp_path}", "-k", checks, str(HERE / "second_device_checks.py")],
        env={**os.environ, "SECOND_DEVICE_FLOAT64": float64}, cwd=HERE.parent, check=False,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
