"""Steps on Ray, in a cluster of several nodes on this machine, and as Slurm jobs of submitit."""

import os
import signal
import threading
import time

import pytest

from layerswap.ground.errors import StudyError
from layerswap.study import runner
from layerswap.study.journal import StudyJournal
from layerswap.study.runner import OnRay, OnSlurm, run_graph
from layerswap.study.steps import Graph, Resources, Step


@pytest.fixture
def cluster(monkeypatch):
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    cluster.add_node(num_cpus=1, resources={"other": 1})
    yield cluster
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setattr(runner, "POLL", 0.05)
    return OnSlurm(tmp_path / "jobs", cluster="local")


def graph(width):
    """As many data sets as trainings, each on its own, and tables of all."""
    small = Resources(cpus=1, memory_gb=0.05)
    data = [Step(f"data/{i}", "data", {"i": i}, resources=small) for i in range(width)]
    trainings = [Step(f"train/{i}", "train", {"i": i}, (f"data/{i}",), resources=small)
                 for i in range(width)]  # fmt: skip
    needs = tuple(step.name for step in trainings)
    return Graph([*data, *trainings, Step("tables", "tables", {}, needs, resources=small)])


def functions(marks, broken="", seconds=0.0):
    # Inside a function, so that workers, which cannot import this file, get it by value.
    def work(context):
        import os
        import time
        from pathlib import Path

        if context.step.name == broken:
            raise ValueError("no such data")
        with (Path(marks) / context.step.name.replace("/", "-")).open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(seconds)
        parts = [(folder / "out").read_text() for folder in context.inputs.values()]
        (context.folder / "out").write_text("+".join([*sorted(parts), context.step.name]))

    return dict.fromkeys(("data", "train", "tables"), work)


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
@pytest.mark.parametrize("name", ["ray", "slurm"])
def test_a_failure_on_a_cluster_stops_only_its_followers(name, request, tmp_path):
    if name == "ray":
        executor = OnRay(request.getfixturevalue("cluster").address)
    else:
        executor = request.getfixturevalue("slurm")
    works = functions(tmp_path, broken="data/1")
    summary = run_graph(graph(2), tmp_path / "out", works, executor=executor)
    assert [record.why for record in summary.failed] == ["ValueError: no such data"]
    assert summary.blocked == {"train/1": "data/1", "tables": "data/1"}
    assert summary.records["train/0"].state == "done"


def test_a_study_runs_as_jobs(slurm, tmp_path):
    summary = run_graph(graph(1), tmp_path / "out", functions(tmp_path), executor=slurm)
    assert not summary.failed, [record.why for record in summary.failed]
    journal = StudyJournal(tmp_path / "out", graph(1))
    assert (journal.folder("tables") / "out").read_text() == "data/0+train/0+tables"
    assert [record.state for record in journal.status()] == ["done"] * 3


def test_without_slurm_it_is_one_line(tmp_path, monkeypatch):
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun, wherever Slurm is installed
    with pytest.raises(StudyError, match="Slurm cannot be reached"):
        OnSlurm(tmp_path)
