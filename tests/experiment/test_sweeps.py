"""A sweep from its file to its folder, against scores computed by hand."""

from __future__ import annotations

import json
import sqlite3

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from lm_eval_world import write_sweep
from refusals import one_line
from typer.testing import CliRunner

import layerswap as ls
from layerswap.cli import app
from layerswap.compose.presets import Zones
from layerswap.experiment.answers import Answer, open_folder
from layerswap.experiment.conditions import (
    CHANCE,
    CHOSEN,
    DEFAULT,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
    grid_plans,
)
from layerswap.experiment.evaluator import Evaluator
from layerswap.experiment.spec import Grid, read_sweep
from layerswap.experiment.sweep_page import lead, sweep_report, write_result
from layerswap.experiment.sweeps import run_sweep
from layerswap.experiment.tables import scores_table
from layerswap.ground.errors import EvaluationError, RecipeError
from layerswap.report.stack import NOTHING_ON_TOP


def test_a_sweep_chooses_on_one_split_and_reports_on_the_other(world, tmp_path):
    lines: list[str] = []
    board = run_sweep(*read_sweep(write_sweep(world, tmp_path / "sweep.yaml")), log=lines.append)
    assert lines[0].startswith("6 compositions: ")
    assert len(board.development) == 6
    for task in ("maembe_choose", "maembe_generate"):
        development, test = (
            {r.document for r in board.rows if (r.split, r.task) == (split, task)}
            for split in ("development", "test")
        )
        assert development | test == set(range(5))
        assert not development & test
    assert board.measure == ("maembe_choose", "acc_norm", "none")
    for one, mean in board.development.items():
        scores = [
            r.score for r in board.rows
            if (r.split, r.condition, r.task, r.metric)
            == ("development", one, "maembe_choose", "acc_norm")
        ]  # fmt: skip
        assert len(scores) == 3
        assert mean == pytest.approx(np.mean(scores))
    assert board.development[board.chosen] == max(board.development.values())
    leads = board.default if board.selected == DEFAULT else board.chosen.zones
    assert board.best.recipe.swap.zones(4) == leads
    assert set(board.scores) == {CHOSEN, DEFAULT, SOUP, TASK_EXPERT, LANGUAGE_EXPERT, CHANCE}
    assert {len(scores) for scores in board.scores.values()} == {2}


def test_the_folder_holds_it_all_and_a_rerun_changes_nothing(world, tmp_path):
    path, out = write_sweep(world, tmp_path / "sweep.yaml"), tmp_path / "out"
    for _ in range(2):
        done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
        assert done.exit_code == 0, done.output
        found = {f.name: f.read_bytes() for f in out.iterdir() if "sqlite" not in f.name}
        assert set(found) == {"answers.parquet", "board.json", "best.yaml", "report.html"}
    summary = json.loads(found["board.json"])
    assert summary["compositions_tried"] == 6
    rows = pq.read_table(out / "answers.parquet").to_pylist()
    best = Condition.from_dict(summary["chosen"]).zones
    again = [r["score"] for r in rows
             if Condition.from_dict(r) == CHOSEN and r["metric"] == "acc_norm"]  # fmt: skip
    tested = {Condition.from_dict(row): row for row in summary["test"]}
    assert tested[CHOSEN]["mean"] == pytest.approx(np.mean(again))
    assert tested[SOUP]["selected_minus"]["n"] == 2
    plan = ls.make_plan(ls.read_recipe(out / "best.yaml"))
    leads = Zones(1, 1) if summary["selected"] == "swap, default" else best
    assert plan.recipe.swap.zones(4) == leads
    assert "The selected model is " in done.output
    page = found["report.html"].decode()
    assert f"<code>layerswap merge {out / 'best.yaml'} --out merged</code>" in page
    assert "Where each of 4 layers comes from" in page
    assert "Answers side by side" in page
    assert page.count("<article") == 2  # the test documents, with the answers of all models


def planted(scores):
    """A stand-in for `Evaluator.rows` with these scores by split and zones, of five documents."""

    def rows(self, split, conditions):
        found = []
        for one in conditions:
            zones = Zones(1, 1) if one == DEFAULT else one.zones
            right = scores[split].get(zones, 0)
            found += [
                Answer("", "t", i, "acc", "none", float(i < right), split=split, condition=one)
                for i in range(5)
            ]
        return found

    return rows


CASES = [
    ({"development": {Zones(2, 0): 5}, "test": {Zones(1, 1): 5}}, Zones(2, 0)),
    ({"development": {Zones(2, 0): 3, Zones(1, 1): 2}, "test": {Zones(1, 1): 5}}, Zones(2, 0)),
    ({"development": {Zones(2, 0): 3, Zones(1, 1): 3}, "test": {Zones(2, 0): 5}}, Zones(1, 1)),
    ({"development": {Zones(1, 1): 5}, "test": {Zones(2, 0): 5}}, Zones(1, 1)),
]
"""Right answers by split and zones, and the zones that are to be saved and headed."""


