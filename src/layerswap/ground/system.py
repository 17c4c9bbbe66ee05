"""Calls that differ between Linux, macOS and Windows, each with its fallback.

No other module asks for the system, or calls a function that a system lacks. docs/safety.md says
which promises depend on the system.
"""

from __future__ import annotations

import _thread
import codecs
import errno
import os
import re
import signal
import struct
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from layerswap.ground.errors import LayerswapError

try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

OTHER_FILES = 100
"""Files that a process opens beside those of weights: libraries, outputs, connections."""
LINUX, WINDOWS = sys.platform == "linux", sys.platform == "win32"
LARGEST_CALL = 1 << 30
"""Most bytes of one read or write: macOS and Windows refuse 2 GiB."""
NOT_IN_KERNEL = (
    errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP,
    errno.EPERM, errno.EACCES,  # sandboxes answer so to system calls they do not know
    errno.ENOTTY, errno.ETXTBSY,  # of FICLONERANGE
)  # fmt: skip
"""Errors of copying or sharing in the kernel after which reading and writing may still work."""
FICLONERANGE = 0x4020940D
"""Linux's request to share blocks between two files."""
_SEEKING = [threading.Lock() for _ in range(64)]
_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Numbers of two settings of glibc's `mallopt` (`malloc.h`)."""

# --- open files ---


def open_to_read(path: Path) -> int:
    """Open a file for reading; a pipe that nobody writes to is not waited for."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0))


def open_to_write(path: Path) -> int:
    """Create a file for writing, which must not exist yet."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    return os.open(path, flags, 0o666)


def read_at(handle: int, buffer: memoryview, offset: int) -> int:
    """Read bytes from `offset` on into a buffer; return their number, 0 at the end."""
    buffer = buffer[:LARGEST_CALL]
    if hasattr(os, "preadv"):
        return os.preadv(handle, [buffer], offset)
    with _SEEKING[handle % len(_SEEKING)]:
        os.lseek(handle, offset, os.SEEK_SET)
        data = os.read(handle, len(buffer))
    buffer[: len(data)] = data
    return len(data)


def write_at(handle: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """Write all bytes at `offset` of an open file."""
    view = memoryview(data)
    while part := view[:LARGEST_CALL]:
        if hasattr(os, "pwrite"):
            count = os.pwrite(handle, part, offset)
        else:
            with _SEEKING[handle % len(_SEEKING)]:
                os.lseek(handle, offset, os.SEEK_SET)
                count = os.write(handle, part)
        view, offset = view[count:], offset + count


def copy_range(source: int, output: int, nbytes: int, start: int, offset: int) -> int:
    """Copy bytes inside the kernel; return their number, 0 if they must be read and written."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(source, output, nbytes, start, offset)
    except OSError as error:
        if error.errno not in NOT_IN_KERNEL:
            raise
        return 0


def share_range(source: int, output: int, nbytes: int, start: int, offset: int) -> bool:
    """Share whole blocks between two files; return False if the filesystem cannot."""
    if not LINUX:
        return False
    try:
        fcntl.ioctl(output, FICLONERANGE, struct.pack("qQQQ", source, start, nbytes, offset))
    except OSError as error:
        if error.errno not in NOT_IN_KERNEL:
            raise
        return False
    return True


def start_writing(handle: int, offset: int, nbytes: int) -> None:
    """Start flushing these bytes to the disk, rather than all bytes at the end."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # some filesystems take no advice
            os.posix_fadvise(handle, offset, nbytes, os.POSIX_FADV_DONTNEED)


def flush(path: Path) -> None:
    """Flush a file or a folder to the disk; on Windows a folder cannot be flushed."""
    if WINDOWS and path.is_dir():
        return
    # Windows flushes only files that are open for writing.
    handle = os.open(path, os.O_RDWR if WINDOWS else os.O_RDONLY)
    try:
        flush_handle(handle)
    except OSError as error:
        # Some network filesystems refuse to flush a folder; its files are flushed.
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.EBADF)):
            raise
    finally:
        os.close(handle)


def flush_handle(handle: int) -> None:
    """Flush an open file to the disk; on macOS also the disk's own cache."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with suppress(OSError):  # some filesystems have only fsync
            fcntl.fcntl(handle, fcntl.F_FULLFSYNC)
            return
    os.fsync(handle)


def exchange(first: Path, second: Path) -> bool:
    """Exchange two folders in one atomic step; return False if the system cannot."""
    import ctypes

    paths = os.fsencode(first), os.fsencode(second)
    try:
        library = ctypes.CDLL(None, use_errno=True)
        if hasattr(library, "renamex_np"):  # macOS
            failed = library.renamex_np(*paths, _RENAME_SWAP)
        else:
            failed = library.renameat2(_AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE)
    except (OSError, AttributeError, TypeError):  # TypeError: Windows has no such library
        return False
    code = ctypes.get_errno()
    if failed and code not in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        raise OSError(code, os.strerror(code), str(second))
    return not failed


def link_new(source: Path, target: Path) -> bool:
    """Give a file a second name, atomically; return False if the name is taken."""
    try:
        os.link(source, target)
    except FileExistsError:
        return False
    except OSError:  # the filesystem has no hard links
        try:
            with target.open("xb") as file:
                file.write(source.read_bytes())
        except FileExistsError:
            return False
    return True


# --- names ---

_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])( *\..*)?", re.I)


def sorted_paths(paths: Iterable[Path]) -> list[Path]:
    """Sort paths as Linux does; Windows would ignore their case."""
    return sorted(paths, key=lambda path: path.parts)


def check_names(names: Iterable[str]) -> None:
    """Refuse relative paths, with `/`, that some systems cannot hold in one folder."""
    seen: dict[str, str] = {}
    for name in names:
        if reason := next(filter(None, map(unusable_name, name.split("/"))), None):
            raise LayerswapError(f"{name!r:.80}: {reason}; choose another name")
        # macOS ignores the composition of letters, and with Windows their case.
        twin = seen.setdefault(unicodedata.normalize("NFD", name).casefold(), name)
        if twin != name:
            raise LayerswapError(
                f"{twin!r:.80} and {name!r:.80} are one name on macOS and Windows; rename one"
            )


def unusable_name(name: str) -> str | None:
    """Return the reason why not every system can have a file of this name; None if it can."""
    if bad := re.search(r'[<>:"/\\|?*\0-\x1f]', name):
        return f"no name of a file may have {bad[0]!r}"
    if not name or name != name.rstrip(". "):
        return "no name of a file on Windows is empty or ends with a dot or a space"
    return "Windows reserves this name" if _DEVICE.fullmatch(name.rstrip()) else None


# --- processes, memory and the console ---


def processors() -> int:
    """Number of processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_memory() -> int:
    """Free main memory, bytes, with the file cache, which the system gives back on demand."""
    try:
        words = Path("/proc/meminfo").read_text("ascii").split()
        return int(words[words.index("MemAvailable:") + 1]) << 10
    except (ValueError, OSError):
        import psutil  # type: ignore[import-untyped]

        return int(psutil.virtual_memory().available)


