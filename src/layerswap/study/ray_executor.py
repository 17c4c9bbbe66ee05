"""Steps on a Ray cluster: as many at once as its processors, devices and memory allow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap._types import Log
from layerswap.errors import StudyError
from layerswap.study.journal import StudyJournal
from layerswap.study.runner import Work, do_step
from layerswap.study.steps import Graph, Step
from layerswap.study.storage import Storage

LOST = 3
"""How often a step is begun again after its worker or its node was lost."""


class OnRay:
    """Runs steps on a Ray cluster, whose nodes share the study's folder or its storage.

    A step whose worker or node is lost is begun again on another, and goes on from what it left.

    Args:
        address: of the cluster; a running one is looked for, and one is started here if there is
            none, when None.
        settings: more for `ray.init`.

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

    def run(
        self, journal: StudyJournal, steps: list[Step], works: Mapping[str, Work], log: Log
    ) -> None:
        """Do these steps, each as soon as those it needs are done; see `running.Executor`."""
        waiting = {step.name: step for step in steps}
        done = set(journal.finished())
        running: dict[Any, tuple[Step, float]] = {}
        while waiting or running:
            for step in [s for s in waiting.values() if done.issuperset(s.needs)]:
                log(step.name)
                running[self._begin(journal, step, works)] = (step, time.monotonic())
                del waiting[step.name]
            if not running:
                return  # what still waits needs a step that failed
            ended, _ = self._ray.wait(list(running), num_returns=1)
            for handle in ended:
                step, started = running.pop(handle)
                if self._end(journal, handle, step, started, log=log):
                    done.add(step.name)

    def _begin(self, journal: StudyJournal, step: Step, works: Mapping[str, Work]) -> Any:
        takes = step.resources
        remote = self._ray.remote(
            num_cpus=takes.cpus,
            num_gpus=takes.gpus,
            memory=int(takes.memory_gb * 2**30),
            max_retries=LOST,
            max_calls=1,  # so that a step gives its memory, and its device, back
        )(_work)
        return remote.options(name=step.name).remote(
            str(journal.root), list(journal.graph), journal.storage, step, dict(works)
        )

    def _end(
        self, journal: StudyJournal, handle: Any, step: Step, started: float, *, log: Log
    ) -> bool:
        """Note how a step ended, and say whether it is done."""
        try:
            self._ray.get(handle)
        except self._ray.exceptions.RayError as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            journal.finish(step, state="failed", started=started, why=why, attempts=LOST + 1)
        entry = journal.entry(step.name)
        if entry is not None and entry.state == "done":
            return True
        log(f"{step.name} failed: {entry.why if entry else 'it left no record'}")
        return False


def _work(
    root: str,
    steps: list[Step],
    storage: Storage | None,
    step: Step,
    works: Mapping[str, Work],
) -> None:
    do_step(StudyJournal(Path(root), Graph(steps), storage), step, works, lambda line: None)
