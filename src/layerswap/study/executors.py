"""Chooses the executor of a study by the words of the command line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.study.clusters import ClusterExecutor
from layerswap.study.on_ray import OnRay
from layerswap.study.on_slurm import OnSlurm


def executor_of(
    on: str,
    logs: Path,
    *,
    slurm: Mapping[str, Any] | None = None,
    hours: Mapping[str, float] | None = None,
) -> ClusterExecutor:
    """The executor for `slurm`, `ray`, or the address of a Ray cluster.

    Args:
        on: the word of the command line.
        logs: folder of the jobs' own files.
        slurm: parameters of jobs, whole and by kind of step.
        hours: estimated hours by step.
    """
    if on == "slurm":
        return OnSlurm(logs, slurm or {}, hours or {})
    return OnRay(None if on == "ray" else on)
