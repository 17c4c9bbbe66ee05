"""Runs commands in turn, each as a process of its own, and tabulates seconds and memory."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

LAYERSWAP = Path(sys.executable).with_name("layerswap")
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass
class Contestant:
    """One command, and what it has measured so far.

    Attributes:
        name: what the tables call it.
        command: a shell command; `{out}` stands for the folder or file that it makes.
        rounds: how many of the rounds it takes part in.
        own_clock: true if the last line that it prints is its seconds.
        seconds: wall time of every run.
        peaks: peak resident memory of every run, in bytes.
    """

    name: str
    command: str
    rounds: int
    own_clock: bool = False
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)

    @property
    def median(self) -> float:
        return median(self.seconds)


def measure(command: str, log: Path) -> tuple[float, int]:
    """Wall seconds, and peak resident bytes of the largest process of the command."""
    # As installed: an environment may forbid Python to keep what it compiled.
    changes = {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": ""}
    with log.open("w") as output:
        started = time.perf_counter()
        child = subprocess.Popen(
            ["/bin/sh", "-c", command], stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, **changes},
        )  # fmt: skip
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"failed ({child.returncode}): {command}\n{tail}")
    return seconds, usage.ru_maxrss * 1024


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def run_rounds(
    contestants: Sequence[Contestant],
    folder: Path,
    look: Callable[[str, Path], None] = lambda name, out: None,
    out: str = "out",
    before: Callable[[], None] = os.sync,
) -> None:
    """All contestants in turn, round after round; `look` sees the outputs of the first.

    `before` runs before each of them: what the last run left to be written must not slow it down.
    """
    for number in range(max(contestant.rounds for contestant in contestants)):
        for contestant in contestants:
            if number >= contestant.rounds:
                continue
            remove(folder / out)
            before()
            command = contestant.command.format(out=folder / out)
            seconds, peak = measure(command, folder / "log.txt")
            if contestant.own_clock:
                seconds = float((folder / "log.txt").read_text().splitlines()[-1])
            contestant.seconds.append(seconds)
            contestant.peaks.append(peak)
            print(f"round {number + 1}: {contestant.name}: {seconds:.2f} s", flush=True)
            if number == 0:
                look(contestant.name, folder / out)
    remove(folder / out)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ruler, *rows])


def times(
    contestants: Sequence[Contestant],
    floor: Contestant,
    columns: Mapping[str, Callable[[Contestant], str]] | None = None,
    title: str = "",
) -> str:
    """Every command's seconds, its ratio to the floor, memory, and columns of one's own."""
    extra = columns or {}
    header = (title, "median s", "range s", "runs", f"/ {floor.name}", "peak MB", *extra)
    rows = [
        (
            c.name, f"{c.median:.2f}", f"{min(c.seconds):.2f} to {max(c.seconds):.2f}",
            str(len(c.seconds)), f"{c.median / floor.median:.2f}", f"{median(c.peaks) / 1e6:,.0f}",
            *(cell(c) for cell in extra.values()),
        )
        for c in contestants
    ]  # fmt: skip
    return table(header, rows)


def version(package: str, python: str = sys.executable) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()


def machine(folder: Path) -> str:
    """The machine, and the versions on our side, as a list in Markdown."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    df = ["df", "--output=fstype", str(folder)]
    kind = subprocess.check_output(df, text=True).split()[-1]
    coreutils = subprocess.check_output(["cp", "--version"], text=True).splitlines()[0]
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    names = ("layerswap", "torch", "transformers", "numpy")
    return (
        f"- {len(os.sched_getaffinity(0))} processors ({platform.machine()}), "
        f"{memory / 1e9:.0f} GB of memory, {kind}, {system}\n"
        f"- Python {platform.python_version()}, "
        + ", ".join(f"{name} {version(name)}" for name in names)
        + f"; {coreutils}"
    )


def report(name: str, parts: Iterable[str], options: argparse.Namespace) -> None:
    """Print a report, and with `--write` put it into `results`."""
    text = "\n\n".join(part.strip() for part in parts if part) + "\n"
    print(text)
    if options.write:
        (RESULTS / f"{name}.md").write_text(text, "utf-8")
