"""Ray's own cluster of several nodes on this machine: workers and nodes are lost on the way."""

import os
import signal
import time
from pathlib import Path

import pytest

from layerswap.study.journal import StudyJournal
from layerswap.study.runner import run_graph
from layerswap.study.steps import Graph, Resources, Step

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1, resources={"other": 1})
    yield found
    ray.shutdown()
    found.shutdown()


def graph():
    small = Resources(cpus=1, memory_gb=0.05)
    first = [Step(f"data/{i}", "data", {"i": i}, resources=small) for i in range(4)]
    second = [
        Step(f"train/{i}", "train", {"i": i}, (f"data/{i}",), resources=small) for i in range(4)
    ]
    last = Step("tables", "tables", {}, tuple(s.name for s in second), resources=small)
    return Graph([*first, *second, last])


def make_works(marks):
    # Inside a function, so that workers, which cannot import this file, get it by value.
    def work(context):
        import os
        import time
        from pathlib import Path

        begun = Path(marks) / context.step.name.replace("/", "-")
        with begun.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(0.5)
        parts = [(folder / "out").read_text() for folder in context.inputs.values()]
        (context.folder / "out").write_text("+".join([*sorted(parts), context.step.name]))

    return dict.fromkeys(("data", "train", "tables"), work)


def outputs(root):
    journal = StudyJournal(root, graph())
    return {step.name: (journal.folder(step.name) / "out").read_text() for step in graph()}


@pytest.mark.slow
def test_a_study_on_ray_survives_a_killed_worker_and_a_lost_node(cluster, tmp_path):
    import threading

    from layerswap.study.runner import OnRay

    marks = tmp_path / "marks"
    marks.mkdir()
    run_graph(graph(), tmp_path / "here", make_works(marks))
    for mark in marks.iterdir():
        mark.unlink()

    def harm():
        while not (seen := list(Path(marks).glob("train-*"))):
            time.sleep(0.02)
        os.kill(int(seen[0].read_text().split()[0]), signal.SIGKILL)
        time.sleep(0.5)
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)

    thread = threading.Thread(target=harm)
    thread.start()
    executor = OnRay(cluster.address)
    summary = run_graph(graph(), tmp_path / "ray", make_works(marks), executor=executor)
    thread.join()
    assert not summary.failed, [entry.why for entry in summary.failed]
    assert outputs(tmp_path / "ray") == outputs(tmp_path / "here")
    begun = sum(len(mark.read_text().split()) for mark in marks.iterdir())
    assert begun > len(graph())  # what was lost was begun again
    again = run_graph(graph(), tmp_path / "ray", make_works(marks), executor=executor)
    assert sum(len(mark.read_text().split()) for mark in marks.iterdir()) == begun
    assert not again.failed


@pytest.mark.slow
def test_a_failure_on_ray_stops_only_what_needs_it(cluster, tmp_path):
    from layerswap.study.runner import OnRay

    def broken(context):
        if context.step.settings["i"] == 2:
            raise ValueError("no such data")
        (context.folder / "out").write_text("x")

    works = {**make_works(tmp_path), "data": broken}
    summary = run_graph(graph(), tmp_path / "out", works, executor=OnRay(cluster.address))
    assert [entry.why for entry in summary.failed] == ["ValueError: no such data"]
    assert summary.blocked == {"train/2": "data/2", "tables": "data/2"}
    assert summary.records["train/3"].state == "done"
