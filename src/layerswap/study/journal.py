"""What has become of a study's steps, on disk: one small file in each step's folder."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from layerswap.checkpoint.commit import write_json
from layerswap.errors import StudyError
from layerswap.study.steps import Estimate, Graph, Resources, Step
from layerswap.study.storage import Storage
from layerswap.versions import versions

State = Literal["waiting", "done", "failed", "blocked"]
STEPS, RECORD, LOG, INDEX = "steps", "step.json", "log.txt", "study.json"
PAGE = "report.html"
PACKAGES = ("layerswap", "torch", "transformers", "trl", "lm_eval")
"""Whose versions are written down with a step."""


@dataclass(frozen=True)
class StepRecord:
    """One step, as its folder tells.

    Attributes:
        name: of the step.
        kind: of the step.
        key: whole.
        state: `done` or `failed`; a step that was cut short has no entry.
        seconds: that it took.
        where: the machine that did it.
        why: the reason of a failure.
        attempts: how often it was tried.
        versions: of the packages that did it.
        stamp: of this time that it was done.
        after: the stamps of the steps it needs, as they were then.
    """

    name: str
    kind: str
    key: str
    state: State
    seconds: float
    where: str
    why: str = ""
    attempts: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    stamp: str = ""
    after: dict[str, str] = field(default_factory=dict)


class StudyJournal:
    """The folder of a study; nothing is written before `open`.

    Args:
        root: the folder.
        graph: the steps.
        storage: where finished steps are copied to, and come from.
    """

    def __init__(self, root: Path, graph: Graph, storage: Storage | None = None) -> None:
        self.root, self.graph, self.storage = root.expanduser().absolute(), graph, storage

    def open(self) -> StudyJournal:
        """Make the folder where there is none, and write down which steps there are.

        Raises:
            StudyError: the folder holds something else, or cannot be written.
        """
        try:
            if self.root.is_dir() and any(self.root.iterdir()) and not self.index.is_file():
                raise StudyError(f"{self.root}: is no study's folder; choose another output")
            (self.root / STEPS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"{self.root}: cannot be written ({error.strerror})") from None
        steps = [asdict(step) | {"folder": self.graph.folder(step.name)} for step in self.graph]
        write_json(self.index, {"steps": steps})
        if self.storage is not None:
            self.storage.write(INDEX, self.index.read_bytes())
        return self

    @property
    def index(self) -> Path:
        """The file that tells the steps and their folders."""
        return self.root / INDEX

    def folder(self, name: str) -> Path:
        """Where a step's output is, or will be."""
        return self.root / STEPS / self.graph.folder(name)

    def entry(self, name: str) -> StepRecord | None:
        """What became of a step; None where it was not tried, or was cut short."""
        here = self._here(name)
        if self.storage is None or (here is not None and here.state == "done"):
            return here
        # Another machine may have done what failed here.
        there = self.storage.read(f"{STEPS}/{self.graph.folder(name)}/{RECORD}")
        return here if there is None else self._read(name, there)

    def _here(self, name: str) -> StepRecord | None:
        try:
            return self._read(name, (self.folder(name) / RECORD).read_bytes())
        except OSError:
            return None

    def _read(self, name: str, record: bytes) -> StepRecord | None:
        try:
            entry = StepRecord(**json.loads(record))
        except (ValueError, TypeError):
            return None
        return entry if entry.key == self.graph.keys[name] else None

    def bring(self, name: str) -> Path:
        """A finished step's folder, copied here from the storage where it is not here yet."""
        folder, here = self.folder(name), self._here(name)
        if self.storage is not None and (here is None or here.state != "done"):
            self.storage.get(f"{STEPS}/{self.graph.folder(name)}", folder)
        return folder

    def finished(self) -> dict[str, StepRecord]:
        """The steps that are done, from what the steps they need gave the last time, in order.

        Each record is read once: behind a storage that is a request.
        """
        found: dict[str, StepRecord] = {}
        for step in self.graph:
            entry = self.entry(step.name)
            if entry is None or entry.state != "done":
                continue
            if all(n in found and entry.after.get(n, "") == found[n].stamp for n in step.needs):
                found[step.name] = entry
        return found

    def left(self) -> list[Step]:
        """The steps that are not done, in order."""
        finished = self.finished()
        return [step for step in self.graph if step.name not in finished]

    def _stamp(self, name: str) -> str:
        entry = self.entry(name)
        return "" if entry is None else entry.stamp

    def begin(self, step: Step) -> Path:
        """The folder to work in; it holds what an earlier attempt has left."""
        folder = self.folder(step.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
        return folder

    def finish(
        self, step: Step, *, state: State, started: float, why: str, attempts: int
    ) -> StepRecord:
        """Write down how a step ended."""
        entry = StepRecord(
            step.name, step.kind, self.graph.keys[step.name], state,
            round(time.monotonic() - started, 3), socket.gethostname(), why, attempts,
            versions(*PACKAGES), uuid4().hex, {need: self._stamp(need) for need in step.needs},
        )  # fmt: skip
        folder = self.folder(step.name)
        write_json(folder / RECORD, asdict(entry))
        if self.storage is not None:
            self.storage.put(folder, f"{STEPS}/{folder.name}", last=RECORD)
        return entry


def read_journal(root: Path, storage: Storage | None = None) -> StudyJournal:
    """The journal of a study that was begun, as its folder tells it; nothing is written.

    Args:
        root: the local folder.
        storage: what is behind it, if anything.

    Raises:
        StudyError: the folder is no study's, or its index is damaged.
    """
    index = root.expanduser().absolute() / INDEX
    where = root if storage is None else storage.url
    try:
        found = index.read_bytes() if storage is None else storage.read(INDEX)
    except OSError:
        found = None
    if found is None:
        own = root / PAGE
        there = f"; its report is {own}" if own.is_file() else ""
        raise StudyError(f"{where}: is no study's folder: it has no {INDEX}{there}")
    try:
        steps = [_step(one) for one in json.loads(found)["steps"]]
        return StudyJournal(root, Graph(steps), storage)
    except (ValueError, TypeError, KeyError) as error:
        raise StudyError(f"{where}: {INDEX} is damaged ({type(error).__name__}: {error})") from None


def _step(told: dict[str, Any]) -> Step:
    return Step(
        told["name"], told["kind"], told["settings"], tuple(told["needs"]), told["inputs"],
        Resources(**told["resources"]), Estimate(**told["estimate"]), told["version"],
    )  # fmt: skip
