"""The delta map against reading both checkpoints, side by side in one run.

    python bench/delta.py FOLDER [--gb 2] [--rounds 3]

Makes a synthetic Llama-shaped base and expert in FOLDER, which is created and removed, and times
in turn `cat` of all weight files to nowhere and `layerswap delta`, each as a process of its own.
Reads come from the page cache. The target: within twice the time of reading.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import merge_data


def timed(command: str) -> float:
    started = time.perf_counter()
    subprocess.run(command, shell=True, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    options.folder.mkdir()
    try:
        layers = merge_data.layers_for(options.gb)
        merge_data.write_checkpoints(options.folder, layers)
        merge_data.write_documents(options.folder, layers)
        base, expert, out = (options.folder / name for name in ("base", "task", "map"))
        read = f"cat {base}/*.safetensors {expert}/*.safetensors > /dev/null"
        program = Path(sys.executable).with_name("layerswap")
        measure = f"{program} delta --base {base} --expert {expert} --out {out} --overwrite"
        commands = {"reading both": read, "python with torch": f"{sys.executable} -c 'import torch'",
                    "layerswap delta": measure}  # fmt: skip
        timed(read)
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(options.rounds):
            for name, command in commands.items():
                seconds[name].append(timed(command))
        floor = statistics.median(seconds["reading both"])
        for name, found in seconds.items():
            middle = statistics.median(found)
            print(f"| {name} | {middle:.2f} s | {middle / floor:.2f} |")
    finally:
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
