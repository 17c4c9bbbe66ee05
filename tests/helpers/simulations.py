"""Simulations of macOS and Windows on Linux: calls that they lack are taken away.

A simulation is no macOS and no Windows. It shows that the code has a fallback for each missing
call, and that no open file is removed or replaced, which Windows refuses.

    LAYERSWAP_SIMULATED=windows python -m pytest -p simulations tests/merge
"""

from __future__ import annotations

import ctypes
import errno
import os
import pathlib
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest

from layerswap.ground import system

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

LINUX_ALONE = (
    "copy_file_range", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "sendfile",
    "splice", "memfd_create", "O_PATH", "O_TMPFILE", "O_DIRECT", "pidfd_open",
)  # fmt: skip
NOT_ON_WINDOWS = (
    "pread", "pwrite", "preadv", "pwritev", "O_CLOEXEC", "O_NONBLOCK", "killpg", "chown", "getpgid",
    "setsid", "nice", "sync", "fdatasync",
)  # fmt: skip
SIGNALS = ("SIGKILL", "SIGXCPU", "SIGPIPE", "SIGHUP", "pthread_kill", "alarm", "setitimer")
SYSTEMS = ("macos", "windows")
SOURCE = str(pathlib.Path(system.__file__).parent.parent)


class Library:
    """The C library of macOS, with `renamex_np` by Linux' own exchange; nothing of Linux' alone."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "renamex_np":
            return lambda one, two, flags: self._real.renameat2(-100, one, -100, two, flags)
        raise AttributeError(f"dlsym(RTLD_DEFAULT, {name}): symbol not found")


class Control:
    """The module `fcntl` of macOS, as far as it is called."""

    F_FULLFSYNC = 51

    def fcntl(self, handle: int, command: int) -> None:
        assert command == self.F_FULLFSYNC
        os.fsync(handle)


@contextmanager
def simulated(name: str) -> Iterator[None]:
    """Simulate `macos` or `windows` for the block, in layerswap's own calls.

    Libraries chose their calls when they were imported, by `sys.platform`, which stays.
    """
    if sys.platform != "linux":
        pytest.skip("simulations run on Linux")
    with pytest.MonkeyPatch.context() as patch:
        shutil._USE_CP_SENDFILE = False  # type: ignore[attr-defined]
        tempfile._O_TMPFILE_WORKS = False  # type: ignore[attr-defined]
        # Only the system's module calls these (tests/ground/test_system.py); libraries may, too.
        gone = LINUX_ALONE if name == "macos" else (*LINUX_ALONE, *NOT_ON_WINDOWS)
        patch.setattr(system, "os", Lacking(os, gone))
        patch.setattr(system, "LINUX", False)
        real = ctypes.CDLL(None, use_errno=True)
        load = ctypes.CDLL
        if name == "macos":
            patch.setattr(system, "fcntl", Control())  # without ioctl: no request of Linux is sent

            def open_library(path: str | None, *rest: Any, **options: Any) -> Any:
                ours = path is None and _caller().startswith(SOURCE)
                return Library(real) if ours else load(path, *rest, **options)

            patch.setattr(ctypes, "CDLL", open_library)
        else:
            with suppress(ImportError):  # it would ask the simulated library for its console
                import colorama  # noqa: F401
            patch.setattr(system, "signal", Lacking(signal, SIGNALS))
            patch.setattr(system, "WINDOWS", True)
            patch.setattr(system, "fcntl", None)

            def open_none(path: str | None, *rest: Any, **options: Any) -> Any:
                if path is None and _caller().startswith(SOURCE):
                    raise TypeError("argument of type 'NoneType' is not iterable")
                return load(path, *rest, **options)

            patch.setattr(ctypes, "CDLL", open_none)
            _refuse_as_windows(patch)
        yield


class Lacking:
    """A module of Python without some of its names."""

    def __init__(self, module: Any, names: tuple[str, ...]) -> None:
        self._module, self._names = module, names

    def __getattr__(self, name: str) -> Any:
        if name in self._names:
            raise AttributeError(f"module {self._module.__name__!r} has no attribute {name!r}")
        return getattr(self._module, name)


def _lives(process: int) -> bool:
    """Answer as psutil on Windows, whose ids have 32 bits."""
    if process >= 1 << 31:
        raise OverflowError("signed integer is greater than maximum")
    return os.path.exists(f"/proc/{process}")  # noqa: PTH110


def _refuse_as_windows(patch: pytest.MonkeyPatch) -> None:
    """Refuse folders that are opened, read-only handles that are flushed, and files in use."""
    opened, flushed, killed = os.open, os.fsync, os.kill

    def open_file(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if _is_ours() and os.path.isdir(path):  # noqa: PTH112
            raise PermissionError(errno.EACCES, "Permission denied", os.fspath(path))
        return opened(path, flags, *rest, **options)

    def flush(handle: Any) -> None:
        if fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flushed(handle)

    def kill(process: int, number: int) -> None:
        assert number, "os.kill(pid, 0) ends the process on Windows"
        killed(process, number)

    patch.setattr(os, "open", open_file)
    patch.setattr(os, "fsync", flush)
    patch.setattr(os, "kill", kill)
    # psutil on Linux calls os.kill.
    patch.setattr(psutil, "pid_exists", _lives)
    for name in ("rename", "replace", "unlink", "remove", "rmdir"):
        patch.setattr(os, name, _refusing_files_in_use(getattr(os, name)))
    patch.setattr(shutil, "rmtree", _removing_one_by_one)


def _caller() -> str:
    return sys._getframe(2).f_code.co_filename


def _is_ours() -> bool:
    """True if layerswap called, at any depth; tests and libraries may do what Linux allows."""
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        # Locks and temporary files are opened on Windows so that they can be removed.
        if "filelock" in file or file.endswith("tempfile.py"):
            return False
        if file.startswith(SOURCE):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _refusing_files_in_use(call: Callable[..., None]) -> Callable[..., None]:
    def refuse(path: Any, *rest: Any, **options: Any) -> None:
        if _is_ours() and "dir_fd" not in options:
            for one in (path, *rest[:1]):
                if isinstance(one, str | os.PathLike) and (user := _user_of(os.fspath(one))):
                    raise PermissionError(
                        errno.EACCES, f"is used by another process ({user})", os.fspath(one)
                    )
        call(path, *rest, **options)

    return refuse


def _user_of(path: str) -> str | None:
    """Return the open or mapped file of this process that is the path or in it, else None."""
    try:
        inside = os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
        whole = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))  # noqa: PTH118, PTH119, PTH120
    except OSError:
        return None
    for handle in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            used = os.readlink(f"/proc/self/fd/{handle}")  # noqa: PTH115
            regular = stat.S_ISREG(os.fstat(int(handle)).st_mode)
        except OSError:
            continue
        if regular and (used == whole or (inside and used.startswith(f"{whole}/"))):
            return used
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        for line in maps:
            used = line[73:].rstrip("\n")
            if used and (used == whole or (inside and used.startswith(f"{whole}/"))):
                return f"{used}, mapped"
    return None


def _removing_one_by_one(path: Any, ignore_errors: bool = False, **_: Any) -> None:
    """`shutil.rmtree` as on Windows: by names, so that files in use stay."""
    try:
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                os.unlink(os.path.join(folder, name))  # noqa: PTH108, PTH118
            for name in folders:
                inner = os.path.join(folder, name)  # noqa: PTH118
                (os.unlink if os.path.islink(inner) else os.rmdir)(inner)  # noqa: PTH114
        os.rmdir(path)  # noqa: PTH106
    except OSError:
        if not ignore_errors:
            raise


OF_LINUX = {
    "ground/test_system.py": ("",),
    "checkpoint/test_source_files.py": ("[pipe-",),
    "merge/test_safety.py": ("a_write_that_fails_at_any_moment",),
    "ground/test_commit.py": (
        "misread[a*b]", "misread[a?]", "all_is_flushed_before", "the_order_without",
    ),
    "cli/test_output.py": ("no_path_forges_a_line",),
    "cli/test_commands.py": ("an_output_is_overwritten",),  # it maps the old output itself
    "merge/test_merge_refusals.py": ("vanished",),
    "checkpoint/test_read.py": ("short_reads_are_completed",),
    "merge/test_merge_bytes.py": ("in_the_kernel", "short_writes"),
    "merge/test_shared_blocks.py": ("",),
}  # fmt: skip
"""Tests whose subject is a call or a name that a simulated system lacks."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of Linux' own calls in a simulation."""
    if not os.environ.get("LAYERSWAP_SIMULATED"):
        return
    out = [
        item for item in items for file, names in OF_LINUX.items()
        if item.nodeid.split("::")[0].endswith(file) and any(name in item.name for name in names)
    ]  # fmt: skip
    config.hook.pytest_deselected(items=out)
    items[:] = [item for item in items if item not in out]


@pytest.fixture(autouse=True, scope="session")
def _simulation() -> Iterator[None]:
    """The system that LAYERSWAP_SIMULATED names, for a whole run of pytest."""
    if name := os.environ.get("LAYERSWAP_SIMULATED"):
        with simulated(name):
            yield
    else:
        yield
