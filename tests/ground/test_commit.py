"""Atomic commits: after any failure or kill there is the old folder or the new one."""

import ctypes
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import committer
import pytest
from committer import MARKER, commit_version, whole_version, write_output
from refusals import refused

from layerswap.ground import commit, system
from layerswap.ground.commit import atomic_folder
from layerswap.ground.errors import MergeError

DEAD = 2**22 + 1  # above the largest process id that Linux gives


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def committed(target, *, overwrite=False):
    return atomic_folder(target, marker=MARKER, overwrite=overwrite)


def commit_then(target, action):
    """Commit version 2 over any output, with `action(folder)` after the writing."""
    with committed(target, overwrite=True) as folder:
        write_output(folder, 2)
        action(folder)


def refusal(target, *, overwrite=False):
    with (
        pytest.raises(MergeError) as caught,
        committed(target, overwrite=overwrite),
    ):
        pytest.fail("the block ran")
    return str(caught.value)


@pytest.fixture
def target(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def old(target):
    target.mkdir()
    write_output(target, 1)
    return target


@pytest.fixture(params=["exchange", "fallback"])
def either_way(request, monkeypatch):
    if request.param == "fallback":
        monkeypatch.setattr(system, "exchange", lambda *_: False)
    return request.param


# --- success ---


def test_overwriting(old, either_way):
    (old / "left over").write_text("of the old output")
    with committed(old, overwrite=True) as folder:
        assert list(folder.iterdir()) == []
        write_output(folder, 2)
        assert (old / "left over").exists()
    assert whole_version(old) == 2
    assert names(old.parent) == ["out"]


def exchange_answers(monkeypatch, code):
    """Have the system's exchange fail with a code; None for a system without the call."""
    call = {} if code is None else {"renameat2": staticmethod(lambda *_: -1)}
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: type("Library", (), call))
    monkeypatch.setattr(ctypes, "get_errno", lambda: code)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, None])
def test_a_system_that_cannot_exchange_falls_back(old, monkeypatch, code):
    exchange_answers(monkeypatch, code)
    commit_version(old, 2)
    assert whole_version(old) == 2
    assert names(old.parent) == ["out"]


def test_an_exchange_that_fails_leaves_the_old_output(old, monkeypatch):
    exchange_answers(monkeypatch, errno.EIO)
    with pytest.raises(MergeError, match=r"out: cannot be written \(Input/output error\)"):
        commit_version(old, 2)
    assert whole_version(old) == 1
    assert names(old.parent) == ["out"]


def test_the_working_directory_as_a_target(old, monkeypatch):
    monkeypatch.chdir(old)
    commit_version(Path(), 2)
    assert whole_version(old) == 2
    assert names(old.parent) == ["out"]


def test_a_relative_target_survives_a_change_of_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with committed(Path("out")) as folder:
        write_output(folder, 1)
        monkeypatch.chdir(tmp_path / "elsewhere")
    assert whole_version(tmp_path / "out") == 1


@pytest.mark.parametrize("name", ["a*b", "[x]", "a?", "ü n", "out.partial-"])
def test_names_that_a_pattern_could_misread(tmp_path, name):
    commit_version(tmp_path / name, 1)
    (tmp_path / f"{commit._partial_prefix(tmp_path / name)}{DEAD}-aa").mkdir()
    (tmp_path / f"{name}.replaced-aa").mkdir()
    commit_version(tmp_path / name, 2)
    assert whole_version(tmp_path / name) == 2
    assert names(tmp_path) == [name]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_modes_follow_the_umask(target, umask, mode):
    before = os.umask(umask)
    try:
        commit_version(target, 1)
    finally:
        os.umask(before)
    assert (target / MARKER).stat().st_mode & 0o777 == mode
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask


# --- refusals ---


def test_an_existing_folder(old):
    expected = f"{old}: exists already; choose another output or pass --overwrite"
    assert refusal(old) == expected
    assert whole_version(old) == 1


@pytest.mark.parametrize("content", [[], ["model.safetensors"]])
def test_a_folder_that_is_not_ours(target, content):
    target.mkdir()
    for name in content:
        (target / name).write_text("precious")
    for overwrite in (False, True):
        assert refusal(target, overwrite=overwrite) == (
            f"{target}: has no {MARKER}, so layerswap did not write it and will not replace it; "
            "choose another output"
        )
    assert names(target) == content


