"""A small study of toy steps, and a driver of it that may be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from processes import PATH

from layerswap.ground import system
from layerswap.study.steps import Graph, Resources, Step

DRIVER = """
import sys
from pathlib import Path
from cluster_steps import drive
drive(Path(sys.argv[1]), float(sys.argv[2]))
"""


def graph(width: int, **resources: float) -> Graph:
    """As many data sets as trainings, each on its own, and tables of all."""
    small = Resources(**{"cpus": 1, "memory_gb": 0.2, **resources})
    data = [Step(f"data/{i}", "data", {"i": i}, resources=small) for i in range(width)]
    trainings = [Step(f"train/{i}", "train", {"i": i}, (f"data/{i}",), resources=small)
                 for i in range(width)]  # fmt: skip
    needs = tuple(step.name for step in trainings)
    return Graph([*data, *trainings, Step("tables", "tables", {}, needs, resources=small)])


def functions(
    marks: Path,
    *,
    broken: str = "",
    seconds: float = 0.0,
    swallow: str = "",
    slow_first: float = 0.0,
) -> Mapping[str, Callable[..., None]]:
    """The same function for all kinds; each begin of a step is a line of its mark.

    `broken` fails, `swallow` takes 4 GB of memory, and `slow_first` are the seconds of the first
    try of data, which saves when it is interrupted.
    """

    # Inside a function, so that workers, which cannot import this file, get it by value.
    def work(context):
        import os
        import time
        from pathlib import Path

        from layerswap.ground import system

        if context.step.name == broken:
            raise ValueError("no such data")
        mark = Path(marks) / context.step.name.replace("/", "-")
        slow = slow_first if context.step.kind == "data" and not mark.exists() else 0
        with mark.open("a") as file:
            file.write(f"{os.getpid()}\n")
        context.log(f"half of {context.step.name}")
        held = b"x" * (4 << 30 if context.step.name == swallow else 0)
        time.sleep(seconds)
        if slow:
            with system.first_interrupt("saving") as asked:
                if asked.wait(slow):
                    (context.folder / "saved").touch()
                    raise KeyboardInterrupt
        parts = [(folder / "out").read_text() for folder in context.inputs.values()]
        del held
        (context.folder / "out").write_text("+".join([*sorted(parts), context.step.name]))

    return dict.fromkeys(("data", "train", "tables"), work)


def drive(folder: Path, seconds: float) -> None:
    """Run one chain of steps on Slurm as the command line does, and print its lines."""
    from layerswap.study.on_slurm import OnSlurm
    from layerswap.study.runner import run_graph

    system.interrupt_on(signal.SIGTERM)
    executor = OnSlurm(folder / "out" / "jobs", {}, {})
    works = functions(folder / "marks", seconds=seconds)

    def tell(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    run_graph(graph(1), folder / "out", works, executor=executor, log=tell)


def start_driver(folder: Path, seconds: float, inside: Sequence[str] = ()) -> subprocess.Popen[str]:
    """Start `drive` in a process of its own, which the command `inside` starts."""
    return subprocess.Popen(
        [*inside, sys.executable, "-c", DRIVER, str(folder), str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(PATH)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
