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
                if (other := _read(folder / LEASE)) and other != owner:
                    system.interrupt_main()
                    return
                os.utime(folder / LEASE)

    thread = threading.Thread(target=renew, daemon=True)
    thread.start()
    try:
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
    owner = _read(folder / LEASE)
    if owner is not None and owner.token == token:
        (folder / LEASE).unlink(missing_ok=True)


def _take(folder: Path, owner: Owner) -> None:
    lease, fresh = folder / LEASE, folder / f".{LEASE}-{uuid4().hex}"
    fresh.write_bytes(json.dumps(asdict(owner)).encode())
    try:
        while not system.link_new(fresh, lease):
            # The age by the clock of the file system, which all machines share.
            other = _living(lease, fresh.stat().st_mtime)
            if other is not None and other.token != owner.token:
                raise StudyError(
                    f"{folder}: {other} writes into it; wait for its end, or end it, and run the "
                    "command again"
                )
            _move_away(lease)
    finally:
        fresh.unlink()


def _move_away(lease: Path) -> None:
    """Remove a lease without removing the one that another process takes at the same time."""
    before, old = _read(lease), lease.with_name(f".{LEASE}-{uuid4().hex}")
    with suppress(FileNotFoundError):
        lease.rename(old)
        if _read(old) != before:
            system.link_new(old, lease)
        old.unlink()


def _living(lease: Path, now: float) -> Owner | None:
    owner = _read(lease)
    with suppress(OSError):
        if owner is None or now - lease.stat().st_mtime > SILENCE:
            return None
        here = owner.where == socket.gethostname()
        return owner if not here or system.is_running(owner.process) else None
    return None


def _read(lease: Path) -> Owner | None:
    try:
        return Owner(**json.loads(lease.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
