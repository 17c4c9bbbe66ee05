"""Steps on Ray, in a cluster of several nodes on this machine; and the owner of a step's folder."""

import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from cluster_steps import functions, graph

from layerswap.ground.errors import StudyError
from layerswap.study import clusters, lease
from layerswap.study.journal import INDEX, StudyJournal
from layerswap.study.lease import Owner, held, living_owner
from layerswap.study.on_ray import OnRay
from layerswap.study.runner import run_graph, run_step


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    for left in (2, 1, 0):
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=1)
            cluster.add_node(num_cpus=1, resources={"other": 1})
            break
        except Exception:  # Ray's class: a node has 30 seconds to start, too few on a busy machine
            cluster.shutdown()
            if not left:
                raise
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.mark.slow
def test_a_study_on_ray_survives_a_killed_worker_and_a_lost_node(cluster, tmp_path):
    steps, marks = graph(4), tmp_path / "marks"
    marks.mkdir()
    run_graph(steps, tmp_path / "here", functions(tmp_path))

    def harm():
        while not (seen := list(marks.glob("train-*"))):
            time.sleep(0.02)
        os.kill(int(seen[0].read_text().split()[0]), signal.SIGKILL)
        time.sleep(0.5)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    thread = threading.Thread(target=harm)
    thread.start()
    executor = OnRay(cluster.address)
    works = functions(marks, seconds=0.5)
    summary = run_graph(steps, tmp_path / "ray", works, executor=executor)
    thread.join()
    assert not summary.failed, [record.why for record in summary.failed]
    for step in steps:
        here, there = (
            (StudyJournal(tmp_path / name, steps).folder(step.name) / "out").read_text()
            for name in ("here", "ray")
        )
        assert here == there
    begun = sum(len(mark.read_text().split()) for mark in marks.iterdir())
    assert begun > len(steps)  # lost steps began again
    again = run_graph(steps, tmp_path / "ray", works, executor=executor)
    assert sum(len(mark.read_text().split()) for mark in marks.iterdir()) == begun
    assert not again.failed


@pytest.mark.slow
def test_failures_on_ray_are_one_line_and_stop_only_their_followers(cluster, tmp_path):
    executor, lines = OnRay(cluster.address), []
    works = functions(tmp_path, broken="data/1")
    summary = run_graph(graph(2), tmp_path / "out", works, executor=executor)
    assert [record.why for record in summary.failed] == ["ValueError: no such data"]
    assert summary.blocked == {"train/1": "data/1", "tables": "data/1"}
    assert summary.records["train/0"].state == "done"

    # A request that no node can meet, and a worker that does not see the folder.
    executor.check(list(graph(1, gpus=4)), lines.append)
    assert "no node of the Ray cluster has 1 CPU, 4 GPU, 0.2 GB of memory" in lines[0]
    hidden = tmp_path / "hidden"
    journal = StudyJournal(hidden, graph(1)).open()
    (hidden / INDEX).unlink()
    executor.run(journal, [graph(1)["data/0"]], works, lines.append, lambda step: None)
    assert "does not see the study's folder" in journal.record("data/0").why


def journal_of(tmp_path):
    journal = StudyJournal(tmp_path / "out", graph(1)).open()
    journal.folder("data/0").mkdir()
    return journal


def test_a_folder_has_one_owner(tmp_path):
    journal = journal_of(tmp_path)
    works, step = functions(tmp_path), graph(1)["data/0"]
    other = Owner(job="12")
    with held(journal.folder("data/0"), other):
        assert living_owner(journal.folder("data/0")) == other
        with pytest.raises(StudyError, match=rf"Slurm job 12, process \d+ on {other.where} writes"):
            run_step(journal, step, works, print)
        assert journal.record("data/0") is None
    assert run_step(journal, step, works, print).state == "done"
    assert not list(journal.folder("data/0").glob("*lease*"))


@pytest.mark.parametrize("change", ["silent", "dead", "restarted", "damaged"])
def test_a_lease_passes_on_when_its_owner_is_gone(change, tmp_path):
    folder = journal_of(tmp_path).folder("data/0")
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
    folder, got, refused = journal_of(tmp_path).folder("data/0"), [], []
    stale = folder / lease.LEASE
    stale.write_text("{")
    start, end = threading.Barrier(8), threading.Barrier(8)

    def take():
        start.wait()
        try:
            with held(folder, Owner()):
                got.append(1)
                end.wait()
        except StudyError:
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
    folder = journal_of(tmp_path).folder("data/0")

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


def test_other_versions_on_a_node_are_named_once(tmp_path):
    lines = []
    run = clusters._Run(None, journal_of(tmp_path), {}, lines.append, lambda step: None)
    here = next(iter(run.versions.values()))
    for where in ("node1", "node2", "node2"):
        run.compare_versions(where, here if where == "node1" else {**here, "torch": "1.0"})
    assert lines == [f"note: node2 has torch 1.0 instead of {here['torch']}"]
