"""The scripts that build the lab draw the shipped questions, and train models that are resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
from research.lab.build import RECORDED_EXAMPLES, build
from research.lab.datasets import base_stream, language_stream, take, task_stream
from research.lab.scoring import score_folder
from research.lab.study import shipped_questions, write_study
from research.lab.tasks import TASK_STEPS, examples, split_of
from research.lab.train import ModelShape, Training, Trainings
from research.lab.world import WorldSettings, make_world, settings_of

from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import read_record, shipped
from layerswap.lab.questions import questions
from layerswap.study.plan import plan_study
from layerswap.study.spec import read_study

WORLD = make_world()
SCARCE = {language.name for language in WORLD.scarce}
TINY = replace(
    Trainings(),
    shape=ModelShape(layers=2, hidden=16, heads=2, mlp=16),
    base=Training(steps=3, learning_rate=1e-3, batch=4, warmup=1),
    task=Training(steps=2, learning_rate=1e-3, batch=4, warmup=1),
    language=Training(steps=2, learning_rate=1e-3, batch=4, warmup=1),
    joint=Training(steps=4, learning_rate=1e-3, batch=4, warmup=1),
)


def test_the_shipped_questions_are_those_that_the_script_draws():
    drawn: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for row in shipped_questions():
        key = row["skill"], row["language"], row["split"]
        drawn.setdefault(key, []).append((row["prompt"], row["answer"]))
    assert len(drawn) == 8
    for key, rows in drawn.items():
        assert [*map(tuple, questions(*key))] == rows


def test_shipped_models_were_made_with_the_defaults():
    record = shipped().record
    assert settings_of(record) == WorldSettings()
    assert record["trainings"] == json.loads(json.dumps(asdict(Trainings())))


@pytest.fixture(scope="module")
def streams():
    """The first rows that the base, the task expert and the language experts train on."""
    mixes = Trainings()
    return {
        "base": take(base_stream(WORLD, mixes.base_mix, seed=0), 9000),
        "task": take(task_stream(WORLD, seed=1), 3000),
        **{
            name: take(language_stream(WORLD, name, mixes.language_mix, seed=1), 3000)
            for name in sorted(SCARCE)
        },
    }


def test_only_the_task_expert_trains_on_the_task_and_in_the_source_language(streams):
    for name, stream in streams.items():
        tasks = [one for one in stream if (one.skill, one.steps) == ("problem", TASK_STEPS)]
        assert len(tasks) == (len(stream) if name == "task" else 0)
    assert {one.language for one in streams["task"]} == {WORLD.source.name}
    for name in SCARCE:
        assert not any(one.answer.isdigit() for one in streams[name])
    problems = [one for one in streams["base"] if one.skill == "problem"]
    for name in SCARCE:
        assert 0 < sum(one.language == name for one in problems) / len(problems) < 0.08


def test_no_tested_problem_is_in_any_training_stream(streams):
    trained = {one.meaning for stream in streams.values() for one in stream}
    assert {split_of(meaning) for meaning in trained} == {"train"}
    for language in WORLD.languages:
        tested = examples(WORLD, language, "problem", "test", 500)
        assert not trained & {one.meaning for one in tested}


def test_the_answer_of_a_problem_is_what_its_clauses_leave():
    for example in examples(WORLD, "furo", "problem", "test", 200):
        clauses = [clause.split() for clause in example.meaning.split("; ")]
        changes = (-int(n) if verb.startswith("lose") else int(n) for _, verb, n, _ in clauses)
        assert example.answer == str(sum(changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["base", "task-1", "language-nela-1", "language-furo-1"])
def test_a_shipped_model_reaches_the_scores_in_the_record(name):
    lab, n = shipped(), 100
    for language, recorded in lab.record["models"][name]["development"].items():
        scores = score_folder(lab.base.parent / name, language, "development", n)
        for measure, right in scores.items():
            noise = 4 * (recorded[measure] * (1 - recorded[measure]) / n) ** 0.5
            assert right.mean() == pytest.approx(recorded[measure], abs=noise + 0.02)


@pytest.mark.slow
def test_a_build_leaves_a_record_and_is_resumed_to_equal_bytes(tmp_path, monkeypatch):
    for name in ("RECORDED_EXAMPLES", "TEST_QUESTIONS", "SHOWN"):
        monkeypatch.setattr(f"research.lab.build.{name}", 8)
    seen: list[tuple[str, int, int]] = []
    how = {"trainings": TINY, "runs": 1, "progress": lambda *what: seen.append(what)}
    build(tmp_path, seed=3, **how)
    record = read_record(tmp_path)
    names = ["base", "task-1", "language-nela-1", "language-furo-1", "joint-nela", "joint-furo"]
    assert list(record["models"]) == names
    weights = tmp_path / "task-1" / "model.safetensors"
    first = weights.read_bytes()
    del record["models"]["task-1"]
    (tmp_path / "record.json").write_text(json.dumps(record))
    seen.clear()
    build(tmp_path, seed=3, **how)
    assert {name for name, _, _ in seen} == {"task-1"}
    assert weights.read_bytes() == first
    with pytest.raises(RecipeError, match="holds a lab whose seed differs"):
        build(tmp_path, seed=4, trainings=TINY, runs=1)


def test_the_study_plans_from_its_own_files(tmp_path):
    path = write_study(tmp_path, runs=1, n=8, steps=2)
    graph = plan_study(read_study(path), path.parent)
    assert {"evaluate/nela", "evaluate/furo"} <= {step.name for step in graph}
    assert len((tmp_path / "tasks" / "lab_problem_nela.jsonl").read_text().splitlines()) == 10


@pytest.mark.slow
@pytest.mark.retrain
def test_rebuilt_experts_reach_the_recorded_scores(tmp_path):
    lab = shipped()
    recorded = lab.record["models"]
    kept = {name: recorded[name] for name in ("base", "joint-nela", "joint-furo")}
    record = {**lab.record, "models": kept, "runs": 1}
    (tmp_path / "record.json").write_text(json.dumps(record))
    shutil.copytree(lab.base, tmp_path / "base")
    made = build(tmp_path, seed=record["seed"], runs=1)["models"]
    assert set(made) == {*kept, "task-1", "language-nela-1", "language-furo-1"}
    for name, model in made.items():
        for language, scores in model["development"].items():
            for measure, score in recorded[name]["development"][language].items():
                noise = 4 * (2 * score * (1 - score) / RECORDED_EXAMPLES) ** 0.5
                assert scores[measure] == pytest.approx(score, abs=noise + 0.02)
