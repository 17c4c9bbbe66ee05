"""One side of a sandboxed run: the program, or the tests that call it. Linux only.

    python -I -S -B _sandbox_child.py ROLE SETTINGS    # started by evaluation.sandbox

The isolation needs no root and is permanent. It has resource limits; namespaces for users,
processes, mounts, network and IPC, if the kernel allows them, over a root with the interpreter's
files (read-only) and a small folder in memory; Landlock over the same files; and seccomp with a
list of the few system calls that such a program needs.

The program has neither the verdict nor the expected values. `tests` runs the assertions with its
own builtins and asks `program` for names, calls, attributes and the truth of objects. Data of
Python's types come by value, and `tests` compares them. All other objects stay in the program and
have a number. The program decides the truth, the length and the items of its objects, and what two
of them have in common, but never if one equals a value of the tests. Messages are data in pickle's
format; their reader has no instruction that calls or imports.

Not promised: a program can guess, can treat the arguments of the tests as special, and decides a
test that compares two of its own objects. Data that a call returns are a copy; only arguments are
kept in step. An object that is no data has no order, sum or membership with values of the tests.

Only the standard library is imported, all of it before the isolation starts.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import datetime
import functools
import importlib
import io
import json
import operator
import os
import pickle
import platform
import resource
import signal
import struct
import sys
import sysconfig
import tempfile
import traceback
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import IO, Any, ClassVar, cast

READY = b"walls are up"
"""Start of the message of an isolated process; a missing part of the isolation follows."""
MESSAGE_BYTES = 1 << 26
"""Largest size of one message between the two sides."""
LEVELS = 10_000
"""Recursion limit for nested data."""
TMPFS = b"size=4m,nr_inodes=256,mode=0755"
"""Quota of the folder that a program may write to."""
MODULES = (
    "array", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "fractions",
    "functools", "heapq", "itertools", "json", "math", "operator", "random", "re", "statistics",
    "string", "sys", "typing",
)  # fmt: skip
"""Modules that tests may use if the program imports them."""
KNOWN = {*dir(builtins), *MODULES}
INSTRUCTIONS = (
    "PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "NONE",
    "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "EMPTY_TUPLE",
    "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS",
    "FROZENSET", "BINPERSID",
)  # fmt: skip
"""Instructions of pickle for data."""
CALLS: dict[str, tuple[int | None, int | None]] = {
    # name: number of the system call on x86_64 and on aarch64; None if it does not exist there
    "read": (0, 63), "write": (1, 64), "open": (2, None), "close": (3, 57), "stat": (4, None),
    "fstat": (5, 80), "lstat": (6, None), "poll": (7, None), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "pread64": (17, 67), "readv": (19, 65),
    "writev": (20, 66), "access": (21, None), "select": (23, None), "sched_yield": (24, 124),
    "mremap": (25, 216), "madvise": (28, 233), "dup": (32, 23), "nanosleep": (35, 101),
    "getpid": (39, 172), "exit": (60, 93), "uname": (63, 160), "ftruncate": (77, 46),
    "getcwd": (79, 17), "rename": (82, None), "mkdir": (83, None), "rmdir": (84, None),
    "unlink": (87, None), "readlink": (89, None), "gettimeofday": (96, 169),
    "getrusage": (98, 165), "times": (100, 153), "getuid": (102, 174), "getgid": (104, 176),
    "geteuid": (107, 175), "getegid": (108, 177), "sigaltstack": (131, 132), "gettid": (186, 178),
    "time": (201, None), "futex": (202, 98), "sched_getaffinity": (204, 123),
    "getdents64": (217, 61), "clock_gettime": (228, 113), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "exit_group": (231, 94), "openat": (257, 56),
    "mkdirat": (258, 34), "newfstatat": (262, 79), "unlinkat": (263, 35), "renameat": (264, 38),
    "readlinkat": (267, 78), "faccessat": (269, 48), "pselect6": (270, 72), "ppoll": (271, 73),
    "getrandom": (318, 278), "statx": (332, 291), "faccessat2": (439, 439),
}  # fmt: skip
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


def wall_off() -> str:
    """Isolate this process; code after this call runs in the sandbox.

    Returns:
        Why there are no namespaces, or nothing. seccomp and Landlock are always there.

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
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != 0:  # the outer process, whose number here is 0, has exited already
            os._exit(1)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("cannot give up privileges")
    wall_off_files(None if missing else "/work", libc)
    wall_off_calls(libc)
    return missing


