"""Studies on a real Slurm of two nodes, which is started here, and its faults."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
from cluster_steps import functions, graph, start_driver
from real_slurm import command, missing, real_slurm
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.ground.errors import StudyError
from layerswap.study import clusters, on_slurm
from layerswap.study.journal import StudyJournal
from layerswap.study.on_slurm import OnSlurm, default_time, job_of, last_lines, minutes
from layerswap.study.runner import run_graph
from layerswap.study.steps import Step

pytest.importorskip("submitit")
NOBODY = 65534
FAILING = """#!/bin/sh
case "$*" in *{word}*)
    echo >> {calls}
    if [ $(wc -l < {calls}) -gt {first} ] && [ $(wc -l < {calls}) -le {last} ]; then
        sleep {seconds}; echo "error: {line}" >&2; exit 1
    fi;;
esac
exec {real} "$@"
"""
real = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]


@pytest.fixture(scope="module")
def slurm():
    with real_slurm():
        yield


@pytest.fixture
def study(slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(clusters, "POLL", 0.2)
    monkeypatch.setattr(clusters, "LATER", 0.5)
    monkeypatch.setattr(on_slurm, "LOOK", 0.3)
    return Study(tmp_path)


@pytest.fixture
def failing(tmp_path, monkeypatch):
    """Lets a command of Slurm fail, or hang, some times before it works."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def fail(name, word, line, *, times, seconds=0, after=0):
        calls, path = folder / f"{name}.calls", folder / name
        calls.write_text("")
        here = shutil.which(name, path=os.environ["PATH"].removeprefix(f"{folder}:"))
        fault = {"word": word, "line": line, "seconds": seconds}
        fault |= {"first": after, "last": after + times}
        path.write_text(FAILING.format(calls=calls, real=here, **fault))
        path.chmod(0o755)

    return fail


class Study:
    """Runs of one small study, with their lines."""

    def __init__(self, folder):
        self.folder, self.lines, self.marks = folder, [], folder / "marks"
        self.marks.mkdir()

    def run(self, width=1, parameters=None, resources=None, hours=None, **works):
        self.graph = graph(width, **(resources or {}))
        executor = OnSlurm(self.folder / "out" / "jobs", parameters or {}, hours or {})
        works = functions(self.marks, **works)
        return run_graph(self.graph, self.folder / "out", works, executor=executor,
                         log=self.lines.append)  # fmt: skip

    def during(self, name, action):
        """Call `action` with the job of a step as soon as the step runs."""

        def act():
            wait_for((self.marks / name.replace("/", "-")).exists)
            action(self.job(name))

        threading.Thread(target=act).start()

    def step_folder(self, name):
        return StudyJournal(self.folder / "out", graph(1)).folder(name)

    def job(self, name):
        return job_of(self.step_folder(name))["job"]

    def told(self, words):
        return any(words in line for line in self.lines)

    def begun(self, name):
        mark = self.marks / name.replace("/", "-")
        return len(mark.read_text().split()) if mark.exists() else 0


def invoke(*words):
    done = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return done.output


def wait_for(ready, seconds=60):
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end
        time.sleep(0.05)


