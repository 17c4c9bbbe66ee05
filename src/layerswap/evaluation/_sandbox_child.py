"""Runs one program in this process, after giving up everything it does not need. Linux only.

    python -I -S -B confined.py PROGRAM LIMITS     # started by evaluate.sandbox, never imported

Three walls, none of which needs root or can be taken down again: resource limits; Landlock, which
lets the program read the interpreter's own files and use its folder, and nothing else; and seccomp,
which refuses the system calls for processes, signals, sockets, and what could change the machine.
Only the standard library is imported, and all of it before the walls are up.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
import sysconfig
from pathlib import Path

UNCONFINED = 97
"""Exit code where the walls cannot be put up."""
WALLS: dict[str, dict[str, tuple[int | None, int | None]]] = {
    # name: numbers of the system calls on x86_64 and on aarch64; None where it is not one
    "processes": {
        "clone": (56, 220), "fork": (57, None), "vfork": (58, None), "execve": (59, 221),
        "execveat": (322, 281), "clone3": (435, 435), "unshare": (272, 97), "setns": (308, 268),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
        "pidfd_getfd": (438, 438), "setrlimit": (160, 164), "prlimit64": (302, 261),
    },
    "signals": {
        "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
        "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
        "pidfd_send_signal": (424, 424),
    },
    "sockets": {
        "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202),
        "accept4": (288, 242), "bind": (49, 200), "listen": (50, 201), "sendto": (44, 206),
        "sendmsg": (46, 211), "recvfrom": (45, 207), "recvmsg": (47, 212),
        "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "shmget": (29, 194),
    },
    "files": {  # that Landlock does not watch
        "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
        "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54),
        "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
        "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
        "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
        "mknod": (133, None), "mknodat": (259, 33), "open_by_handle_at": (304, 265),
    },
    "machine": {
        "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
        "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
        "swapon": (167, 224), "swapoff": (168, 225), "reboot": (169, 142),
        "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
        "clock_settime": (227, 112), "init_module": (175, 105), "delete_module": (176, 106),
        "finit_module": (313, 273), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
        "acct": (163, 89), "iopl": (172, None), "ioperm": (173, None), "add_key": (248, 217),
        "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
        "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    },
}  # fmt: skip
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the numbers, and the kernel's name of the architecture (AUDIT_ARCH)."""

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_READ = 1 << 2 | 1 << 3
"""Reading files and listing folders."""
_ALLOW, _EPERM = 0x7FFF0000, 0x00050000 | 1


def limit(limits: dict[str, int]) -> None:
    """Bounds on memory, processor time and files, for good."""
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_CPU: limits["seconds"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def wall_off_files(folder: str, libc: ctypes.CDLL) -> None:
    """Landlock: the interpreter's files can be read, `folder` can be used, nothing else."""
    version = libc.syscall(_LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        raise OSError("the kernel has no Landlock")
    # Rights by version: 13 in the first, then refer, truncate, and ioctl on devices.
    rights = (1 << 13) - 1
    for since, bit in ((2, 13), (3, 14), (5, 15)):
        rights |= (1 << bit) if version >= since else 0
    ruleset = struct.pack("=Q", rights)
    handle = libc.syscall(_LANDLOCK_CREATE, ruleset, len(ruleset), 0)
    if handle < 0:
        raise OSError("Landlock refuses")
    paths = sysconfig.get_paths()
    readable = {paths["stdlib"], paths["platstdlib"], sys.base_prefix, sys.base_exec_prefix}
    readable |= {"/usr/lib", "/lib", "/lib64", "/usr/share/zoneinfo", "/dev/urandom", "/dev/null"}
    for path, allowed in (*((path, _LANDLOCK_READ) for path in readable), (folder, rights)):
        if not Path(path).exists():
            continue
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = struct.pack("=Qi", allowed if Path(path).is_dir() else allowed & 1 << 2, opened)
        if libc.syscall(_LANDLOCK_ADD, handle, 1, rule, 0) < 0:
            raise OSError(f"Landlock refuses {path}")
        os.close(opened)
    if libc.syscall(_LANDLOCK_RESTRICT, handle, 0) < 0:
        raise OSError("Landlock cannot be put up")
    os.close(handle)


def wall_off_calls(libc: ctypes.CDLL) -> None:
    """seccomp: the calls of `WALLS` fail with EPERM."""
    if platform.machine() not in MACHINES:
        raise OSError(f"no list of system calls for {platform.machine()}")
    column, architecture = MACHINES[platform.machine()]
    calls = [call[column] for group in WALLS.values() for call in group.values()]
    numbers = sorted(number for number in calls if number is not None)
    load, equal, above, give = 0x20, 0x15, 0x35, 0x06
    program = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, _EPERM), (load, 0, 0, 0)]
    # The x32 table of x86_64 holds the same calls under other numbers.
    program += [(above, 0, 1, 0x40000000), (give, 0, 0, _EPERM)]
    for number in numbers:
        program += [(equal, 0, 1, number), (give, 0, 0, _EPERM)]
    program.append((give, 0, 0, _ALLOW))
    code = b"".join(struct.pack("=HBBI", *line) for line in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = struct.pack("@HP", len(program), ctypes.addressof(buffer))
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0):
        raise OSError("seccomp cannot be put up")


def main() -> None:
    """Put the walls up, run the program, and say so on the last line if it came to its end."""
    path = sys.argv[1]
    token = sys.stdin.readline().strip()
    source = Path(path).read_text("utf-8")
    output = os.dup(1)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
            raise OSError("privileges cannot be given up")
        wall_off_files(str(Path.cwd()), libc)
        wall_off_calls(libc)
    except (OSError, AttributeError) as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(UNCONFINED)
    sys.argv = [path]
    exec(compile(source, path, "exec"), {"__name__": "__main__"})
    sys.stdout.flush()
    # A program that ends the process before its tests have run must not count as right.
    os.write(output, f"\n{token}".encode())


if __name__ == "__main__":
    limit(json.loads(sys.argv[2]))
    main()
