"""Journal of a study: a small file in each step's folder records how the step ended."""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import TypeAdapter

from layerswap.ground.commit import local_path, write_json
from layerswap.ground.errors import StudyError, one_line
from layerswap.ground.lease import Owner, living_owner
from layerswap.study.steps import Graph, Step
from layerswap.versions import versions

State = Literal["waiting", "running", "done", "failed", "blocked"]
STEPS, RECORD, LOG, INDEX = "steps", "step.json", "log.txt", "study.json"
PAGE = "report.html"
PACKAGES = ("layerswap", "torch", "transformers", "trl", "lm_eval")
"""Packages whose versions are recorded with a step."""
DERIVED = ("blocked_by", "since", "progress")
"""Fields that no file holds."""


@dataclass(frozen=True)
class StepRecord:
    """The state of a step.

    The folder of a step that ended holds its record. `StudyJournal.status` derives those of the
    others, of a running step from its lease and its log.
    """

    name: str
    kind: str
    key: str
    state: State
    seconds: float | None = None  # until the end, or until now
    where: str = ""  # the machine
    why: str = ""  # the reason of a failure, or of not being tried
    attempts: int = 1
    versions: dict[str, str] = field(default_factory=dict)
    stamp: str = ""  # unique to this run of the step
    after: dict[str, str] = field(default_factory=dict)  # stamps of the steps that it needs
    blocked_by: str = ""  # the failed step that a blocked one needs
    since: str = ""  # start of a running step, in ISO 8601 with the time zone
    progress: str = ""  # the last line of its log


class StudyJournal:
    """The folder of a study; `open` creates it."""

    def __init__(self, root: Path, graph: Graph) -> None:
        self.root, self.graph = local_path(root), graph

    def open(self) -> StudyJournal:
        """Create the folder if it is missing, and write the steps into its index."""
        index = self.root / INDEX
        try:
            if self.root.is_dir() and any(self.root.iterdir()) and not index.is_file():
                raise StudyError(f"{self.root}: is not a study folder; choose another output")
            (self.root / STEPS).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StudyError(f"{self.root}: cannot be written ({error.strerror})") from None
        steps = [step.to_dict() | {"folder": self.graph.folder(step.name)} for step in self.graph]
        write_json(index, {"steps": steps})
        return self

    def folder(self, name: str) -> Path:
        """The folder of a step's output, which need not exist yet."""
        return self.root / STEPS / self.graph.folder(name)

    def log(self, name: str) -> Path:
        """The log of a step's lines on this machine, which need not exist yet."""
        return self.folder(name) / LOG

    def record(self, name: str) -> StepRecord | None:
        """Return the record of a step that ended; None if the step has no record."""
        try:
            content = (self.folder(name) / RECORD).read_bytes()
            record = TypeAdapter(StepRecord).validate_json(content)
        except (OSError, ValueError):
            return None
        return record if record.key == self.graph.keys[name] else None

    def finished(self) -> dict[str, StepRecord]:
        """List the finished steps with current inputs, in order."""
        done: dict[str, StepRecord] = {}
        for step in self.graph:
            record = self.record(step.name)
            if record is None or record.state != "done":
                continue
            if all(n in done and record.after.get(n, "") == done[n].stamp for n in step.needs):
                done[step.name] = record
        return done

    def left(self) -> list[Step]:
        """The steps that are not done, in order."""
        finished = self.finished()
        return [step for step in self.graph if step.name not in finished]

    def status(self) -> list[StepRecord]:
        """The state of every step, in order."""
        records: list[StepRecord] = []
        blocked: dict[str, str] = {}
        finished = self.finished()
        for step in self.graph:
            record = finished.get(step.name) or self.record(step.name)
            if record is not None and record.state == "failed":
                blocked |= dict.fromkeys(self.graph.followers(step.name), step.name)
            elif record is None or step.name not in finished:
                record = self._unfinished(step, blocked.get(step.name, ""))
            records.append(record)
        return records

    def _unfinished(self, step: Step, needed: str) -> StepRecord:
        """The record of a step that runs, needs a failed one, or waits."""
        new = StepRecord(step.name, step.kind, self.graph.keys[step.name], "waiting")
        if (owner := self.owner(step.name)) is not None:
            started = datetime.fromtimestamp(owner.started).astimezone()
            return replace(
                new, state="running", seconds=round(time.time() - owner.started, 1),
                where=owner.where, since=started.isoformat("T", "seconds"),
                progress=self._last_line(step.name),
            )  # fmt: skip
        if needed:
            return replace(new, state="blocked", why=f"needs {needed}", blocked_by=needed)
        return new  # not tried yet, cut short, or a step that it needs was run again

    def _last_line(self, name: str) -> str:
        """Return the last line of a step's log, without the time."""
        try:
            *_, last = self.log(name).read_text("utf-8", "replace").splitlines()
        except (OSError, ValueError):
            return ""
        return " ".join(last.split(" ")[2:])

    def owner(self, name: str) -> Owner | None:
        """The process that runs a step."""
        return living_owner(self.folder(name))

    def clear(self, name: str) -> None:
        """Remove the record of a step whose lease this process holds."""
        (self.folder(name) / RECORD).unlink(missing_ok=True)

    def add_to_log(self, step: Step, text: str) -> None:
        """Append text with the time to the step's log."""
        with suppress(OSError), self.log(step.name).open("ab") as file:
            file.write(f"{datetime.now().isoformat(' ', 'seconds')} {text}\n".encode())

    def finish(
        self, step: Step, *, state: State, started: float, why: str, attempts: int
    ) -> StepRecord:
        """Record the end of a step; `started` is its `time.monotonic()`, s."""
        needed = {name: self.record(name) for name in step.needs}
        record = StepRecord(
            step.name, step.kind, self.graph.keys[step.name], state,
            round(time.monotonic() - started, 3), socket.gethostname(), why, attempts,
            versions(*PACKAGES), uuid4().hex,
            {name: earlier.stamp if earlier else "" for name, earlier in needed.items()},
        )  # fmt: skip
        content = {name: value for name, value in asdict(record).items() if name not in DERIVED}
        write_json(self.folder(step.name) / RECORD, content)
        return record


def read_journal(root: Path) -> StudyJournal:
    """The journal of a study that was started; writes nothing."""
    try:
        content = (local_path(root) / INDEX).read_bytes()
    except OSError:
        page = root / PAGE
        hint = f"; its report is {page}" if page.is_file() else ""
        if not root.exists():
            hint = "; a study that has just started is still checked"
        raise StudyError(f"{root}: is not a study folder: it has no {INDEX}{hint}") from None
    try:
        graph = Graph(TypeAdapter(list[Step]).validate_python(json.loads(content)["steps"]))
        _ = graph.keys  # of all settings
        return StudyJournal(root, graph)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        why = f"{type(error).__name__}: {one_line(error, 160)}"
        raise StudyError(f"{root}: {INDEX} is damaged ({why})") from None
