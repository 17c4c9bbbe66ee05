"""Searches beyond the grid: what they may choose, that they learn, and that they go on."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import yaml
from lm_eval_world import write_sweep
from typer.testing import CliRunner

import layerswap as ls
from layerswap.checkpoint import Place
from layerswap.cli import app
from layerswap.compose import Blend
from layerswap.engine.trie import build_trie, count_layers, paths_of
from layerswap.errors import RecipeError
from layerswap.evaluation.response_cache import AnswerStore
from layerswap.report.sweeps import tell_search
from layerswap.search.conditions import Condition
from layerswap.search.evaluator import DEVELOPMENT, Evaluator, by_condition
from layerswap.search.spec import SearchSpec, read_sweep
from layerswap.search.tpe import OUTSIDE, Search, parameters, run_search, with_choices_plan

LAYERS = 4


@pytest.fixture
def start(world):
    return ls.swap(task=world["task"], language=world["language"], bottom=1, top=1)


def test_choices_become_the_composition_they_name(start):
    spec = SearchSpec(each="layer_and_role", take=["task", "language", 0.25], outside=["language"])
    choices = {
        key: "language" if key == OUTSIDE else "task" for key in parameters(spec, LAYERS)
    } | {"1.attention": "language", "1.mlp": "0.25", "2.mlp": "language"}
    made = with_choices_plan(start, choices).composition
    language, task = Blend.of("language"), Blend.of("task")
    quarter = Blend.of({"task": 0.75, "language": 0.25})
    assert made[Place(None, "embedding")] == made[Place(None, "head")] == language
    assert made[Place(0, "mlp")] == made[Place(0, "attention")] == task
    assert made[Place(1, "attention")] == made[Place(1, "norm")] == language
    assert made[Place(1, "mlp")] == quarter
    assert (made[Place(2, "attention")], made[Place(2, "mlp")]) == (task, language)


def planted(batch):
    """A score that only choices decide: the language expert in even layers, blended outside."""
    scores = {}
    for number, choices in batch.items():
        right = sum(
            value == ("blend" if key == OUTSIDE else ("language", "task")[int(key) % 2])
            for key, value in choices.items()
        )
        scores[number] = right / len(choices)
    return scores


def test_it_finds_what_was_planted(start):
    spec = SearchSpec(outside=["blend", "task"], trials=60, batch=10)
    trials = Search(spec, start).run(planted, None)
    assert len(trials) == 60
    assert max(trial.score for trial in trials) == 1.0
    early, late = trials[:20], trials[-20:]
    assert sum(t.score for t in late) > sum(t.score for t in early) * 1.1, "it learns"


def test_a_batch_begins_alike_and_so_costs_less(start):
    batches = []

    def score(batch):
        batches.append(list(batch.values()))
        return planted(batch)

    spec = SearchSpec(outside=["blend", "task"], trials=80, batch=16)
    Search(spec, start).run(score, None)
    for batch in batches[1:]:
        assert len({choices[OUTSIDE] for choices in batch}) == 1
        assert len({choices["0"] for choices in batch}) == 1
    together = naive = 0
    for batch in batches[1:]:
        plans = [with_choices_plan(start, choices) for choices in batch]
        counts = count_layers(build_trie(paths_of(plan.composition for plan in plans)))
        together, naive = together + counts.distinct, naive + counts.naive
    assert together < 0.5 * naive


@pytest.mark.slow
def test_a_search_that_was_killed_goes_on(start, tmp_path):
    spec, file = SearchSpec(trials=24, batch=8), tmp_path / "study.sqlite"
    calls = []

    def dies(batch):
        calls.append(len(batch))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return planted(batch)

    with pytest.raises(KeyboardInterrupt):
        Search(spec, start, file).run(dies, None)
    first = Search(SearchSpec(trials=8, batch=8), start, file).run(planted, None)
    assert len(first) == 8, "what was told is kept"
    more: list[int] = []

    def counts(batch):
        more.append(len(batch))
        return planted(batch)

    trials = Search(spec, start, file).run(counts, None)
    assert len(trials) == 24
    assert sum(more) == 16
    assert [t.choices for t in trials[:8]] == [t.choices for t in first]


def test_a_search_on_tasks_from_its_file_to_its_folder(world, tmp_path):
    search = {"take": ["task", "language", 0.5], "outside": ["blend", "language"], "trials": 12,
              "batch": 6}  # fmt: skip
    path = write_sweep(world, tmp_path / "sweep.yaml", grid=None, search=search)
    out = tmp_path / "out"
    for _ in range(2):
        done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(out)])
        assert done.exit_code == 0, done.output
    facts = json.loads((out / "board.json").read_text())
    assert facts["compositions_tried"] == 12
    scores = [trial["score"] for trial in facts["trials"]]
    assert facts["best_trial"]["score"] == max(scores)
    assert [row["condition"] for row in facts["test"]] == [
        "swap, chosen on development", "task expert", "language expert", "soup", "swap, default",
    ]  # fmt: skip
    plan = ls.make_plan(ls.read_recipe(out / "best.yaml"))
    merged = plan.save(tmp_path / "merged")
    assert (merged / "model.safetensors").is_file()
    assert "The best is " in done.output


@pytest.mark.slow
def test_a_search_that_estimates_most_trials_resumes(world, tmp_path):
    settings = {"calibration": 2, "documents": 1, "finalists": 1}

    def run(trials):
        path = write_sweep(
            world, tmp_path / "sweep.yaml", grid=None, tasks=["maembe_choose"],
            search={"trials": trials, "batch": 6}, item_response=settings,
        )  # fmt: skip
        store = AnswerStore(tmp_path / "answers.sqlite")
        return run_search(*read_sweep(path), study=tmp_path / "study.sqlite", store=store)

    found = run(12)
    went = found.screening
    assert went.documents == 3
    assert 1 in went.examples
    assert went.examples.count(3) == 3
    # What is chosen was scored on all documents.
    assert found.best_trial.score == max(went.estimates[i] for i in went.survivors)
    scored = Counter(row.condition for row in found.rows
                     if (row.split, row.metric) == (DEVELOPMENT, "acc"))  # fmt: skip
    assert sorted(scored.values()) == sorted(went.examples)
    assert "3 of" in tell_search(found).colophon
    # Resumed, the model is fitted to the same trials again, and says the same of the others.
    again = run(12)
    assert (again.trials, again.screening) == (found.trials, went)


def test_any_expert_of_the_recipe_can_be_taken(world, tmp_path):
    experts = {"task": str(world["task"]), "language": str(world["language"]),
               "both": {"merge": {"method": "slerp", "experts": ["task", "language"]}}}  # fmt: skip
    path = write_sweep(
        world,
        tmp_path / "sweep.yaml",
        recipe={"experts": experts, "swap": {}},
        grid=None,
        search={"take": ["task", "both"], "trials": 4, "batch": 4},
    )
    found = run_search(*read_sweep(path), store=AnswerStore())
    assert {c for t in found.trials for k, c in t.choices.items() if k != OUTSIDE} == {
        "task", "both",
    }  # fmt: skip
    assert yaml.safe_dump(found.best_recipe)


def test_an_expert_that_the_recipe_does_not_have(world, tmp_path):
    path = write_sweep(
        world, tmp_path / "sweep.yaml", grid=None, search={"take": ["task", "nobody"], "trials": 2}
    )
    with pytest.raises(
        RecipeError, match="no expert 'nobody' in the recipe; it has language, task"
    ):
        read_sweep(path)
    done = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert done.exit_code
    assert not (tmp_path / "out").exists()


def test_scores_of_trials_are_those_of_the_compositions(world, tmp_path):
    search = {"take": ["task", "language"], "trials": 6, "batch": 3}
    path = write_sweep(world, tmp_path / "sweep.yaml", grid=None, search=search)
    spec, recipe = read_sweep(path)
    found = run_search(spec, recipe)
    start = ls.make_plan(recipe)
    for trial in found.trials[-2:]:
        one = Condition("alone")
        evaluator = Evaluator(spec, {one: with_choices_plan(start, trial.choices)})
        rows = evaluator.rows(DEVELOPMENT, [one])
        scores = by_condition(rows, evaluator.measure(rows))[one]
        assert scores.mean() == pytest.approx(trial.score)
