"""Journal of a study: a small file in each step's folder records how the step ended."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Literal
from uuid import uuid4

from pydantic import TypeAdapter

from layerswap.ground import system
from layerswap.ground.commit import local_path, write_json
from layerswap.ground.errors import StudyError, one_line
from layerswap.ground.lease import HEARTBEAT, SILENCE, InUse, Lease, Owner, living_owner
from layerswap.study.steps import Graph, Step
from layerswap.versions import versions

State = Literal["waiting", "running", "done", "failed", "blocked"]
STEPS, RECORD, LOG, INDEX = "steps", "step.json", "log.txt", "study.json"
LOOK = 0.5
"""Seconds between two looks for new progress."""
PAGE = "report.html"
PACKAGES = ("layerswap", "torch", "transformers", "trl", "lm_eval")
"""Packages whose versions are recorded with a step."""
OF_RUNNING = ("blocked_by", "since", "progress", "process", "seen")
"""Fields that the record of a step that ended does not have."""


@dataclass(frozen=True)
class StepRecord:
    """The state of a step.

    The folder of a step that runs or ended holds its record. `StudyJournal.status` derives those of
    the others.
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
    process: int = 0
    seen: float = 0.0  # time of its last sign of life, s since the epoch

    @property
    def alive(self) -> bool:
        """True if the process of a running step lives, or wrote recently on another machine."""
        if self.state != "running":
            return False
        if self.where != socket.gethostname():
            return time.time() - self.seen < SILENCE
        return system.is_running(self.process)


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
        """The record of a step that runs or ended; None if it was not tried."""
        try:
            content = (self.folder(name) / RECORD).read_bytes()
            record = TypeAdapter(StepRecord).validate_json(content)
            datetime.fromisoformat(record.since or "2000-01-01")
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
            elif record is not None and record.alive:
                passed = time.time() - datetime.fromisoformat(record.since).timestamp()
                record = replace(record, seconds=round(passed, 1))
            elif step.name not in finished:
                # Not tried yet, cut short, or a step that it needs was run again.
                by, key = blocked.get(step.name, ""), self.graph.keys[step.name]
                record = StepRecord(step.name, step.kind, key, "blocked" if by else "waiting",
                                    why=f"needs {by}" if by else "", blocked_by=by)  # fmt: skip
            assert record is not None
            records.append(record)
        return records

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

    @contextmanager
    def running(self, step: Step, lease: Lease) -> Iterator[Callable[[str], None]]:
        """Record that a step runs, until the block ends; yields the log of its progress.

        A process that lost the lease records nothing.

        Raises:
            InUse: the lease was lost when the block ended.
        """
        sign = StepRecord(
            step.name, step.kind, self.graph.keys[step.name], "running",
            where=socket.gethostname(), since=datetime.now().astimezone().isoformat("T", "seconds"),
            stamp=lease.owner.token, process=os.getpid(),
        )  # fmt: skip
        ended = threading.Event()
        progress = ""

        def note(line: str) -> None:
            nonlocal progress
            progress = line
            self.add_to_log(step, line)

        def beat() -> None:
            written, seen = "", 0.0
            while True:
                if (progress != written or time.time() - seen > HEARTBEAT) and lease.kept:
                    written, seen = progress, time.time()
                    with suppress(OSError):  # a failed heartbeat must not fail the step
                        content = asdict(replace(sign, progress=written, seen=seen))
                        write_json(self.folder(step.name) / RECORD, content)
                if ended.wait(LOOK):
                    return

        self.clear(step.name)
        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield note
        finally:
            ended.set()
            thread.join()
            if lease.kept:
                self.clear(step.name)
        if not lease.kept:
            raise InUse(f"{lease.folder}: another process took it over")

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
        content = {name: value for name, value in asdict(record).items() if name not in OF_RUNNING}
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
