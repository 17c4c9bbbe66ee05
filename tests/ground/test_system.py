"""Calls that differ between systems: each fallback does what the call does."""

from __future__ import annotations

import ast
import io
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path, PurePosixPath

import pytest
from processes import layerswap
from simulations import SYSTEMS, simulated

from layerswap.ground import system
from layerswap.ground.errors import LayerswapError

SOURCE = Path(system.__file__).parent.parent
LINUX_ONLY = {"_sandbox_child.py", "sandbox.py"}
"""The sandbox of programs, which runs on Linux alone."""
SYSTEM_CALLS = {
    "os": {
        "kill", "killpg", "fork", "getuid", "getgid", "geteuid", "getppid", "statvfs", "nice",
        "pread", "preadv", "pwrite", "pwritev", "copy_file_range", "sendfile", "posix_fadvise",
        "posix_fallocate", "sched_getaffinity", "cpu_count", "sysconf", "uname", "mkfifo", "chown",
        "fsync", "fdatasync", "sync", "setsid", "getpgid", "name", "open", "link", "startfile",
    },
    "sys": {"platform", "getwindowsversion"},
    "platform": {"system", "platform", "win32_ver", "mac_ver", "libc_ver"},
}  # fmt: skip
ENCODINGS = {"utf-8", "utf-8-sig", "ascii"}
SYSTEM_MODULES = {
    "fcntl",
    "resource",
    "pwd",
    "grp",
    "termios",
    "msvcrt",
    "winreg",
    "ctypes",
    "mmap",
}


@pytest.fixture(params=["linux", *SYSTEMS])
def any_system(request):
    if request.param == "linux":
        yield "linux"
    else:
        with simulated(request.param):
            yield request.param


