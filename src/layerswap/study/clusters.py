"""Runs steps on a cluster: starts each when those it needs are done, and records lost ones.

A new run of a study adopts steps that an earlier run left running; it never starts one twice.
"""

from __future__ import annotations

import socket
import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

from layerswap.ground import system
from layerswap.ground.errors import LayerswapError, StudyError
from layerswap.ground.lease import InUse, Owner, taken
from layerswap.ground.types import Log
from layerswap.study.journal import INDEX, StudyJournal
from layerswap.study.kinds import KINDS
from layerswap.study.runner import Ended, Executor, StepFunction, run_step
from layerswap.study.steps import Step

POLL = 1.0
"""Seconds between two looks at the jobs."""
LATER = 30.0
"""Seconds after which a submission is tried again that the cluster takes later."""
RETRIES = 3
"""Restarts of a step whose worker or node was lost, or whose time was over."""
LATE = 60.0
"""Seconds until the record of a finished job is visible on a network file system."""


@dataclass
class Running:
    """A step that runs on the cluster; without a handle, one that waits to be submitted."""

    step: Step
    handle: Any = None
    token: str = field(default_factory=lambda: uuid4().hex)
    started: float = field(default_factory=time.monotonic)
    tries: int = 1
    ended: float | None = None
    elsewhere: bool = False  # another process runs it
    told: str = ""  # the last line about it


class Later(StudyError):
    """A submission that the cluster refuses, perhaps for now alone."""


@dataclass(frozen=True)
class Ending:
    """How a job ended: the reason if it failed, and whether another try can succeed."""

    why: str = ""
    again: bool = False


class ClusterExecutor(Executor):
    """Starts each step as soon as those that it needs are done."""

    def run(
        self,
        journal: StudyJournal,
        steps: list[Step],
        functions: Mapping[str, StepFunction],
        log: Log,
        ended: Ended,
    ) -> None:
        """Run these steps, each after those it needs, and record the end of each."""
        _Run(self, journal, functions, log, ended).run(steps)

    @abstractmethod
    def adopt(self, journal: StudyJournal, step: Step) -> tuple[Any, str] | None:
        """The handle and the token of a step that an earlier run started; None without one."""

    @abstractmethod
    def submit(self, step: Step, folder: Path, call: tuple[Any, ...]) -> Any:
        """Start `run_remotely(*call)` with the step's resources; returns a handle.

        Raises:
            StudyError: the cluster refuses it; `Later` if another try may succeed.
        """

    @abstractmethod
    def wait(self, handles: Mapping[Any, str], log: Log) -> dict[Any, Ending]:
        """Wait at most about `POLL` seconds; returns the calls that have ended.

        `handles` has the name of each call's step.
        """

    def named(self, handle: Any) -> str:
        """The name of a call for the user."""
        return f"job {handle}"

    @abstractmethod
    def cancel(self, handles: Mapping[Any, str]) -> str:
        """Cancel calls; returns the line for the user."""


