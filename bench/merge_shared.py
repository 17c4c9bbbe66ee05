"""Swaps that share blocks with their experts, against `cp` and mergekit, on filesystems in a file.

    python bench/merge_shared.py FOLDER             # 2 GB, 3 rounds, needs root
    python bench/merge_shared.py FOLDER --mergekit mergekit-env/bin/mergekit-yaml
    python bench/merge_shared.py FOLDER --write     # into bench/results/merge-shared.md

Makes XFS with and without reflinks, and ext4, in loop files of FOLDER, which is created and removed
and needs six times the size of a checkpoint. Every command ends when its output is on the disk.
On XFS with reflinks, `--many` compositions of the pair are kept side by side at the end.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import merge_data
import merge_report
import merge_runs
from merge_runs import Contestant

HERE = Path(__file__).resolve().parent
KINDS = {
    "XFS": ["mkfs.xfs", "-q", "-m", "reflink=1"],
    "XFS without reflinks": ["mkfs.xfs", "-q", "-m", "reflink=0"],
    "ext4": ["mkfs.ext4", "-q", "-m", "0"],
}
COPY, SHARE = "cp --reflink=never", "cp --reflink=always"
START = "python that imports pydantic, typer and yaml"
OURS, BLENDED = "layerswap swap, nothing blended", "layerswap swap, embeddings blended"


@contextmanager
def filesystem(kind: str, folder: Path, nbytes: float) -> Iterator[Path]:
    """A mounted filesystem in a loop file."""
    image, where = folder / "image", folder / "disk"
    where.mkdir()
    with image.open("wb") as file:
        file.truncate(int(nbytes))
    subprocess.run([*KINDS[kind], str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", str(where)], check=True)
        image.unlink()
        where.rmdir()


def used(folder: Path) -> int:
    """Bytes in use, with all of them on the disk."""
    subprocess.run(["sync", "-f", str(folder)], check=True)
    return shutil.disk_usage(folder).used


def contestants(disk: Path, kind: str, options: argparse.Namespace) -> list[Contestant]:
    """Everything that runs on one filesystem."""
    swap = (
        f"'{merge_runs.LAYERSWAP}' merge --task '{disk}/task' --language '{disk}/language' "
        "--out '{out}'"
    )
    sync = " && sync '{out}'/*"
    commands = {
        COPY: f"cp -r --reflink=never '{disk}/task' '{{out}}'{sync}",
        SHARE: f"cp -r --reflink=always '{disk}/task' '{{out}}'{sync}",
        OURS: f"{swap} --outside task",
        BLENDED: swap,
        f"{OURS}, --layout plain": f"{swap} --outside task --layout plain",
    }
    if kind != "XFS":
        del commands[SHARE], commands[f"{OURS}, --layout plain"]
    else:
        commands[START] = f"'{sys.executable}' -c 'import pydantic.main, typer.main, yaml'"
    found = [Contestant(name, command, options.rounds) for name, command in commands.items()]
    if options.mergekit and kind == "XFS":
        layers = merge_data.layers_for(options.gb)
        slices = merge_runs.mergekit(disk, options.mergekit, layers, options.rounds, 0)[:1]
        found += merge_runs.with_sync(slices)
    return found


def run_kind(kind: str, experts: Path, options: argparse.Namespace) -> tuple[str, str]:
    """The table of one filesystem, and on XFS the line on many compositions."""
    with filesystem(kind, options.folder, (5.5 * options.gb + 0.5) * 1e9) as disk:
        for name in ("task", "language"):
            shutil.copytree(experts / name, disk / name)
        before = used(disk)
        new: dict[str, int] = {}
        found = contestants(disk, kind, options)
        print(kind, flush=True)
        merge_runs.run_rounds(
            found, disk, lambda name, out: new.update({name: used(disk) - before})
        )
        many = keep_many(disk, options.many, before) if kind == "XFS" and options.many else ""
    many += against_mergekit(found)
    copying = next(c for c in found if c.name == COPY)
    rows = [
        (
            c.name, f"{median(c.seconds):.2f}", f"{min(c.seconds):.2f} to {max(c.seconds):.2f}",
            f"{median(c.seconds) / median(copying.seconds):.2f}", f"{new[c.name] / 1e6:,.2f}",
            f"{median(c.peaks) / 1e6:,.0f}",
        )
        for c in found
    ]  # fmt: skip
    header = (kind, "median s", "range s", f"/ {COPY}", "MB newly used", "peak MB")
    return merge_report.table(header, rows), many


def against_mergekit(found: Sequence[Contestant]) -> str:
    """The factor over mergekit, if it took part."""
    seconds = {contestant.name: median(contestant.seconds) for contestant in found}
    return "".join(
        f"\n\n{name} takes {theirs / seconds[OURS]:.0f} times as long as {OURS}, and "
        f"{theirs / seconds[BLENDED]:.0f} times as long as with its embeddings blended."
        for name, theirs in seconds.items()
        if name.startswith("mergekit")
    )


def keep_many(disk: Path, count: int, before: int) -> str:
    """Write compositions of the pair side by side; what they take beyond `before` bytes."""
    import layerswap as ls

    started = time.perf_counter()
    plan = ls.swap(task=disk / "task", language=disk / "language", outside="task")
    plans = plan.grid(bottom=range(plan.composition.layers), top=range(10))[:count]
    for number, each in enumerate(plans):
        each.save(disk / f"kept-{number}")
    seconds, new = time.perf_counter() - started, used(disk) - before
    return (
        f"{len(plans)} compositions of the pair, {len(plans) * plan.nbytes / 1e9:.0f} GB of "
        f"weights, were written in {seconds:.1f} s by one process, each flushed to the disk, and "
        f"take {new / 1e6:,.1f} MB."
    )


def report(tables: Sequence[str], many: str, options: argparse.Namespace, machine: str) -> str:
    """The whole of `results/merge-shared.md`."""
    nbytes = merge_report.output_bytes(options.gb)
    given = f"--gb {options.gb:g} --rounds {options.rounds}"
    parts = [
        "# Merging on filesystems that share blocks",
        f"Made by `python bench/merge_shared.py FOLDER {given}`.",
        machine,
        f"Synthetic Llama-shaped experts of {nbytes / 1e9:.2f} GB in bfloat16, in files of 1 GB, "
        "on filesystems in loop files on one disk. Every command ran as a process of its own, all "
        "in turn, round after round, and waits until its output is on the disk. The machine was "
        "shared with other work of lower priority, so ratios say more than seconds.",
        *tables,
        many,
        "Targets with nothing blended: at most 0.8 s, at most 0.15 of cp --reflink=never, a "
        "thirtieth of mergekit, at most 8 MB newly used.",
    ]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder to create, and to remove at the end")
    parser.add_argument("--gb", type=float, default=2.0, help="size of a checkpoint (2)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of every command (3)")
    parser.add_argument("--many", type=int, default=100, help="compositions kept at the end (100)")
    parser.add_argument("--mergekit", type=Path, help="its mergekit-yaml, in its environment")
    parser.add_argument("--write", action="store_true", help="write bench/results/merge-shared.md")
    options = parser.parse_args()
    options.folder = options.folder.absolute()
    options.folder.mkdir(parents=True)
    experts = options.folder / "experts"
    try:
        script = [sys.executable, str(HERE / "merge_data.py"), str(experts)]
        subprocess.run([*script, "--gb", str(options.gb), "--experts-alone"], check=True)
        machine = "\n".join(f"- {line}" for line in merge_report.describe(options.folder))
        outcomes = [run_kind(kind, experts, options) for kind in KINDS]
    finally:
        shutil.rmtree(options.folder)
    many = "".join(line for _, line in outcomes)
    text = report([table for table, _ in outcomes], many, options, machine)
    print(text)
    if options.write:
        (HERE / "results" / "merge-shared.md").write_text(text, "utf-8")


if __name__ == "__main__":
    main()
