"""The merge benchmark's tables, as Markdown; see `merge.py`."""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from merge_data import LAYER_PARAMETERS, OUTSIDE_PARAMETERS, layers_for
from merge_runs import DENSITY, FLAGS, Contestant, version

BARE = "python with numpy"
COPY, SYNCED = "cp -r", "cp -r, synced"
RATIOS = (
    ("layerswap swap", COPY, "at most 1.3", 1.3),
    ("layerswap swap", SYNCED, "at most 1.3", 1.3),
    ("layerswap swap, nothing blended", COPY, "at most 1.3", 1.3),
    ("layerswap swap, nothing blended", SYNCED, "at most 1.3", 1.3),
    ("mergekit passthrough slices", "layerswap swap", "at least 6", -6),
    ("mergekit passthrough slices", "layerswap swap, nothing blended", "at least 6", -6),
    ("layerswap soup", SYNCED, "near 1 (it reads twice as much)", None),
    ("mergekit linear", "layerswap soup", "at least 3.5", -3.5),
    ("mergekit ties", "layerswap ties per tensor", "at least 15", -15),
)
"""First over second, the target in words, and the limit: negative where more is better."""
MEMORY_TARGET = 200e6


def median(contestant: Contestant) -> float:
    return statistics.median(contestant.seconds)


def output_bytes(gigabytes: float) -> int:
    return 2 * (layers_for(gigabytes) * LAYER_PARAMETERS + OUTSIDE_PARAMETERS)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ruler, *rows]) + "\n"


def times(contestants: Sequence[Contestant], nbytes: int) -> str:
    bare = next(c for c in contestants if c.name == BARE)
    rows = []
    for c in contestants:
        speed = "" if c is bare else f"{nbytes / 1e6 / median(c):,.0f}"
        rows.append(
            (
                c.name,
                f"{median(c):.2f}",
                f"{min(c.seconds):.2f} to {max(c.seconds):.2f}",
                str(len(c.seconds)),
                speed,
                f"{statistics.median(c.peaks) / 1e6:,.0f}",
            )
        )
    header = ("", "median s", "range s", "runs", "MB/s written", "peak MB")
    return table(header, rows)


def ratios(contestants: Sequence[Contestant]) -> str:
    by_name = {c.name: c for c in contestants}
    rows = []
    for first, second, words, limit in RATIOS:
        if first not in by_name or second not in by_name:
            continue
        ratio = median(by_name[first]) / median(by_name[second])
        met = "" if limit is None else verdict(ratio <= limit if limit > 0 else ratio >= -limit)
        rows.append((f"{first} / {second}", f"{ratio:.2f}", words, met))
    for c in contestants:
        if c.name.startswith("layerswap"):
            peak = statistics.median(c.peaks)
            words, met = "at most 200 MB", verdict(peak <= MEMORY_TARGET)
            rows.append((f"{c.name}: peak memory", f"{peak / 1e6:,.0f} MB", words, met))
    return table(("", "measured", "target", "met"), rows)


def verdict(met: bool) -> str:
    return "yes" if met else "**no**"


def proofs(found: Mapping[str, Mapping[str, int]]) -> str:
    keys = ("tensors", "elements", "equal", "one step", "further")
    extra = ("at a threshold", "cancel exactly")
    rows = []
    for ours, counts in found.items():
        explained = ", ".join(f"{counts[key]:,} {key}" for key in extra if counts.get(key))
        unexplained = counts.get("further", 0) - sum(counts.get(key, 0) for key in extra)
        why = f"{explained}; {unexplained:,} unexplained" if counts.get("further") else ""
        rows.append((ours, *(f"{counts.get(key, 0):,}" for key in keys), why))
    header = ("", "tensors", "elements", "equal bits", "one step apart", "further", "why")
    return table(header, rows)


def growth(sizes: Mapping[float, Sequence[Contestant]]) -> str:
    rows = []
    for size, contestants in sizes.items():
        copying = next(c for c in contestants if c.name == SYNCED)
        nbytes = output_bytes(size)
        for c in contestants:
            rows.append(
                (
                    f"{nbytes / 1e9:.2f} GB: {c.name}",
                    f"{median(c):.2f}",
                    f"{min(c.seconds):.2f} to {max(c.seconds):.2f}",
                    f"{nbytes / 1e6 / median(c):,.0f}",
                    f"{median(c) / median(copying):.2f}",
                    f"{median(c) - median(copying):+.2f}",
                    f"{statistics.median(c.peaks) / 1e6:,.0f}",
                )
            )
    relative = ("/ cp -r, synced", "s more")
    return table(("", "median s", "range s", "MB/s written", *relative, "peak MB"), rows)


