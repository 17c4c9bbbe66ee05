"""Running a graph: what is done stays done, what fails stops only what needs it."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from layerswap._types import Log
from layerswap.errors import LayerswapError, StudyError
from layerswap.study.journal import LOG, State, StepRecord, StudyJournal
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage

Work = Callable[["Context"], None]
"""Does a step: reads the folders of what it needs, and writes into its own."""
TRANSIENT: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError)
"""Faults that may pass: of the network, mostly."""
TRIES = 3
PAUSE = 2.0
"""Seconds before the second try; twice as many before each further one."""


@dataclass(frozen=True)
class Context:
    """What a step works with.

    Attributes:
        step: the step.
        folder: its own; what an earlier attempt left is in it.
        inputs: the folders of the steps that it needs, by name.
        log: told what it does.
    """

    step: Step
    folder: Path
    inputs: Mapping[str, Path]
    log: Log


class Executor(Protocol):
    """Where steps run: one at a time here, or many on a cluster."""

    def run(
        self, journal: StudyJournal, steps: list[Step], works: Mapping[str, Work], log: Log
    ) -> None:
        """Do these steps, each after those it needs; every end is in the journal."""


@dataclass(frozen=True)
class Summary:
    """How a run of a study ended.

    Attributes:
        entries: what became of each step that was tried or done before.
        blocked: steps that were not tried, with the failed step that they need.
    """

    entries: Mapping[str, StepRecord]
    blocked: Mapping[str, str]

    @property
    def failed(self) -> list[StepRecord]:
        """The steps that failed."""
        return [entry for entry in self.entries.values() if entry.state == "failed"]

    def check(self) -> None:
        """Let nothing pass that failed.

        Raises:
            StudyError: a step failed.
        """
        if self.failed:
            raise StudyError("; ".join(f"{entry.name}: {entry.why}" for entry in self.failed))


class InProcess:
    """Runs steps one after the other in this process."""

    def run(
        self, journal: StudyJournal, steps: list[Step], works: Mapping[str, Work], log: Log
    ) -> None:
        """Do these steps in order; see `Executor`."""
        done = set(journal.finished())
        for step in steps:
            if done.issuperset(step.needs) and do_step(journal, step, works, log).state == "done":
                done.add(step.name)


def run_graph(
    graph: Graph,
    root: Path,
    works: Mapping[str, Work],
    *,
    executor: Executor | None = None,
    storage: Storage | None = None,
    log: Log = lambda line: None,
) -> Summary:
    """Do every step of a graph that is not done yet.

    Args:
        graph: the steps.
        root: the study's folder; a run that was killed goes on in it.
        works: what does each kind of step.
        executor: where; in this process when None.
        storage: where finished steps are kept; in the study's folder alone when None.
        log: told what is being done.

    Raises:
        StudyError: the folder holds something else.
    """
    journal = StudyJournal(root, graph, storage)
    try:
        journal.open()
        waiting = journal.left()
        log(f"{len(graph)} steps, {len(graph) - len(waiting)} of them done before")
        (executor or InProcess()).run(journal, waiting, works, log)
    except OSError as error:  # of the journal; what a step raises is in its record
        raise StudyError(f"{journal.root}: cannot be written ({error})") from None
    entries = {step.name: entry for step in graph if (entry := journal.entry(step.name))}
    finished = journal.finished()
    tried = {name for name, entry in entries.items() if entry.state == "failed" or name in finished}
    blocked: dict[str, str] = {}
    for name, entry in entries.items():
        if entry.state == "failed":
            blocked |= {one: name for one in graph.followers(name) if one not in tried}
    return Summary(entries, blocked)


def do_step(journal: StudyJournal, step: Step, works: Mapping[str, Work], log: Log) -> StepRecord:
    """Do one step, with further tries after faults that may pass, and write down how it ended.

    An interruption from outside (Ctrl-C, a kill) leaves the step as if it had not been tried.
    """
    started = time.monotonic()
    state: State = "failed"
    why, attempt = "", 0
    folder = journal.begin(step)
    while True:
        attempt += 1
        log(f"{step.name}" + (f", try {attempt}" if attempt > 1 else ""))
        try:
            inputs = {name: journal.bring(name) for name in step.needs}
            works[step.kind](Context(step, folder, inputs, log))
        except TRANSIENT as error:
            why = _reason(error)
            if attempt < TRIES:
                time.sleep(PAUSE * 2 ** (attempt - 1))
                continue
        except LayerswapError as error:
            why = str(error)
        except Exception as error:  # a study goes on with what does not need this step
            why = _reason(error)
            (folder / LOG).write_text(traceback.format_exc(), "utf-8")
        else:
            state, why = "done", ""
        break
    entry = journal.finish(step, state=state, started=started, why=why, attempts=attempt)
    if state == "failed":
        log(f"{step.name} failed: {why}")
    return entry


def status(journal: StudyJournal) -> list[dict[str, Any]]:
    """Every step with its state, for a table: `waiting` and `blocked` too."""
    rows: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    finished = journal.finished()
    for step in journal.graph:
        entry = journal.entry(step.name)
        state: State = entry.state if entry else "waiting"
        if state == "done" and step.name not in finished:
            state = "waiting"  # what it was made from was made again
        why = entry.why if entry else ""
        if state == "failed":
            failed |= dict.fromkeys(journal.graph.followers(step.name), step.name)
        if state == "waiting" and step.name in failed:
            state, why = "blocked", f"needs {failed[step.name]}"
        seconds = entry.seconds if entry else None
        rows.append({"step": step.name, "state": state, "seconds": seconds, "why": why})
    return rows


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
