"""Prints results on standard output, and notes and progress on standard error.

Progress is shown as bars on a terminal, which disappear with their work, and as a line every 15
seconds elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerswap.ground.errors import visible

if TYPE_CHECKING:
    from rich.progress import Progress

    from layerswap.evaluation.response_cache import AnswerStore


SCHEMA = 2
"""Version of the JSON that commands print; see docs/reference/cli.md."""


@dataclass
class Settings:
    """The output options of the command that runs."""

    quiet: bool = False
    verbose: bool = False
    json: bool = False


settings = Settings()
_live: list[Progress] = []
"""The bars on the terminal; a note is printed above them."""


def say(text: object) -> None:
    """Print a result for people; nothing with --quiet or --json.

    Line breaks in a text are escaped; a table or a plan escapes its own parts.
    """
    if not settings.quiet and not settings.json:
        _echo(text)


def log(text: str) -> None:
    """Print a line of progress or a note on standard error; nothing with --quiet."""
    if not settings.quiet and _live:
        from rich.text import Text

        _live[-1].console.print(Text(visible(text)), soft_wrap=True)
    elif not settings.quiet:
        _echo(text, err=True)


def suggest(*words: object) -> None:
    """Name the command that comes next, on standard error; nothing with --quiet or --json."""
    if not settings.json:
        log(f"next: {shlex.join(['layerswap', *map(str, words)])}")


def unused(name: str) -> str:
    """Return a free path for the output of a next command: the name, or the name with a number."""
    numbered = (f"{name}-{number}" for number in count(2))
    return next(path for path in chain([name], numbered) if not Path(path).exists())


def finish(command: str, facts: Mapping[str, Any], texts: Sequence[object] = ()) -> None:
    """Print the result of a command: `facts` with --json (docs/reference/cli.md), else `texts`."""
    if settings.json:
        from layerswap.versions import __version__

        head = {"command": command, "schema": SCHEMA, "layerswap_version": __version__}
        typer.echo(json.dumps({**head, **facts}, indent=2, ensure_ascii=False))
    else:
        for text in texts:
            say(text)


def choose(*, quiet: bool, verbose: bool, as_json: bool) -> None:
    """Set the output options before a command runs."""
    settings.quiet, settings.verbose, settings.json = quiet, verbose, as_json
    if not verbose:
        # Hides the bars of lm-eval and datasets: the commands show their own progress.
        os.environ.setdefault("TQDM_DISABLE", "1")
    if verbose:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")


def _echo(text: object, *, err: bool = False) -> None:
    if (styled := getattr(text, "styled", None)) is not None:  # a table escapes its own parts
        typer.echo(styled())
        return
    lines = [text] if isinstance(text, str) else str(text).split("\n")
    typer.echo("\n".join(map(visible, lines)), err=err)


SECONDS_BETWEEN_LINES = 15.0
"""Seconds between two lines of one job where standard error is no terminal."""


class Job:
    """Work with a counter of finished units, shown as a bar, or as lines without `bars`."""

    def __init__(self, label: str, unit: str, bars: Progress | None = None) -> None:
        self.label, self.unit, self.bars = label, unit, bars  # `bytes` or another word
        self.done = self.total = 0  # the total is 0 while it is unknown
        self.started = self.shown = time.monotonic()  # s; `shown` is the time of the last line
        # Until the first unit is done, the bar has no total: it moves instead of being empty.
        self.bar = None if bars is None else bars.add_task(label, total=None, job=self)

    def reach(self, done: int, total: int) -> None:
        """Set the units done and the units in all, and show them; a line only if one is due."""
        finished = bool(total) and done >= total and done > self.done
        self.done, self.total = done, total
        if self.bars is not None and self.bar is not None:
            self.bars.update(self.bar, completed=done, total=(done and total) or None,
                             visible=not 0 < total <= done)  # fmt: skip
            return
        now = time.monotonic()
        if now - (self.started if finished else self.shown) < SECONDS_BETWEEN_LINES:
            return
        self.shown = now
        rate = self.done / max(now - self.started, 1e-9)
        left = f", {(self.total - self.done) / rate:,.0f} s left" if rate and self.total else ""
        log(f"{self.label}: {self.amount(rate)}{left}")

    def amount(self, rate: float | None) -> str:
        """Units done, units in all, and units per second."""
        total = f" of {self._words(self.total)}" if self.total else ""
        unit = f" {self.unit}" if self.unit != "bytes" else ""
        per_second = f", {self._words(rate)}/s" if rate else ""
        return f"{self._words(self.done)}{total}{unit}{per_second}"

    def _words(self, count: float) -> str:
        if self.unit == "bytes":
            return f"{count / 1e9:,.2f} GB"
        return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.2g}"


@contextmanager
def step_progress(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yields a function that advances it by n units."""
    with _jobs(unit) as begin:
        job = begin(label)
        yield lambda count: job.reach(job.done + count, total)


@contextmanager
def answer_progress(label: str, path: Path) -> Iterator[AnswerStore]:
    """A store of answers that shows how many of all compositions are left, and the rate.

    The total is compositions times requests: a document with one prompt is one request, a choice of
    four is four. Answers that the store already has are not counted.
    """
    from layerswap.evaluation.response_cache import AnswerStore

    with _jobs("answers") as begin:
        job = begin(label)
        with closing(AnswerStore(path, lambda total, done: job.reach(done, total))) as store:
            yield store


@contextmanager
def named_progress(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """One job per name; yields a function of a name, the units done and the units in all."""
    with _jobs(unit) as begin:
        begun = cache(begin)
        yield lambda name, done, total: begun(name).reach(done, total)


@contextmanager
def _jobs(unit: str) -> Iterator[Callable[[str], Job]]:
    """Yields a function that begins a job of a name."""
    if settings.quiet or not sys.stderr.isatty():
        yield lambda name: Job(name, unit)
        return
    with _bars() as bars:
        _live.append(bars)
        try:
            yield lambda name: Job(name, unit, bars)
        finally:
            _live.remove(bars)


def _bars() -> Progress:
    from rich import progress
    from rich.console import Console
    from rich.text import Text

    class Amount(progress.ProgressColumn):
        """Units done, units in all, and units per second."""

        def render(self, task: progress.Task) -> Text:
            job: Job = task.fields["job"]
            return Text(job.amount(task.speed) if job.done else "loading")

    name = progress.TextColumn("{task.description}", markup=False)
    columns = (name, progress.BarColumn(), Amount(), progress.TimeRemainingColumn())
    return progress.Progress(*columns, console=Console(stderr=True), transient=True)
