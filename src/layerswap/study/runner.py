"""Runner of a graph: finished steps stay, and a failure stops only what needs the failed step."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from layerswap._types import Log
from layerswap.errors import LayerswapError, StudyError
from layerswap.study.journal import LOG, State, StepRecord, StudyJournal
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage

StepFunction = Callable[["Context"], None]
"""Runs a step: reads the folders of the steps that it needs, and writes into its own."""
TRANSIENT: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError)
"""Faults that may pass: of the network, mostly."""
TRIES = 3
PAUSE = 2.0
"""Seconds before the second try; twice as many before each further one."""


@dataclass(frozen=True)
class Context:
    """The surroundings of a step that runs.

    Attributes:
        step: the step.
        folder: its own; it holds the output of an earlier attempt.
        inputs: the folders of the steps that it needs, by name.
        log: called with each line of progress.
    """

    step: Step
    folder: Path
    inputs: Mapping[str, Path]
    log: Log


class Executor(Protocol):
    """The place where steps run: this process, or a cluster."""

    def run(
        self,
        journal: StudyJournal,
        steps: list[Step],
        functions: Mapping[str, StepFunction],
        log: Log,
    ) -> None:
        """Run these steps, each after those it needs; how each ended is in the journal."""


@dataclass(frozen=True)
class Summary:
    """The end of a run of a study.

    Attributes:
        records: of each step that was tried now or before.
        blocked: steps that were not tried, with the failed step that they need.
    """

    records: Mapping[str, StepRecord]
    blocked: Mapping[str, str]

    @property
    def failed(self) -> list[StepRecord]:
        """The steps that failed."""
        return [record for record in self.records.values() if record.state == "failed"]

    def check(self) -> None:
        """Raise what failed.

        Raises:
            StudyError: a step failed.
        """
        if self.failed:
            raise StudyError("; ".join(f"{record.name}: {record.why}" for record in self.failed))


class InProcess:
    """Runs steps one after the other in this process."""

    def run(
        self,
        journal: StudyJournal,
        steps: list[Step],
        functions: Mapping[str, StepFunction],
        log: Log,
    ) -> None:
        """Run these steps in order; see `Executor`."""
        done = set(journal.finished())
        for step in steps:
            if not done.issuperset(step.needs):
                continue
            if run_step(journal, step, functions, log).state == "done":
                done.add(step.name)


def run_graph(
    graph: Graph,
    root: Path,
    functions: Mapping[str, StepFunction],
    *,
    executor: Executor | None = None,
    storage: Storage | None = None,
    log: Log = lambda line: None,
) -> Summary:
    """Run every step of a graph that is not done yet.

    Args:
        graph: the steps.
        root: the study's folder; a run that was killed resumes in it.
        functions: by kind of step.
        executor: runs them; in this process when None.
        storage: keeps finished steps; the study's folder alone when None.
        log: called with each line of progress.

    Raises:
        StudyError: the folder holds something else.
    """
    journal = StudyJournal(root, graph, storage)
    try:
        journal.open()
        waiting = journal.left()
        log(f"{len(graph)} steps, {len(graph) - len(waiting)} of them done before")
        (executor or InProcess()).run(journal, waiting, functions, log)
    except OSError as error:  # of the journal; what a step raises is in its record
        raise StudyError(f"{journal.root}: cannot be written ({error})") from None
    records = {step.name: record for step in graph if (record := journal.record(step.name))}
    blocked = {one.step: one.blocked_by for one in journal.status() if one.blocked_by}
    return Summary(records, blocked)


def run_step(
    journal: StudyJournal, step: Step, functions: Mapping[str, StepFunction], log: Log
) -> StepRecord:
    """Run one step, again after faults that may pass, and record how it ended.

    An interruption from outside (Ctrl-C, a kill) leaves the step as if it had not been tried.
    """
    started = time.monotonic()
    folder = journal.begin(step)
    with journal.running(step) as note:

        def both(line: str) -> None:
            log(line)
            note(line)

        state, why, attempts = _try(journal, Context(step, folder, {}, both), functions)
    record = journal.finish(step, state=state, started=started, why=why, attempts=attempts)
    if state == "failed":
        log(f"{step.name} failed: {why}")
    return record


def _try(
    journal: StudyJournal, context: Context, functions: Mapping[str, StepFunction]
) -> tuple[State, str, int]:
    """Try a step; returns its state, the reason of a failure and the number of attempts."""
    step = context.step
    for attempt in range(1, TRIES + 1):
        context.log(f"{step.name}" + (f", try {attempt}" if attempt > 1 else ""))
        try:
            inputs = {name: journal.bring(name) for name in step.needs}
            functions[step.kind](replace(context, inputs=inputs))
        except TRANSIENT as error:
            why = _reason(error)
            if attempt < TRIES:
                time.sleep(PAUSE * 2 ** (attempt - 1))
        except LayerswapError as error:
            return "failed", str(error), attempt
        except Exception as error:  # the study resumes with what does not need this step
            (context.folder / LOG).write_text(traceback.format_exc(), "utf-8")
            return "failed", _reason(error), attempt
        else:
            return "done", "", attempt
    return "failed", why, TRIES


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
