"""A sweep from its file to its folder, against scores computed by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from lm_eval_world import write_sweep
from typer.testing import CliRunner

import layerswap as ls
from layerswap.cli import app
from layerswap.compose import Zones, swap
from layerswap.engine.trie import LayerCounts
from layerswap.errors import EvaluationError, RecipeError
from layerswap.report.sweeps import lead
from layerswap.search.conditions import (
    CHOSEN,
    DEFAULT,
    LANGUAGE_EXPERT,
    SOUP,
    TASK_EXPERT,
    Condition,
)
from layerswap.search.evaluator import DocumentScore, Evaluator, objectives
from layerswap.search.grid import GridResult, chosen_by_signal, run_sweep
from layerswap.search.spec import read_sweep


def test_a_sweep_chooses_on_one_split_and_reports_on_the_other(world, tmp_path):
    spec, recipe = read_sweep(write_sweep(world, tmp_path / "sweep.yaml"))
    board = run_sweep(spec, recipe)
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
    assert set(board.scores) == {CHOSEN, DEFAULT, SOUP, TASK_EXPERT, LANGUAGE_EXPERT}
    assert {len(scores) for scores in board.scores.values()} == {2}


def test_the_folder_holds_it_all_and_a_rerun_changes_nothing(world, tmp_path):
    path, out = write_sweep(world, tmp_path / "sweep.yaml"), tmp_path / "out"
    for _ in range(2):
        done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
        assert done.exit_code == 0, done.output
        found = {f.name: f.read_bytes() for f in out.iterdir() if "sqlite" not in f.name}
        assert set(found) == {"scores.parquet", "board.json", "best.yaml", "report.html"}
    summary = json.loads(found["board.json"])
    assert summary["compositions_tried"] == 6
    rows = pq.read_table(out / "scores.parquet").to_pylist()
    best = Condition.from_dict(summary["chosen"]).zones
    again = [r["score"] for r in rows
             if Condition.from_dict(r) == CHOSEN and r["metric"] == "acc_norm"]  # fmt: skip
    tested = {Condition.from_dict(row): row for row in summary["test"]}
    assert tested[CHOSEN]["mean"] == pytest.approx(np.mean(again))
    assert tested[SOUP]["selected_minus"]["n"] == 2
    plan = ls.make_plan(ls.read_recipe(out / "best.yaml"))
    leads = Zones(1, 1) if summary["selected"] == "swap, default" else best
    assert plan.recipe.swap.zones(4) == leads
    assert "The best is " in done.output


def planted(scores):
    """A stand-in for `Evaluator.rows` with these scores by split and zones, of five documents."""

    def rows(self, split, conditions, *given, **named):
        found = []
        for one in conditions:
            zones = Zones(1, 1) if one == DEFAULT else one.zones
            right = scores[split].get(zones, 0)
            found += [
                DocumentScore(split, one, "t", "acc", "none", i, float(i < right)) for i in range(5)
            ]
        return found

    return rows


CASES = [
    ({"development": {Zones(2, 0): 5}, "test": {Zones(1, 1): 5}}, Zones(2, 0)),
    ({"development": {Zones(2, 0): 3, Zones(1, 1): 2}, "test": {Zones(2, 0): 5}}, Zones(1, 1)),
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
    assert board.best_recipe["swap"]["bottom"] == zones.bottom
    named = "the swap, default" if zones == Zones(1, 1) else "bottom 2, top 0"
    score = scores["test"].get(zones, 0) / 5
    assert lead(board).startswith(f"The best is {named}. On 5 documents that it was not chosen on")
    assert f"acc is {score:.3f} [" in lead(board)


def test_sensitivity_is_the_difference_of_means():
    grid = {Zones(b, u): 0.1 * b + 0.01 * u for b in range(3) for u in range(2)}
    board = GridResult(
        {}, best=SimpleNamespace(composition=swap(4)), rows=[], measure=None, chosen_by="t",
        development={Condition("swap", zones=z): score for z, score in grid.items()},
        counts=LayerCounts(1, 1, 1),
    )  # fmt: skip
    found = board.sensitivity
    first = np.mean([v for z, v in grid.items() if z.bottom > 0])
    rest = np.mean([v for z, v in grid.items() if z.bottom == 0])
    assert found[0] == pytest.approx(first - rest)
    assert found[2] is None
    assert found[3] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": {"bottom": "0-2", "top": -1}}, "grid.top[0]"),
        ({"grid": {"bottom": "a", "top": 0}}, "grid.bottom"),
        ({"tasks": []}, "tasks: name at least one"),
        ({"grid": None}, "give either a grid or a search"),
        ({"without_labels": {"by": "agreement"}}, "agreement needs `prompts`"),
        ({"without_labels": {}}, "give prompts (with their parallel) or text to choose by"),
        ({"without_labels": {"text": "nowhere.txt"}}, "without_labels.text: "),
        ({"without_labels": {"text": "x", "answer": "("}}, "not a regular expression"),
        ({"halving": {"first": 1}}, "halving.first"),
        ({"grid": None, "search": {"take": ["task"]}}, "search.take"),
        ({"grid": None, "search": {"take": ["task", 1.5]}}, "1.5 is no share"),
        ({"tasks": ["a", "a"]}, "task 'a' is there twice"),
        ({"development": 1.0}, "development"),
        ({"metrics": 1}, "metrics"),
        ({"include": ["nowhere"]}, "include: "),
    ],
)
def test_mistakes_in_the_file(world, tmp_path, changes, message):
    with pytest.raises(RecipeError) as caught:
        read_sweep(write_sweep(world, tmp_path / "sweep.yaml", **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_of_something_else_is_left_alone(world, tmp_path):
    path = write_sweep(world, tmp_path / "sweep.yaml")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert "is no sweep's folder; choose another output" in str(done.exception)


# --- choosing in other ways ----------------------------------------------------------------------


@pytest.fixture
def texts(tmp_path):
    """Prompts in two languages, line by line, and plain text."""
    target = [f"Asha ana maembe {n} na Juma ana 3. Jumla ni ngapi?" for n in range(1, 7)]
    source = [f"Asha has {n} mangoes and Juma has 3. How many in all?" for n in range(1, 7)]
    for name, lines in (("sw.txt", target), ("en.txt", source), ("plain.txt", target[:3])):
        (tmp_path / name).write_text("\n".join(lines))
    return tmp_path


@pytest.mark.slow
def test_a_race_gives_the_same_best_and_says_what_it_saved(world, tmp_path):
    whole = run_sweep(*read_sweep(write_sweep(world, tmp_path / "a.yaml")))
    said: list[str] = []
    path = write_sweep(world, tmp_path / "b.yaml", halving={"first": 2, "error": 0.1})
    board = run_sweep(*read_sweep(path), log=said.append)
    assert board.race is not None
    assert board.race.rounds == (2, 3)
    assert board.chosen == whole.chosen
    assert board.development == whole.development, "so few documents let nothing leave"
    assert any("compositions were scored on all 3 examples" in line for line in said)


@pytest.mark.parametrize(
    "by", ["agreement", "consensus", "confidence", "self_consistency", "fluency", "closeness"]
)
def test_a_choice_without_labels_and_without_tasks(world, texts, by):
    signals = {"by": by, "prompts": "sw.txt", "parallel": "en.txt", "text": "plain.txt",
               "answer": "[0-9a-z]", "max_new_tokens": 4}  # fmt: skip
    path = write_sweep(world, texts / "sweep.yaml", tasks=[], without_labels=signals, choose_by={})
    out = texts / "out"
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    facts = json.loads((out / "board.json").read_text())
    assert facts["chosen_by"] == f"{by} (no labels)"
    assert facts["test"] == []
    values = {(d["bottom"], d["top"]): d["mean"] for d in facts["development"]}
    best = facts["chosen"]
    assert values[best["bottom"], best["top"]] == max(values.values())
    assert "No task was given to compare it on." in done.output
    assert (out / "report.html").is_file()


@pytest.mark.slow
def test_the_default_signal_is_the_first_that_the_files_allow(world, texts):
    chosen = {}
    for name, files in {
        "a": {"prompts": "sw.txt", "parallel": "en.txt"},
        "b": {"prompts": "sw.txt"},
        "c": {"text": "plain.txt"},
    }.items():
        signals = {**files, "max_new_tokens": 3}
        path = write_sweep(world, texts / f"{name}.yaml", without_labels=signals)
        board = run_sweep(*read_sweep(path))
        chosen[name] = board.chosen_by
        assert board.measure == ("maembe_choose", "acc_norm", "none")
        assert CHOSEN in board.scores
    assert chosen == {
        "a": "agreement (no labels)",
        "b": "consensus (no labels)",
        "c": "fluency (no labels)",
    }


@pytest.mark.slow
def test_ranks_of_tasks_and_signals_together(world, texts):
    signals = {"by": ["tasks", "fluency"], "text": "plain.txt"}
    path = write_sweep(world, texts / "sweep.yaml", without_labels=signals)
    board = run_sweep(*read_sweep(path))
    assert board.chosen_by == "mean rank of tasks, fluency (no labels)"
    assert all(0 < value <= 1 for value in board.development.values())


def test_files_that_are_not_parallel(world, texts):
    signals = {"by": "agreement", "prompts": "sw.txt", "parallel": "plain.txt"}
    path = write_sweep(world, texts / "sweep.yaml", without_labels=signals)
    with pytest.raises(EvaluationError, match=r"plain.txt has 3 prompts and .*sw.txt 6"):
        run_sweep(*read_sweep(path))


def test_memory_is_told_before_the_work(world, tmp_path):
    said: list[str] = []
    run_sweep(*read_sweep(write_sweep(world, tmp_path / "sweep.yaml")), log=said.append)
    assert said[0].startswith("6 compositions: ")
    assert any(line.startswith("scoring 16 at a time with 6 compositions: about") for line in said)
    assert any(line.startswith("generating 42 at a time with 6 compositions:") for line in said)


# --- from Python ---------------------------------------------------------------------------------


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
    assert set(table[table.composition == str(CHOSEN)].split) == {"test"}
    page = found.report(tmp_path / "report.html")
    assert page.read_text().startswith("<!DOCTYPE html>")
    shown = found._repr_html_()
    assert "swap, chosen on development" in shown
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


def test_outside_is_an_axis_of_the_grid(world, tmp_path):
    grid = {"bottom": [0, 1], "top": 1, "outside": ["task", "language"]}
    board = run_sweep(*read_sweep(write_sweep(world, tmp_path / "sweep.yaml", grid=grid)))
    assert [str(one) for one in board.development] == [
        "swap 0,1,0,0, outside task", "swap 1,1,0,0, outside task",
        "swap 0,1,0,0, outside language", "swap 1,1,0,0, outside language",
    ]  # fmt: skip
    selected = board.chosen.outside if board.selected == CHOSEN else "blend"
    assert board.best.recipe.swap.outside == selected


def test_mistakes_in_a_sweep_from_python(world):
    plan = ls.swap(task=world["task"], language=world["language"])
    for settings, message in (
        ({"tasks": "maembe_choose", "developmnt": 0.5}, "developmnt.*development"),
        ({}, "tasks: name at least one"),
        ({"tasks": "maembe_choose", "seed": -1}, "seed"),
    ):
        with pytest.raises(RecipeError, match=message):
            ls.sweep(plan, **settings)
    with pytest.raises(EvaluationError, match="no composition to evaluate"):
        ls.sweep([], tasks="maembe_choose")


def test_a_signal_that_tells_nothing_apart_takes_the_default():
    grid = [Condition("swap", zones=Zones(b, u)) for b in range(3) for u in range(2)]
    said: list[str] = []
    assert chosen_by_signal(dict.fromkeys(grid, 0.5), Zones(1, 1), said.append) == grid[3]
    assert said[0] == "swap 0,0,0,0: 0.5000"
    assert "cannot tell the compositions apart; swap 1,1,0,0 is taken as the default" in said[-1]
    assert chosen_by_signal(dict.fromkeys(grid, 0.5), Zones(5, 2), said.append) == grid[0]
    values = {one: i / 10 for i, one in enumerate(grid)}
    assert chosen_by_signal(values, Zones(1, 1), said.append) == grid[5]
    assert said[-1] == "the best is 0.2500 above the median of 6 compositions"


def test_the_front_holds_what_no_other_beats_in_both():
    zones = [Condition("swap", zones=Zones(b, 0)) for b in range(6)]
    scores = dict(zip(zones, (0.5, 0.6, 0.6, 0.4, 0.5, 0.9), strict=True))
    shares = ([0.9], [0.7, 0.9], [0.6], [0.9], [0.8, 1.0], [])
    rows = [
        DocumentScore(split, one, "t", "answer_language_share", "none", document, share)
        for one, found in zip(zones, shares, strict=True)
        for document, share in enumerate(found)
        for split, share in (("development", share), ("test", 0.0))
    ]
    found = objectives(scores, rows)
    assert [one.zones.bottom for one in found] == [0, 1, 2, 3, 4]  # the last wrote too little
    assert {one.zones.bottom: both.front for one, both in found.items()} == {
        0: True, 1: True, 2: False, 3: False, 4: True,
    }  # fmt: skip
    assert found[zones[1]][:2] == (0.6, pytest.approx(0.8))


def test_a_sweep_reports_the_language_of_the_answers(world, tmp_path):
    changes = {"answer_language": "sw", "tasks": ["maembe_generate"],
               "gen_kwargs": "max_gen_toks=60,until=@@", "choose_by": {}}  # fmt: skip
    path, out = write_sweep(world, tmp_path / "sweep.yaml", **changes), tmp_path / "out"
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    board = json.loads((out / "board.json").read_text())
    rows = pq.read_table(out / "scores.parquet").to_pandas()
    shares = rows[(rows.metric == "answer_language_share") & (rows.split == "development")]
    means = shares.groupby("composition").score.mean()
    assert len(board["objectives"]) == len(means) > 1
    for one in board["objectives"]:
        name = str(Condition.from_dict(one))
        assert one["language"] == pytest.approx(means[name])
    assert any(one["front"] for one in board["objectives"])
    assert "Score and language" in (out / "report.html").read_text()
    assert board["compared_by"]["metric"] == "exact_match"


def test_an_answer_language_that_cannot_be_identified_is_refused(world, tmp_path):
    spec, recipe = read_sweep(write_sweep(world, tmp_path / "s.yaml", answer_language="chr"))
    with pytest.raises(EvaluationError, match="py3langid cannot identify 'chr'"):
        run_sweep(spec, recipe)