def allow_open_files(count: int) -> None:
    """Raise this process's limit of open files by `count`, at most to the hard limit.

    macOS begins with 256; a large mixture of experts has more files of weights.
    """
    with suppress(ImportError, ValueError, OSError):  # Windows has no such limit
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = count + OTHER_FILES
        if hard != resource.RLIM_INFINITY:
            wanted = min(wanted, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    if WINDOWS:
        import psutil

        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones if the C library is glibc.

    By default glibc returns large blocks to the system, and every batch faults their pages in
    again. The faults take a sixth of the time of a head with 262,144 rows. The whole process keeps
    the setting.
    """
    import ctypes

    with suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)


def is_running(process: int) -> bool:
    """True if a process with this id lives on this machine."""
    try:
        if WINDOWS:  # where os.kill ends the process
            import psutil

            return bool(psutil.pid_exists(process))
        os.kill(process, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True


_AT_ONCE = threading.Event()
_LISTENING = set[int]()
"""Processes that called `interrupt_on`; their forked workers inherit the handler."""


class Terminated(KeyboardInterrupt):
    """An interrupt by a signal other than that of Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def interrupt_on(*numbers: int) -> None:
    """Let signals such as SIGTERM interrupt this program as Ctrl-C does, unless ignored."""
    _LISTENING.add(os.getpid())
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _terminate)


def _terminate(number: int, frame: object) -> None:
    if os.getpid() not in _LISTENING:  # a forked worker, which has nothing to save
        os._exit(128 + number)
    raise Terminated(number)


def interrupt_main() -> None:
    """Interrupt the main thread at once, as Ctrl-C does without `first_interrupt`."""
    _AT_ONCE.set()
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
    else:
        _thread.interrupt_main()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let `interrupt_main` work where Ctrl-C is ignored, as in a background job of a script.

    Ctrl-C itself stays ignored. Changes nothing in another thread than the main one.
    """

    def handle(number: int, frame: object) -> None:
        if _AT_ONCE.is_set():
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    _AT_ONCE.clear()
    signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def first_interrupt(message: str) -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, and show a message; the second one interrupts.

    So are the signals of `interrupt_on`. An interrupt after the first is one by its signal.
    Changes nothing in another thread than the main one, or if Ctrl-C is handled elsewhere.
    """
    asked, first = threading.Event(), list[int]()

    def handle(number: int, frame: FrameType | None) -> None:
        worker = before[number] is _terminate and os.getpid() not in _LISTENING
        if asked.is_set() or _AT_ONCE.is_set() or worker:
            before[number](number, frame)
        first.append(number)
        asked.set()
        with suppress(RuntimeError, OSError):  # a write that the signal interrupts
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    main = threading.current_thread() is threading.main_thread()
    known = signal.valid_signals() if main else ()
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in known}
    before = {number: handler for number, handler in handlers.items()
              if handler in (signal.default_int_handler, _terminate)}  # fmt: skip
    _AT_ONCE.clear()
    for number in before:
        signal.signal(number, handle)
    try:
        yield asked
    except KeyboardInterrupt:
        for number in first:
            before[number](number, None)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_PLAIN = {
    "█": "#", "▓": "#", "▒": "=", "░": ".", "─": "-", "━": "-", "│": "|", "├": "+", "└": "+",
    "…": "...", "–": "-", "·": ".", "×": "x", "→": "->", "±": "+-", "≥": ">=", "≤": "<=",
}  # fmt: skip


def open_console() -> None:
    """Let a console show plain letters for those that its code page lacks.

    Files and pipes get UTF-8 on Windows too, unless PYTHONIOENCODING says otherwise.
    """
    codecs.register_error("layerswap.plain", _plain)
    for stream in (sys.stdout, sys.stderr):
        encoding = getattr(stream, "encoding", None)
        if encoding is None or not hasattr(stream, "reconfigure"):
            continue
        if WINDOWS and not stream.isatty() and "PYTHONIOENCODING" not in os.environ:
            encoding = "utf-8"
        if encoding != stream.encoding or codecs.lookup(encoding).name != "utf-8":
            stream.reconfigure(encoding=encoding, errors="layerswap.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    simple = unicodedata.normalize("NFKD", letter)[0]
    return _PLAIN.get(letter, simple if simple.isascii() else "?"), error.start + 1
