"""The sandboxed processes that run a program and its tests. Linux only.

    python -I -S -B _sandbox_child.py < TASK    # started by evaluation.sandbox

The isolation needs no root and is permanent. It has resource limits; namespaces for users,
processes, mounts, network and IPC, if the kernel allows them, over a root with the interpreter's
files (read-only) and a small folder in memory; Landlock over the same files; and seccomp with a
list of the few system calls that such a program needs.

Program and tests run in two such processes. The tests call the program's functions through a pipe:
arguments and results are copied as plain values, and other objects stay with the program. So the
program never holds the expected values or the channel of the verdict, whatever it does to its own
interpreter. The tests are sent when the program's process exists and has no way to read them.

Only the standard library is imported, all of it before the isolation starts.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

PASSED = b"passed"
READY = b"walls are up"
"""Start of the line of an isolated process; a missing part of the isolation follows."""
TMPFS = b"size=4m,nr_inodes=256,mode=0755"
"""Quota of the folder that a program may write to."""
CALLS: dict[str, tuple[int | None, int | None]] = json.loads(
    Path(__file__).with_name("sandbox_calls.json").read_bytes()
)
"""Number of each system call on x86_64 and on aarch64; None if it does not exist there."""
FILTERED: dict[str, tuple[tuple[int, int], tuple[int, ...]]] = {
    # Calls that are allowed for some values of their second argument. F_SETOWN and F_SETSIG are
    # not among them, because they make a pipe send signals to any process.
    "fcntl": ((72, 25), (1, 2, 3, 1030)),  # F_GETFD, F_SETFD, F_GETFL, F_DUPFD_CLOEXEC
    "ioctl": ((16, 29), (0x5401, 0x5450, 0x5451)),  # TCGETS, FIONCLEX, FIOCLEX
}
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers, and the kernel's code of the architecture (AUDIT_ARCH)."""

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 1, 38, 22, 2
_NAMESPACES = 0x10000000 | 0x20000 | 0x20000000 | 0x40000000 | 0x8000000 | 0x4000000
"""Users, mounts, processes, network, IPC and host name."""
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = (
    1, 2, 4, 32, 4096, 16384, 1 << 18
)  # fmt: skip
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 1 << 2 | 1 << 3
"""Reading files and listing folders."""
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | 1


def readable_paths() -> list[str]:
    """Files and folders that a Python program reads: the standard library, shared libraries."""
    paths = sysconfig.get_paths()
    wanted = [
        paths["stdlib"], paths["platstdlib"], sys.base_prefix, sys.base_exec_prefix, "/usr/lib",
        "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null",
    ]  # fmt: skip
    return [path for path in dict.fromkeys(wanted) if Path(path).exists()]


def limit(settings: dict[str, int]) -> None:
    """Limit memory, processor time, files and processes, permanently."""
    bounds = {
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_CPU: settings["seconds"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def enter_namespaces(libc: ctypes.CDLL) -> None:
    """Enter new namespaces and a new root.

    Raises:
        OSError: the kernel does not allow it.
    """
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NAMESPACES):
        raise OSError(f"unshare: {os.strerror(ctypes.get_errno())}")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    root = tempfile.gettempdir().encode()
    _mount(libc, b"none", b"/", None, flags=_MS_REC | _MS_PRIVATE)
    visible = [(path, os.open(path, os.O_PATH)) for path in readable_paths()]
    _mount(libc, b"sandbox", root, b"tmpfs", flags=_MS_NOSUID | _MS_NODEV, data=TMPFS)
    for path, handle in visible:
        inside = Path(os.fsdecode(root) + path)
        source = f"/proc/self/fd/{handle}"
        if Path(source).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        _mount(libc, source.encode(), bytes(inside), None, flags=_MS_BIND | _MS_REC)
        # Flags of the original mount can forbid this; Landlock makes it read-only too.
        flags = _MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID
        libc.mount(None, bytes(inside), None, flags, None)
        os.close(handle)
    work = Path(os.fsdecode(root), "work")
    work.mkdir()
    os.chdir(root)
    if libc.syscall(_PIVOT_ROOT[platform.machine()], b".", b".") or libc.umount2(b".", 2):
        raise OSError("cannot enter the root of the sandbox")
    os.chdir("/work")


def _mount(libc: ctypes.CDLL, source: bytes, target: bytes, kind: bytes | None, **how: Any) -> None:
    if libc.mount(source, target, kind, how["flags"], how.get("data")):
        raise OSError(ctypes.get_errno(), f"cannot mount {os.fsdecode(target)}")


def wall_off_files(folder: str | None, libc: ctypes.CDLL) -> None:
    """Allow reading the interpreter's files and using `folder`, and nothing else (Landlock).

    A program without namespaces has no folder, because nothing would limit what it writes.
    """
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise OSError("the kernel has no Landlock")
    # Rights by version: 13 in the first, then refer, truncate and ioctl on devices.
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << bit) if version >= since else 0
    ruleset = struct.pack("=Q", rights)
    handle = libc.syscall(_LANDLOCK_CREATE, ruleset, len(ruleset), 0)
    if handle < 0:
        raise OSError("Landlock refuses its rules")
    # In the folder, everything is allowed but devices, sockets, pipes and links.
    own = rights & ~(1 << 6 | 1 << 9 | 1 << 10 | 1 << 11 | 1 << 12)
    allowed = [(path, _LANDLOCK_READ) for path in readable_paths()]
    for path, right in [*allowed, *([(folder, own)] if folder else [])]:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", right if Path(path).is_dir() else right & 1 << 2, opened)
        if libc.syscall(_LANDLOCK_ADD, handle, 1, rule, 0) < 0:
            raise OSError(f"Landlock refuses {path}")
        os.close(opened)
    if libc.syscall(_LANDLOCK_RESTRICT, handle, 0) < 0:
        raise OSError("cannot start Landlock")
    os.close(handle)


