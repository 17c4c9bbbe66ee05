"""Runs a graph of steps in this process, or by an executor of a cluster.

Finished steps are kept, and a failure stops only the steps that need the failed one.
"""

from __future__ import annotations

import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerswap.ground.errors import LayerswapError, StudyError, one_line
from layerswap.ground.lease import InUse, Owner, held
from layerswap.ground.types import Log, duration
from layerswap.study.journal import State, StepRecord, StudyJournal
from layerswap.study.steps import Graph, Step

StepFunction = Callable[["Context"], None]
Ended = Callable[[Step], None]
"""Runs a step: reads the folders of the steps that it needs, and writes into its own."""
TRANSIENT: tuple[type[BaseException], ...] = (ConnectionError, TimeoutError)
"""Errors that a retry may avoid, mostly of the network."""
TRIES = 3
PAUSE = 2.0
"""Seconds before the second try; they double before each further one."""


@dataclass(frozen=True)
class Context:
    """The inputs and the output folder of a step that runs."""

    step: Step
    folder: Path  # may hold the output of an earlier attempt
    inputs: Mapping[str, Path]  # folders of the steps that it needs, by name
    log: Log


class Executor(ABC):
    """Runs the steps of a study elsewhere, and returns when all have ended."""

    @abstractmethod
    def check(self, steps: Sequence[Step], log: Log) -> None:
        """Check the requests of steps before anything is written.

        Raises:
            StudyError: the cluster refuses one.
        """

    @abstractmethod
    def run(
        self,
        journal: StudyJournal,
        steps: list[Step],
        functions: Mapping[str, StepFunction],
        log: Log,
        ended: Ended,
    ) -> None:
        """Run these steps, each after those it needs, and record the end of each."""


@dataclass(frozen=True)
class Summary:
    """States of all steps at the end of a run, by name."""

    records: Mapping[str, StepRecord]

    @property
    def failed(self) -> list[StepRecord]:
        """The steps that failed."""
        return [record for record in self.records.values() if record.state == "failed"]

    @property
    def blocked(self) -> dict[str, str]:
        """The steps that were not tried, with the failed step that each needs."""
        return {name: step.blocked_by for name, step in self.records.items() if step.blocked_by}


def run_graph(
    graph: Graph,
    root: Path,
    functions: Mapping[str, StepFunction],
    *,
    executor: Executor | None = None,
    log: Log = lambda line: None,
    hours: Mapping[str, float] | None = None,
    ended: Ended = lambda step: None,
) -> Summary:
    """Run every step of a graph that is not done yet.

    Args:
        graph: the steps.
        root: the study's folder; a run that was killed resumes in it.
        functions: by kind of step.
        executor: runs the steps; this process by default.
        log: called with each line of progress.
        hours: estimated hours by step, for the time left of a study that runs here.
        ended: called with each step that is done.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """
    journal = StudyJournal(root, graph)
    try:
        waiting = journal.left()
        log(f"{len(graph)} steps, {len(graph) - len(waiting)} of them done before")
        if executor is not None:
            executor.check(waiting, log)
        journal.open()
        if executor is None:
            _run_here(journal, waiting, functions, log, hours=hours or {}, ended=ended)
        else:
            executor.run(journal, waiting, functions, log, ended)
    except OSError as error:  # of the journal; the error of a step is in its record
        raise StudyError(f"{journal.root}: cannot be written ({error})") from None
    return Summary({record.name: record for record in journal.status()})


def _run_here(
    journal: StudyJournal,
    steps: list[Step],
    functions: Mapping[str, StepFunction],
    log: Log,
    *,
    hours: Mapping[str, float],
    ended: Ended,
) -> None:
    """Run these steps one after the other in this process; skip those that need a failed one."""
    done = set(journal.finished())
    left = {step.name: 3600 * hours.get(step.name, 0.0) for step in steps}
    taken = planned = 0.0
    before = len(journal.graph) - len(steps)
    for number, step in enumerate(steps, start=before + 1):
        if done.issuperset(step.needs):
            # Estimates are corrected by the steps that ended.
            seconds = sum(left.values()) * (taken / planned if planned else 1)
            time_left = f", about {duration(seconds)} left for the study" if seconds else ""
            log(f"step {number} of {len(journal.graph)}: {step.name}{time_left}")
            record = run_step(journal, step, functions, log)
            if record.state == "done":
                done.add(step.name)
                taken, planned = taken + (record.seconds or 0), planned + left[step.name]
                ended(step)
        del left[step.name]


def run_step(
    journal: StudyJournal,
    step: Step,
    functions: Mapping[str, StepFunction],
    log: Log,
    owner: Owner | None = None,
) -> StepRecord:
    """Run one step, retry it after `TRANSIENT` errors, and record its end.

    An interruption (Ctrl-C, a kill) leaves the step without a record. A step that another process
    has finished meanwhile does not run again.

    Raises:
        InUse: another process runs the step.
    """
    started, folder = time.monotonic(), journal.folder(step.name)
    with held(folder, owner or Owner()) as lease:
        if (finished := journal.finished().get(step.name)) is not None:
            return finished
        journal.clear(step.name)

        def log_and_note(line: str) -> None:
            log(line)
            journal.add_to_log(step, line)

        inputs = {name: journal.folder(name) for name in step.needs}
        context = Context(step, folder, inputs, log_and_note)
        state, why, attempts = _try(journal, context, functions[step.kind])
        if not lease.kept:
            raise InUse(f"{folder}: another process took it over")
        record = journal.finish(step, state=state, started=started, why=why, attempts=attempts)
    if state == "failed":
        log(f"{step.name} failed: {why}")
    return record


def _try(journal: StudyJournal, context: Context, function: StepFunction) -> tuple[State, str, int]:
    """Try a step; returns its state, the reason of a failure and the number of attempts."""
    step = context.step
    for attempt in range(1, TRIES + 1):
        context.log(f"{step.name}: starting" + (f", try {attempt}" if attempt > 1 else ""))
        try:
            function(context)
        except TRANSIENT as error:
            why = _reason(error)
            if attempt < TRIES:
                time.sleep(PAUSE * 2 ** (attempt - 1))
        except LayerswapError as error:
            return "failed", str(error), attempt
        except Exception as error:  # the steps that do not need this one run on
            journal.add_to_log(step, traceback.format_exc())
            return "failed", _reason(error), attempt
        else:
            return "done", "", attempt
    return "failed", why, TRIES


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"
