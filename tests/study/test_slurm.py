"""Steps as Slurm jobs, by submitit's local executor: the same outputs as in one process."""

import pytest

from layerswap.errors import StudyError
from layerswap.study import runner
from layerswap.study.journal import StudyJournal
from layerswap.study.runner import OnSlurm, run_graph
from layerswap.study.steps import Graph, Resources, Step

pytest.importorskip("submitit")


def graph():
    small = Resources(cpus=1, memory_gb=0.05)
    first = [Step(f"data/{i}", "data", {"i": i}, resources=small) for i in range(2)]
    last = Step("tables", "tables", {"i": 9}, ("data/0", "data/1"), resources=small)
    return Graph([*first, last])


def make_functions(broken=None):
    # Inside a function, so that jobs, which cannot import this file, get it by value.
    def write(context):
        if context.step.name == broken:
            raise ValueError("no such data")
        parts = [(folder / "out").read_text() for folder in context.inputs.values()]
        (context.folder / "out").write_text("+".join([*parts, str(context.step.settings["i"])]))

    return dict.fromkeys(("data", "tables"), write)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "POLL", 0.05)
    return OnSlurm(tmp_path / "jobs", cluster="local")


def test_a_study_runs_as_jobs(slurm, tmp_path):
    summary = run_graph(graph(), tmp_path / "out", make_functions(), executor=slurm)
    assert not summary.failed, [record.why for record in summary.failed]
    journal = StudyJournal(tmp_path / "out", graph())
    assert (journal.folder("tables") / "out").read_text() == "0+1+9"
    assert [row.state for row in journal.status()] == ["done"] * 3


@pytest.mark.slow
def test_a_failed_job_stops_only_what_needs_it(slurm, tmp_path):
    functions = make_functions(broken="data/1")
    summary = run_graph(graph(), tmp_path / "out", functions, executor=slurm)
    assert [record.why for record in summary.failed] == ["ValueError: no such data"]
    assert summary.blocked == {"tables": "data/1"}


def test_without_slurm_it_is_one_line(tmp_path):
    with pytest.raises(StudyError, match="Slurm cannot be reached"):
        OnSlurm(tmp_path)
