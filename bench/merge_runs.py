"""What the merge benchmark runs, and how it measures; see `merge.py`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

DENSITY = 0.5
LAYERSWAP = Path(sys.executable).with_name("layerswap")
FLAGS = ("--async-write", "--write-threads", "2", "--quiet")
"""Flags of mergekit-yaml: writing overlaps computing."""


@dataclass
class Contestant:
    """One command, and what it has measured so far.

    Attributes:
        name: what the tables call it.
        command: a shell command; `{out}` stands for the folder that it makes.
        rounds: how many of the rounds it takes part in.
        seconds: wall time of every run.
        peaks: peak resident memory of every run, in bytes.
    """

    name: str
    command: str
    rounds: int
    seconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)


def measure(command: str, log: Path) -> tuple[float, int]:
    """Wall seconds, and peak resident bytes of the largest process of the command."""
    with log.open("w") as output:
        started = time.perf_counter()
        child = subprocess.Popen(
            ["/bin/sh", "-c", command],
            stdout=output,
            stderr=subprocess.STDOUT,
            # As installed: an environment may forbid Python to keep what it compiled.
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "NO_COLOR": "1",
                "PYTHONDONTWRITEBYTECODE": "",
            },
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - started
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
        sys.exit(f"failed ({child.returncode}): {command}\n{tail}")
    return seconds, usage.ru_maxrss * 1024


def run_rounds(
    contestants: Sequence[Contestant],
    folder: Path,
    look: Callable[[str, Path], None] = lambda name, out: None,
) -> None:
    """All contestants in turn, round after round; `look` sees the outputs of the first."""
    out = folder / "out"
    for number in range(max(c.rounds for c in contestants)):
        for contestant in contestants:
            if number >= contestant.rounds:
                continue
            shutil.rmtree(out, ignore_errors=True)
            os.sync()  # what the last run left to be written must not slow this one down
            command = contestant.command.format(out=out)
            seconds, peak = measure(command, folder / "log.txt")
            contestant.seconds.append(seconds)
            contestant.peaks.append(peak)
            print(f"round {number + 1}: {contestant.name}: {seconds:.2f} s", flush=True)
            if number == 0:
                look(contestant.name, out)
    shutil.rmtree(out, ignore_errors=True)


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def floors(source: Path, rounds: int) -> list[Contestant]:
    """Copying the bytes of an output, with and without waiting for the disk, and importing."""
    return [
        Contestant("cp -r", f"cp -r '{source}' '{{out}}'", rounds),
        Contestant("cp -r, synced", f"cp -r '{source}' '{{out}}' && sync '{{out}}'/*", rounds),
        Contestant("python with numpy", f"'{sys.executable}' -c 'import numpy'", rounds),
    ]


def layerswap(folder: Path, rounds: int, slow: int) -> list[Contestant]:
    """Every merge of layerswap that the benchmark compares; writes their recipes.

    TIES takes part in `slow` of the rounds, and stays away if that is 0.
    """
    experts = {name: str(folder / name) for name in ("task", "language")}
    both = {"experts": experts}
    recipes: dict[str, dict[str, object]] = {
        "swap": {**both, "swap": {}},
        "swap, nothing blended": {**both, "swap": {"outside": "language"}},
        "soup": {**both, "soup": {"experts": list(experts)}},
    }
    for scope in ("tensor", "model") if slow else ():
        method = {"method": "ties", "experts": list(experts), "density": DENSITY, "scope": scope}
        recipes[f"ties per {scope}"] = {
            **both,
            "base": str(folder / "base"),
            "merge": method,
        }
    found = []
    for name, recipe in recipes.items():
        path = folder / f"layerswap-{slug(name)}.yaml"
        path.write_text(json.dumps(recipe))  # JSON is YAML
        command = f"'{LAYERSWAP}' merge '{path}' --out '{{out}}'"
        runs = slow if name.startswith("ties") else rounds
        found.append(Contestant(f"layerswap {name}", command, runs))
    return found


def mergekit(folder: Path, script: Path, layers: int, rounds: int, slow: int) -> list[Contestant]:
    """The same merges by mergekit; writes their configurations."""
    task, language, base = (str(folder / name) for name in ("task", "language", "base"))
    low, high = zones(layers)
    slices = [(language, 0, low), (task, low, layers - high), (language, layers - high, layers)]
    half = {"weight": 0.5, "density": DENSITY}
    dense = [{"model": model, "parameters": half} for model in (task, language)]
    linear = [{"model": model, "parameters": {"weight": 0.5}} for model in (task, language)]
    configs: dict[str, dict[str, object]] = {
        "passthrough slices": {
            "merge_method": "passthrough",
            "slices": [
                {"sources": [{"model": model, "layer_range": [first, last]}]}
                for model, first, last in slices
            ],
            "dtype": "bfloat16",
        },
        "linear": {"merge_method": "linear", "models": linear, "dtype": "bfloat16"},
        "ties": {
            "merge_method": "ties",
            "base_model": base,
            "models": dense,
            "dtype": "float32",
            "out_dtype": "bfloat16",
        },
    }
    found = []
    for name, config in configs.items():
        path = folder / f"mergekit-{slug(name)}.yaml"
        path.write_text(json.dumps(config))
        command = f"'{script}' '{path}' '{{out}}' {' '.join(FLAGS)}"
        found.append(Contestant(f"mergekit {name}", command, slow if name == "ties" else rounds))
    return found


def zones(layers: int) -> tuple[int, int]:
    """The paper's 5 and 2 of 32 layers, scaled as layerswap scales them."""
    bottom, top = (max(1, int(count * layers / 32 + 0.5)) for count in (5, 2))
    return bottom, top


def with_sync(contestants: Sequence[Contestant]) -> Iterator[Contestant]:
    """The contestants, each waiting until its files are on the disk; layerswap always does."""
    for contestant in contestants:
        if contestant.name.startswith("mergekit"):
            contestant.command += " && sync '{out}'/*"
        yield contestant


def install_mergekit(folder: Path, constraints: Path | None) -> Path:
    """A virtual environment with the latest mergekit, and layerswap's torch if it takes it."""
    home = folder / "mergekit-venv"
    script = home / "bin" / "mergekit-yaml"
    if script.is_file():
        return script
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
    limits = ["-c", str(constraints)] if constraints else []
    torch = version("torch").split("+")[0]
    subprocess.run([*pip, *limits, f"torch=={torch}"], check=False)
    subprocess.run([*pip, *limits, "mergekit"], check=True)
    return script


def version(package: str, python: str = sys.executable) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()
