"""What of an unfinished output folder is finished, so that a later run can go on from there."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from types import TracebackType
from typing import Any

from layerswap._types import PathLike
from layerswap.checkpoint.strict_json import read_json_object
from layerswap.errors import CheckpointError, MergeError

JOURNAL = "journal.json"


class Journal:
    """The finished files of a folder that is being written, for work of one key.

    A file is entered only once it is on the disk, so that what the journal names can be trusted
    after a power cut too. Flushing happens beside the writing of the next file.

    Attributes:
        finished: how many bytes of each file need not be written again, by name.

    Example:
        with Journal(folder, key) as journal:
            for file in files:
                if file.name not in journal.finished:
                    write(file)
                    journal.enter(file.name)
    """

    def __init__(self, folder: Path, key: str) -> None:
        self._folder, self._key = folder, key
        self.finished = read_journal(folder, key) or {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._flushes: list[Future[None]] = []
        _remove_all_but(folder, (*self.finished, JOURNAL))

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=error is not None)
        if error is None:
            for flush in self._flushes:
                flush.result()
            (self._folder / JOURNAL).unlink(missing_ok=True)

    def enter(self, file: str, nbytes: int | None = None) -> None:
        """Note that a file, or its first `nbytes` bytes, is finished, once it is on the disk."""
        self._flushes.append(self._pool.submit(self._enter, file, nbytes))

    def _enter(self, file: str, nbytes: int | None = None) -> None:
        path = self._folder / file
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        self.finished[file] = path.stat().st_size if nbytes is None else nbytes
        draft = self._folder / f"{JOURNAL}.draft"
        with draft.open("w", encoding="utf-8") as stream:
            json.dump({"key": self._key, "finished": self.finished}, stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(self._folder / JOURNAL)


def read_journal(folder: Path, key: str) -> dict[str, int] | None:
    """Finished bytes of a folder's files, by name; None when it is not work of this key."""
    try:
        data = read_json_object(folder / JOURNAL)
    except (OSError, CheckpointError):
        return None
    finished = data.get("finished")
    if data.get("key") != key or not isinstance(finished, dict):
        return None
    return {name: size for name, size in finished.items() if _size(folder / name) >= size}


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _remove_all_but(folder: Path, keep: Iterable[str]) -> None:
    for path in folder.iterdir():
        if path.name not in set(keep) and path.is_file():
            path.unlink()


PARTIAL = ".partial-"
"""Follows the output folder's name in the name of a folder that is still being written."""
REPLACED = ".replaced-"
"""Follows the output folder's name in the name of the old folder while it is being replaced."""
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def atomic_folder(
    target: Path, *, marker: str, overwrite: bool = False, resume: str | None = None
) -> Iterator[Path]:
    """A fresh folder beside `target` that becomes `target` when the block ends well.

    Every file is flushed to disk before the rename, and the parent folder after it. New files
    follow the umask; a folder that is replaced passes its permissions on. An exception removes
    the unfinished folder. A killed process leaves it behind under a name with `.partial-`; the
    next commit to the same target, once that process is gone, goes on with it or removes it.

    Args:
        target: the folder to create.
        marker: a file that only our own outputs hold; a folder without it is never replaced.
        overwrite: replace an existing folder.
        resume: the key of the work; a folder that a killed process left with a journal of this
            key is handed out again (see `Journal`).

    Raises:
        MergeError: `target` exists and may not be replaced, or the disk refuses.

    Example: `with atomic_folder(out, marker="layerswap.json") as folder: ...`
    """
    refuse_target(target, marker=marker, overwrite=overwrite)
    with _partial_folder(target, resume) as (folder, real):
        _keep_mode(real, folder)
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
    """A file in a fresh folder beside `target` that becomes `target` when the block ends well.

    As `atomic_folder`, for a single file: a killed process leaves a folder with `.partial-`.

    Args:
        target: the file to create.
        is_ours: tells a file that may be replaced from others.
        overwrite: replace an existing file.
        resume: the key of the work, as in `atomic_folder`.

    Raises:
        MergeError: `target` exists and may not be replaced, or the disk refuses.
    """
    refuse_file(target, is_ours=is_ours, overwrite=overwrite)
    with _partial_folder(target, resume) as (folder, real):
        path = folder / real.name
        yield path
        if real.is_file():
            path.chmod(stat.S_IMODE(real.stat().st_mode))
        sync_tree(folder)
        # Another process may have finished the same target meanwhile.
        refuse_file(real, is_ours=is_ours, overwrite=overwrite)
        path.replace(real)
        _sync(real.parent)


@contextmanager
def _partial_folder(target: Path, resume: str | None) -> Iterator[tuple[Path, Path]]:
    """The folder of an unfinished output, and where the output really goes."""
    real = target.resolve()  # "." and ".." have no name to put a suffix to
    folder = real.with_name(f"{_partial_prefix(real)}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        _adopt(real, folder, resume)
        _sweep_leftovers(real)
        folder.mkdir(exist_ok=True)
        yield folder, real
    except OSError as error:
        detail = error.strerror or str(error)
        raise MergeError(f"{target}: cannot be written ({detail}); nothing was kept") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _keep_mode(target: Path, folder: Path) -> None:
    """Give `folder` the permissions of the folder that it will replace; its owner keeps all."""
    if target.is_dir():
        folder.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU)


