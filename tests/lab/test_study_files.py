"""The lab's study: planned from files that it writes itself."""

import pytest

from layerswap.errors import StudyError
from layerswap.lab.exports import write_study
from layerswap.study.journal import StudyJournal
from layerswap.study.plan import plan_study
from layerswap.study.runner import run_graph
from layerswap.study.spec import read_study
from layerswap.study.step_functions import step_functions


@pytest.mark.slow
def test_the_labs_study_runs_from_its_own_files(tmp_path):
    path = write_study(tmp_path, runs=1, n=8, steps=2)
    graph = plan_study(read_study(path), path.parent)
    again = plan_study(read_study(write_study(tmp_path, runs=1, n=8, steps=2)), path.parent)
    assert again.keys == graph.keys
    summary = run_graph(graph, tmp_path / "study", step_functions())
    assert not summary.failed, [entry.why for entry in summary.failed]
    tables = (StudyJournal(tmp_path / "study", graph).folder("tables") / "tables.md").read_text()
    for treatment in (
        "simultaneous",
        "joint",
        "swap of soups",
        "ties, density 0.5",
        "swap, chosen on development",
    ):
        # Each language, also in the source language; both together; and the ranks.
        assert tables.count(f"| {treatment} |") == 6


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    mine = tmp_path / "inputs" / "study.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(StudyError, match="is no folder of `lab study`; choose another output"):
        write_study(tmp_path, runs=1, n=8, steps=2)
    assert mine.read_text() == "mine"
    assert sorted(tmp_path.rglob("*")) == [mine.parent, mine]


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_a_damaged_record_is_one_line(tmp_path, text):
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / "lab_study.json").write_text(text)
    with pytest.raises(StudyError, match="is damaged; choose another output"):
        write_study(tmp_path, runs=1, n=8, steps=2)


def test_another_number_of_questions_can_be_asked(tmp_path):
    asked = tmp_path / "inputs" / "tasks" / "lab_problem_nela.jsonl"
    for n, lines in ((8, 10), (16, 20)):
        write_study(tmp_path, runs=1, n=n, steps=2)
        assert len(asked.read_text().splitlines()) == lines
