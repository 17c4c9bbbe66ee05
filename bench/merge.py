"""Merging against `cp -r` and mergekit, side by side in one run: seconds, memory, results.

    python bench/merge.py FOLDER                     # 2 GB checkpoints, 5 rounds
    python bench/merge.py FOLDER --write             # into bench/results/merge.md
    python bench/merge.py FOLDER --no-mergekit       # without the other tool

Makes synthetic checkpoints in FOLDER, which is created and removed, installs mergekit into a
virtual environment there, and runs every tool in turn, round after round, each as a process of
its own. FOLDER needs about six times the size of a checkpoint, and 2 GB for mergekit.

Reads come from the page cache. layerswap always waits until its output is on the disk; `cp -r`
is measured without and with that wait, and mergekit waits only with `--sync`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

import merge_data
import merge_report
import merge_runs
from merge_runs import Contestant

HERE = Path(__file__).resolve().parent
PAIRS = {
    "layerswap swap, nothing blended": "mergekit passthrough slices",
    "layerswap soup": "mergekit linear",
    "layerswap ties per tensor": "mergekit ties",
}
"""What must give the same tensors."""


class Proof:
    """Keeps the first outputs of each pair until both are there, and compares them."""

    def __init__(self, folder: Path, sources: Path) -> None:
        self._folder = folder
        self._sources = sources
        self._wanted = {name: ours for ours, theirs in PAIRS.items() for name in (ours, theirs)}
        self.found: dict[str, dict[str, int]] = {}

    def __call__(self, name: str, out: Path) -> None:
        ours = self._wanted.get(name)
        if ours is None:
            return
        kept = self._folder / f"kept-{merge_runs.slug(ours)}"
        if not kept.is_dir():
            out.rename(kept)
            return
        first, second = (out, kept) if name == ours else (kept, out)
        command = [sys.executable, str(HERE / "merge_compare.py"), str(first), str(second)]
        if "ties" in name:
            command += ["--ties", str(self._sources), str(merge_runs.DENSITY)]
        self.found[ours] = json.loads(subprocess.check_output(command))
        print(f"{ours} against {PAIRS[ours]}: {self.found[ours]}", flush=True)
        shutil.rmtree(kept)


def make_sources(folder: Path, gigabytes: float) -> Path:
    """The three checkpoints, made by a process of its own: this one must stay small.

    The peak of a child is never less than what its parent held when it was started.
    """
    sources = folder / f"{gigabytes:g}GB"
    script = str(HERE / "merge_data.py")
    subprocess.run([sys.executable, script, str(sources), "--gb", str(gigabytes)], check=True)
    return sources


def side_by_side(options: argparse.Namespace) -> tuple[list[Contestant], Proof]:
    """Every tool on checkpoints of one size."""
    sources = make_sources(options.folder, options.gb)
    ours = merge_runs.layerswap(sources, options.rounds, options.ties_rounds)
    example = sources / "example"
    merge_runs.measure(ours[1].command.format(out=example), options.folder / "log.txt")
    theirs = []
    if options.mergekit:
        script = merge_runs.install_mergekit(options.folder, options.mergekit_constraints)
        layers = merge_data.layers_for(options.gb)
        theirs = merge_runs.mergekit(sources, script, layers, options.rounds, options.ties_rounds)
    if options.sync:
        theirs = list(merge_runs.with_sync(theirs))
    partners = {PAIRS[name]: name for name in PAIRS}
    ordered = merge_runs.floors(example, options.rounds) + ours
    for contestant in theirs:
        names = [other.name for other in ordered]
        ordered.insert(names.index(partners[contestant.name]) + 1, contestant)
    proof = Proof(options.folder, sources)
    merge_runs.run_rounds(ordered, options.folder, proof)
    shutil.rmtree(sources)
    return ordered, proof


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder to create, and to remove at the end")
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint (2)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of every command (5)")
    parser.add_argument("--ties-rounds", type=int, default=3, help="runs of TIES (3)")
    parser.add_argument("--sync", action="store_true", help="mergekit waits for the disk too")
    parser.add_argument("--no-mergekit", dest="mergekit", action="store_false")
    parser.add_argument("--mergekit-constraints", type=Path, help="a constraints file for pip")
    parser.add_argument("--write", action="store_true", help="write bench/results/merge.md")
    options = parser.parse_args()
    given = ["FOLDER" if word == str(options.folder) else word for word in sys.argv[1:]]
    options.arguments = " ".join(given)
    return options


def main() -> None:
    options = read_options()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True)
    try:
        machine = merge_report.describe(options.folder)
        contestants, proof = side_by_side(options)
        if options.mergekit:
            python = str(options.folder / "mergekit-venv" / "bin" / "python")
            machine += [merge_report.mergekit_versions(python)]
        text = merge_report.report(contestants, proof.found, machine, options)
    finally:
        shutil.rmtree(options.folder)
    print(text)
    if options.write:
        (HERE / "results" / "merge.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