@pytest.mark.parametrize(("scores", "zones"), CASES)
@pytest.mark.parametrize("grid", [{"bottom": "0-2", "top": [0, 1]}, {"bottom": [0, 2], "top": 0}])
def test_development_alone_decides_what_is_saved_and_headed(
    world, tmp_path, monkeypatch, scores, zones, grid
):
    """The default, (1, 1), is evaluated even if it is not in the grid."""
    monkeypatch.setattr(Evaluator, "rows", planted(scores))
    path = write_sweep(world, tmp_path / "sweep.yaml", grid=grid, choose_by={})
    board = run_sweep(*read_sweep(path))
    assert board.selected == (DEFAULT if zones == Zones(1, 1) else CHOSEN)
    assert board.best.recipe.swap.zones(4) == zones
    assert board.best.recipe.swap.bottom == zones.bottom
    named = "the default swap" if zones == Zones(1, 1) else "bottom 2, top 0"
    score = scores["test"].get(zones, 0) / 5
    above, _, rest = lead(board, tmp_path).partition("The selected model is ")
    assert rest.startswith(f"{named}, the best of ")
    assert " on the development documents. On 5 other documents, t acc is " in rest
    assert f"acc is {100 * score:.1f} [" in rest
    if score == 1 or (named == "the default swap" and board.chosen.zones != Zones(2, 0)):
        assert "above" not in above, "no other model was tested that answers more documents"
    else:
        best = "default swap" if named != "the default swap" else "chosen swap"
        assert above.endswith(f"{tmp_path}/above.yaml --out merged writes the {best}. ")
    texts = " ".join(section.text for section in sweep_report(board).sections)
    clear = scores["development"].get(Zones(2, 0)) == 5 and grid["top"] != 0
    assert (NOTHING_ON_TOP in texts) == clear, "not of ties, nor without a layer on top to compare"


def test_an_expert_is_saved_if_it_is_best_and_what_the_test_shows_above_it_is_written(
    world, tmp_path, monkeypatch
):
    """Models without zones are right on all development documents, and on no test document."""
    scores = {"development": {None: 5, Zones(1, 1): 4}, "test": {Zones(1, 1): 5}}
    monkeypatch.setattr(Evaluator, "rows", planted(scores))
    path = write_sweep(world, tmp_path / "sweep.yaml", choose_by={})
    board = run_sweep(*read_sweep(path))
    assert board.selected == TASK_EXPERT
    facts = write_result(board, tmp_path)
    assert facts["selected"] == "task expert"
    assert facts["development_lead"] is None, "the chosen composition is the default swap"
    table = scores_table(board)
    assert f"minus {CHOSEN}" not in table.columns
    assert table.caption.endswith(f" The same model as {DEFAULT}: {CHOSEN}.")
    assert facts["above"] == ["swap, chosen on development", "swap, default"]
    competed = {str(Condition.from_dict(row)): row["mean"] for row in facts["competed"]}
    assert competed["task expert"] == competed["soup"] == 1.0
    assert competed["swap, default"] == 0.8
    assert ls.read_recipe(tmp_path / "best.yaml").soup.experts == ["task"]
    assert ls.read_recipe(tmp_path / "above.yaml").swap.bottom == 1
    scores["test"][None] = 5
    write_result(run_sweep(*read_sweep(path)), tmp_path)
    assert not (tmp_path / "above.yaml").exists()


