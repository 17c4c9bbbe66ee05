"""Atomic output folders and files, with a journal for resuming.

An output is written in its target's folder under a `.partial-` name, flushed to disk, and renamed.
Missing parent folders are made when the writing begins, after every check.
A process that is killed at any moment leaves the old output, the new one, or a partial folder; the
next commit to the same target resumes or removes the partial folder.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from layerswap.ground import system
from layerswap.ground.errors import CheckpointError, MergeError
from layerswap.ground.strict_json import read_json_object
from layerswap.ground.types import PathLike

JOURNAL = "journal.json"
PARTIAL = ".partial-"
"""Follows the target's name in the name of a folder that is still being written."""
REPLACED = ".replaced-"
"""Follows the target's name in the name of the old folder while it is being replaced."""
FLUSHES = 8
"""Files that are flushed at a time."""


# --- outputs ---


@contextmanager
def atomic_folder(
    target: Path, *, marker: str, overwrite: bool = False, resume: str | None = None
) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `target` if the block succeeds.

    Every file is flushed to disk before the rename, and the parent folder after it. New files
    follow the umask; a replaced folder passes its permissions on. An exception removes the
    unfinished folder. A folder without the file `marker` is never replaced. With `resume`,
    the key of the work, the folder of a killed process with this key continues (see `Journal`).
    """
    refuse_target(target, marker=marker, overwrite=overwrite)
    with _partial_folder(target, resume) as (folder, real):
        if real.is_dir():  # its owner keeps all permissions
            folder.chmod(stat.S_IMODE(real.stat().st_mode) | stat.S_IRWXU)
        yield folder
        sync_tree(folder)
        _put_in_place(folder, real, marker=marker, overwrite=overwrite)


@contextmanager
def atomic_file(
    target: Path,
    *,
    is_ours: Callable[[Path], bool],
    overwrite: bool = False,
    resume: str | None = None,
) -> Iterator[Path]:
    """Yield a temporary file path, which is renamed to `target` if the block succeeds.

    As `atomic_folder`, for a file. Only a file for which `is_ours` returns True may be replaced.
    """
    refuse_file(target, is_ours=is_ours, overwrite=overwrite)
    with _partial_folder(target, resume) as (folder, real):
        path = folder / real.name
        yield path
        if real.is_file():
            path.chmod(stat.S_IMODE(real.stat().st_mode))
        sync_tree(folder)
        # Another process may have finished the same target in the meantime.
        refuse_file(real, is_ours=is_ours, overwrite=overwrite)
        path.replace(real)
        system.flush(real.parent)


@contextmanager
def _partial_folder(target: Path, resume: str | None) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of an unfinished output, and the resolved target."""
    real = target.resolve()  # "." and ".." have no name for a suffix
    folder = real.with_name(f"{_partial_prefix(real)}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        _adopt_leftover(real, folder, resume)
        _remove_leftovers(real)
        folder.mkdir(exist_ok=True)
        yield folder, real
    except OSError as error:
        detail = error.strerror or str(error)
        raise MergeError(f"{target}: cannot be written ({detail}); nothing was kept") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _put_in_place(folder: Path, target: Path, *, marker: str, overwrite: bool) -> None:
    """Rename a finished folder to its target, and remove the old one."""
    # Another process may have finished the same target in the meantime.
    refuse_target(target, marker=marker, overwrite=overwrite)
    old = None
    if not overwrite or not target.exists():
        try:
            folder.rename(target)
        except OSError:  # the target has appeared since the check
            refuse_target(target, marker=marker, overwrite=False)
            raise
    elif system.exchange(folder, target):
        old = folder
    else:
        old = target.with_name(target.name + REPLACED + uuid.uuid4().hex[:8])
        target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            old.rename(target)
            raise
    system.flush(target.parent)
    # Only now: a power cut must never leave the old folder half removed under its own name.
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def write_json(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a JSON file atomically: readers see the old content or the new."""
    draft = path.with_name(f".{path.name}{PARTIAL}{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
            stream.flush()
            system.flush_handle(stream.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk, several at a time.

    Parallel flushes share one journal commit of the filesystem.
    """
    with ThreadPoolExecutor(FLUSHES, thread_name_prefix="flush") as pool:
        for directory, _, files in os.walk(folder):
            paths = (Path(directory, name) for name in (*files, ""))
            list(pool.map(system.flush, paths))


# --- refusals ---


def refuse_target(target: PathLike, *, marker: str, overwrite: bool) -> Path:
    """Check that a folder may be written; return its absolute path.

    An existing folder needs `overwrite` and must hold `marker`.
    """
    folder = local_path(target)
    system.check_path(folder)
    with _unwritable(folder):
        if folder.is_symlink():
            raise MergeError(f"{folder}: is a link; choose another output")
        if folder.exists() and not folder.is_dir():
            raise MergeError(f"{folder}: exists and is not a folder; choose another output")
        if folder.is_dir() and not (folder / marker).is_file():
            raise MergeError(
                f"{folder}: has no {marker}, so layerswap did not write it and will not replace "
                "it; choose another output"
            )
        _refuse_existing(folder, overwrite)
    return folder


def refuse_file(target: PathLike, *, is_ours: Callable[[Path], bool], overwrite: bool) -> Path:
    """Check that a file may be written; return its absolute path.

    An existing file needs `overwrite`, and layerswap must have written it.
    """
    file = local_path(target)
    system.check_path(file)
    with _unwritable(file):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise MergeError(f"{file}: exists and is not a file; choose another output")
        if file.exists() and not is_ours(file):
            raise MergeError(
                f"{file}: layerswap did not write it and will not replace it; choose another output"
            )
        _refuse_existing(file, overwrite)
    return file


def local_path(target: PathLike) -> Path:
    """The absolute path of an output; refuses an address."""
    if re.match(r"\w{2,}:/", os.fspath(target)):  # a path keeps one of the slashes of s3://
        raise MergeError(f"{target}: the output must be a local folder, not an address")
    return Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111


@contextmanager
def _unwritable(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise MergeError(f"{target}: cannot be written ({error.strerror})") from None


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if target.exists() and not overwrite:
        raise MergeError(f"{target}: exists already; choose another output or pass --overwrite")
    parent = existing_parent(target)
    if not parent.is_dir():
        raise MergeError(f"{parent}: is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise MergeError(f"{parent}: not writable")


def existing_parent(target: Path) -> Path:
    """Return the nearest existing parent folder of an absolute path."""
    return next(parent for parent in target.parents if os.path.lexists(parent))


# --- the journal, and partial folders of killed processes ---


class Journal:
    """Journal of the finished files in an unfinished output folder, for one work key.

    A file is entered after it is flushed to disk, so the journal survives a power cut.
    Files are flushed while the next one is written. `finished` gives, by name, the bytes of a file
    that need not be written again.
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self.finished = read_journal(folder, key) or {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._flushes: list[Future[None]] = []
        for path in folder.iterdir():
            if path.name not in (*self.finished, JOURNAL) and path.is_file():
                path.unlink()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # If all went well, the whole folder is flushed next: files that wait need no entry.
        self._pool.shutdown(cancel_futures=True)
        if error is None:
            for flush in self._flushes:
                if not flush.cancelled():
                    flush.result()
            (self._folder / JOURNAL).unlink(missing_ok=True)

    def enter(self, file: str, nbytes: int | None = None) -> None:
        """Enter a file, or its first `nbytes` bytes, as finished once it is on disk."""
        self._flushes.append(self._pool.submit(self._enter, file, nbytes))

    def _enter(self, file: str, nbytes: int | None = None) -> None:
        path = self._folder / file
        system.flush(path)
        self.finished[file] = path.stat().st_size if nbytes is None else nbytes
        draft = self._folder / f"{JOURNAL}.draft"
        with draft.open("w", encoding="utf-8", newline="\n") as stream:
            json.dump({"key": self._key, "finished": self.finished}, stream)
            stream.flush()
            system.flush_handle(stream.fileno())
        draft.replace(self._folder / JOURNAL)


def read_journal(folder: Path, key: str) -> dict[str, int] | None:
    """Return the finished bytes of a folder's files, by name; None if the key differs."""
    try:
        data = read_json_object(folder / JOURNAL)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
    except (OSError, CheckpointError):
        return None
    finished = data.get("finished")
    if data.get("key") != key or not isinstance(finished, dict):
        return None
    return {name: size for name, size in finished.items() if sizes.get(name, -1) >= size}


def _adopt_leftover(target: Path, folder: Path, key: str | None) -> None:
    """Rename the partial folder of this key with the most finished work to `folder`."""
    if key is None:
        return
    journals = {leftover: read_journal(leftover, key) for leftover in _leftovers(target)}
    work = {leftover: sum(sizes.values()) for leftover, sizes in journals.items() if sizes}
    # If two runs resume at once, one renames the folder and the other starts anew.
    if work:
        with suppress(FileNotFoundError):
            max(work, key=work.__getitem__).rename(folder)


def _remove_leftovers(target: Path) -> None:
    for leftover in _leftovers(target):
        shutil.rmtree(leftover, ignore_errors=True)
    if target.exists():
        for leftover in target.parent.glob(f"{escape(target.name)}{REPLACED}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _leftovers(target: Path) -> Iterator[Path]:
    """Yield the partial folders that dead processes left for this target."""
    prefix = _partial_prefix(target)
    for leftover in sorted(target.parent.glob(f"{escape(prefix)}*")):
        pid = leftover.name.removeprefix(prefix).split("-")[0]
        if pid.isdecimal() and not system.is_running(int(pid)):
            yield leftover


def _partial_prefix(target: Path) -> str:
    # With the host's name, because a process id means nothing on another machine.
    return f"{target.name}{PARTIAL}{platform.node() or 'host'}-"