class Remote:
    """An object of the other side, which the other side uses when it is asked to.

    An operation with a value of this side sees only the content: the value of the object if its
    class derives from a plain type. Otherwise an `__eq__` of the program could decide a comparison.
    """

    __slots__ = ("_layerswap",)
    _layerswap: tuple[Peer, int, Any, int | None]

    def __init__(self, peer: Peer, number: int, content: Any, hashed: int | None) -> None:
        object.__setattr__(self, "_layerswap", (peer, number, content, hashed))

    def __call__(self, *args: object, **kwargs: object) -> object:
        return ask(self, "__call__", *args, **kwargs)

    def __getattribute__(self, name: str) -> Any:
        if name == "_layerswap":
            return object.__getattribute__(self, name)
        if name == "__class__":
            content = self._layerswap[2]
            return Remote if content is None else type(content)
        return ask(self, "__getattribute__", name)

    def __hash__(self) -> int:
        _, _, content, hashed = self._layerswap
        if content is None and hashed is None:
            raise TypeError("unhashable object of the program")
        return hash(content) if hashed is None else hashed


def ask(remote: Remote, do: str, *args: object, **kwargs: object) -> Any:
    """Let the other side use its object."""
    peer: Peer = remote._layerswap[0]
    return peer.ask(do, remote, *args, **kwargs)


def plain_of(remote: Remote) -> Any:
    """The value of an object whose class derives from a plain type, None for other objects."""
    content = remote._layerswap[2]
    return ask(remote, "plain") if hasattr(content, "clear") else content


def binary(name: str, operation: Callable[[Any, Any], object]) -> Callable[[Any, Any], object]:
    """The method of `Remote` for an operator."""

    def method(self: Remote, other: object) -> object:
        if type(other) is Remote:
            return ask(self, name, other)
        content = plain_of(self)
        return NotImplemented if content is None else operation(content, other)

    return method


OPERATIONS: dict[str, Callable[..., Any]] = {
    "__call__": lambda target, *args, **kwargs: target(*args, **kwargs),
    "__getattribute__": getattr,
    "__setattr__": setattr, "__delattr__": delattr, "__getitem__": operator.getitem,
    "__setitem__": operator.setitem, "__delitem__": operator.delitem, "__bool__": bool,
    "__len__": len, "__iter__": iter, "__next__": next, "__reversed__": reversed, "__str__": str,
    "__repr__": repr, "__int__": int, "__float__": float, "__index__": operator.index,
    "__abs__": abs, "__neg__": operator.neg,
    "__instancecheck__": lambda kind, one: isinstance(one, kind),
}  # fmt: skip
"""What one side may ask of an object of the other, and the method of `Remote` that asks for it."""
ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
for _name in [name for name in OPERATIONS if name not in ("__call__", "__getattribute__")]:
    setattr(Remote, _name, functools.partialmethod(ask, _name))
for _name in (*ARITHMETIC, "eq", "ne", "lt", "le", "gt", "ge"):
    _operation = getattr(operator, f"__{_name}__")
    OPERATIONS[f"__{_name}__"] = _operation
    setattr(Remote, f"__{_name}__", binary(f"__{_name}__", _operation))
    if _name in ARITHMETIC:
        OPERATIONS[f"__r{_name}__"] = lambda one, two, do=_operation: do(two, one)
        setattr(Remote, f"__r{_name}__", binary(f"__r{_name}__", OPERATIONS[f"__r{_name}__"]))

