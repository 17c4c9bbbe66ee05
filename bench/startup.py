"""How fast the command answers: `layerswap --help` against a bare interpreter, in one run.

    python bench/startup.py

Prints the medians of alternating runs, in seconds, and their ratio. The target for
`layerswap --help` is under 0.5 s.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

RUNS = 15


def seconds(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    script = shutil.which("layerswap", path=str(Path(sys.executable).parent))
    if script is None:
        sys.exit("layerswap is not installed beside this interpreter")
    commands = {
        "layerswap --help": [script, "--help"],
        "python -c pass": [sys.executable, "-c", ""],
    }
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    for name, median in medians.items():
        print(f"{name:18} {median:.3f} s (median of {RUNS})")
    help_seconds, bare_seconds = medians.values()
    print(f"ratio {help_seconds / bare_seconds:.1f}; target under 0.5 s")


if __name__ == "__main__":
    main()
