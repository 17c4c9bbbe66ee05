"""Estimated costs of the steps of a study."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from layerswap.study.costs import Costs, Estimate, size_of, speed_of
from layerswap.study.kinds import kind_of
from layerswap.study.spec import StudySpec
from layerswap.study.steps import Graph
from layerswap.study.trainings import selections_of


@dataclass(frozen=True)
class StudyCosts:
    """The estimated costs of a study."""

    costs: Costs
    steps: Mapping[str, Estimate]  # by name
    disk_gb: float  # when the study has ended
    passing_gb: float  # further disk while it runs


def cost_study(spec: StudySpec, graph: Graph) -> StudyCosts:
    """Estimate the costs of a study from its plan."""
    base = next(step.settings["base"] for step in graph if step.kind == "evaluate")
    whole = spec.dtype == "float32" or (spec.dtype is None and spec.device == "cpu")
    costs = Costs(size_of(spec, base), speed_of(spec.device), 4 if whole else 2)
    steps = {step.name: kind_of(step).cost(step, graph, costs) for step in graph}
    # Checkpoints of the runs of one kind are on the disk together, until some are selected.
    passing: dict[str, float] = defaultdict(float)
    selections = selections_of(graph)
    for name, estimate in steps.items():
        passing[selections.get(name, name)] += estimate.passing_gb
    disk = sum(estimate.disk_gb for estimate in steps.values())
    return StudyCosts(costs, steps, disk, max(passing.values()))