PLAIN: dict[type, Callable[[Any], Any]] = {
    int: int.__index__, float: float.__float__, complex: complex.__complex__, str: str.__str__,
    bytes: bytes.__bytes__, dict: lambda x: dict(dict.items(x)),
    tuple: lambda x: tuple(tuple.__iter__(x)), list: lambda x: list(list.__iter__(x)),
    frozenset: lambda x: frozenset(frozenset.__iter__(x)), set: lambda x: set(set.__iter__(x)),
}  # fmt: skip
"""Types that are sent by value, and the function that converts a subclass to its plain type."""
CONTAINERS = (list, dict, set)
ATOMS = {type(None), bool, *PLAIN} - {complex}
"""Types that the data instructions of pickle can write."""
MADE: dict[type, tuple[Callable[..., Any], Callable[[Any], tuple[Any, ...]]]] = {
    # type: function that makes a value of it, and the arguments for that
    complex: (complex, lambda x: (x.real, x.imag)),
    bytearray: (bytearray, lambda x: (bytes(x),)),
    range: (range, lambda x: (x.start, x.stop, x.step)),
    Decimal: (Decimal, lambda x: (str(x),)),
    Fraction: (Fraction, lambda x: (x.numerator, x.denominator)),
    deque: (deque, lambda x: (list(x), x.maxlen)),
    Counter: (Counter, lambda x: (dict(x),)),
    OrderedDict: (OrderedDict, lambda x: (list(x.items()),)),
    defaultdict: (defaultdict, lambda x: (x.default_factory, dict(x))),
    type({}.keys()): (dict.keys, lambda x: (dict.fromkeys(x),)),
    type({}.values()): (dict.values, lambda x: (dict(enumerate(x)),)),
    type({}.items()): (dict.items, lambda x: (dict(x),)),
    datetime.date: (datetime.date, lambda x: (x.year, x.month, x.day)),
    datetime.datetime: (datetime.datetime, lambda x: (
        x.year, x.month, x.day, x.hour, x.minute, x.second, x.microsecond, x.tzinfo
    )),
    datetime.timedelta: (datetime.timedelta, lambda x: (x.days, x.seconds, x.microseconds)),
    datetime.timezone: (datetime.timezone, lambda x: (x.utcoffset(None),)),
}  # fmt: skip
TYPES = {kind for kind in (*MADE, *vars(builtins).values()) if isinstance(kind, type)} - {type}
TYPE_NAMES = {kind.__name__: kind for kind in TYPES}
"""Types that are the same on both sides; not `type`, which could make classes for the tests."""


def contents(container: Any) -> Any:
    """A shallow copy of a container as a list, dict or set."""
    for kind in (dict, set):
        if isinstance(container, kind):
            return kind(container)
    return list(container)


def refill(container: Any, new: Any) -> None:
    """Give a container the contents that the other side left in its copy."""
    container.clear()
    if new:
        (container.update if isinstance(container, dict | set) else container.extend)(new)


def plain(value: Any) -> Any:
    """The plain value of an instance of a class that derives from a plain type, else None."""
    for base, convert in PLAIN.items():
        if issubclass(type(value), base):
            return convert(value)
    for base, (make, arguments) in MADE.items():
        if issubclass(type(value), base):
            return make(*arguments(value))
    return None


class Writer(pickle.Pickler):
    """Writes one message.

    Args:
        file: file to write to.
        peer: this side, which numbers the objects that are not sent by value.
        served: containers of the request that the message answers.
    """

    def __init__(self, file: IO[bytes], peer: Peer, served: Sequence[Any]) -> None:
        super().__init__(file, protocol=5)
        self._peer = peer
        self._served = {id(cell): number for number, cell in enumerate(served)}
        self._cells: dict[int, Any] = {}
        self._made: dict[int, tuple[int, Any]] = {}

    def persistent_id(self, value: Any) -> Any:  # noqa: PLR0911
        """How a value is sent; None for data that pickle writes without a call."""
        kind, address = type(value), id(value)
        if address in self._served:
            return "cell", self._served[address]
        if kind in ATOMS:
            if kind in CONTAINERS:
                self._cells.setdefault(address, value)
            return None
        if kind is Remote:
            return "yours", value._layerswap[1]
        if kind in MADE:
            if address in self._made:
                return "again", self._made[address][0]
            number = len(self._made)
            self._made[address] = number, value
            return "made", kind.__name__, MADE[kind][1](value), number
        if isinstance(value, type) and value in TYPES:
            return "type", value.__name__
        if isinstance(value, types.ModuleType) and value.__name__ in MODULES:
            return "module", value.__name__
        return "mine", *self._peer.number(value)

    def cells(self) -> list[Any]:
        """The containers of the message, in the order of `Reader.cells`."""
        return [*self._cells.values(), *(value for _, value in self._made.values())]


