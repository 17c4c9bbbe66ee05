"""Prints results on standard output, and notes and progress on standard error.

Progress is shown as bars on a terminal, which disappear with their work, and as a line every 15
seconds elsewhere.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from layerswap.ground.errors import visible

if TYPE_CHECKING:
    from rich.progress import Progress

    from layerswap.evaluation.response_cache import AnswerStore


SCHEMA = 1
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


def suggest(command: str) -> None:
    """Name the command that comes next, on standard error; nothing with --quiet or --json."""
    if not settings.json:
        log(f"next: layerswap {command}")


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


@contextmanager
def step_progress(label: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """Show a progress bar; yields a function that advances it by n units."""
    with named_progress(unit) as report:
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            report(label, done, total)

        advance(0)
        yield advance


@contextmanager
def answer_progress(label: str, path: Path) -> Iterator[AnswerStore]:
    """A store of answers that shows how many of all compositions are left, and the rate.

    The total is compositions times requests: a document with one prompt is one request, a choice of
    four is four. Answers that the store already has are not counted.
    """
    from layerswap.evaluation.response_cache import AnswerStore

    with named_progress("answers") as report:
        report(label, 0, 0)
        with closing(AnswerStore(path, lambda total, done: report(label, done, total))) as store:
            yield store


@contextmanager
def named_progress(unit: str) -> Iterator[Callable[[str, int, int], None]]:
    """Show a job per name; yields a function of a name, the units done and the units in all.

    A total of 0 is unknown.
    """
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}", markup=False), progress.BarColumn(),
        progress.TextColumn("{task.fields[amount]}", markup=False), progress.TimeRemainingColumn(),
    )  # fmt: skip
    live = sys.stderr.isatty() and not settings.quiet
    bars = progress.Progress(*columns, console=Console(stderr=True), transient=True,
                             disable=not live)  # fmt: skip
    tasks: dict[str, progress.TaskID] = {}
    started: dict[str, float] = {}
    shown: dict[str, float] = {}  # time of the last line of each job, s

    def report(name: str, done: int, total: int) -> None:
        now = time.monotonic()
        if name not in tasks:
            tasks[name] = bars.add_task(name, total=None, amount="loading")
            started[name] = shown[name] = now
        passed = now - started[name]
        rate = done / max(passed, 1e-9)
        amount, finished = _amount(done, total, rate, unit), 0 < total <= done
        # Until the first unit is done, the bar has no total: it moves instead of being empty.
        bars.update(tasks[name], completed=done, total=(done and total) or None,
                    visible=not finished, amount=amount if done else "loading")  # fmt: skip
        waited = passed if finished else now - shown[name]
        if not live and waited >= SECONDS_BETWEEN_LINES:
            shown[name] = now
            left = f", {(total - done) / rate:,.0f} s left" if rate and total else ""
            log(f"{name}: {amount}{left}")

    if live:
        _live.append(bars)
    try:
        with bars:
            yield report
    finally:
        if live:
            _live.remove(bars)


def _amount(done: int, total: int, rate: float, unit: str) -> str:
    """Units done, units in all, and units per second."""

    def words(count: float) -> str:
        if unit == "bytes":
            return f"{count / 1e9:,.2f} GB"
        return f"{count:,.0f}" if count >= 10 or count == int(count) else f"{count:.2g}"

    of_all = f" of {words(total)}" if total else ""
    named = f" {unit}" if unit != "bytes" else ""
    return f"{words(done)}{of_all}{named}" + (f", {words(rate)}/s" if rate else "")
