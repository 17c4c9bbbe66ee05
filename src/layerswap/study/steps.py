"""Steps of a study, and their graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from graphlib import TopologicalSorter
from typing import Annotated, Any

from pydantic import Field

from layerswap.ground.strict import Strict


class Resources(Strict):
    """Resources that a step holds while it runs; a fraction of a GPU shares one."""

    cpus: Annotated[float, Field(gt=0, strict=False)] = 1
    gpus: Annotated[float, Field(ge=0, strict=False)] = 0
    memory_gb: Annotated[float, Field(gt=0, strict=False)] = 2


@dataclass(frozen=True)
class Step:
    """A unit of work with its own output folder."""

    name: str  # unique in the study, such as `train/task/2`
    kind: str  # selects the function that runs it
    settings: Mapping[str, Any]  # plain data
    needs: tuple[str, ...] = ()  # names of the steps whose folders it reads
    inputs: Mapping[str, str] = field(default_factory=dict)  # fingerprints of files that it reads
    resources: Resources = field(default_factory=Resources)  # not part of its key
    version: int = 1  # raised when its kind writes something else for the same settings
    delete_checkpoints: bool = False  # those that no later step reads; not part of its key
    # The `Kind` that planned it, whose settings these are; None after reading from disk.
    planned: Any = field(default=None, compare=False, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, from which Pydantic restores the step."""
        data = {**vars(self), "resources": self.resources.model_dump()}
        del data["planned"]
        return data


class Graph:
    """The steps of a study, each after those that it needs."""

    def __init__(self, steps: Sequence[Step]) -> None:
        by_name = {step.name: step for step in steps}
        TopologicalSorter({step.name: step.needs for step in steps}).prepare()  # refuses circles
        self._steps: dict[str, Step] = {}

        def add(name: str) -> None:
            if name not in self._steps:
                for need in by_name[name].needs:
                    add(need)
                self._steps[name] = by_name[name]

        # Depth first: a language is evaluated as soon as its experts are there.
        needed = {name for step in steps for name in step.needs}
        for step in steps:
            if step.name not in needed:
                add(step.name)

    def __iter__(self) -> Iterator[Step]:
        return iter(self._steps.values())

    def __len__(self) -> int:
        return len(self._steps)

    def __contains__(self, name: object) -> bool:
        return name in self._steps

    def __getitem__(self, name: str) -> Step:
        return self._steps[name]

    @cached_property
    def keys(self) -> dict[str, str]:
        """The key of every step: the SHA-256 of its inputs."""
        keys: dict[str, str] = {}
        for step in self:
            content = {
                "kind": step.kind,
                "version": step.version,
                "settings": step.settings,
                "inputs": dict(step.inputs),
                "needs": [keys[name] for name in step.needs],
            }
            text = json.dumps(content, sort_keys=True, ensure_ascii=False)
            keys[step.name] = hashlib.sha256(text.encode()).hexdigest()
        return keys

    def folder(self, name: str) -> str:
        """The name of a step's folder: kind and key."""
        return f"{self[name].kind}-{self.keys[name][:16]}"

    def followers(self, name: str) -> list[str]:
        """Every step that needs this one, directly or not, in order."""
        reached = {name}
        for step in self:
            if reached & set(step.needs):
                reached.add(step.name)
        return [step.name for step in self if step.name in reached and step.name != name]
