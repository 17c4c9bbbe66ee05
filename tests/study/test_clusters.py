"""Steps on Ray, in a cluster of several nodes on this machine; and the owner of a step's folder."""

import multiprocessing
import os
import re
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from cluster_steps import functions, graph

from layerswap.ground import lease
from layerswap.ground.errors import StudyError
from layerswap.ground.lease import Owner, held, living_owner
from layerswap.study import clusters, on_ray, ray_inside, trainings
from layerswap.study.journal import INDEX, StudyJournal
from layerswap.study.on_ray import OnRay
from layerswap.study.runner import run_graph, run_step
from layerswap.study.steps import Resources, Step


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
    executor.check(list(graph(1)), lines.append)
    wrong = (
        "no node of the Ray cluster has 1 CPU, 4 GPU, 0.2 GB of memory .*; add a node, or change"
    )
    for _ in range(30):  # Ray's monitor writes what it sees some seconds after the start
        if ray_inside.is_fixed(executor._ray.nodes()):
            break
        time.sleep(1)
    with pytest.raises(StudyError, match=wrong):
        executor.check(list(graph(1, gpus=4)), lines.append)
    assert not lines
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
        with pytest.raises(lease.InUse, match=rf"Slurm job 12, process \d+ on {other.where}"):
            run_step(journal, step, works, print)
        assert journal.record("data/0") is None
    assert run_step(journal, step, works, print).state == "done"
    assert not list(journal.folder("data/0").glob("*lease*"))


def test_a_step_that_another_process_finished_does_not_run_again(tmp_path):
    """Two drivers plan the same step, or a cluster requeues its job after the end."""
    journal, step = journal_of(tmp_path), graph(1)["data/0"]
    first = run_step(journal, step, functions(tmp_path), print)
    again = run_step(journal, step, functions(tmp_path, broken="data/0"), print, Owner("requeued"))
    assert again == first
    assert (tmp_path / "data-0").read_text().split() == [str(os.getpid())]


def test_a_process_that_lost_its_lease_records_and_removes_nothing(tmp_path):
    """It ends before it notices, and the other process has finished the step."""
    journal, step = journal_of(tmp_path), graph(1)["data/0"]
    won = {}

    def slow(context):
        context.log("begun")
        (context.folder / lease.LEASE).unlink()
        won["record"] = run_step(journal, step, functions(tmp_path), print)
        context.log("half")

    with pytest.raises(lease.InUse, match=r"data-.*: another process took it over"):
        run_step(journal, step, {"data": slow}, print)
    assert journal.record("data/0") == won["record"]
    assert (journal.folder("data/0") / "out").read_text() == "data/0"


def test_no_checkpoint_of_a_training_that_another_process_runs_is_deleted(tmp_path):
    """Neither its own nor those of the trainings before it."""
    runs = [tmp_path / name / "expert" for name in ("first", "second")]
    weights = [run / "checkpoints" / "checkpoint-8" / "model.safetensors" for run in runs]
    for file in weights:
        file.parent.mkdir(parents=True)
        file.touch()
        (file.parent / "trainer_state.json").write_text('{"global_step": 8}')
    with held(runs[1].parent, Owner(job="12")), pytest.raises(lease.InUse, match="Slurm job 12"):
        trainings._delete_others(runs, [weights[0].parent])
    assert all(file.is_file() for file in weights)
    assert not list(tmp_path.rglob(trainings.DELETED))
    trainings._delete_others(runs, [weights[0].parent])
    assert [file.is_file() for file in weights] == [True, False]
    assert not list(tmp_path.rglob("*lease*"))


class Processes(clusters.ClusterExecutor):
    """A cluster whose jobs are processes here, which all drivers see in `jobs`."""

    def __init__(self, jobs, meanwhile=lambda: None):
        self.jobs, self.meanwhile = jobs, meanwhile

    def check(self, steps, log):
        pass

    def adopt(self, journal, step):
        job, token = self.jobs.get(step.name, (None, ""))
        return (job, token) if job and job.is_alive() else None

    def submit(self, step, folder, call):
        self.meanwhile()
        assert step.name not in self.jobs
        job = multiprocessing.get_context("fork").Process(target=clusters.run_remotely, args=call)
        job.start()
        self.jobs[step.name] = job, call[-1]
        return job

    def wait(self, handles, log):
        time.sleep(0.02)
        return {job: clusters.Ending() for job in handles if not job.is_alive()}

    def cancel(self, handles):
        return ""


