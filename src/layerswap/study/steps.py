"""What the steps of a study take while they run, which a cluster places them by."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from layerswap.compose.schema import Strict
from layerswap.errors import StudyError
from layerswap.training.mix.schema import NonEmpty


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


Kind = Literal["data", "train", "select", "change", "judge"]
USUAL: dict[Kind, Resources] = {
    "train": Resources(cpus=4, gpus=1, memory_gb=64),
    "select": Resources(cpus=4, gpus=1, memory_gb=64),
    "judge": Resources(cpus=4, gpus=1, memory_gb=96),
}
"""Of the kinds of step that run models, where there are devices."""


class StepResources(Strict):
    """What a step takes while it runs; what is not given is left as it is.

    Attributes:
        cpus: processors.
        gpus: devices; a fraction shares one.
        memory_gb: of main memory.
    """

    cpus: Annotated[float, Field(gt=0, strict=False)] | None = None
    gpus: Annotated[float, Field(ge=0, strict=False)] | None = None
    memory_gb: Annotated[float, Field(gt=0, strict=False)] | None = None


class TrainingResources(StepResources):
    """The same of a training, which accelerate may launch in several processes.

    Attributes:
        processes: of one training; the effective batch grows with them, unless it is given.
        launch: accelerate's configuration for them: `ddp`, `fsdp2`, `zero3` or a file.
    """

    processes: PositiveInt = 1
    launch: NonEmpty = "ddp"


class StudyResources(Strict):
    """What the steps of each kind take, which a cluster places them by."""

    data: StepResources = StepResources()
    train: TrainingResources = TrainingResources()
    select: StepResources = StepResources()
    change: StepResources = StepResources()
    judge: StepResources = StepResources()

    def of(self, kind: Kind, *, device: str) -> Resources:
        """What the steps of a kind take: what is said here, and what is usual where it is not.

        Args:
            kind: of step.
            device: where models run.
        """
        usual = Resources() if device == "cpu" else USUAL.get(kind, Resources())
        takes: StepResources = getattr(self, kind)
        given = {name: getattr(takes, name) for name in ("cpus", "gpus", "memory_gb")}
        if kind == "train" and device != "cpu" and self.train.processes > 1:
            usual = replace(usual, gpus=self.train.processes)
        return replace(usual, **{name: value for name, value in given.items() if value is not None})