def refuse_target(target: PathLike, *, marker: str, overwrite: bool) -> Path:
    """Check that `target` may be written, before any work is done for it.

    Returns:
        Its absolute path.

    Raises:
        MergeError: it exists (and `overwrite` is off, or it does not hold `marker`), or its
            parent folder is missing or not writable.
    """
    folder = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
    try:
        _refuse(folder, marker=marker, overwrite=overwrite)
    except OSError as error:
        raise MergeError(f"{folder}: cannot be written ({error.strerror})") from None
    return folder


def refuse_file(target: PathLike, *, is_ours: Callable[[Path], bool], overwrite: bool) -> Path:
    """Check that a file may be written, before any work is done for it.

    Returns:
        Its absolute path.

    Raises:
        LayerswapError: it exists (and `overwrite` is off, or it is not one of ours), or its
            parent folder is missing or not writable.
    """
    file = Path(os.path.abspath(os.path.expanduser(target)))  # noqa: PTH100, PTH111
    try:
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise MergeError(f"{file}: exists and is not a file; choose another output")
        if file.exists() and not is_ours(file):
            raise MergeError(
                f"{file}: layerswap did not write it and will not replace it; choose another output"
            )
        if file.exists() and not overwrite:
            raise MergeError(f"{file}: exists already; choose another output or pass --overwrite")
        _refuse_parent(file)
    except OSError as error:
        raise MergeError(f"{file}: cannot be written ({error.strerror})") from None
    return file


def write_json(path: Path, data: Mapping[str, Any] | Sequence[Any]) -> None:
    """Write a JSON file in one step: readers see the old content or the new, never a part.

    Raises:
        OSError: the disk refuses.
    """
    draft = path.with_name(f".{path.name}{PARTIAL}{os.getpid()}")
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        if path.exists():
            shutil.copymode(path, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Flush every file and folder below `folder` to disk."""
    for directory, _, files in os.walk(folder):
        for name in files:
            _sync(Path(directory) / name)
        _sync(Path(directory))


def _refuse(target: Path, *, marker: str, overwrite: bool) -> None:
    if target.is_symlink():
        raise MergeError(f"{target}: is a link; choose another output")
    if target.exists() and not target.is_dir():
        raise MergeError(f"{target}: exists and is not a folder; choose another output")
    if target.is_dir() and not (target / marker).is_file():
        raise MergeError(
            f"{target}: has no {marker}, so layerswap did not write it and will not replace it; "
            "choose another output"
        )
    if target.is_dir() and not overwrite:
        raise MergeError(f"{target}: exists already; choose another output or pass --overwrite")
    _refuse_parent(target)


def _refuse_parent(target: Path) -> None:
    if target.parent.exists() and not target.parent.is_dir():
        raise MergeError(f"{target.parent}: is not a folder")
    if not target.parent.is_dir():
        raise MergeError(f"{target.parent}: no such folder; create it first")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise MergeError(f"{target.parent}: not writable")


def _put_in_place(folder: Path, target: Path, *, marker: str, overwrite: bool) -> None:
    # Another process may have finished the same target meanwhile.
    refuse_target(target, marker=marker, overwrite=overwrite)
    if not overwrite or not target.exists():
        _rename_to_free(folder, target, marker=marker, overwrite=overwrite)
        old = None
    elif _exchange(folder, target):
        old = folder
    else:
        old = target.with_name(target.name + REPLACED + uuid.uuid4().hex[:8])
        target.rename(old)
        try:
            folder.rename(target)
        except BaseException:
            old.rename(target)
            raise
    _sync(target.parent)
    # Only now: a power cut must never find the old folder half removed under its own name.
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def _rename_to_free(folder: Path, target: Path, *, marker: str, overwrite: bool) -> None:
    """Rename to a name that was free a moment ago; who came first keeps it."""
    try:
        folder.rename(target)
    except OSError:
        refuse_target(target, marker=marker, overwrite=False)
        raise


def _exchange(first: Path, second: Path) -> bool:
    """Swap two folders in one atomic step; False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    paths = os.fsencode(first), os.fsencode(second)
    if renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _adopt(target: Path, folder: Path, key: str | None) -> None:
    """Take over, as `folder`, the leftover with the most finished work of this key."""
    if key is None:
        return
    found = {leftover: read_journal(leftover, key) for leftover in _leftovers(target)}
    work = {leftover: sum(files.values()) for leftover, files in found.items() if files}
    # Two runs that resume at once cannot both rename it: the other finds nothing and starts anew.
    for leftover in sorted(work, key=work.__getitem__, reverse=True)[:1]:
        with suppress(FileNotFoundError):
            leftover.rename(folder)


def _leftovers(target: Path) -> Iterator[Path]:
    """Unfinished folders of this target whose process is gone."""
    prefix = _partial_prefix(target)
    for leftover in sorted(target.parent.glob(f"{escape(prefix)}*")):
        pid = leftover.name.removeprefix(prefix).split("-")[0]
        if pid.isdecimal() and not _alive(int(pid)):
            yield leftover


def _sweep_leftovers(target: Path) -> None:
    for leftover in _leftovers(target):
        shutil.rmtree(leftover, ignore_errors=True)
    if target.exists():
        for leftover in target.parent.glob(f"{escape(target.name)}{REPLACED}*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _partial_prefix(target: Path) -> str:
    # The host is part of the name because a process id means nothing on another machine.
    return f"{target.name}{PARTIAL}{platform.node() or 'host'}-"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network filesystems refuse to sync a directory; the files in it are synced.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF)):
            raise
    finally:
        os.close(handle)
