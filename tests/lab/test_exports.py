"""Exports of the lab: its questions as lm-eval tasks, and its study from its own files."""

from __future__ import annotations

import json
import warnings

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate
from layerswap.ground.errors import StudyError
from layerswap.lab.assets import shipped
from layerswap.lab.exports import write_study
from layerswap.lab.scoring import sweep_correct
from layerswap.lab.tasks import examples
from layerswap.merge import swap
from layerswap.study.journal import StudyJournal
from layerswap.study.kinds import step_functions
from layerswap.study.plan import plan_study
from layerswap.study.runner import run_graph
from layerswap.study.spec import read_study

N = 24


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab") / "tasks"
    done = CliRunner().invoke(app, ["lab", "export", "--out", str(out), "--n", str(N)])
    assert done.exit_code == 0, done.output
    return out


def test_every_language_has_both_skills(tasks):
    lab = shipped()
    languages = (lab.world.source.name, *lab.languages)
    expected = [f"lab_{skill}_{one}" for one in languages for skill in ("problem", "comprehension")]
    assert json.loads((tasks / "lab_tasks.json").read_text()) == expected
    for name in expected:
        assert len((tasks / f"{name}.jsonl").read_text().splitlines()) == N


@pytest.mark.slow
def test_a_sweep_gives_what_lm_eval_gives_the_merged_checkpoint(tasks, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lab = shipped()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts["furo"][0], dtype="float32")
    plans = plan.grid(bottom=[0, 2, 4], top=[0, 3])
    names = ["lab_problem_furo", "lab_comprehension_furo"]
    tokenizer = AutoTokenizer.from_pretrained(lab.base)
    found = evaluate(Sweep(plans), tokenizer, names, include=[tasks])
    scores = {tuple(one["results"][name]["exact_match,whole"] for name in names) for one in found}
    assert len(scores) > 1, "the compositions differ"
    for index in (0, 3):
        folder = plans[index].save(tmp_path / str(index))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = lm_eval.simple_evaluate(
                model=HFLM(pretrained=str(folder), batch_size=8, device="cpu", dtype="float32"),
                tasks=names, bootstrap_iters=0, log_samples=True,
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            )  # fmt: skip
        for name in names:
            mine, theirs = found[index]["samples"][name], expected["samples"][name]
            assert [one["resps"] for one in mine] == [one["resps"] for one in theirs]
            assert [one["exact_match"] for one in mine] == [one["exact_match"] for one in theirs]


def test_the_tasks_score_as_the_lab_does(tasks):
    lab = shipped()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts["nela"][0], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(lab.base)
    (found,) = evaluate(Sweep([plan]), tokenizer, ["lab_problem_nela"], include=[tasks])
    asked = examples(lab.world, "nela", "problem", "test", N)
    (right,) = sweep_correct(Sweep([plan]), tokenizer, asked)
    rows = sorted(found["samples"]["lab_problem_nela"], key=lambda one: one["doc_id"])
    assert [bool(one["exact_match"]) for one in rows] == right.tolist()


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
        "simultaneous training", "joint training", "swap of soups", "TIES, density 0.5",
        "swap, chosen on development",
    ):  # fmt: skip
        # Each language, also in the source language; and both together.
        assert tables.count(f"| {treatment} |") == 5


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    mine = tmp_path / "inputs" / "study.yaml"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(StudyError, match="is not a folder of `lab study`; choose another output"):
        write_study(tmp_path, runs=1, n=8, steps=2)
    assert mine.read_text() == "mine"
    assert sorted(tmp_path.rglob("*")) == [mine.parent, mine]


def test_another_number_of_questions_can_be_asked(tmp_path):
    asked = tmp_path / "inputs" / "tasks" / "lab_problem_nela.jsonl"
    for n, lines in ((8, 10), (16, 20)):
        write_study(tmp_path, runs=1, n=n, steps=2)
        assert len(asked.read_text().splitlines()) == lines
