"""Runs steps as tasks of a Ray cluster."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerswap.ground.errors import StudyError, one_line
from layerswap.ground.types import Log
from layerswap.study import clusters, ray_inside
from layerswap.study.clusters import (
    RETRIES,
    ClusterExecutor,
    Ending,
    Later,
    first_of_kinds,
    reason,
    run_remotely,
)
from layerswap.study.journal import StudyJournal
from layerswap.study.steps import Step
from layerswap.versions import install

SILENCE = 30.0
"""Seconds without an answer of Ray's head; after 60, Ray ends this process by itself."""


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
        self._started = False  # True if the cluster is this machine alone
        for where in () if ray.is_initialized() else [address] if address else ["auto", "local"]:
            if where != "local":
                _check_answers(where)
            try:
                ray.init(address=where, include_dashboard=False, log_to_driver=False)
            except (ConnectionError, ValueError, RuntimeError) as error:
                if where == "auto" and isinstance(error, ConnectionError):
                    continue  # no cluster runs
                why = one_line(error)
                raise StudyError(f"the Ray cluster cannot be reached ({why})") from None
            self._started = where == "local"
            break
        self._ray: Any = ray
        self._head, self._answered = ray.get_runtime_context().gcs_address, time.monotonic()

    def check(self, steps: Sequence[Step], log: Log) -> None:
        """Refuse requests that no node can meet; log them if an autoscaler may add one."""
        nodes: list[dict[str, Any]] = [node for node in self._ray.nodes() if node["Alive"]]
        amounts = [node["Resources"] for node in nodes]
        for kind, step in first_of_kinds(steps).items():
            asked = _request(step)
            if any(all(node.get(key, 0) >= asked[key] for key in asked) for node in amounts):
                continue
            largest = ", ".join(f"{shown(key, max(node.get(key, 0) for node in amounts))}"
                                for key in asked)  # fmt: skip
            wanted = ", ".join(shown(key, number) for key, number in asked.items())
            none = f"no node of the Ray cluster has {wanted} (largest: {largest})"
            key = clusters.resources_key(kind)
            if self._started:
                raise StudyError(f"{none}; change {key or 'the machine'}")
            change = f", or change {key}" if key else ""
            if ray_inside.is_fixed(nodes):
                raise StudyError(f"{none}; add a node{change}")
            log(f"note: {none}; {kind} steps wait until one joins{change}")

    def adopt(self, journal: StudyJournal, step: Step) -> None:
        """Return None: Ray ends the tasks of a driver that ends."""

    def submit(self, step: Step, folder: Path, call: tuple[Any, ...]) -> Any:
        """Start a step as a Ray task."""
        if not self._answers():
            raise Later(f"the head of the Ray cluster at {self._head} does not answer")
        remote = self._ray.remote(
            num_cpus=step.resources.cpus,
            num_gpus=step.resources.gpus,
            memory=int(step.resources.memory_gb * 2**30),
            max_retries=RETRIES,
            max_calls=1,  # a step's process ends with it, and frees its memory and device
        )(run_remotely)
        return remote.options(name=step.name).remote(*call)

    def wait(self, handles: Mapping[Any, str], log: Log) -> dict[Any, Ending]:
        """Wait for a Ray task; a `StudyError` if the head of the cluster does not answer."""
        if not self._answers() and time.monotonic() - self._answered > SILENCE:
            raise StudyError(
                f"the head of the Ray cluster at {self._head} does not answer; start a cluster "
                "and run the study again, which resumes"
            )
        if not handles:
            time.sleep(clusters.POLL)
            return {}
        ready, _ = self._ray.wait([*handles], num_returns=1, timeout=clusters.POLL)
        return {handle: self._ending(handle) for handle in ready}

    def _answers(self) -> bool:
        if not _listens(self._head):
            return False
        self._answered = time.monotonic()
        return True

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


def _check_answers(given: str) -> None:
    """Refuse a cluster without an answer; Ray itself would wait for minutes."""
    address = ray_inside.address_of(given)
    if address is None or "://" in address or _listens(address):
        return
    if given != "auto" or os.environ.get("RAY_ADDRESS"):
        raise StudyError(f"no Ray cluster answers at {address}; check the address, or start one")
    raise StudyError(
        f"the Ray cluster at {address} has ended, but Ray still names it as the one of this "
        "machine; run `ray stop`, which forgets it, or `ray start --head`"
    )


def _listens(address: str) -> bool:
    """True if something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=clusters.POLL).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def _request(step: Step) -> dict[str, float]:
    """The resources of a step by Ray's names; memory in bytes."""
    asked = step.resources
    amounts = {"CPU": asked.cpus, "GPU": asked.gpus, "memory": asked.memory_gb * 2**30}
    return {key: number for key, number in amounts.items() if number}


def shown(key: str, number: float) -> str:
    """An amount of a resource of Ray in words."""
    return f"{number / 2**30:.3g} GB of memory" if key == "memory" else f"{number:g} {key}"
