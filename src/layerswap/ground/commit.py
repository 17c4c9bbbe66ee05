"""Atomic output folders and files.

An output is written in its target's folder under a `.partial-` name, flushed to disk, and renamed.
Missing parent folders are made when the writing begins, after every check.
A process that is killed at any moment leaves the old output, the new one, or a partial folder; the
next commit to the same target removes the partial folder.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Any

from layerswap.ground import system
from layerswap.ground.errors import MergeError
from layerswap.ground.types import PathLike

PARTIAL = ".partial-"
"""Follows the target's name in the name of a folder that is still being written."""
REPLACED = ".replaced-"
"""Follows the target's name in the name of the old folder while it is being replaced."""
FLUSHES = 8
"""Files that are flushed at a time."""


# --- outputs ---


@contextmanager
def atomic_folder(target: Path, *, marker: str, overwrite: bool = False) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `target` if the block succeeds.

    Every file is flushed to disk before the rename, and the parent folder after it. New files
    follow the umask; a replaced folder passes its permissions on. An exception removes the
    unfinished folder. A folder without the file `marker` is never replaced.
    """
    refuse_target(target, marker=marker, overwrite=overwrite)
    with _partial_folder(target) as (folder, real):
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
) -> Iterator[Path]:
    """Yield a temporary file path, which is renamed to `target` if the block succeeds.

    As `atomic_folder`, for a file. Only a file for which `is_ours` returns True may be replaced.
    """
    refuse_file(target, is_ours=is_ours, overwrite=overwrite)
    with _partial_folder(target) as (folder, real):
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
def _partial_folder(target: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the folder of an unfinished output, and the resolved target."""
    real = target.resolve()  # "." and ".." have no name for a suffix
    folder = real.with_name(f"{_partial_prefix(real)}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        real.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(real)
        folder.mkdir()
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


def discard(folder: Path) -> None:
    """Remove a folder; a killed process never leaves half of it under its name."""
    aside = folder.with_name(f"{_partial_prefix(folder)}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    with suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


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


# --- partial folders of killed processes ---


def _remove_leftovers(target: Path) -> None:
    """Remove the partial folders that dead processes left for this target."""
    prefix = _partial_prefix(target)
    for leftover in target.parent.glob(f"{escape(prefix)}*"):
        pid = leftover.name.removeprefix(prefix).split("-")[0]
        if pid.isdecimal() and not system.is_running(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)
    if target.exists():
        for leftover in target.parent.glob(f"{escape(target.name)}{REPLACED}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _partial_prefix(target: Path) -> str:
    # With the host's name, because a process id means nothing on another machine.
    return f"{target.name}{PARTIAL}{platform.node() or 'host'}-"


def refuse_unfinished(path: Path) -> None:
    """Refuse the draft of an output that was interrupted, and a file in it."""
    real = path.resolve()
    if any(PARTIAL in name for name in (path.name, real.name, real.parent.name)):
        raise MergeError(f"{path}: an unfinished merge; merge it again")
