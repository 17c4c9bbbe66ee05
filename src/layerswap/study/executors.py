"""Executors that run steps on a cluster: as many at once as its resources allow."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap._types import Log
from layerswap.errors import StudyError
from layerswap.study.journal import StudyJournal
from layerswap.study.runner import StepFunction, run_step
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage

MINUTES = 3 * 24 * 60
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
            timeout_min=MINUTES,
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
