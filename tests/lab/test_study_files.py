"""The lab's study: planned from files that it writes itself."""

from layerswap.lab.study_files import write_study
from layerswap.study.journal import Journal
from layerswap.study.planning import plan_study
from layerswap.study.running import run_graph
from layerswap.study.spec import read_study
from layerswap.study.works import works


def test_the_labs_study_runs_from_its_own_files(tmp_path):
    path = write_study(tmp_path, runs=1, n=8, steps=2)
    graph = plan_study(read_study(path), path.parent)
    again = plan_study(read_study(write_study(tmp_path, runs=1, n=8, steps=2)), path.parent)
    assert again.keys == graph.keys
    summary = run_graph(graph, tmp_path / "study", works())
    assert not summary.failed, [entry.why for entry in summary.failed]
    tables = (Journal(tmp_path / "study", graph).folder("tables") / "tables.md").read_text()
    for treatment in (
        "simultaneous",
        "joint",
        "swap of soups",
        "ties, density 0.5",
        "swap, chosen on development",
    ):
        assert tables.count(f"| {treatment} |") == 4  # each language, both, and the ranks
