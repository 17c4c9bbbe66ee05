"""Lease of a folder: one owner at a time, across machines that share the folder."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from uuid import uuid4

from layerswap.ground import system
from layerswap.ground.commit import discard
from layerswap.ground.errors import StudyError

LEASE = "lease.json"
HEARTBEAT, SILENCE = 30.0, 300.0
"""Seconds between two renewals, and of silence after which an owner counts as lost."""


class InUse(StudyError):
    """A folder that another process writes into."""


@dataclass(frozen=True)
class Owner:
    """The process that writes into a folder."""

    token: str = field(default_factory=lambda: uuid4().hex)  # kept when a cluster restarts a job
    where: str = field(default_factory=socket.gethostname)
    process: int = field(default_factory=os.getpid)
    job: str = field(default_factory=lambda: os.environ.get("SLURM_JOB_ID", ""))
    brief: bool = False  # holds the lease for seconds, and is waited for
    started: float = field(default_factory=time.time)  # s since the epoch

    def __str__(self) -> str:
        job = f"Slurm job {self.job}, " if self.job else ""
        return f"{job}process {self.process} on {self.where}"


@dataclass(frozen=True)
class Lease:
    """The right of one owner to write into a folder, and to remove it."""

    folder: Path
    owner: Owner
    path: Path

    @property
    def kept(self) -> bool:
        """False once another owner has it, or had it."""
        return _read(self.path) == self.owner

    def discard(self) -> None:
        """Remove the folder, unless another owner has the lease now."""
        with _removing(self.path):
            if self.kept:
                discard(self.folder)


@contextmanager
def held(folder: Path, owner: Owner, *, beside: bool = False) -> Iterator[Lease]:
    """Hold the lease of a folder while the block runs, and renew it.

    A process that loses its lease to another owner, such as after hours of suspension, is
    interrupted. The lease is a file in the folder, or `beside` a folder that need not exist.

    Raises:
        InUse: a living owner with another token has the lease.
    """
    with taken(folder, owner, beside=beside) as lease:
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(HEARTBEAT):
                with suppress(OSError):  # a failed heartbeat must not fail the step
                    if not lease.kept and (_read(lease.path) or not lease.path.exists()):
                        system.interrupt_main()
                        return
                    os.utime(lease.path)

        thread = threading.Thread(target=renew, daemon=True)
        thread.start()
        try:
            with system.interruptible():
                yield lease
        finally:
            ended.set()
            thread.join()


@contextmanager
def taken(folder: Path, owner: Owner, *, beside: bool = False) -> Iterator[Lease]:
    """As `held`, for seconds; others wait for the end of a `brief` owner."""
    path = folder.with_name(f".{folder.name}.{LEASE}") if beside else folder / LEASE
    lease = Lease(folder, owner, path)
    _take(lease)
    try:
        yield lease
    finally:
        _remove(lease.path, lambda holder: holder == owner)


def living_owner(folder: Path) -> Owner | None:
    """The owner of a folder that renewed its lease lately; None without one."""
    owner = _living(folder / LEASE, time.time())
    return owner if owner and not owner.brief else None


def remove_lease(folder: Path, token: str) -> None:
    """Remove the lease of an owner that is known to have ended."""
    _remove(folder / LEASE, lambda holder: holder.token == token)


def _take(lease: Lease) -> None:
    path = lease.path
    fresh = path.with_name(f".{path.name}-{uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(json.dumps(asdict(lease.owner)).encode())
    except OSError as error:
        raise StudyError(f"{lease.folder}: cannot be written ({error.strerror})") from None
    try:
        while not system.link_new(fresh, path):
            with _removing(path):
                if not path.exists():  # another process may take it from now on
                    continue
                os.utime(fresh)
                # The age by the clock of the file system, which all machines share.
                holder = _living(path, fresh.stat().st_mtime)
                waits = False
                if holder is None or holder.token == lease.owner.token:
                    path.unlink()
                elif not (waits := holder.brief):
                    raise InUse(
                        f"{lease.folder}: {holder} writes into it; wait for its end, or end it, "
                        "and run the command again"
                    )
            if waits:
                time.sleep(0.05)
    finally:
        fresh.unlink()


def _remove(path: Path, is_it: Callable[[Owner], bool]) -> None:
    def there() -> bool:
        holder = _read(path)
        return holder is not None and is_it(holder)

    if there():
        with _removing(path):
            if there():
                path.unlink(missing_ok=True)


@contextmanager
def _removing(path: Path) -> Iterator[None]:
    """Hold the right to remove a lease, which one process has at a time.

    Otherwise a process that has read an old lease could remove the new one of another process.
    """
    right, mine = (path.with_name(f".{path.name}-{end}") for end in ("removing", uuid4().hex))
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


def _living(path: Path, now: float) -> Owner | None:
    owner = _read(path)
    with suppress(OSError):
        if owner is None or now - path.stat().st_mtime > SILENCE:
            return None
        here = owner.where == socket.gethostname()
        return owner if not here or system.is_running(owner.process) else None
    return None


def _read(path: Path) -> Owner | None:
    try:
        return Owner(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return None
