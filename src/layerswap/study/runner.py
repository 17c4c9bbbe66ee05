"""Runs a graph of steps in this process, on Ray or on Slurm.

Finished steps are kept, and a failure stops only the steps that need the failed one.
"""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from layerswap.ground.errors import LayerswapError, StudyError, one_line
from layerswap.ground.types import Log, duration
from layerswap.study.journal import LOG, State, StepRecord, Storage, StudyJournal
from layerswap.study.steps import Graph, Step
from layerswap.versions import install

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
        return {name: one.blocked_by for name, one in self.records.items() if one.blocked_by}

    def check(self) -> None:
        """Raise an error if a step failed."""
        if self.failed:
            raise StudyError("; ".join(f"{record.name}: {record.why}" for record in self.failed))


def run_graph(
    graph: Graph,
    root: Path,
    functions: Mapping[str, StepFunction],
    *,
    executor: ClusterExecutor | None = None,
    storage: Storage | None = None,
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
        storage: keeps finished steps; the study's folder by default.
        log: called with each line of progress.
        hours: estimated hours by step, for the time left of a study that runs here.
        ended: called with each step that is done.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """
    journal = StudyJournal(root, graph, storage)
    try:
        journal.open()
        waiting = journal.left()
        log(f"{len(graph)} steps, {len(graph) - len(waiting)} of them done before")
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
    journal: StudyJournal, step: Step, functions: Mapping[str, StepFunction], log: Log
) -> StepRecord:
    """Run one step, retry it after `TRANSIENT` errors, and record its end.

    An interruption (Ctrl-C, a kill) leaves the step without a record.
    """
    started = time.monotonic()
    folder = journal.folder(step.name)
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
        context.log(f"{step.name}: starting" + (f", try {attempt}" if attempt > 1 else ""))
        try:
            inputs = {name: journal.fetch(name) for name in step.needs}
            functions[step.kind](replace(context, inputs=inputs))
        except TRANSIENT as error:
            why = _reason(error)
            if attempt < TRIES:
                time.sleep(PAUSE * 2 ** (attempt - 1))
        except LayerswapError as error:
            return "failed", str(error), attempt
        except Exception as error:  # the steps that do not need this one run on
            (context.folder / LOG).write_bytes(traceback.format_exc().encode())
            return "failed", _reason(error), attempt
        else:
            return "done", "", attempt
    return "failed", why, TRIES


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error, 300)}"


SLURM_MINUTES = 3 * 24 * 60
"""Time limit of a Slurm job."""
POLL = 1.0
"""Seconds between two looks at the jobs."""
RETRIES = 3
"""Restarts of a step whose worker or node was lost."""


class ClusterExecutor(ABC):
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
        waiting = {step.name: step for step in steps}
        done = set(journal.finished())
        running: dict[Any, tuple[Step, float]] = {}
        while waiting or running:
            for step in [one for one in waiting.values() if done.issuperset(one.needs)]:
                log(step.name)
                call = (str(journal.root), list(journal.graph), journal.storage, step,
                        dict(functions))  # fmt: skip
                running[self.submit(step, call)] = (step, time.monotonic())
                del waiting[step.name]
            if not running:
                return  # the waiting steps need one that failed
            for handle in self.wait(list(running)):
                step, started = running.pop(handle)
                if lost := self.lost(handle):
                    journal.finish(step, state="failed", started=started, why=lost,
                                   attempts=RETRIES + 1)  # fmt: skip
                record = journal.record(step.name)
                if record is not None and record.state == "done":
                    done.add(step.name)
                    ended(step)
                else:
                    log(f"{step.name} failed: {(record and record.why) or 'it left no record'}")

    @abstractmethod
    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start `run_remotely(*call)` with the step's resources; returns a handle."""

    @abstractmethod
    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait until a call ends; returns the calls that have ended."""

    @abstractmethod
    def lost(self, handle: Any) -> str:
        """The error of a call that ended without a record; empty if it returned."""


class OnRay(ClusterExecutor):
    """Runs steps on a Ray cluster whose nodes share the study's folder or its storage.

    A step whose worker or node is lost restarts on another, and resumes from its folder. Without
    an address it takes a running cluster, or starts one here.
    """

    def __init__(self, address: str | None = None) -> None:
        try:
            import ray
        except ImportError:
            raise StudyError(f"--on ray needs Ray; {install('ray')}") from None
        if not ray.is_initialized():
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                why = one_line(error)
                raise StudyError(f"the Ray cluster cannot be reached ({why})") from None
        self._ray = ray

    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start a step as a Ray task."""
        remote = self._ray.remote(
            num_cpus=step.resources.cpus,
            num_gpus=step.resources.gpus,
            memory=int(step.resources.memory_gb * 2**30),
            max_retries=RETRIES,
            max_calls=1,  # a step's process ends with it, and frees its memory and device
        )(run_remotely)
        return remote.options(name=step.name).remote(*call)

    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait for a Ray task."""
        return list(self._ray.wait(handles, num_returns=1)[0])

    def lost(self, handle: Any) -> str:
        """The error of a Ray task."""
        try:
            self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {one_line(error)}"
        return ""


class OnSlurm(ClusterExecutor):
    """Submits each step as a Slurm job through submitit.

    Nodes share the study's folder or its storage. A lost job is a failed step; the next run of
    the study resumes it. With the cluster `local`, jobs are processes of this machine.
    """

    def __init__(self, logs: Path, *, cluster: str = "slurm") -> None:
        try:
            import submitit
        except ImportError:
            raise StudyError(f"--on slurm needs submitit; {install('slurm')}") from None
        try:
            self._executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        except RuntimeError as error:
            raise StudyError(f"Slurm cannot be reached ({' '.join(str(error).split())})") from None

    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start a step as a job."""
        self._executor.update_parameters(
            name=step.name.replace("/", "-"),
            cpus_per_task=math.ceil(step.resources.cpus),
            gpus_per_node=math.ceil(step.resources.gpus),
            mem_gb=step.resources.memory_gb,
            timeout_min=SLURM_MINUTES,
        )
        return self._executor.submit(run_remotely, *call)

    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait for a job."""
        while not (ended := [job for job in handles if job.done()]):
            time.sleep(POLL)
        return ended

    def lost(self, handle: Any) -> str:
        """The error of a job."""
        error = handle.exception()
        return f"job {handle.job_id}: {' '.join(str(error).split())[-200:]}" if error else ""


def executor_of(on: str, logs: Path) -> ClusterExecutor:
    """The executor for `slurm`, `ray`, or the address of a Ray cluster."""
    if on == "slurm":
        return OnSlurm(logs)
    return OnRay(None if on == "ray" else on)


def run_remotely(
    root: str,
    steps: list[Step],
    storage: Storage | None,
    step: Step,
    functions: Mapping[str, StepFunction],
) -> None:
    """Run a step in a worker of a cluster, and record its end in the journal."""
    run_step(StudyJournal(Path(root), Graph(steps), storage), step, functions, lambda line: None)
