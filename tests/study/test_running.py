"""The engine: nothing twice, nothing lost, and one failure stops only what needs it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from layerswap.ground.errors import MergeError, RecipeError, StudyError
from layerswap.ground.lease import Owner
from layerswap.study import runner as running
from layerswap.study.journal import StudyJournal, read_journal
from layerswap.study.report import merge_models
from layerswap.study.runner import run_graph
from layerswap.study.steps import Graph, Step


def chain(**settings):
    return Graph([
        Step("c", "evaluate", {"x": settings.get("c", 0)}, ("b", "side")),
        Step("a", "data", {"x": settings.get("a", 0)}),
        Step("b", "train", {"x": settings.get("b", 0)}, ("a",)),
        Step("side", "data", {"x": settings.get("side", 7)}),
    ])  # fmt: skip


@pytest.fixture
def works():
    done = []

    def work(context):
        done.append(context.step.name)
        text = "".join((folder / "out").read_text() for folder in context.inputs.values())
        (context.folder / "out").write_text(
            f"{text}{context.step.name}{context.step.settings['x']}"
        )

    return done, dict.fromkeys(("data", "train", "evaluate"), work)


def test_steps_are_done_in_order_once(tmp_path, works):
    done, kinds = works
    ended = []
    summary = run_graph(chain(), tmp_path, kinds, ended=lambda step: ended.append(step.name))
    assert done == ended == ["a", "b", "side", "c"]
    assert not summary.failed
    journal = StudyJournal(tmp_path, chain())
    assert (journal.folder("c") / "out").read_text() == "a0b0side7c0"
    run_graph(chain(), tmp_path, kinds)
    assert len(done) == 4


def test_a_changed_step_and_what_follows_it_are_done_again(tmp_path, works):
    done, kinds = works
    run_graph(chain(), tmp_path, kinds)
    done.clear()
    run_graph(chain(b=1), tmp_path, kinds)
    assert done == ["b", "c"]
    done.clear()
    run_graph(chain(), tmp_path, kinds)
    assert done == []  # the earlier output is still there
    run_graph(chain(side=8), tmp_path, kinds)
    assert done == ["side", "c"]


def test_a_key_holds_all_that_matters_and_nothing_else():
    graph = chain()
    same = Graph([replace(step, name=step.name) for step in reversed(list(graph))])
    assert same.keys == graph.keys
    steps = {step.name: step for step in graph}
    other = Graph([*[s for s in graph if s.name != "a"], replace(steps["a"], inputs={"f": "1"})])
    changed = {name for name in graph.keys if graph.keys[name] != other.keys[name]}
    assert changed == {"a", "b", "c"}


def test_a_failure_stops_only_its_followers_until_the_next_run(tmp_path, works):
    done, kinds = works
    broken = {**kinds, "train": lambda context: 1 / 0}
    summary = run_graph(chain(), tmp_path, broken)
    assert done == ["a", "side"]
    assert [entry.name for entry in summary.failed] == ["b"]
    assert summary.blocked == {"c": "b"}
    rows = {row.name: row for row in StudyJournal(tmp_path, chain()).status()}
    assert rows["b"].why == "ZeroDivisionError: division by zero"
    assert rows["c"].state == "blocked"
    assert rows["c"].why == "needs b"
    assert (
        "ZeroDivisionError" in (StudyJournal(tmp_path, chain()).folder("b") / "log.txt").read_text()
    )
    run_graph(chain(), tmp_path, kinds)
    assert done == ["a", "side", "b", "c"]


def test_our_own_errors_are_one_line_and_not_tried_twice(tmp_path, works):
    _done, kinds = works
    tried = []

    def refuse(context):
        tried.append(1)
        raise RecipeError("there is no such expert")

    summary = run_graph(chain(), tmp_path, {**kinds, "train": refuse})
    assert summary.failed[0].why == "there is no such expert"
    assert summary.failed[0].attempts == len(tried) == 1


def test_faults_that_may_pass_are_tried_again(tmp_path, works, monkeypatch):
    _done, kinds = works
    monkeypatch.setattr(running, "PAUSE", 0.0)
    tried = []

    def flaky(context):
        tried.append(1)
        if len(tried) < 3:
            raise ConnectionError("the Hub is away")
        kinds["data"](context)

    summary = run_graph(chain(), tmp_path, {**kinds, "train": flaky})
    assert summary.records["b"].attempts == 3
    assert summary.records["b"].state == "done"

    def dead(context):
        raise TimeoutError("gone")

    summary = run_graph(chain(b=5), tmp_path, {**kinds, "train": dead})
    assert summary.failed[0].attempts == 3
    assert summary.failed[0].why == "TimeoutError: gone"


def test_a_killed_study_resumes(tmp_path):
    script = tmp_path / "study.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from layerswap.study.runner import run_graph\n"
        "from layerswap.study.steps import Graph, Step\n"
        "def work(context):\n"
        "    with open(sys.argv[2], 'a') as log: log.write(context.step.name + '\\n')\n"
        "    while context.step.name == 's2' and not Path(sys.argv[3]).exists(): time.sleep(0.01)\n"
        "    (context.folder / 'out').write_text('x')\n"
        "steps = [Step(f's{i}', 'data', {'i': i}, (f's{i - 1}',) if i else ()) for i in range(6)]\n"
        "run_graph(Graph(steps), Path(sys.argv[1]), {'data': work})\n"
    )
    log = tmp_path / "log"
    log.touch()
    command = [sys.executable, script, tmp_path / "out", log, tmp_path / "may end"]
    process = subprocess.Popen(command)
    while len(log.read_text().split()) < 3:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (tmp_path / "may end").touch()
    subprocess.run(command, check=True)
    done = log.read_text().split()
    assert done[:3] == ["s0", "s1", "s2"]
    assert done[3:] == ["s2", "s3", "s4", "s5"]


def test_a_running_step_is_shown_with_its_progress(tmp_path, works):
    seen = []

    def slow(context):
        context.log("step 3 of 10")
        seen.append({row.name: row for row in journal.status()}["b"])
        works[1]["data"](context)

    journal = StudyJournal(tmp_path, chain())
    run_graph(chain(), tmp_path, {**works[1], "train": slow})
    (row,) = seen
    assert (row.state, row.progress) == ("running", "step 3 of 10")
    assert row.since.startswith(time.strftime("%Y-%m-%dT"))
    assert [row.state for row in journal.status()] == ["done"] * 4
    # A lease of a process that is gone, or of another machine long ago, is none.
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    (journal.folder("c") / "step.json").unlink()
    place = journal.folder("c") / "lease.json"
    for where, process, ago, state in (
        (socket.gethostname(), child.pid, 0, "waiting"), ("elsewhere", 1, 3600, "waiting"),
        ("elsewhere", 1, 5, "running"),
    ):  # fmt: skip
        place.write_text(json.dumps(asdict(Owner(where=where, process=process))))
        os.utime(place, (time.time() - ago,) * 2)
        assert {row.name: row.state for row in journal.status()}["c"] == state


def test_another_folder_and_an_address_are_refused(tmp_path, works):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(StudyError, match="is not a study folder"):
        run_graph(chain(), tmp_path, works[1])
    with pytest.raises(MergeError, match="s3:/x: the output must be a local folder"):
        run_graph(chain(), Path("s3://x"), works[1])


def test_the_followers_of_a_repeated_step_are_repeated(tmp_path, works):
    done, kinds = works
    run_graph(chain(), tmp_path / "one", kinds)
    journal = StudyJournal(tmp_path / "one", chain())
    shutil.rmtree(journal.folder("b"))
    assert [row.state for row in journal.status()] == ["done", "waiting", "done", "waiting"]
    done.clear()
    run_graph(chain(), tmp_path / "one", kinds)
    assert done == ["b", "c"]
    assert [row.state for row in journal.status()] == ["done"] * 4


def test_asking_for_the_status_or_a_model_writes_nothing(tmp_path):
    with pytest.raises(StudyError, match="is not a study folder"):
        read_journal(tmp_path / "none")
    with pytest.raises(StudyError, match="is not a study folder"):
        list(merge_models(tmp_path / "none", log=print))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "changes",
    [{"seconds": {"a": 1}}, {"why": {"a": 1}}, {"state": "over"}, {"after": [1]},
     {"attempts": "x"}], ids=str,
)  # fmt: skip
def test_a_record_of_other_values_is_none(tmp_path, works, changes):
    done, kinds = works
    run_graph(chain(), tmp_path, kinds)
    place = StudyJournal(tmp_path, chain()).folder("side") / "step.json"
    record = json.loads(place.read_text())
    for content, found in ((record, "done"), (record | changes, "waiting")):
        place.write_text(json.dumps(content))
        states = {one.name: one.state for one in read_journal(tmp_path).status()}
        assert (states["side"], states["b"]) == (found, "done")
    run_graph(chain(), tmp_path, kinds)
    assert done[-2:] == ["side", "c"]
