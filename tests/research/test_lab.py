"""The scripts that build the lab draw the shipped questions, and train models that are resumed."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import pytest
from research.lab.build import RECORDED_EXAMPLES, build
from research.lab.study import shipped_questions, write_study
from research.lab.tasks import examples
from research.lab.train import ModelShape, Training, Trainings, collate, encode
from research.lab.world import WorldSettings, make_tokenizer, make_world, settings_of

from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import read_record, shipped
from layerswap.lab.questions import questions
from layerswap.study.journal import StudyJournal
from layerswap.study.kinds import step_functions
from layerswap.study.plan import plan_study
from layerswap.study.runner import run_graph
from layerswap.study.spec import read_study

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


def test_training_problems_are_no_test_problems_and_every_word_is_known():
    world = make_world()
    tokenizer = make_tokenizer(world)
    train = examples(world, "furo", "problem", "train", 400)
    test = examples(world, "furo", "problem", "test", 400)
    assert not {one.prompt for one in train} & {one.prompt for one in test}
    ids = tokenizer([one.prompt for one in train])["input_ids"]
    assert not any(tokenizer.unk_token_id in row for row in ids)


def test_the_loss_is_on_the_completion_and_its_end_only():
    world = make_world()
    tokenizer = make_tokenizer(world)
    asked = examples(world, "furo", "problem", "train", 8)
    rows = encode(tokenizer, asked)
    for row, example in zip(rows, asked, strict=True):
        learned = [i for i in row["labels"] if i != -100]
        assert tokenizer.decode(learned) == example.completion + "</s>"
    batch = collate(rows, tokenizer.pad_token_id)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape


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


@pytest.mark.slow
def test_the_labs_study_runs_from_its_own_files(tmp_path):
    path = write_study(tmp_path, runs=1, n=8, steps=2)
    graph = plan_study(read_study(path), path.parent)
    summary = run_graph(graph, tmp_path / "study", step_functions())
    assert not summary.failed, [entry.why for entry in summary.failed]
    tables = (StudyJournal(tmp_path / "study", graph).folder("tables") / "tables.md").read_text()
    for treatment in (
        "simultaneous training", "joint training", "swap of soups", "TIES, density 0.5",
        "swap, chosen on development",
    ):  # fmt: skip
        # Each language, also in the source language; and both together.
        assert tables.count(f"| {treatment} |") == 5


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
