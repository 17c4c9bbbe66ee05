"""Lease of a step's folder: one owner at a time, across machines that share the folder."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

from layerswap.ground import system
from layerswap.ground.errors import StudyError

LEASE = "lease.json"
HEARTBEAT, SILENCE = 30.0, 300.0
"""Seconds between two renewals, and of silence after which an owner counts as lost."""


@dataclass(frozen=True)
class Owner:
    """The process that writes into a step's folder."""

    token: str = field(default_factory=lambda: uuid4().hex)  # kept when a cluster restarts a job
    where: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.where}"


@contextmanager
def held(folder: Path, owner: Owner) -> Iterator[None]:
    """Hold the lease of an existing folder while the block runs, and renew it.

    A process that loses its lease to another owner, such as after hours of suspension, is
    interrupted.

    Raises:
        StudyError: a living owner with another token has the lease.
    """
    _take(folder, owner)
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(HEARTBEAT):
            with suppress(OSError):  # a failed heartbeat must not fail the step
                if (holder := _read(folder / LEASE)) and holder != owner:
                    system.interrupt_main()
                    return
                os.utime(folder / LEASE)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
        with system.interruptible():
            yield
    finally:
        ended.set()
        thread.join()
        remove_lease(folder, owner.token)


def living_owner(folder: Path) -> Owner | None:
    """The owner of a folder that renewed its lease lately; None without one."""
    return _living(folder / LEASE, time.time())


def remove_lease(folder: Path, token: str) -> None:
    """Remove the lease of an owner that is known to have ended."""
    lease = folder / LEASE
    if not _has_token(lease, token):
        return
    with _removing(lease):
        if _has_token(lease, token):
            lease.unlink(missing_ok=True)


def _take(folder: Path, owner: Owner) -> None:
    lease, fresh = folder / LEASE, folder / f".{LEASE}-{uuid4().hex}"
    fresh.write_bytes(json.dumps(asdict(owner)).encode())
    try:
        while not system.link_new(fresh, lease):
            with _removing(lease):
                if not lease.exists():  # another process may take it from now on
                    continue
                os.utime(fresh)
                # The age by the clock of the file system, which all machines share.
                holder = _living(lease, fresh.stat().st_mtime)
                if holder is not None and holder.token != owner.token:
                    raise StudyError(
                        f"{folder}: {holder} writes into it; wait for its end, or end it, and run "
                        "the command again"
                    )
                lease.unlink()
    finally:
        fresh.unlink()


@contextmanager
def _removing(lease: Path) -> Iterator[None]:
    """Hold the right to remove a lease, which one process has at a time.

    Otherwise a process that has read an old lease could remove the new one of another process.
    """
    right, mine = (lease.with_name(f".{LEASE}-{end}") for end in ("removing", uuid4().hex))
    mine.touch()
    try:
        while not system.link_new(mine, right):
            os.utime(mine)
            with suppress(FileNotFoundError):
                if mine.stat().st_mtime - right.stat().st_mtime > SILENCE:
                    right.unlink()  # its process was killed within a millisecond's work
            time.sleep(0.01)
        try:
            yield
        finally:
            right.unlink(missing_ok=True)
    finally:
        mine.unlink()


def _living(lease: Path, now: float) -> Owner | None:
    owner = _read(lease)
    with suppress(OSError):
        if owner is None or now - lease.stat().st_mtime > SILENCE:
            return None
        here = owner.where == socket.gethostname()
        return owner if not here or system.is_running(owner.process) else None
    return None


def _has_token(lease: Path, token: str) -> bool:
    owner = _read(lease)
    return owner is not None and owner.token == token


def _read(lease: Path) -> Owner | None:
    try:
        return Owner(**json.loads(lease.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
