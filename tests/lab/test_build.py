"""Building: small models from the real code path; what is finished is not made again."""

import json
from dataclasses import replace

import pytest

from layerswap.ground.errors import RecipeError
from layerswap.lab.assets import open_lab, read_record, settings_of
from layerswap.lab.build import build
from layerswap.lab.train import ModelShape, Training, Trainings, collate, encode
from layerswap.lab.world import WorldSettings

TINY = replace(
    Trainings(),
    shape=ModelShape(layers=2, hidden=16, heads=2, mlp=16),
    base=Training(steps=3, learning_rate=1e-3, batch=4, warmup=1),
    task=Training(steps=2, learning_rate=1e-3, batch=4, warmup=1),
    language=Training(steps=2, learning_rate=1e-3, batch=4, warmup=1),
    joint=Training(steps=4, learning_rate=1e-3, batch=4, warmup=1),
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    patch = pytest.MonkeyPatch()
    for name in ("RECORDED_EXAMPLES", "TEST_QUESTIONS", "SHOWN"):
        patch.setattr(f"layerswap.lab.build.{name}", 8)
    out = tmp_path_factory.mktemp("lab")
    seen = []
    build(out, seed=3, trainings=TINY, runs=1, progress=lambda *what: seen.append(what))
    yield out, seen
    patch.undo()


@pytest.mark.slow
def test_a_build_leaves_checkpoints_in_float16_and_a_record(tiny):
    import torch
    from transformers import AutoModelForCausalLM

    out, seen = tiny
    names = ["base", "task-1", "language-nela-1", "language-furo-1", "joint-nela", "joint-furo"]
    assert sorted(p.name for p in out.iterdir()) == sorted([*names, "record.json"])
    for name in names:
        model = AutoModelForCausalLM.from_pretrained(out / name, dtype="auto")
        assert {p.dtype for p in model.parameters()} == {torch.float16}
    record = read_record(out)
    assert list(record["models"]) == names
    assert settings_of(record) == WorldSettings()
    assert record["models"]["base"]["final_loss"] > 0
    assert set(record["models"]["language-furo-1"]["development"]) == {"furo"}
    joint = record["models"]["joint-furo"]
    assert {len(right) for right in joint["test"].values()} == {8}
    assert len(joint["written"].split("\n")) == 8
    assert ("base", 3, 3) in seen


def test_what_is_finished_is_not_trained_again(tiny):
    out, _ = tiny
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}
    seen = []
    build(out, seed=3, trainings=TINY, runs=1, progress=lambda *what: seen.append(what))
    assert not seen
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*") if p.is_file()}


def test_a_model_that_was_cut_short_is_made_again_the_same(tiny):
    out, _ = tiny
    weights = out / "task-1" / "model.safetensors"
    first = weights.read_bytes()
    record = read_record(out)
    del record["models"]["task-1"]
    (out / "record.json").write_text(json.dumps(record))
    (out / ".task-1.partial").mkdir()
    seen = []
    build(out, seed=3, trainings=TINY, runs=1, progress=lambda *what: seen.append(what))
    assert {name for name, _, _ in seen} == {"task-1"}
    assert weights.read_bytes() == first
    assert weights.read_bytes() != (out / "base" / "model.safetensors").read_bytes()
    assert not (out / ".task-1.partial").exists()


def test_a_folder_with_another_lab_is_left_alone(tiny):
    out, _ = tiny
    with pytest.raises(RecipeError, match="holds a lab whose seed differs"):
        build(out, seed=4, trainings=TINY, runs=1)


def test_a_folder_without_a_lab_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"no lab here \(record\.json is missing\)"):
        open_lab(tmp_path)
    (tmp_path / "record.json").write_text("{")
    with pytest.raises(RecipeError, match="not a lab's record"):
        open_lab(tmp_path)


def test_the_loss_is_on_the_completion_and_its_end_only():
    from layerswap.lab.tasks import examples
    from layerswap.lab.world import make_tokenizer, make_world

    world = make_world()
    tokenizer = make_tokenizer(world)
    asked = examples(world, "furo", "problem", "train", 8)
    rows = encode(tokenizer, asked)
    for row, example in zip(rows, asked, strict=True):
        learned = [i for i in row["labels"] if i != -100]
        assert tokenizer.decode(learned) == example.completion + "</s>"
    batch = collate(rows, tokenizer.pad_token_id)
    assert batch["input_ids"].shape == batch["labels"].shape == batch["attention_mask"].shape
    assert ((batch["attention_mask"] == 0) == (batch["input_ids"] == tokenizer.pad_token_id)).all()