@dataclass
class _Run:
    """One run of a study's steps on a cluster."""

    executor: ClusterExecutor
    journal: StudyJournal
    functions: Mapping[str, StepFunction]
    log: Log
    ended: Ended
    running: dict[str, Running] = field(default_factory=dict)
    later: float = 0.0  # when submissions are tried again, as `time.monotonic()`, s

    def run(self, steps: list[Step]) -> None:
        waiting = {step.name: step for step in steps}
        done = set(self.journal.finished())
        try:
            while waiting or self.running:
                for step in [later for later in waiting.values() if done.issuperset(later.needs)]:
                    self.running[step.name] = Running(waiting.pop(step.name))
                if not self.running:
                    return  # the waiting steps need one that failed
                done.update(self.begun())
                done.update(self.finished())
        except system.Terminated:
            raise  # the jobs run on; the next run adopts them
        except KeyboardInterrupt:
            if handles := self.handles():
                self.log(self.executor.cancel(handles))
            raise

    def handles(self) -> dict[Any, str]:
        named = self.running.items()
        return {running.handle: name for name, running in named if running.handle is not None}

    def begun(self) -> list[str]:
        """Begin the steps that nobody runs; returns those that another process has finished."""
        done = []
        for name, running in list(self.running.items()):
            if running.handle is None and time.monotonic() >= self.later:
                if not running.elsewhere:
                    done += self.begin(running)
                elif self.journal.owner(name) is None:
                    done += self.settle(running, Ending(again=True))
        return done

    def begin(self, running: Running) -> list[str]:
        """Adopt or start a step; returns its name if another process has finished it."""
        name, journal = running.step.name, self.journal
        running.handle, running.elsewhere = None, False
        try:
            with taken(journal.folder(name), Owner(running.token, brief=True)):
                finished = name in journal.finished()
                if not finished and not self.adopted(running):
                    journal.clear(name)
                    self.submit(running)
        except InUse:
            running.elsewhere, finished = not self.adopted(running), False
            if running.elsewhere:
                self.tell(running, f"{name}: waits for {journal.owner(name)}, which runs it")
        return self.settle(running, Ending()) if finished else []

    def adopted(self, running: Running) -> bool:
        """True if an earlier run, or another one, has started the step."""
        if adopted := self.executor.adopt(self.journal, running.step):
            running.handle, running.token = adopted
            self.log(f"{running.step.name}: adopts {self.executor.named(running.handle)}")
        return adopted is not None

    def submit(self, running: Running) -> None:
        step = running.step
        call = (self.journal, step, dict(self.functions), running.token)
        try:
            running.handle = self.executor.submit(step, self.journal.folder(step.name), call)
        except Later as error:
            self.later = time.monotonic() + LATER
            self.tell(running, f"{step.name}: {error}; trying again")
        except StudyError as error:
            self.fail(running, str(error))
        else:
            again = f", try {running.tries}" if running.tries > 1 else ""
            self.log(f"{step.name}: {self.executor.named(running.handle)}{again}")

    def tell(self, running: Running, line: str) -> None:
        """Log a line about a step once."""
        if line != running.told:
            running.told = line
            self.log(line)

    def finished(self) -> list[str]:
        """Wait for a while; returns the steps that are done since."""
        ended = self.executor.wait(self.handles(), self.log)
        return [
            name
            for running in list(self.running.values())
            if running.handle in ended
            for name in self.settle(running, ended[running.handle])
        ]

    def settle(self, running: Running, ending: Ending) -> list[str]:
        """Handle the end of a job; returns the step's name if it is done."""
        step, name = running.step, running.step.name
        record = self.journal.record(name)
        if record is not None and record.state == "done":
            del self.running[name]
            self.ended(step)
            return [name]
        if record is not None and record.state == "failed":
            del self.running[name]
            self.log(f"{name} failed: {record.why}")
            return []
        owner = self.journal.owner(name)
        if owner is not None and owner.token != running.token:
            running.handle, running.elsewhere = None, True
        elif ending.again and running.tries <= RETRIES:
            self.log(f"{name}: {ending.why or 'its process ended'}; it runs again")
            running.tries += 1
            return self.begin(running)
        elif ending.why or self.is_late(running):
            self.fail(running, ending.why or "it ended without a record")
        return []

    @staticmethod
    def is_late(running: Running) -> bool:
        running.ended = running.ended or time.monotonic()
        return time.monotonic() - running.ended > LATE

    def fail(self, running: Running, why: str) -> None:
        """Record that a job was lost or refused, unless another process runs the step by now."""
        step, journal = running.step, self.journal
        try:
            with taken(journal.folder(step.name), Owner(running.token, brief=True)):
                journal.finish(
                    step, state="failed", started=running.started, why=why, attempts=running.tries
                )
        except InUse:
            running.handle, running.elsewhere = None, True
        else:
            del self.running[step.name]
            self.log(f"{step.name} failed: {why}")


def run_remotely(
    journal: StudyJournal, step: Step, functions: Mapping[str, StepFunction], token: str
) -> None:
    """Run a step in a worker of a cluster, and record its end in the journal.

    Raises:
        StudyError: this machine lacks the study's folder, or another process runs the step.
    """
    if not (journal.root / INDEX).is_file():
        raise StudyError(
            f"{socket.gethostname()} does not see the study's folder {journal.root}; choose a "
            "folder that all nodes share"
        )

    def tell(line: str) -> None:
        print(line, flush=True)  # noqa: T201  # into the job's own log

    run_step(journal, step, functions, tell, Owner(token))


def first_of_kinds(steps: Sequence[Step]) -> dict[str, Step]:
    """The first step of each kind."""
    first: dict[str, Step] = {}
    for step in steps:
        first.setdefault(step.kind, step)
    return first


def resources_key(kind: str) -> str:
    """Return the study's key for the resources of a kind of step; empty if they are fixed."""
    key = KINDS[kind].resources
    return f"resources.{key}" if key else ""


def reason(error: BaseException) -> str:
    """The one line of an error of ours, otherwise its type and text."""
    text = " ".join(str(error).split())[-300:]
    return text if isinstance(error, LayerswapError) else f"{type(error).__name__}: {text}"
