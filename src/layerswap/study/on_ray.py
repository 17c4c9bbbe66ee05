"""Runs steps as tasks of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerswap.ground.errors import StudyError, one_line
from layerswap.ground.types import Log
from layerswap.study import clusters
from layerswap.study.clusters import (
    RETRIES,
    ClusterExecutor,
    Ending,
    first_of_kinds,
    reason,
    run_remotely,
)
from layerswap.study.journal import StudyJournal
from layerswap.study.steps import Step
from layerswap.versions import install


class OnRay(ClusterExecutor):
    """Runs steps on a Ray cluster whose nodes share the study's folder.

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
        self._ray: Any = ray

    def check(self, steps: Sequence[Step], log: Log) -> None:
        """Log the requests that no node of the cluster can meet; a new node may join."""
        every: list[dict[str, Any]] = self._ray.nodes()
        nodes = [node["Resources"] for node in every if node["Alive"]]
        for kind, step in first_of_kinds(steps).items():
            asked = _request(step)
            if not any(all(node.get(key, 0) >= asked[key] for key in asked) for node in nodes):
                largest = ", ".join(f"{shown(key, max(node.get(key, 0) for node in nodes))}"
                                    for key in asked)  # fmt: skip
                wanted = ", ".join(shown(key, number) for key, number in asked.items())
                log(
                    f"note: no node of the Ray cluster has {wanted} (largest: {largest}); "
                    f"{kind} steps wait until one joins, or change resources.{kind}"
                )

    def adopt(self, journal: StudyJournal, step: Step) -> None:
        """Return None: Ray ends the tasks of a driver that ends."""

    def submit(self, step: Step, folder: Path, call: tuple[Any, ...]) -> Any:
        """Start a step as a Ray task."""
        remote = self._ray.remote(
            num_cpus=step.resources.cpus,
            num_gpus=step.resources.gpus,
            memory=int(step.resources.memory_gb * 2**30),
            max_retries=RETRIES,
            max_calls=1,  # a step's process ends with it, and frees its memory and device
        )(run_remotely)
        return remote.options(name=step.name).remote(*call)

    def wait(self, handles: Mapping[Any, str], log: Log) -> dict[Any, Ending]:
        """Wait for a Ray task."""
        if not handles:
            time.sleep(clusters.POLL)
            return {}
        ready, _ = self._ray.wait([*handles], num_returns=1, timeout=clusters.POLL)
        return {handle: self._ending(handle) for handle in ready}

    def _ending(self, handle: Any) -> Ending:
        try:
            self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            return Ending(reason(getattr(error, "cause", None) or error))
        return Ending()

    def named(self, handle: Any) -> str:
        """The name of a task for the user."""
        return f"Ray task {handle.task_id().hex()}"

    def cancel(self, handles: Mapping[Any, str]) -> str:
        """Cancel Ray tasks."""
        for handle in handles:
            self._ray.cancel(handle, force=True)
        return f"cancelled on Ray: {', '.join(handles.values())}"


def _request(step: Step) -> dict[str, float]:
    """The resources of a step by Ray's names; memory in bytes."""
    asked = step.resources
    amounts = {"CPU": asked.cpus, "GPU": asked.gpus, "memory": asked.memory_gb * 2**30}
    return {key: number for key, number in amounts.items() if number}


def shown(key: str, number: float) -> str:
    """An amount of a resource of Ray in words."""
    return f"{number / 2**30:.3g} GB of memory" if key == "memory" else f"{number:g} {key}"
