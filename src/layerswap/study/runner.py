"""Runs a graph of steps here or on a cluster: finished steps stay, and a failure stops few."""

from __future__ import annotations

import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

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


SLURM_MINUTES = 3 * 24 * 60
"""Time limit of a Slurm job."""
POLL = 1.0
"""Seconds between two looks at the jobs."""
RETRIES = 3
"""Times that a step is started again after its worker or its node was lost."""


class ClusterExecutor(ABC):
    """Starts each step as soon as those that it needs are done; see `runner.Executor`."""

    def run(
        self,
        journal: StudyJournal,
        steps: list[Step],
        functions: Mapping[str, StepFunction],
        log: Log,
    ) -> None:
        """Run these steps; how each ended is in the journal."""
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
                return  # what still waits needs a step that failed
            for handle in self.wait(list(running)):
                step, started = running.pop(handle)
                if lost := self.lost(handle):
                    journal.finish(step, state="failed", started=started, why=lost,
                                   attempts=RETRIES + 1)  # fmt: skip
                record = journal.record(step.name)
                if record is not None and record.state == "done":
                    done.add(step.name)
                else:
                    log(f"{step.name} failed: {record.why if record else 'it left no record'}")

    @abstractmethod
    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start `run_remotely(*call)` where the step's resources are; returns a handle."""

    @abstractmethod
    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait until one of these ended; returns those that did."""

    @abstractmethod
    def lost(self, handle: Any) -> str:
        """The reason why a call that ended left no record; empty if it returned."""


class OnRay(ClusterExecutor):
    """Runs steps on a Ray cluster, whose nodes share the study's folder or its storage.

    A step whose worker or node is lost is started again on another, and resumes from its folder.

    Args:
        address: of the cluster. When None, a running one is used, or one is started here.
        settings: further settings of `ray.init`.

    Raises:
        StudyError: Ray is not installed, or the cluster cannot be reached.
    """

    def __init__(self, address: str | None = None, **settings: Any) -> None:
        try:
            import ray
        except ImportError:
            raise StudyError('--on ray needs Ray: pip install "layerswap[ray]"') from None
        if not ray.is_initialized():
            try:
                ray.init(address=address, include_dashboard=False, log_to_driver=False, **settings)
            except (ConnectionError, ValueError, RuntimeError) as error:
                why = " ".join(str(error).split())[:200]
                raise StudyError(f"the Ray cluster cannot be reached ({why})") from None
        self._ray = ray

    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start a step as a Ray task; see `ClusterExecutor`."""
        remote = self._ray.remote(
            num_cpus=step.resources.cpus,
            num_gpus=step.resources.gpus,
            memory=int(step.resources.memory_gb * 2**30),
            max_retries=RETRIES,
            max_calls=1,  # so that a step gives its memory, and its device, back
        )(run_remotely)
        return remote.options(name=step.name).remote(*call)

    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait for a Ray task; see `ClusterExecutor`."""
        return list(self._ray.wait(handles, num_returns=1)[0])

    def lost(self, handle: Any) -> str:
        """The error of a Ray task; see `ClusterExecutor`."""
        try:
            self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return ""


class OnSlurm(ClusterExecutor):
    """Submits each step as a Slurm job, through submitit.

    Nodes share the study's folder or its storage. A job that was lost is a failed step, which the
    next run of the study resumes.

    Args:
        logs: the folder of the jobs' logs.
        cluster: submitit's executor; `local` runs jobs as processes of this machine.
        parameters: further parameters of every job, such as `slurm_partition`.

    Raises:
        StudyError: submitit is not installed, or Slurm cannot be reached.
    """

    def __init__(self, logs: Path, *, cluster: str = "slurm", **parameters: Any) -> None:
        try:
            import submitit
        except ImportError:
            raise StudyError('--on slurm needs submitit: pip install "layerswap[slurm]"') from None
        try:
            self._executor = submitit.AutoExecutor(folder=logs, cluster=cluster)
        except RuntimeError as error:
            raise StudyError(f"Slurm cannot be reached ({' '.join(str(error).split())})") from None
        self._parameters = parameters

    def submit(self, step: Step, call: tuple[Any, ...]) -> Any:
        """Start a step as a job; see `ClusterExecutor`."""
        self._executor.update_parameters(
            name=step.name.replace("/", "-"),
            cpus_per_task=math.ceil(step.resources.cpus),
            gpus_per_node=math.ceil(step.resources.gpus),
            mem_gb=step.resources.memory_gb,
            timeout_min=SLURM_MINUTES,
            **self._parameters,
        )
        return self._executor.submit(run_remotely, *call)

    def wait(self, handles: list[Any]) -> list[Any]:
        """Wait for a job; see `ClusterExecutor`."""
        while not (ended := [job for job in handles if job.done()]):
            time.sleep(POLL)
        return ended

    def lost(self, handle: Any) -> str:
        """The error of a job; see `ClusterExecutor`."""
        error = handle.exception()
        return f"job {handle.job_id}: {' '.join(str(error).split())[-200:]}" if error else ""


def executor_of(on: str, logs: Path) -> ClusterExecutor:
    """The executor of a name.

    Args:
        on: `slurm`, `ray`, or the address of a Ray cluster.
        logs: the folder for logs of jobs.

    Raises:
        StudyError: what it needs is not installed, or it cannot be reached.
    """
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
    """Run a step of a study in a worker of a cluster; how it ended is in the journal."""
    run_step(StudyJournal(Path(root), Graph(steps), storage), step, functions, lambda line: None)