def test_only_one_module_calls_what_differs_between_systems():
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        if path.name in LINUX_ONLY or path == Path(system.__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            where = f"{path.name}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import):
                wrong += [f"{where} {a.name}" for a in node.names if a.name in SYSTEM_MODULES]
            if isinstance(node, ast.ImportFrom) and node.module in SYSTEM_MODULES:
                wrong.append(f"{where} {node.module}")
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                calls = SYSTEM_CALLS.get(node.value.id, set())
                flag = node.value.id == "os" and re.match("O_|POSIX_|RWF_", node.attr)
                if node.attr in calls or flag:
                    wrong.append(f"{where} {node.value.id}.{node.attr}")
    # An open null device stands for standard output after a full disk.
    assert [line for line in wrong if not line.startswith("__init__.py")] == []
    assert len(wrong) <= 2, wrong


def test_text_files_have_one_encoding_and_one_line_ending():
    """Windows would write its code page, and two characters at the end of each line."""
    wrong = []
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            words = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
            values = [getattr(value, "value", None) for value in node.args]
            where = f"{path.name}:{node.lineno}"
            if node.func.attr == "read_text" and not {*values, *words.values()} & ENCODINGS:
                named = isinstance(node.func.value, ast.Name) and node.func.value.id == "yaml_file"
                wrong += [] if named else [where]
            if node.func.attr == "write_text" and path.name not in LINUX_ONLY:
                named = "utf-8" in {*values, *words.values()} and words.get("newline") == "\n"
                wrong += [] if named else [where]
            modes = [mode for mode in values if isinstance(mode, str) and set(mode) & set("wax")]
            if node.func.attr == "open" and modes and len(modes[0]) < 3 and "b" not in modes[0]:
                wrong += [] if words.get("newline") == "\n" else [where]
    assert wrong == []


def test_reads_and_writes_by_position(any_system, tmp_path):
    path = tmp_path / "file"
    data = bytes(range(256)) * 5  # with line ends and the end-of-file character of text mode
    handle = system.open_to_write(path)
    system.write_at(handle, data[500:], 500)
    system.write_at(handle, data[:500], 0)
    os.close(handle)
    assert path.read_bytes() == data
    with pytest.raises(FileExistsError):
        system.open_to_write(path)
    handle = system.open_to_read(path)
    buffer = bytearray(100)
    assert system.read_at(handle, memoryview(buffer), 777) == 100
    assert buffer == data[777:877]
    assert system.read_at(handle, memoryview(buffer), len(data) - 3) == 3
    assert system.read_at(handle, memoryview(buffer), len(data)) == 0
    os.close(handle)


def test_threads_share_a_handle(any_system, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"".join(bytes([number]) * 1000 for number in range(200)))
    handle = system.open_to_read(path)
    wrong = []

    def read(first: int) -> None:
        buffer = bytearray(1000)
        for number in range(first, 200, 4):
            system.read_at(handle, memoryview(buffer), number * 1000)
            if set(buffer) != {number}:
                wrong.append(number)

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(handle)
    assert wrong == []


def test_copies_in_the_kernel_only_on_linux(any_system, tmp_path):
    (tmp_path / "source").write_bytes(b"abcdefgh")
    source = system.open_to_read(tmp_path / "source")
    output = system.open_to_write(tmp_path / "output")
    count = system.copy_range(source, output, 4, 2, 0)
    shared = system.share_range(source, output, 0, 0, 0) and any_system != "linux"
    system.start_writing(output, 0, count)
    os.close(source)
    os.close(output)
    assert count == (4 if any_system == "linux" else 0)
    assert not shared


def test_folders_are_exchanged_in_one_step_where_the_system_can(any_system, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    done = system.exchange(tmp_path / "a", tmp_path / "b")
    assert done == (any_system != "windows")
    assert (tmp_path / "a" / ("b" if done else "a")).exists()


def test_a_process_that_lives_and_one_that_does_not(any_system):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert system.is_running(child.pid)
        assert child.poll() is None  # asking has not ended it
        child.communicate(b"\n")
    assert not system.is_running(child.pid)
    assert not system.is_running(10**12)
    assert system.is_running(os.getpid())


def test_numbers_of_the_machine(any_system):
    import psutil

    assert 1 <= system.processors() <= os.cpu_count()
    assert 1e7 < system.free_memory() <= psutil.virtual_memory().total
    system.keep_freed_memory()


def test_free_memory_without_proc(monkeypatch):
    import psutil

    def missing(*_):
        raise FileNotFoundError

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", missing)
        patch.setattr(psutil, "virtual_memory", type("Memory", (), {"available": 123}))
        assert system.free_memory() == 123


@pytest.mark.slow
def test_the_main_thread_is_interrupted(any_system):
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        threading.Timer(0.05, system.interrupt_main).start()
        threading.Event().wait(5)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("name", ["model.safetensors", "naïve", "contact", "a.b", "COM", "lpt10"])
def test_names_that_every_system_can_have(name):
    assert system.unusable_name(name) is None
    system.check_names([name, f"step/{name}"])


@pytest.mark.parametrize(
    "name",
    ["a:b", "a?b", "con", "Nul.txt", "aux.", "a ", "a.", "..", "", "com1.json", "x\ny", "a|b"],
)
def test_names_that_windows_cannot_have(name):
    with pytest.raises(LayerswapError, match="choose another name"):
        system.check_names(["fine", f"step/{name}"])


@pytest.mark.parametrize("names", [("Sw", "sw"), ("é", "e\u0301"), ("straße", "STRASSE")])
def test_names_that_are_one_on_other_systems(names):
    with pytest.raises(LayerswapError, match="are one name on macOS and Windows; rename one"):
        system.check_names(names)
    system.check_names([names[0], names[0]])


def test_paths_sort_alike_on_every_system():
    from pathlib import PureWindowsPath

    names = ["b", "A", "a/c", "B", "a-b"]
    kinds = (PurePosixPath, PureWindowsPath)
    orders = [[path.as_posix() for path in system.sorted_paths(map(k, names))] for k in kinds]
    assert orders == [["A", "B", "a/c", "a-b", "b"]] * 2


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "cp932", "utf-8"])
def test_consoles_of_other_code_pages_show_plain_letters(encoding, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr(sys, "stdout", stream)
    system.open_console()
    drawing = "0 ███░ → ñ क"
    stream.write(drawing)
    stream.flush()
    shown = stream.buffer.getvalue().decode(encoding)
    assert shown == drawing if encoding == "utf-8" else shown.startswith("0 ")
    if encoding == "ascii":
        assert shown == "0 ###. -> n ?"
    assert not set(shown) - {*drawing, *"#.->n?"}


def test_files_of_windows_get_utf_8(monkeypatch):
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    monkeypatch.setattr(sys, "stdout", stream)
    with simulated("windows"):
        system.open_console()
    stream.write("क")
    stream.flush()
    assert stream.buffer.getvalue() == "क".encode()


def test_the_plan_is_drawn_in_any_code_page(tmp_path):
    from plain_checkpoints import write_family

    root = write_family(tmp_path)
    pair = ("--task-expert", root["task"], "--language-expert", root["language"])
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    done = layerswap("plan", *pair, env=environment, text=False)
    assert done.returncode == 0, done.stderr
    assert b"#" in done.stdout
    assert done.stdout.decode("cp1252").isascii()
