"""How fast the command answers: help and a plan against a bare interpreter, in one run.

    python bench/startup.py

Prints the medians of alternating runs, in seconds. The target for `layerswap --help` is under
0.5 s, and that for `merge --help` and a plan of the lab's experts under 0.35 s.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import layerswap.lab

RUNS = 15


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    # As installed: an environment may forbid Python to keep what it compiled.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return time.perf_counter() - started


def main() -> None:
    script = shutil.which("layerswap", path=str(Path(sys.executable).parent))
    if script is None:
        sys.exit("layerswap is not installed beside this interpreter")
    lab = Path(layerswap.lab.__file__).parent / "assets"
    commands = {
        "layerswap --help": [script, "--help"],
        "layerswap merge --help": [script, "merge", "--help"],
        "layerswap plan": [
            script,
            "plan",
            "--task-expert",
            str(lab / "task-1"),
            "--language-expert",
            str(lab / "language-furo-1"),
        ],
        "python -c pass": [sys.executable, "-c", ""],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:24} {median:.3f} s (median of {RUNS})")


if __name__ == "__main__":
    main()