def sizes_report(
    sizes: Mapping[float, Sequence[Contestant]],
    machine: Sequence[str],
    options: argparse.Namespace,
) -> str:
    """The whole of `results/merge-sizes.md`."""
    given = " ".join(f"{size:g}" for size in sizes)
    parts = [
        "# Merging small and large checkpoints",
        f"Made by `python bench/merge_sizes.py FOLDER --gb {given} --rounds {options.rounds}`.",
        "\n".join(f"- {line}" for line in machine),
        "Synthetic Llama-shaped experts in bfloat16, in files of 1 GB, as in [merge.md](merge.md). "
        "Every command ran as a process of its own, all in turn, round after round, and each waits "
        "until its output is on the disk; the numbers are medians. Two experts that fit into "
        "memory together are read from the page cache, larger ones from the disk. The machine was "
        "shared with other work, which paused meanwhile; its disk was not.",
        growth(sizes),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def describe(folder: Path) -> list[str]:
    """The machine, and the versions on our side."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    df = ["df", "--output=fstype", str(folder)]
    kind = subprocess.check_output(df, text=True).split()[-1]
    coreutils = subprocess.check_output(["cp", "--version"], text=True).splitlines()[0]
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    names = ("layerswap", "torch", "transformers", "numpy")
    return [
        f"{len(os.sched_getaffinity(0))} processors ({platform.machine()}), "
        f"{memory / 1e9:.0f} GB of memory, {kind}, {system}",
        f"Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f"; {coreutils}",
    ]


def mergekit_versions(python: str) -> str:
    names = ("mergekit", "torch", "transformers", "safetensors", "numpy")
    found = ", ".join(f"{name} {version(name, python)}" for name in names)
    return f"mergekit's environment: {found}; flags `{' '.join(FLAGS)}`"


def report(
    contestants: Sequence[Contestant],
    found: Mapping[str, Mapping[str, int]],
    machine: Sequence[str],
    options: argparse.Namespace,
) -> str:
    """The whole of `results/merge.md`."""
    nbytes = output_bytes(options.gb)
    synced = "waits for the disk too" if options.sync else "does not wait"
    parts = [
        "# Merging, measured",
        f"Made by `python bench/merge.py {options.arguments}`; nothing here was measured in "
        "another run.",
        "\n".join(f"- {line}" for line in machine),
        f"The experts are synthetic Llama-shaped checkpoints of {nbytes / 1e9:.2f} GB in "
        f"bfloat16, {layers_for(options.gb)} layers, sharded in files of 1 GB. Every command ran "
        "as a process of its own, all in turn, round after round; the numbers are medians. The "
        "machine was shared with other work, so the ranges are wide. Reads came from the page "
        "cache. layerswap waits until its output is on the disk (that is part of its promise), "
        f"`cp -r` is given with and without that wait, and mergekit {synced}. Peak memory "
        "counts mapped file pages for a tool that maps its inputs, as mergekit does.",
        times(contestants, nbytes),
        "## Against the targets",
        ratios(contestants),
        HELD_TEXT,
    ]
    if found:
        parts += ["## The same tensors?", PROOF_TEXT, proofs(found)]
    return "\n\n".join(part.strip() for part in parts) + "\n"


HELD_TEXT = (
    "Every command of layerswap pays for its start, of which `python with numpy` is the floor, "
    "and for the wait for the disk, which `cp -r` has only where it says so. Both weigh less the "
    "larger the checkpoint ([merge-sizes.md](merge-sizes.md)). What is computed is bound by the "
    "passes of NumPy over memory: some fourteen for a blend, some seventy for TIES, each of "
    "0.05 to 0.3 nanoseconds an element."
)
PROOF_TEXT = (
    "Every tensor of layerswap's output against mergekit's, element by element, in steps from one "
    "bfloat16 value to the next; a different rounding is one step. mergekit's slices cannot blend "
    "what lies outside the layers, so that pair takes it from the language expert. TIES ran in "
    f"float32 with density {DENSITY:g} per tensor on both sides. It leaves two things open, and "
    "the tools choose differently. Of equal magnitudes at the threshold, mergekit keeps as many as "
    "fill the count, in no particular order; layerswap keeps all. Where the kept deltas cancel "
    "exactly, mergekit takes the positive one; layerswap stays at the base."
)
