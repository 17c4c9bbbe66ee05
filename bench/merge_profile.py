"""Where a merge's time goes, to the system call: on one thread, so that the parts add up.

    python bench/merge_profile.py FOLDER --gb 2

FOLDER is created and removed. Prints seconds, and nanoseconds for every element of the output,
spent in each function itself, for the start, a swap and a soup.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import pstats
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from merge_data import LAYER_PARAMETERS, OUTSIDE_PARAMETERS, layers_for
from merge_report import table

SHOWN = 12


def in_turn(run: object, work: Sequence[object], threads: int) -> None:
    """What the writer's pool does, in the thread that is profiled."""
    assert callable(run)
    for piece in work:
        run(piece)


def parts(profile: cProfile.Profile) -> Iterator[tuple[str, int, float]]:
    """Functions with the most time of their own: name, calls, seconds."""
    stats = pstats.Stats(profile).get_stats_profile().func_profiles
    own = sorted(stats.items(), key=lambda item: -item[1].tottime)
    for name, found in own[:SHOWN]:
        yield name.strip("{}"), int(str(found.ncalls).split("/")[0]), found.tottime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder to create, and to remove at the end")
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint (2)")
    options = parser.parse_args()
    folder = options.folder.absolute()
    script = [sys.executable, str(Path(__file__).with_name("merge_data.py")), str(folder)]
    subprocess.run([*script, "--gb", str(options.gb), "--experts-alone"], check=True)
    elements = layers_for(options.gb) * LAYER_PARAMETERS + OUTSIDE_PARAMETERS

    started = time.perf_counter()
    layerswap = importlib.import_module("layerswap")
    writer = importlib.import_module("layerswap.merge.writer")
    print(f"imports: {time.perf_counter() - started:.2f} s")
    started = time.perf_counter()
    importlib.import_module("numpy")
    print(f"NumPy: {time.perf_counter() - started:.2f} s")
    writer._run_all = in_turn
    experts = {"task": str(folder / "task"), "language": str(folder / "language")}
    try:
        for name, plan in (
            ("swap", layerswap.swap(**experts)),
            ("soup", layerswap.soup(experts=experts)),
        ):
            plan.save(folder / "warm")
            shutil.rmtree(folder / "warm")
            profile = cProfile.Profile()
            profile.runcall(plan.save, folder / "out")
            shutil.rmtree(folder / "out")
            rows = [
                (part, f"{calls:,}", f"{seconds:.3f}", f"{seconds / elements * 1e9:.2f}")
                for part, calls, seconds in parts(profile)
            ]
            print(f"\n{name}\n\n{table(('', 'calls', 's', 'ns an element'), rows)}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