def test_two_drivers_run_each_step_once(tmp_path):
    """The second one begins while the first submits a step."""
    works, jobs, summaries, threads = functions(tmp_path, seconds=0.3), {}, [], []

    def drive(executor):
        summaries.append(run_graph(graph(1), tmp_path / "out", works, executor=executor))

    def second():
        if not threads:
            threads.append(threading.Thread(target=drive, args=[Processes(jobs)]))
            threads[0].start()
            time.sleep(0.2)

    drive(Processes(jobs, second))
    threads[0].join()
    assert [summary.failed for summary in summaries] == [[], []]
    for name in ("data-0", "train-0", "tables"):
        assert len((tmp_path / name).read_text().split()) == 1


def ray_of(nodes, head, *, started):
    executor = OnRay.__new__(OnRay)
    executor._ray = SimpleNamespace(nodes=lambda: nodes, wait=lambda handles, **_: ([], handles))
    executor._head, executor._started, executor._answered = head, started, time.monotonic()
    return executor


@pytest.mark.parametrize(("kind", "key"), [
    ("train", "resources.train"), ("english", "resources.evaluate"),
    ("translated", "resources.evaluate"), ("vectors", "resources.evaluate"), ("tables", ""),
    ("finish", "resources.train"), ("finished", "resources.evaluate"),
])  # fmt: skip
def test_a_request_that_ray_cannot_meet_names_its_key(kind, key, monkeypatch):
    """An autoscaler may add a node; nobody does to a fixed cluster, or to a Ray started here."""
    nodes = [{"Alive": True, "Resources": {"CPU": 2.0, "memory": 2.0**30}}]
    step = Step("s", kind, {}, resources=Resources(cpus=4, memory_gb=1))
    lines = []
    monkeypatch.setattr(ray_inside, "is_fixed", lambda nodes: False)
    ray_of(nodes, "", started=False).check([step], lines.append)
    none = "no node of the Ray cluster has 4 CPU, 1 GB of memory (largest: 2 CPU, 1 GB of memory)"
    change = f", or change {key}" if key else ""
    assert lines == [f"note: {none}; {kind} steps wait until one joins{change}"]
    with pytest.raises(StudyError, match=f"^{re.escape(none)}; change {key or 'the machine'}$"):
        ray_of(nodes, "", started=True).check([step], lines.append)
    monkeypatch.setattr(ray_inside, "is_fixed", lambda nodes: True)
    with pytest.raises(StudyError, match=f"^{re.escape(none)}; add a node{change}$"):
        ray_of(nodes, "", started=False).check([step], lines.append)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["noted by Ray", "given", "in the environment"])
def test_a_ray_cluster_that_has_ended_is_one_line(how, tmp_path, monkeypatch):
    """Ray itself waits for minutes, and ends this process."""
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if how == "in the environment":
        monkeypatch.setenv("RAY_ADDRESS", address)
    elif how == "noted by Ray":
        (tmp_path / "ray").mkdir()
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    said = "has ended, but Ray still names it.*ray stop" if how == "noted by Ray" else "check the a"
    with pytest.raises(StudyError, match=said):
        OnRay(address if how == "given" else None)


def test_rays_head_that_ended_is_one_line(monkeypatch):
    """After 60 seconds, Ray would end this process with a text in C++."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        executor = ray_of([], f"127.0.0.1:{port}", started=False)
        executor.wait({"task": "s"}, print)
    executor.wait({"task": "s"}, print)
    with pytest.raises(clusters.Later, match=f"the head of the Ray cluster at 127.0.0.1:{port} d"):
        executor.submit(graph(1)["data/0"], None, ())
    monkeypatch.setattr(on_ray, "SILENCE", 0.0)
    with pytest.raises(StudyError, match="does not answer; start a cluster and run the study"):
        executor.wait({"task": "s"}, print)