@pytest.mark.parametrize("address", ["s3://bucket/out", "file:/tmp/out"])
def test_an_address_is_no_folder(address):
    assert refusal(Path(address)).endswith(": the output must be a local folder, not an address")


def test_a_marker_that_is_a_folder_is_no_marker(target):
    (target / MARKER).mkdir(parents=True)
    assert "did not write it" in refusal(target, overwrite=True)


@pytest.mark.parametrize("kind", ["file", "link to a folder", "link to nothing"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_target_that_is_no_folder(tmp_path, target, kind, overwrite):
    commit_version(tmp_path / "real", 1)
    if kind == "file":
        target.write_text("precious")
    else:
        target.symlink_to("real" if kind == "link to a folder" else "nothing")
    what = "exists and is not a folder" if kind == "file" else "is a link"
    expected = f"{target}: {what}; choose another output"
    assert refusal(target, overwrite=overwrite) == expected
    assert names(tmp_path) == ["out", "real"]
    assert whole_version(tmp_path / "real") == 1


def test_a_parent_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to("nothing")
    for parent in ("file", "link"):
        for below in ("out", "deep/down/out"):
            assert refusal(tmp_path / parent / below) == f"{tmp_path}/{parent}: is not a folder"
    assert names(tmp_path) == ["file", "link"]


def test_missing_parents_are_made_when_the_writing_begins(tmp_path):
    out = tmp_path / "deep" / "down" / "out"
    assert commit.refuse_target(out, marker=MARKER, overwrite=False) == out
    assert names(tmp_path) == []
    commit_version(out, 1)
    assert whole_version(out) == 1
    with commit.atomic_file(tmp_path / "new" / "file", is_ours=lambda path: True) as draft:
        draft.write_text("1")
    assert (tmp_path / "new" / "file").read_text() == "1"


def test_a_parent_that_may_not_be_written(target, monkeypatch):
    asked = []

    def access(path, mode):
        asked.append((Path(path), mode))
        return False

    monkeypatch.setattr(commit.os, "access", access)
    assert refusal(target) == f"{target.parent}: not writable"
    assert asked == [(target.parent, os.W_OK | os.X_OK)]


def test_a_name_too_long_for_the_disk(tmp_path):
    for length in (250, 300):
        target = tmp_path / ("x" * length)
        assert "File name too long" in refusal(target)
    assert names(tmp_path) == []


# --- failures half way ---


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, MergeError, GeneratorExit])
def test_an_exception_in_the_block_leaves_nothing(target, error):
    def fail(_):
        raise error

    with pytest.raises(error):
        commit_then(target, fail)
    assert names(target.parent) == []


def test_a_full_disk_in_the_block(old):
    def overflow(folder):
        (folder / "model.safetensors").symlink_to("/dev/full")
        (folder / "model.safetensors").write_bytes(b"x")

    expected = f"{old}: cannot be written (No space left on device); nothing was kept"
    assert refused(MergeError, commit_then, old, overflow) == expected
    assert whole_version(old) == 1
    assert names(old.parent) == ["out"]


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fails_to_flush(old, monkeypatch, code):
    def fsync(_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
    expected = f"{old}: cannot be written ({os.strerror(code)}); nothing was kept"
    assert refused(MergeError, commit_version, old, 2) == expected
    assert whole_version(old) == 1
    assert names(old.parent) == ["out"]


def test_a_filesystem_that_cannot_flush_folders(target, monkeypatch):
    real = os.fsync

    def fsync(handle):
        if Path(f"/proc/self/fd/{handle}").is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    commit_version(target, 1)
    assert whole_version(target) == 1


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), KeyboardInterrupt()])
def test_a_fallback_that_fails_half_way_puts_the_old_output_back(old, monkeypatch, error):
    monkeypatch.setattr(system, "exchange", lambda *_: False)
    real = os.rename

    def rename(source, destination):
        if ".partial-" in str(source):
            raise error
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises((MergeError, KeyboardInterrupt)):
        commit_version(old, 2)
    assert whole_version(old) == 1
    assert names(old.parent) == ["out"]


