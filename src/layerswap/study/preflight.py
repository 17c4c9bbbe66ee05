"""Checks of a study before its first step."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from layerswap.ground.errors import StudyError
from layerswap.ground.types import Log
from layerswap.study.evaluating import TablesStep
from layerswap.study.journal import INDEX, read_journal
from layerswap.study.kinds import kind_of
from layerswap.study.steps import Graph, Step


def check_plan(graph: Graph) -> None:
    """Check mixes, trainings, experts, tasks, suites and the grid, without fetching anything."""
    for step in graph:
        kind_of(step).check(step.name)


def check_here(left: Iterable[Step], *, device: bool, log: Log = lambda line: None) -> None:
    """Check that this machine has the data, the device, and the experts of the Hub.

    `left` are the steps that are not done. The device is checked only if they run here.
    """
    steps = list(left)
    for step in steps:
        kind_of(step).check_here(step.name, device=device)
    check_data(steps, fetch=True, log=log)


def check_data(left: Iterable[Step], *, fetch: bool, log: Log = lambda line: None) -> None:
    """Check the files, columns, splits and labels that the steps will read.

    Without `fetch`, only those on this machine. `log` receives a line for each benchmark that is
    left out, has no development split, or is elsewhere.
    """
    seen: set[tuple[str, str]] = set()
    for step in left:
        kind_of(step).check_data(step.name, fetch=fetch, log=log, seen=seen)


def refuse_other_study(graph: Graph, root: Path) -> None:
    """Refuse the folder of another study; a changed version of the same study resumes."""
    try:
        there = read_journal(root).graph
    except StudyError:
        if (root / INDEX).is_file():
            raise  # it is damaged, and may still hold a study
        return  # it is empty, or `StudyJournal.open` refuses it
    name = there["tables"].settings.get("name") if "tables" in there else None
    if name != TablesStep.of(graph["tables"]).name:
        what = f"the study {name!r}" if name else "the steps of another command"
        raise StudyError(f"{root}: holds {what}; choose another output")
