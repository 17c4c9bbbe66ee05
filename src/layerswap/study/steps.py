"""Steps: what a study is made of, and the key that says whether one has been done.

A step's key is a hash of all that its output depends on: its kind and that kind's version, its
settings, the fingerprints of the files it reads, and the keys of the steps it needs. So a finished
step is never redone, and a changed one and what follows it are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from layerswap.errors import StudyError


@dataclass(frozen=True)
class Resources:
    """What a step takes while it runs.

    Attributes:
        cpus: processors.
        gpus: devices; a fraction shares one.
        memory_gb: of main memory.
    """

    cpus: float = 1
    gpus: float = 0
    memory_gb: float = 2


@dataclass(frozen=True)
class Estimate:
    """What a step is thought to cost, for a plan that is not run.

    Attributes:
        gpu_hours: of device time.
        disk_gb: of what it writes.
    """

    gpu_hours: float = 0
    disk_gb: float = 0


@dataclass(frozen=True)
class Step:
    """One piece of work with a folder of its own.

    Attributes:
        name: unique in the study, such as `train/task/2`.
        kind: what it does.
        settings: how; plain data.
        needs: names of the steps whose folders it reads.
        inputs: fingerprints of the files outside the study that it reads, by name.
        resources: what it takes.
        estimate: what it is thought to cost.
        version: raised when its kind comes to write something else for the same settings.
    """

    name: str
    kind: str
    settings: Mapping[str, Any]
    needs: tuple[str, ...] = ()
    inputs: Mapping[str, str] = field(default_factory=dict)
    resources: Resources = Resources()
    estimate: Estimate = Estimate()
    version: int = 1


class Graph:
    """The steps of a study, in an order in which each comes after what it needs.

    Args:
        steps: in any order.

    Raises:
        StudyError: a name is there twice, a need is not there, or steps need each other.
    """

    def __init__(self, steps: Sequence[Step]) -> None:
        self.by_name = {step.name: step for step in steps}
        if len(self.by_name) < len(steps):
            names = [step.name for step in steps]
            twice = next(name for name in names if names.count(name) > 1)
            raise StudyError(f"step {twice} is there twice")
        for step in steps:
            for need in step.needs:
                if need not in self.by_name:
                    raise StudyError(f"step {step.name} needs {need}, which is not there")
        self.order = list(self._sorted())

    def __iter__(self) -> Iterator[Step]:
        return (self.by_name[name] for name in self.order)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, name: str) -> Step:
        return self.by_name[name]

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key of every step, as 64 hexadecimal digits."""
        found: dict[str, str] = {}
        for step in self:
            told = {
                "kind": step.kind,
                "version": step.version,
                "settings": step.settings,
                "inputs": dict(step.inputs),
                "needs": [found[name] for name in step.needs],
            }
            text = json.dumps(told, sort_keys=True, ensure_ascii=False)
            found[step.name] = hashlib.sha256(text.encode()).hexdigest()
        return found

    def folder(self, name: str) -> str:
        """The name of a step's folder: kind and key."""
        return f"{self.by_name[name].kind}-{self.keys[name][:16]}"

    def followers(self, name: str) -> list[str]:
        """Every step that needs this one, directly or not, in order."""
        reached = {name}
        for step in self:
            if reached & set(step.needs):
                reached.add(step.name)
        return [one for one in self.order if one in reached and one != name]

    def _sorted(self) -> Iterator[str]:
        done: set[str] = set()
        waiting = dict(self.by_name)
        while waiting:
            ready = [name for name, step in waiting.items() if set(step.needs) <= done]
            if not ready:
                raise StudyError(f"steps need each other: {', '.join(sorted(waiting))}")
            for name in ready:
                done.add(name)
                del waiting[name]
                yield name
