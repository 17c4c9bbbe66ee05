"""What has become of a study's steps, on disk: one small file in each step's folder."""

from __future__ import annotations

import json
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from layerswap.checkpoint.commit import write_json
from layerswap.errors import StudyError
from layerswap.study.steps import Graph, Step

State = Literal["waiting", "done", "failed", "blocked"]
STEPS, RECORD, LOG, INDEX = "steps", "step.json", "log.txt", "study.json"


@dataclass(frozen=True)
class Entry:
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
    """

    name: str
    kind: str
    key: str
    state: State
    seconds: float
    where: str
    why: str = ""
    attempts: int = 1


class Journal:
    """The folder of a study.

    Args:
        root: the folder; it is made.
        graph: the steps.

    Raises:
        StudyError: the folder holds something else, or cannot be written.
    """

    def __init__(self, root: Path, graph: Graph) -> None:
        self.root, self.graph = root.expanduser().absolute(), graph
        try:
            if self.root.is_dir() and any(self.root.iterdir()) and not self.index.is_file():
                raise StudyError(f"{root}: is no study's folder; choose another output")
            (self.root / STEPS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"{root}: cannot be written ({error.strerror})") from None
        names = {step.name: graph.folder(step.name) for step in graph}
        write_json(self.index, {"steps": names})

    @property
    def index(self) -> Path:
        """The file that maps names of steps to their folders."""
        return self.root / INDEX

    def folder(self, name: str) -> Path:
        """Where a step's output is, or will be."""
        return self.root / STEPS / self.graph.folder(name)

    def entry(self, name: str) -> Entry | None:
        """What became of a step; None where it was not tried, or was cut short."""
        try:
            data = json.loads((self.folder(name) / RECORD).read_text("utf-8"))
            entry = Entry(**data)
        except (OSError, ValueError, TypeError):
            return None
        return entry if entry.key == self.graph.keys[name] else None

    def done(self, name: str) -> bool:
        """Whether a step is finished."""
        entry = self.entry(name)
        return entry is not None and entry.state == "done"

    def begin(self, step: Step) -> Path:
        """The folder to work in; it holds what an earlier attempt has left."""
        folder = self.folder(step.name)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / RECORD).unlink(missing_ok=True)
        return folder

    def finish(self, step: Step, *, state: State, started: float, why: str, attempts: int) -> Entry:
        """Write down how a step ended."""
        entry = Entry(
            step.name, step.kind, self.graph.keys[step.name], state,
            round(time.monotonic() - started, 3), socket.gethostname(), why, attempts,
        )  # fmt: skip
        write_json(self.folder(step.name) / RECORD, asdict(entry))
        return entry