class TestReal:
    pytestmark = real

    def test_a_study_equals_the_local_run_on_two_nodes(self, study, tmp_path):
        summary = study.run(3, seconds=0.5, hours={"tables": 0.7})
        assert not summary.failed, [record.why for record in summary.failed]
        run_graph(study.graph, tmp_path / "here", functions(study.marks))
        journal = StudyJournal(tmp_path / "out", study.graph)
        for step in study.graph:
            there, here = (StudyJournal(tmp_path / name, study.graph).folder(step.name)
                           for name in ("out", "here"))  # fmt: skip
            assert (there / "out").read_text() == (here / "out").read_text()
        limits = [command("scontrol", "show", "job", job_of(journal.folder(name))["job"])
                  for name in ("tables", "data/0")]  # fmt: skip
        for told, limit in zip(limits, ("02:06:00", "3-00:00:00"), strict=True):
            assert f"TimeLimit={limit} " in told
        used = {state.node for state in on_slurm.queue().values()}
        assert {"node1", "node2"} <= used
        log = journal.folder("tables") / "log.txt"
        assert "half of tables" in log.read_text()
        jobs = tmp_path / "out" / "jobs" / "tables"
        assert "half of tables" in next(jobs.glob("*_log.out")).read_text()
        before = len(on_slurm.queue())
        study.run(3)
        assert len(on_slurm.queue()) == before

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_new_driver_adopts_the_job_of_a_killed_one(self, study, number):
        driver = start_driver(study.folder, 6)
        wait_for(lambda: study.begun("data/0"))
        driver.send_signal(number)
        driver.wait()
        job = study.job("data/0")
        with pytest.raises(StudyError, match=rf"Slurm job {job}, process \d+ on .* writes into it"):
            run_graph(graph(1), study.folder / "out", functions(study.marks))
        summary = study.run(seconds=0)
        assert f"data/0: adopts job {job}" in study.lines
        assert not summary.failed
        assert study.begun("data/0") == 1

    def test_ctrl_c_cancels_the_jobs(self, study):
        driver = start_driver(study.folder, 60)
        wait_for(lambda: study.begun("data/0"))
        job = study.job("data/0")
        driver.send_signal(signal.SIGINT)
        lines = driver.communicate(timeout=30)[0]
        assert f"cancelled the Slurm jobs {job} (data/0)" in lines
        wait_for(lambda: on_slurm.queue()[job].state == "CANCELLED")
        summary = study.run()  # its lease is void at once
        assert not summary.failed
        assert study.begun("data/0") == 2

    def test_a_cancelled_job_is_noticed_with_its_state(self, study):
        cancelled = []

        def cancel(job):
            cancelled.append(time.monotonic())
            command("scancel", job)

        study.during("data/0", cancel)
        summary = study.run(seconds=60)
        assert time.monotonic() - cancelled[0] < 15
        (record,) = summary.failed
        assert f"job {study.job('data/0')} CANCELLED on node" in record.why
        assert "CANCELLED AT" in record.why

    def test_a_job_at_its_time_limit_resumes(self, study):
        summary = study.run(parameters={"data": {"time": 1}}, slow_first=300)
        assert not summary.failed, [record.why for record in summary.failed]
        assert study.begun("data/0") == 2
        assert study.begun("train/0") == 1
        assert (study.step_folder("data/0") / "saved").exists()

    @pytest.mark.parametrize("end", ["kill -USR2 $$", "exit 140"])
    def test_a_job_warned_before_it_listens_runs_again(self, study, tmp_path, end):
        mark = tmp_path / "warned"
        once = f"[ -e {mark} ] || {{ touch {mark}; {end}; }}"
        summary = study.run(parameters={"data": {"setup": [once]}})
        assert not summary.failed, [record.why for record in summary.failed]
        assert study.told("it runs again")
        assert study.begun("data/0") == 1

    def test_a_job_beyond_its_memory_fails_with_the_reason(self, study):
        summary = study.run(seconds=20, swallow="data/0", resources={"memory_gb": 0.5})
        (record,) = summary.failed
        assert "memory" in record.why.lower() or "OUT_OF_ME" in record.why, record.why

    def test_drained_nodes_are_named(self, study):
        nodes = "nodename=node1,node2"
        command("scontrol", "update", nodes, "state=drain", "reason=test")
        try:

            def resume():
                wait_for(lambda: study.told("DRAINED"))
                command("scontrol", "update", nodes, "state=resume")

            threading.Thread(target=resume).start()
            summary = study.run()
        finally:
            command("scontrol", "update", nodes, "state=resume")
        assert not summary.failed
        assert "note: Slurm has no node for data steps now" in study.lines[1]

    def test_a_limit_beyond_the_partitions_is_told_at_once(self, study):
        def cancel():
            wait_for(lambda: study.told("PENDING (Partition"))
            command("scancel", study.job("data/0"))

        threading.Thread(target=cancel).start()
        (record,) = study.run(parameters={"partition": "short", "time": 600}).failed
        assert f"job {study.job('data/0')} CANCELLED" in record.why

    def test_the_status_names_job_node_state_and_log(self, study):
        def look(job):
            shown.append((job, invoke("study", "status", study.folder / "out")))
            command("scancel", job)

        shown = []
        study.during("data/0", look)
        study.run(seconds=60)
        job, running = shown[0]
        log = study.folder / "out" / "jobs" / "data-0" / f"{job}_0_log.out"
        assert f"job {job} RUNNING on node" in running
        assert str(log) in running
        steps = json.loads(invoke("study", "status", study.folder / "out", "--json"))["steps"]
        assert steps[0]["job"]["state"] == "CANCELLED"
        assert "CANCELLED AT" in steps[0]["last_lines"][-1]

    @pytest.mark.parametrize(("parameters", "resources", "line"), [
        ({"partition": "nope"}, {}, r"Slurm refuses data/0: invalid partition specified: nope"),
        ({"data": {"constraint": "nope"}}, {}, "Invalid feature specification"),
        ({}, {"gpus": 1}, r"Invalid generic resource \(gres\) specification .*gpus_per_node=1"),
        ({"gpu": "a100"}, {}, r"slurm: Unavailable parameter\(s\): \['gpu'\]; others"),
        ({"train": {"time": "soon"}}, {}, "time 'soon' is no number of minutes"),
    ])  # fmt: skip
    def test_refusals_are_one_line_and_leave_nothing(self, study, parameters, resources, line):
        with pytest.raises(StudyError, match=line):
            study.run(parameters=parameters, resources=resources)
        assert not (study.folder / "out").exists()

    def test_a_driver_inside_an_allocation_hands_none_of_it_on(self, study):
        driver = start_driver(study.folder, 0, inside=["salloc", "-n1", "--mem-per-cpu=300"])
        lines = driver.communicate(timeout=120)[0]
        assert driver.returncode == 0, lines
        assert "failed" not in lines
        assert study.begun("tables") == 1

    def test_the_job_of_another_account_is_adopted(self, study):
        options = ["--parsable", f"--uid={NOBODY}", "-D/", "-o/dev/null", "--mem=100"]
        job = command("sbatch", *options, "--wrap=sleep 60")
        StudyJournal(study.folder / "out", graph(1)).open()
        folder = study.step_folder("data/0")
        folder.mkdir()
        (folder / on_slurm.JOB).write_text(json.dumps({"job": job, "token": "t", "log": ""}))
        os.chown(folder / on_slurm.JOB, NOBODY, -1)

        def cancel():
            wait_for(lambda: study.told(f"data/0: adopts job {job}"))
            command("scancel", job)

        threading.Thread(target=cancel).start()
        (record,) = study.run().failed
        assert f"job {job} CANCELLED" in record.why
        assert study.begun("data/0") == 0

    def test_a_refused_submission_is_tried_again(self, study, failing):
        failing("sbatch", "submission", "Socket timed out on send/recv operation", times=2)
        summary = study.run()
        assert not summary.failed
        assert study.told("Slurm refuses data/0: Socket timed out")
        assert study.told("trying again")

    def test_a_queue_that_does_not_answer_is_asked_again(self, study, failing, monkeypatch):
        monkeypatch.setattr(on_slurm, "ANSWER", 1)
        failing("squeue", "-O", "", times=3, seconds=5)
        with pytest.raises(StudyError, match=r"Slurm cannot be reached .* timed out after 1"):
            study.run()
        failing("squeue", "-O", "", times=2, seconds=5, after=1)
        summary = study.run()
        assert not summary.failed
        assert study.told("timed out after 1 seconds; trying again")

    def test_memory_beyond_the_nodes_is_one_line(self, study, monkeypatch):
        monkeypatch.setattr(on_slurm, "PATIENCE", 1)
        summary = study.run(resources={"memory_gb": 9000})
        (record,) = summary.failed
        assert "Slurm refuses data/0: Memory specification can not be satisfied" in record.why