class Reader(pickle._Unpickler):
    """Reads one message. No instruction that it knows calls, imports or changes an object.

    Args:
        file: file to read from.
        peer: this side.
        asked: containers of the request that the message answers.
    """

    def __init__(self, file: IO[bytes], peer: Peer, asked: Sequence[Any]) -> None:
        super().__init__(file)
        self._peer, self._asked = peer, asked
        self._cells: list[Any] = []
        self._made: dict[int, Any] = {}

    def persistent_load(self, pid: Any) -> Any:  # noqa: PLR0911
        """The value for an answer of `Writer.persistent_id`."""
        match pid:
            case "cell", number:
                return self._asked[number]
            case "again", number:
                return self._made[number]
            case "made", name, arguments, number:
                self._made[number] = MADE[TYPE_NAMES[name]][0](*arguments)
                return self._made[number]
            case "type", name:
                return TYPE_NAMES[name]
            case "module", name if name in MODULES:
                return importlib.import_module(name)
            case "yours", number:
                return self._peer.held[number]
            case "mine", number, *rest:
                return self._peer.remote(number, *rest)
        raise ValueError("not a value")

    def begin(self, kind: Callable[[], Any]) -> None:
        """Put a new container on the stack."""
        self._cells.append(kind())
        cast(Any, self).append(self._cells[-1])

    def cells(self) -> list[Any]:
        """The containers of the message."""
        return [*self._cells, *(self._made[number] for number in sorted(self._made))]

    dispatch: ClassVar[Any] = {
        code: pickle._Unpickler.dispatch[code]
        for code in (getattr(pickle, name)[0] for name in INSTRUCTIONS)
    } | {
        pickle.EMPTY_LIST[0]: functools.partial(begin, kind=list),
        pickle.EMPTY_DICT[0]: functools.partial(begin, kind=dict),
        pickle.EMPTY_SET[0]: functools.partial(begin, kind=set),
    }


class Peer:
    """One of two processes that use each other's objects over two pipes.

    Args:
        reader: descriptor to read from.
        writer: descriptor to write to.
        operations: what the other side may ask for.
    """

    def __init__(
        self, reader: int, writer: int, operations: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._reader, self._writer = os.fdopen(reader, "rb"), writer
        self._operations = operations
        self.held: list[Any] = []
        self._numbers: dict[int, int] = {}
        self._remotes: dict[int, Remote] = {}

    def number(self, value: Any) -> tuple[Any, ...]:
        """The number of an object; the first time also its plain value and its hash."""
        if id(value) in self._numbers:
            return (self._numbers[id(value)],)
        number = self._numbers[id(value)] = len(self.held)
        self.held.append(value)
        content, hashed = plain(value), None
        if hasattr(content, "clear"):
            content.clear()  # it may change, so `plain_of` asks for it
        if cast(Any, type(value)).__hash__ is object.__hash__:
            hashed = number
        elif content is None:
            with contextlib.suppress(Exception):
                hashed = hash(value)
        return number, content, hashed

    def remote(self, number: int, content: Any = None, hashed: int | None = None) -> Remote:
        """The object of the other side with a number; always the same for the same number."""
        known = self._remotes.get(number)
        if known is None or content is not None:
            known = self._remotes[number] = Remote(self, number, content, hashed)
        return known

    def ask(self, do: str, *args: object, **kwargs: object) -> Any:
        """Let the other side do something, and serve what it asks for meanwhile.

        Raises:
            Exception: the operation failed; a built-in type, or RuntimeError.
            EOFError: the other side has exited.
        """
        asked = self.send(("ask", do, args, kwargs))
        while True:
            match self.receive(asked):
                case ("ask", name, arguments, named), served:
                    self._answer(name, arguments, named, served)
                case ("value", value, changed), _:
                    cells = [cell for cell in asked if hasattr(cell, "clear")]
                    for cell, new in zip(cells, changed, strict=True):
                        refill(cell, new)
                    return value
                case ("error", name, text), _:
                    kind = TYPE_NAMES.get(name, object)
                    raise (kind if issubclass(kind, Exception) else RuntimeError)(text)
                case _:
                    raise ValueError("not a message")

    def serve(self) -> None:
        """Do what the other side asks for until it exits."""
        with contextlib.suppress(EOFError):
            while True:
                (_, do, args, kwargs), served = self.receive()
                self._answer(do, args, kwargs, served)

    def _answer(self, do: str, args: Any, kwargs: Any, served: Sequence[Any]) -> None:
        try:
            if do in OPERATIONS and id(args[0]) not in self._numbers:
                raise ValueError("an operation on an object that was not lent")
            value = self._operations[do](*args, **kwargs)
            changed = [contents(cell) for cell in served if hasattr(cell, "clear")]
            self.send(("value", value, changed), served)
        except Exception as error:
            kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins"]
            own = "" if kinds[0] == type(error).__name__ else f"{type(error).__name__}: "
            self.send(("error", kinds[0], f"{own}{error}"[:2000]))

    def send(self, message: object, served: Sequence[Any] = ()) -> list[Any]:
        """Send a message, or the answer to one with the containers `served`; its containers."""
        file = io.BytesIO()
        writer = Writer(file, self, served)
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, LEVELS))
        try:
            writer.dump(message)
        finally:
            sys.setrecursionlimit(limit)
        if file.tell() > MESSAGE_BYTES:
            raise ValueError("a value is too large to compare")
        data = file.getbuffer()
        while data:
            data = data[os.write(self._writer, data) :]
        return writer.cells()

    def receive(self, asked: Sequence[Any] = ()) -> tuple[Any, list[Any]]:
        """The next message and its containers; `asked` are those of the message it answers."""
        reader = Reader(self._reader, self, asked)
        try:
            return reader.load(), reader.cells()
        except EOFError:
            raise EOFError("the program exited before its tests") from None


