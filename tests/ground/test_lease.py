"""The lease of a folder: who gets it, who loses it, and what nobody else may remove."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest

from layerswap.ground import lease
from layerswap.ground.lease import Owner, held, living_owner, taken


@pytest.mark.parametrize("change", ["silent", "dead", "restarted", "damaged"])
def test_a_lease_passes_on_when_its_owner_is_gone(change, tmp_path):
    folder = tmp_path / "step"
    token, where = "t", "elsewhere"
    with held(folder, replace(Owner(), token=token, where=where)):
        file = folder / lease.LEASE
        if change == "silent":
            long_ago = time.time() - lease.SILENCE - 9
            os.utime(file, (long_ago, long_ago))
        elif change == "dead":
            text = file.read_text().replace(where, socket.gethostname())
            file.write_text(text.replace(f'"process": {os.getpid()}', '"process": 99999999'))
        elif change == "damaged":
            file.write_text("{")
        new = Owner(token) if change == "restarted" else Owner()
        with held(folder, new):
            assert living_owner(folder) == new


def test_of_many_that_take_a_stale_lease_one_gets_it(tmp_path):
    folder, got, refused = tmp_path, [], []
    stale = folder / lease.LEASE
    stale.write_text("{")
    start, end = threading.Barrier(8), threading.Barrier(8)

    def take():
        start.wait()
        try:
            with held(folder, Owner()):
                got.append(1)
                end.wait()
        except lease.InUse:
            refused.append(1)
            end.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)


@pytest.mark.parametrize("handler", [signal.default_int_handler, signal.SIG_IGN])
def test_a_process_that_lost_its_lease_is_interrupted(tmp_path, monkeypatch, handler):
    """Also a background job of a script, which ignores Ctrl-C."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    folder = tmp_path / "step"

    def lose():
        if handler is signal.SIG_IGN:
            signal.raise_signal(signal.SIGINT)
        (folder / lease.LEASE).unlink()
        with held(folder, Owner()):
            time.sleep(10)

    before = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(KeyboardInterrupt), held(folder, Owner()):
            lose()
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_only_the_owner_removes_the_folder(tmp_path):
    folder, winner = tmp_path / "step", Owner()
    with held(folder, Owner(), beside=True) as lost:
        folder.mkdir()
        (folder / "weights").touch()
        lost.path.unlink()
        with held(folder, winner, beside=True) as lease_of_winner:
            lost.discard()
            assert not lost.kept
            assert (folder / "weights").exists()
            assert lease_of_winner.kept
            lease_of_winner.discard()
            assert not folder.exists()
    assert [*tmp_path.iterdir()] == []


def test_the_end_of_a_driver_leaves_the_lease_of_its_job(tmp_path):
    """Both have one token, as do a job and its restart."""
    driver = taken(tmp_path, Owner("token", brief=True))
    driver.__enter__()
    with held(tmp_path, Owner("token")) as job:
        driver.__exit__(None, None, None)
        assert job.kept
    assert [*tmp_path.iterdir()] == []


def test_a_brief_owner_is_waited_for_and_is_none_that_runs_something(tmp_path):
    begun, ended = threading.Event(), []

    def submit():
        with taken(tmp_path, Owner("driver", brief=True)):
            begun.set()
            time.sleep(0.3)
            ended.append(time.monotonic())

    thread = threading.Thread(target=submit)
    thread.start()
    begun.wait()
    assert living_owner(tmp_path) is None
    with held(tmp_path, Owner()):
        assert time.monotonic() >= ended[0]
    thread.join()
