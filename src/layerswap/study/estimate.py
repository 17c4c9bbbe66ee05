"""Estimated costs of the steps of a study, at the speed that was measured on this machine."""

from __future__ import annotations

import json
import socket
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from layerswap.ground.commit import write_json
from layerswap.study.costs import Costs, Estimate, size_of, speed_of
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.kinds import kind_of
from layerswap.study.spec import StudySpec
from layerswap.study.steps import Graph
from layerswap.study.trainings import selections_of

SPEED = "speed.json"
"""The measured speed, beside the `study.yaml` that `layerswap new` wrote."""


@dataclass(frozen=True)
class Measured:
    """Speed of a base in training and in reading, tokens/s, and where it was measured."""

    train: float
    read: float
    device: str = ""
    machine: str = ""


def write_speed(measured: Measured, folder: Path) -> None:
    """Write the speed of this machine into the folder of a study."""
    write_json(folder / SPEED, asdict(replace(measured, machine=socket.gethostname())))


def read_speed(folder: Path, device: str) -> Measured | None:
    """Read the speed of this machine on a device; None if it was measured elsewhere or never."""
    try:
        speed = Measured(**json.loads((folder / SPEED).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return speed if (speed.device, speed.machine) == (device, socket.gethostname()) else None


@dataclass(frozen=True)
class StudyCosts:
    """The estimated costs of a study."""

    costs: Costs
    steps: Mapping[str, Estimate]  # by name
    disk_gb: float  # when the study has ended
    passing_gb: float  # further disk while it runs

    @property
    def hours(self) -> dict[str, float]:
        """Hours by kind of step."""
        hours = defaultdict[str, float](float)
        for name, estimate in self.steps.items():
            kind = name.partition("/")[0]
            hours["train" if kind == "partial" else kind] += estimate.hours
        return {kind: total for kind, total in hours.items() if total}


def cost_study(spec: StudySpec, graph: Graph, measured: Measured | None = None) -> StudyCosts:
    """Estimate the costs of a study from its plan, at the measured speed of its base if known."""
    base = next(iter(EvaluateStep.all_of(graph).values())).base
    whole = spec.dtype == "float32" or (spec.dtype is None and spec.device == "cpu")
    costs = Costs(size_of(spec, base), speed_of(spec.device), 4 if whole else 2)
    costs = costs.at(measured.train, measured.read) if measured else costs
    steps = {step.name: kind_of(step).cost(step, graph, costs) for step in graph}
    # Checkpoints of the runs of one kind are on the disk together, until some are selected.
    passing: dict[str, float] = defaultdict(float)
    selections = selections_of(graph)
    for name, estimate in steps.items():
        passing[selections.get(name, name)] += estimate.passing_gb
    disk = sum(estimate.disk_gb for estimate in steps.values())
    return StudyCosts(costs, steps, disk, max(passing.values()))