def test_without_slurm_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no srun, wherever Slurm is installed
    with pytest.raises(StudyError, match="Slurm cannot be reached"):
        OnSlurm(tmp_path, {}, {})


@pytest.mark.parametrize(("kind", "partition", "keys"), [
    ("finish", "gpu", "resources.train or slurm.train"),
    ("finished", "large", "resources.evaluate or slurm.evaluate"),
    ("vectors", "large", "resources.evaluate or slurm.evaluate"),
    ("tables", "cpu", "slurm.tables"),
])  # fmt: skip
def test_steps_that_share_resources_share_parameters(kind, partition, keys):
    executor = OnSlurm.__new__(OnSlurm)
    executor._given, executor._hours = {"partition": "cpu"}, {}
    executor._by_kind = {"train": {"partition": "gpu"}, "evaluate": {"partition": "large"}}
    step = Step("s", kind, {})
    assert executor.parameters(step)["partition"] == partition
    assert executor._refused(step, "why").endswith(f"; change {keys} of the study")


@pytest.mark.parametrize(("hours", "number"), [
    (None, 4320), (0.0, 60), (0.2, 60), (0.5, 90), (5.001, 901), (24, 4320), (900, 4320),
])  # fmt: skip
def test_the_default_time_limit_is_three_times_the_estimate_within_bounds(hours, number):
    assert default_time(hours) == number


@pytest.mark.parametrize(("given", "number"), [
    (90, 90), ("90", 90), ("90:30", 91), ("12:00:00", 720), ("1-12", 2160), ("2-00:30:01", 2911),
])  # fmt: skip
def test_time_limits_in_slurms_forms(given, number):
    assert minutes(given) == number


def test_the_reason_of_srun_is_shown_where_no_other_line_is(tmp_path):
    log = tmp_path / "1_0_log.out"
    log.with_suffix(".err").write_text("srun: fatal: no such thing\n")
    assert last_lines(log, 1) == ["srun: fatal: no such thing"]
    log.with_suffix(".err").write_text("ValueError: why\nsrun: error: node1: exit code 1\n")
    assert last_lines(log, 1) == ["ValueError: why"]