def serve(reader: int, writer: int) -> None:
    """Run the program, then do what the tests ask for until they exit."""
    space: dict[str, object] = {"__name__": "__main__"}

    def names(asked: list[str]) -> dict[str, object]:
        return {name: space[name] for name in asked if name in space}

    peer = Peer(reader, writer, {**OPERATIONS, "names": names, "plain": plain})
    source, _ = peer.receive()
    exec(compile(source, "program.py", "exec", dont_inherit=True), space)
    sys.stdout.flush()
    peer.send(None)
    peer.serve()


def check(peer: Peer, source: str, tests: list[str], tested: list[str] | None) -> None:
    """Run every test.

    Raises:
        BaseException: the exception of a failed test, or an error of the program's side.
    """
    peer.send(source)
    peer.receive()
    space: dict[str, object] = {"__name__": "__main__"}
    stored: set[str] = set()
    for test in tests:
        tree = ast.parse(test)
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        asked = {node.id for node in names if not node.id.startswith("__")} - stored
        stored |= {node.id for node in names if isinstance(node.ctx, ast.Store)}
        own = asked & (tested_names(tree) if tested is None else {*tested})
        answer = peer.ask("names", sorted(asked))
        found = {name: answer[name] for name in asked if name in answer}
        if missing := sorted(own & KNOWN - found.keys()):
            raise NameError(f"the program does not define {missing[0]!r}")
        for name, value in found.items():
            if name in own or name not in KNOWN:
                space[name] = value
            elif name in MODULES:
                # `from datetime import datetime` is Python's, too.
                known = type(value) is not Remote and getattr(value, "__name__", None) == name
                space[name] = value if known else importlib.import_module(name)
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), space)


def tested_names(tree: ast.AST) -> set[str]:
    """The names that a test takes from the program if nobody says which.

    All that are no names of Python, or else the function that is called first: some tasks ask for
    a function called `sum`, but a program that redefines `set` must not change a comparison.
    """
    calls = [
        (node.end_lineno, node.end_col_offset, node.func.id)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return names - KNOWN or {name for *_, name in sorted(calls)[:1]}


def main() -> None:
    """Isolate this process, report that, and run one side."""
    role, settings = sys.argv[1], json.loads(sys.argv[2])
    ready, reader, writer = settings["ready"], settings["reader"], settings["writer"]
    task = json.loads(sys.stdin.buffer.read()) if role == "tests" else {}
    limit(settings)
    try:
        missing = wall_off()
    except (OSError, AttributeError) as error:
        os.write(ready, str(error).encode()[:500])
        os._exit(1)
    os.write(ready, READY + missing.encode()[:500] + b"\n")
    os.close(ready)
    sys.argv = ["program.py"]
    if role == "program":
        try:
            serve(reader, writer)
        except BaseException:
            with contextlib.suppress(BaseException):
                frames = traceback.extract_tb(sys.exc_info()[2])
                own = [frame for frame in frames if frame.filename == "program.py"]
                sys.stderr.write("".join(traceback.format_list(own)))
                sys.stderr.write("".join(traceback.format_exception_only(sys.exc_info()[1])))
            os._exit(1)
        return
    verdict = settings["verdict"]
    said = ""
    try:
        sys.setrecursionlimit(LEVELS)
        lent = ("__call__", "__bool__", "__iter__", "__next__", "__len__", "__str__", "__repr__")
        peer = Peer(reader, writer, {name: OPERATIONS[name] for name in lent})
        check(peer, task["source"], task["tests"], task["tested"])
    except BaseException as error:
        said = f"{type(error).__name__}: {error}"[:2000]
    os.write(verdict, json.dumps({"passed": not said, "said": said}).encode())


if __name__ == "__main__":
    main()
