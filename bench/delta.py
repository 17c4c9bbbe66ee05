"""How long `layerswap delta` takes against reading both checkpoints.

    python bench/delta.py FOLDER --gb 2 --rounds 3

Each round runs, one after the other and each as a process of its own: `cat` of both checkpoints
to /dev/null, `layerswap delta`, and the measuring alone, without starting Python, importing torch
or drawing. First with the files in the page cache, then with them dropped from it, where the
filesystem lets them be dropped. Prints the median of every command, its ratio to `cat`, and peak
memory. The synthetic checkpoints are those of `checkpoints.py`, made once in FOLDER.
"""

from __future__ import annotations

import argparse
import os
import sys
from functools import partial
from pathlib import Path

from checkpoints import make_checkpoints
from runner import LAYERSWAP, Contestant, measure, run_rounds, times

ALONE = """
import sys, time
import torch
from layerswap.deltas.atlas import measure, open_subjects
base, *experts = sys.argv[1:]
subjects = open_subjects(base, *experts)
started = time.perf_counter()
measure(subjects)
print(time.perf_counter() - started)
"""


def drop_from_cache(folders: list[Path]) -> None:
    os.sync()
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            handle = os.open(file, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def contestants(folder: Path, experts: list[str], script: Path, rounds: int) -> list[Contestant]:
    paths = [folder / name for name in ("base", *experts)]
    shards = " ".join(f"'{path}'/*.safetensors" for path in paths)
    flags = " ".join(f"--expert '{path}'" for path in paths[1:])
    label = f"{len(experts)} expert{'s' if len(experts) > 1 else ''}"
    command = LAYERSWAP if LAYERSWAP.exists() else f"{sys.executable}' -m 'layerswap"
    ours = f"'{command}' delta --base '{paths[0]}' {flags} --out '{{out}}'"
    alone = f"'{sys.executable}' '{script}' {' '.join(map(repr, map(str, paths)))}"
    return [
        Contestant(f"cat, {label}", f"cat {shards} > /dev/null", rounds),
        Contestant(f"layerswap delta, {label}", ours, rounds),
        Contestant(f"measuring alone, {label}", alone, rounds, own_clock=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gb", type=float, default=2.0, help="size of each checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = options.folder
    if not (folder / "base").is_dir():
        make_checkpoints(folder, options.gb)
    script = folder / "alone.py"
    script.write_text(ALONE)
    for cold in (False, True):
        for experts in (["task"], ["task", "language"]):
            paths = [folder / name for name in ("base", *experts)]
            found = contestants(folder, experts, script, options.rounds)
            measure(found[0].command, folder / "log.txt")  # into the cache
            before = partial(drop_from_cache, paths) if cold else os.sync
            run_rounds(found, folder, before=before)
            title = "dropped from the page cache" if cold else "in the page cache"
            print(times(found, found[0], title=title))


if __name__ == "__main__":
    main()
