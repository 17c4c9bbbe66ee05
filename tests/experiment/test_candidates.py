"""Random draws from the large space: their compositions, their scores and their report."""

from __future__ import annotations

import json

import pytest
from lm_eval_world import write_sweep
from typer.testing import CliRunner

import layerswap as ls
from layerswap.checkpoint import Place
from layerswap.cli import app
from layerswap.compose import Blend
from layerswap.experiment.answers import values_of
from layerswap.experiment.conditions import CHOSEN, OUTSIDE, Condition, draw_plan, draw_sources
from layerswap.experiment.evaluator import DEVELOPMENT, Evaluator
from layerswap.experiment.spec import Grid, RandomDraws, read_sweep
from layerswap.experiment.sweeps import run_sweep

LAYERS = 4


def test_a_range_that_runs_backwards():
    with pytest.raises(ValueError, match="8-0 runs backwards; write 0-8"):
        Grid.model_validate({"bottom": "8-0", "top": 0})


def test_sources_become_the_composition_that_they_name(world):
    start = ls.swap(task=world["task"], language=world["language"], bottom=1, top=1)
    spec = RandomDraws(draws=1, each="layer_and_role", take=["task", "language", 0.25])
    [drawn] = draw_sources(spec, LAYERS)
    sources = dict.fromkeys(drawn, "task") | {
        OUTSIDE: "language", "1.attention": "language", "1.mlp": "0.25", "2.mlp": "language",
    }  # fmt: skip
    composition = draw_plan(start, sources).composition
    language, task = Blend.of("language"), Blend.of("task")
    quarter = Blend.of({"task": 0.75, "language": 0.25})
    assert composition[Place(None, "embedding")] == composition[Place(None, "head")] == language
    assert composition[Place(0, "mlp")] == composition[Place(0, "attention")] == task
    assert composition[Place(1, "attention")] == composition[Place(1, "norm")] == language
    assert composition[Place(1, "mlp")] == quarter
    assert composition[Place(2, "attention")] == task
    assert composition[Place(2, "mlp")] == language


def test_draws_are_distinct_seeded_and_of_the_whole_space():
    spec = RandomDraws(draws=30, take=["task", "language", 0.5], outside=["blend", "task"], seed=1)
    draws = draw_sources(spec, LAYERS)
    assert len({tuple(one.values()) for one in draws}) == 30
    assert draws == draw_sources(spec, LAYERS)
    assert draws != draw_sources(spec.model_copy(update={"seed": 2}), LAYERS)
    for place in ("0", "3"):
        assert {one[place] for one in draws} == {"task", "language", "0.5"}
    assert {one[OUTSIDE] for one in draws} == {"blend", "task"}
    assert len(draw_sources(RandomDraws(draws=200), LAYERS)) == 2**LAYERS
    assert len(draw_sources(RandomDraws(draws=15), LAYERS)) == 15


def test_neighbours_often_have_the_same_source():
    draws = draw_sources(RandomDraws(draws=200, take=["task", "language"]), 32)
    equal = [one[str(i)] == one[str(i + 1)] for one in draws for i in range(31)]
    assert sum(equal) / len(equal) == pytest.approx(0.75 + 0.25 / 2, abs=0.02)


@pytest.mark.slow
def test_draws_on_tasks_from_the_file_to_its_folder(world, tmp_path):
    random = {"draws": 12, "take": ["task", "language", 0.5], "outside": ["blend", "language"]}
    path = write_sweep(
        world, tmp_path / "sweep.yaml", grid=None, random=random,
        screen={"documents": 2, "finalists": 3},
    )  # fmt: skip
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    facts = json.loads((out / "board.json").read_text())
    assert facts["compositions_tried"] == len(facts["draws"]) == 12
    assert facts["screening"] == {"candidates": 12, "finalists": 4, "first": 2, "documents": 3}
    assert [row["condition"] for row in facts["test"]] == [
        str(CHOSEN), "task expert", "language expert", "soup", "swap, default",
    ]  # fmt: skip
    assert facts["chosen"]["method"] == "draw"
    page = (out / "report.html").read_text()
    assert "The best draws" in page
    assert "Score by source" in page
    merged = ls.make_plan(ls.read_recipe(out / "best.yaml")).save(tmp_path / "merged")
    assert (merged / "model.safetensors").is_file()
    assert "The selected model is " in done.output


@pytest.mark.slow
def test_any_expert_of_the_recipe_can_be_taken(world, tmp_path):
    experts = {"task": str(world["task"]), "language": str(world["language"]),
               "both": {"merge": {"method": "slerp", "experts": ["task", "language"]}}}  # fmt: skip
    path = write_sweep(
        world, tmp_path / "sweep.yaml", recipe={"experts": experts, "swap": {}}, grid=None,
        random={"draws": 4, "take": ["task", "both"]},
    )  # fmt: skip
    board = run_sweep(*read_sweep(path))
    assert {source for one in board.sources.values() for source in one.values()} == {
        "blend", "task", "both",
    }  # fmt: skip
    assert board.worth["0"].keys() == {"task", "both"}
    scored = {row.condition for row in board.rows if row.split == DEVELOPMENT}
    assert scored == {*board.development, *board.competed} - {CHOSEN}


@pytest.mark.slow
def test_scores_of_draws_are_those_of_the_compositions(world, tmp_path):
    path = write_sweep(world, tmp_path / "sweep.yaml", grid=None, random=6)
    spec, recipe = read_sweep(path)
    board = run_sweep(spec, recipe)
    start = ls.make_plan(recipe)
    for one in list(board.development)[-2:]:
        alone = Condition("alone")
        evaluator = Evaluator(spec, {alone: draw_plan(start, board.sources[one])})
        rows = evaluator.rows(DEVELOPMENT, [alone])
        scores = values_of(rows, evaluator.measure(rows))[alone]
        assert scores.mean() == pytest.approx(board.development[one])