def test_an_old_output_that_cannot_be_removed_is_no_failure(old, either_way, monkeypatch):
    def rmtree(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:
        patched.setattr(commit.shutil, "rmtree", rmtree)
        commit_version(old, 2)
    assert whole_version(old) == 2
    assert len(names(old.parent)) == 2


def test_a_target_that_appears_meanwhile_is_kept(target):
    def intrude(_):
        target.mkdir()
        (target / "precious").write_text("")

    with pytest.raises(MergeError, match="so layerswap did not write it"):
        commit_then(target, intrude)
    assert names(target) == ["precious"]
    assert names(target.parent) == ["out"]


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_target_that_appears_at_the_last_moment_is_kept(target, kind, monkeypatch):
    real = os.rename

    def rename(source, destination):
        if kind == "folder":
            (target / "precious").mkdir(parents=True)
        else:
            target.write_text("precious")
        real(source, destination)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(MergeError, match=r"did not write it|exists and is not a folder"):
        commit_version(target, 1)
    assert names(target.parent) == ["out"]
    assert names(target) == ["precious"] if kind == "folder" else target.read_text() == "precious"


# --- the order of disk operations ---


@pytest.fixture
def record(monkeypatch):
    """The disk operations of a commit in order: (verb, path)."""
    events = []
    fsync, rename, rmtree, exchange = os.fsync, os.rename, shutil.rmtree, system.exchange

    def recorded_fsync(handle):
        events.append(("sync", Path(f"/proc/self/fd/{handle}").readlink()))
        fsync(handle)

    def recorded_rename(source, destination):
        events.append(("rename", Path(source)))
        rename(source, destination)

    def recorded_exchange(first, second):
        events.append(("exchange", first))
        return exchange(first, second)

    def recorded_rmtree(path, **options):
        if Path(path).exists():
            events.append(("remove", Path(path)))
        rmtree(path, **options)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "rename", recorded_rename)
    monkeypatch.setattr(commit.shutil, "rmtree", recorded_rmtree)
    monkeypatch.setattr(system, "exchange", recorded_exchange)
    return events


@pytest.mark.parametrize("overwrite", [False, True])
def test_all_is_flushed_before_it_appears_and_the_parent_after(target, record, overwrite):
    """The old output goes last."""
    if overwrite:
        target.mkdir()
        write_output(target, 1)
    with committed(target, overwrite=overwrite) as folder:
        write_output(folder, 2)
        written = {folder, *folder.rglob("*")}
    before, after = record[: len(written)], record[len(written) :]
    assert {("sync", path) for path in written} == set(before)
    appears = ("exchange" if overwrite else "rename", folder)
    assert after == [appears, ("sync", target.parent), *[("remove", folder)] * overwrite]


def test_the_order_without_an_exchange(old, record, monkeypatch):
    monkeypatch.setattr(system, "exchange", lambda *_: False)
    with committed(old, overwrite=True) as folder:
        write_output(folder, 2)
    verbs = [verb for verb, _ in record]
    assert verbs[-4:] == ["rename", "rename", "sync", "remove"]
    assert [path.name.split("-")[0] for _, path in record[-4:]] == [
        "out",
        "out.partial",
        old.parent.name.split("-")[0],
        "out.replaced",
    ]


# --- killed processes ---


@pytest.mark.parametrize(
    ("verb", "fallback", "outcomes"),
    [
        ("steps", 0, {"old or new"}),
        pytest.param("steps", 1, {"old or new", "set aside"}, marks=pytest.mark.slow),
        ("fresh", 0, {"old or new", "nothing"}),
    ],
)
def test_a_kill_at_every_line_of_a_commit(tmp_path, verb, fallback, outcomes):
    command = [sys.executable, committer.__file__, verb, str(tmp_path), str(fallback)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=40, check=True)
    seen = json.loads(done.stdout)
    assert seen.pop("lines") > 100
    assert {outcome for outcome, times in seen.items() if times} == outcomes


def test_the_partial_folder_of_a_live_process_is_left_alone(target):
    prefix = commit._partial_prefix(target)
    alive = target.with_name(f"{prefix}{os.getppid()}-aa")
    elsewhere = target.with_name(f"out.partial-another-host-{DEAD}-aa")
    unknown = target.with_name(f"{prefix}²-aa")
    dead = target.with_name(f"{prefix}{DEAD}-aa")
    for folder in (alive, elsewhere, unknown, dead):
        folder.mkdir()
    commit_version(target, 1)
    assert names(target.parent) == sorted(["out", alive.name, elsewhere.name, unknown.name])


def test_a_replaced_output_is_kept_while_there_is_no_other(target):
    aside = target.with_name("out.replaced-abcd")
    aside.mkdir()
    commit_version(target, 1)
    assert names(target.parent) == ["out", "out.replaced-abcd"]
    commit_version(target, 2)
    assert names(target.parent) == ["out"]
