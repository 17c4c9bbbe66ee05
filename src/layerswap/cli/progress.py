"""Progress bars, on standard error so that output can be piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


@contextmanager
def byte_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in bytes with the rate; yields the function to call with bytes just done."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        job = bar.add_task(label, total=total)
        yield lambda count: bar.update(job, advance=count)


@contextmanager
def step_progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar in steps; yields the function to call with the number of steps just done."""
    with _step_bars() as bars:
        job = bars.add_task(label, total=total)
        yield lambda count: bars.update(job, advance=count)


@contextmanager
def named_progress() -> Iterator[Callable[[str, int, int], None]]:
    """One bar per name; yields a function of a name, the steps done and the steps in all."""
    with _step_bars() as bars:
        jobs: dict[str, TaskID] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in jobs:
                jobs[name] = bars.add_task(name, total=total)
            bars.update(jobs[name], completed=done, total=total)

        yield report


def _step_bars() -> Progress:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=Console(stderr=True))
