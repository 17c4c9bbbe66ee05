"""Swaps and soups of small and large checkpoints against `cp -r`, in one run.

    python bench/merge_sizes.py FOLDER --gb 0.5 2 --write    # into bench/results/merge-sizes.md
    python bench/merge_sizes.py FOLDER --gb 16 --rounds 3

FOLDER is created and removed; it needs three times the largest size. A checkpoint that is larger
than half of the memory is read from the disk, by `cp` as well.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import merge_report
import merge_runs
from merge_runs import Contestant

HERE = Path(__file__).resolve().parent


def run_size(options: argparse.Namespace, size: float) -> list[Contestant]:
    """`cp -r` of an expert, waiting for the disk, and merges of both, in turn."""
    sources = options.folder / f"{size:g}GB"
    script = [sys.executable, str(HERE / "merge_data.py"), str(sources), "--gb", str(size)]
    subprocess.run([*script, "--experts-alone"], check=True)
    copying = merge_runs.floors(sources / "task", options.rounds)[1]
    contestants = [copying, *merge_runs.layerswap(sources, options.rounds, 0)]
    print(f"{size:g} GB", flush=True)
    merge_runs.run_rounds(contestants, options.folder)
    shutil.rmtree(sources)
    return contestants


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder to create, and to remove at the end")
    parser.add_argument("--gb", type=float, nargs="+", default=[0.5, 2.0], help="sizes (0.5 2)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every command (5)")
    parser.add_argument("--write", action="store_true", help="write bench/results/merge-sizes.md")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True)
    try:
        machine = merge_report.describe(options.folder)
        sizes = {size: run_size(options, size) for size in options.gb}
    finally:
        shutil.rmtree(options.folder)
    text = merge_report.sizes_report(sizes, machine, options)
    print(text)
    if options.write:
        (HERE / "results" / "merge-sizes.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