MISTAKES = [
    ({"grid": {"bottom": "0-2", "top": -1}}, "grid.top[0]"),
    ({"grid": {"bottom": "a", "top": 0}}, "grid.bottom"),
    ({"tasks": []}, "tasks: write at least one"),
    ({"grid": {"bottom": "8-0", "top": 0}}, "8-0 runs backwards; write 0-8"),
    ({"tasks": ["a", "a"]}, "tasks: 'a' is given twice"),
    ({"development": 1.0}, "development"),
    ({"metrics": 1}, "metrics"),
    ({"allow_code": True}, "allow_code"),
    ({"include": ["nowhere"]}, "include: "),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_mistakes_in_the_file(world, tmp_path, changes, message):
    path = write_sweep(world, tmp_path / "sweep.yaml", **changes)
    assert message in one_line(RecipeError, read_sweep, path)


def test_an_unknown_measure_is_refused_before_the_documents_are_asked(world, tmp_path):
    path = write_sweep(world, tmp_path / "s.yaml", choose_by={"metric": "acc_morn"})
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
    assert str(done.exception) == "choose_by: no metric 'acc_morn'; did you mean 'acc_norm'?"
    assert [one.name for one in out.glob("answers*")] == ["answers.sqlite"]
    with sqlite3.connect(out / "answers.sqlite") as store:
        compositions = store.execute("SELECT COUNT(DISTINCT composition) FROM answers").fetchone()
    assert compositions == (1,)


def test_a_sweep_of_labels_shows_balanced_measures(world, tmp_path):
    sweep = write_sweep(world, tmp_path / "s.yaml", tasks=["maembe_label"], choose_by={},
                        english="maembe_label")  # fmt: skip
    asked = ["sweep", str(sweep), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert "balanced accuracy, %" in done.output
    board = json.loads((tmp_path / "out" / "board.json").read_text())
    one = next(row for row in board["test"] if row["selected_minus"])
    assert set(one["selected_minus_balanced"]) == {"balanced_accuracy", "macro_f1"}
    assert 0 <= one["macro_f1"]["mean"] <= 1
    expert = next(row for row in board["test"] if row["condition"] == "task expert")
    assert board["english"]["parallel"]
    assert board["english"]["mean"] == expert["mean"]
    assert "In English, on the same documents, the task expert reaches " in done.output


def test_the_task_in_english_may_have_other_documents(world, tmp_path):
    settings = {"tasks": ["maembe_label"], "choose_by": {}}
    path = write_sweep(world, tmp_path / "s.yaml", english="maembe_choose", **settings)
    board = run_sweep(*read_sweep(path))
    assert board.english is not None
    assert not board.english.parallel
    assert board.english.score.n == 2
    path = write_sweep(world, tmp_path / "s.yaml", english="maembe_generate", **settings)
    said: list[str] = []
    assert run_sweep(*read_sweep(path), log=said.append).english is None
    assert [line for line in said if line.startswith("english: no score by acc (none), as in the")]
    path = write_sweep(world, tmp_path / "s.yaml", english="maembe_chose", **settings)
    with pytest.raises(EvaluationError, match="maembe_chose"):
        run_sweep(*read_sweep(path))


def test_a_folder_of_something_else_is_left_alone(world, tmp_path):
    path = write_sweep(world, tmp_path / "sweep.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert "not written by `layerswap sweep`; choose another folder" in str(done.exception)
    assert open_folder(tmp_path / "new" / "sweep", "sweep").is_dir()


# --- from Python ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sweep_from_python_is_that_of_the_file(world, tmp_path):
    spec, recipe = read_sweep(write_sweep(world, tmp_path / "sweep.yaml", development=0.5, seed=3))
    by_file = run_sweep(spec, recipe)
    plan = ls.swap(task=world["task"], language=world["language"])
    settings = {"tasks": spec.tasks, "include": world["tasks"], "seed": 3}
    chosen = {"task": "maembe_choose", "metric": "acc_norm"}
    found = ls.sweep(plan.grid(bottom=range(3), top=range(2)), choose_by=chosen, **settings)
    assert found.development == by_file.development
    assert found.intervals == by_file.intervals
    assert found.best.composition == by_file.best.composition
    table = found.to_pandas()
    assert len(table) == len(by_file.rows)
    assert set(table[table.model == str(CHOSEN)].split) == {"test"}
    page = found.report(tmp_path / "report.html")
    assert page.read_text().startswith("<!DOCTYPE html>")
    shown = repr(found)
    assert "language expert" in shown
    assert len(shown) < 4000


@pytest.mark.slow
def test_a_sweep_takes_one_or_many_plans_recipes_and_paths(world, tmp_path):
    recipe = {"experts": {name: str(world[name]) for name in ("task", "language")}, "swap": {}}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    settings = {"tasks": "maembe_choose", "include": str(world["tasks"])}
    plan = ls.make_plan(ls.read_recipe(path))
    for given in (path, str(path), plan, [plan], [ls.read_recipe(path), str(path)]):
        found = ls.sweep(given, **settings)
        assert [str(one) for one in found.development] == ["swap 1,1,0,0"]
    soup = ls.soup({"task": world["task"], "language": world["language"]})
    found = ls.sweep([soup, plan], **settings)
    assert [str(one) for one in found.development] == ["composition, 0", "swap 1,1,0,0"]


def test_outside_is_an_axis_of_the_grid(world):
    grid = Grid(bottom=[0, 1], top=1, outside=["task", "language"])
    start = ls.swap(task=world["task"], language=world["language"])
    plans = grid_plans(grid, start, log=lambda line: None)
    assert [str(one) for one in plans] == [
        "swap 0,1,0,0, outside task", "swap 1,1,0,0, outside task",
        "swap 0,1,0,0, outside language", "swap 1,1,0,0, outside language",
    ]  # fmt: skip
    assert [plan.recipe.swap.outside for plan in plans.values()] == [c.outside for c in plans]


def test_mistakes_in_a_sweep_from_python(world):
    plan = ls.swap(task=world["task"], language=world["language"])
    for settings, message in (
        ({"tasks": "maembe_choose", "developmnt": 0.5}, "developmnt.*development"),
        ({}, "tasks: write at least one"),
        ({"tasks": "maembe_choose", "seed": -1}, "seed"),
    ):
        with pytest.raises(RecipeError, match=message):
            ls.sweep(plan, **settings)
    with pytest.raises(EvaluationError, match="no composition to evaluate"):
        ls.sweep([], tasks="maembe_choose")
    soup = ls.soup([world["task"], world["language"]])
    with pytest.raises(EvaluationError, match=r"english: needs a task expert to ask; give a swap"):
        ls.sweep(soup, tasks="maembe_choose", include=world["tasks"], english="maembe_label")