def wall_off_calls(libc: ctypes.CDLL) -> None:
    """Allow only the calls of `CALLS` and `FILTERED`; all others fail with EPERM (seccomp)."""
    column, architecture = MACHINES[platform.machine()]
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, _EPERM), (load, 0, 0, 0)]
    # The x32 table of x86_64 has the same calls under other numbers.
    program += [(above, 0, 1, 0x40000000), (give, 0, 0, _EPERM)]
    for numbers in CALLS.values():
        if (number := numbers[column]) is not None:
            program += [(equal, 0, 1, number), (give, 0, 0, _ALLOW)]
    for both, values in FILTERED.values():
        # Another call jumps over this block. The low half of the second argument decides.
        block = [(load, 0, 0, 24)]
        for value in values:
            block += [(equal, 0, 1, value), (give, 0, 0, _ALLOW)]
        block.append((give, 0, 0, _EPERM))
        program += [(equal, 0, len(block), both[column]), *block]
    program.append((give, 0, 0, _EPERM))
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError("cannot start seccomp")


def wall_off() -> tuple[int, str]:
    """Start the program's process and isolate both; code after this call runs in the sandbox.

    Returns:
        The process of the program, or 0 in it; and why there are no namespaces, or nothing. seccomp
        and Landlock are always there.

    Raises:
        OSError: a part of the isolation is not available.
    """
    if platform.machine() not in MACHINES:
        raise OSError(f"no list of system calls for {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    missing = ""
    try:
        enter_namespaces(libc)
    except OSError as error:
        missing = str(error)
    else:
        # When the first process of a namespace exits, the kernel kills all others in it.
        if inner := os.fork():
            os.closerange(3, 256)
            _, status = os.waitpid(inner, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
        _end_with(0, libc)  # the outer process, whose number here is 0
    judge = os.getpid()
    if not (program := os.fork()):
        _end_with(judge, libc)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("cannot give up privileges")
    wall_off_files(None if missing else "/work", libc)
    wall_off_calls(libc)
    return program, missing


def _end_with(parent: int, libc: ctypes.CDLL) -> None:
    """Kill this process when its parent dies."""
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # A parent outside of this namespace of processes is 0, also where mounts were refused after it.
    if os.getppid() not in (parent, 0):  # it has exited already
        os._exit(1)


# --- the pipe between a program and its tests ---

SCALARS: tuple[Any, ...] = (type(None), bool, int, float, complex, str, bytes)
KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (*SCALARS, list, tuple, set, frozenset, dict)
}
"""Values that are copied; other objects stay with the program, and the tests have their number."""


def packed(value: Any, keep: Callable[[Any], int]) -> list[Any]:
    """Write a value as JSON's types; `keep` returns the number of an object that is not copied."""
    if isinstance(value, type) and value in KINDS.values():
        return ["type", value.__name__]
    kind = next((kind for kind in KINDS.values() if isinstance(value, kind)), None)
    if kind is None:
        return ["object", keep(value)]
    if kind in SCALARS:
        return [kind.__name__, repr(value if value is None else kind(value))]
    parts = value.items() if kind is dict else value
    return [kind.__name__, [packed(part, keep) for part in parts]]


def unpacked(data: Any, find: Callable[[int], Any]) -> Any:
    """Read what `packed` wrote; `find` returns the object with a number."""
    name, content = data
    if name in ("object", "type"):
        return find(content) if name == "object" else KINDS[content]
    if KINDS[name] in SCALARS:
        return float(content) if name == "float" else ast.literal_eval(content)
    return KINDS[name](unpacked(part, find) for part in content)


def serve(source: str, asked: IO[str], answers: IO[str]) -> None:
    """Run a program, and then call its functions as the tests ask."""
    space: dict[str, Any] = {"__name__": "__main__"}
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    known: dict[str, Callable[..., Any]] = {
        "define": lambda: exec(compile(source, "program.py", "exec", dont_inherit=True), space),
        "global": space.__getitem__, "getattr": getattr, "setattr": setattr,
        "list": list,
    }  # fmt: skip
    for line in asked:
        try:
            name, *given = json.loads(line)
            args, named = (unpacked(part, objects.__getitem__) for part in given)
            function = known[name] if isinstance(name, str) else objects[name]
            answer = ["value", packed(function(*args, **named), keep)]
        except BaseException as error:
            answer = [type(error).__name__, str(error)[:2000]]
        print(json.dumps(answer), file=answers, flush=True)


class EndedError(Exception):
    """The program's process has ended."""


def judge(tests: str, asked: IO[str], answers: IO[str]) -> None:
    """Run the tests of a program; the functions of the program run in the other process.

    Raises:
        EndedError: the other process has ended.
    """

    class Remote:
        """An object in the other process."""

        def __init__(self, number: int) -> None:
            self.__dict__["_number"] = number

        def __call__(self, *args: Any, **named: Any) -> Any:
            return ask(self._number, *args, **named)

        def __getattr__(self, name: str) -> Any:
            return ask("getattr", self, name)

        def __setattr__(self, name: str, value: Any) -> None:
            ask("setattr", self, name, value)

        def __iter__(self) -> Any:
            return iter(ask("list", self))

    class Names(dict[str, Any]):
        """The names of the tests: their own, then the program's, then the built-in ones."""

        def __missing__(self, name: str) -> Any:
            return ask("global", name)

    def number(value: Any) -> int:
        if isinstance(value, Remote):
            return int(value._number)
        raise TypeError(f"a test hands plain values to a program, not {type(value).__name__}")

    def ask(name: str | int, *args: Any, **named: Any) -> Any:
        line, question = "", [name, packed(args, number), packed(named, number)]
        with suppress(BrokenPipeError):
            print(json.dumps(question), file=asked, flush=True)
            line = answers.readline()
        if not line.endswith("\n"):
            raise EndedError
        kind, content = json.loads(line)
        if kind == "value":
            return unpacked(content, Remote)
        error = getattr(builtins, str(kind), None)
        if isinstance(error, type) and issubclass(error, Exception):
            raise error(content)
        raise RuntimeError(f"{kind}: {content}")

    ask("define")
    exec(compile(tests, "tests.py", "exec", dont_inherit=True), Names(__name__="__main__"))


def main() -> None:
    """Isolate a process for a program and one for its tests, report that, and run both."""
    task = _received()
    verdict, asked, answers = os.dup(1), os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 1)
    limit(task)
    sys.set_int_max_str_digits(0)
    try:
        program, missing = wall_off()
    except (OSError, AttributeError) as error:
        os.write(verdict, str(error).encode()[:500])
        os._exit(1)
    if not program:
        for descriptor in (0, verdict, asked[1], answers[0]):
            os.close(descriptor)
        os.dup(nothing)  # as 0
        sys.argv = ["program.py"]
        serve(task["source"], os.fdopen(asked[0]), os.fdopen(answers[1], "w"))
        os._exit(0)
    os.close(asked[0])
    os.close(answers[1])
    os.write(verdict, READY + missing.encode()[:500] + b"\n")
    said = PASSED
    try:
        judge(_received()["tests"], os.fdopen(asked[1], "w"), os.fdopen(answers[0]))
    except EndedError:
        _, status = os.waitpid(program, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF or 1)
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:2000].encode("utf-8", errors="replace")
    os.write(verdict, said)
    os._exit(0)


def _received() -> dict[str, Any]:
    """Read one line of the task, and nothing beyond it."""
    line = b""
    while not line.endswith(b"\n") and (data := os.read(0, 1 << 16)):
        line += data
    return dict(json.loads(line))


if __name__ == "__main__":
    main()
