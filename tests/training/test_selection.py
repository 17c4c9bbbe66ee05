"""Selecting among checkpoints: real runs, real scores, and not all of one run."""

import json
import math

import pytest
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.errors import EvaluationError, TrainingError
from layerswap.lab.lm_eval_tasks import export_tasks
from layerswap.training.expert.freezing import freeze_or_revert
from layerswap.training.expert.select import candidates, scorer, select, signal_tasks
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train


def spec_of(base, rows, **more):
    return check_expert({
        "base": str(base), "save_every": 32,
        "data": {key: str(rows / f"task-{key}.jsonl") for key in ("train", "validation")},
        "hyperparameters": {"learning_rate": 1e-2, "per_device_train_batch_size": 16},
        **more,
    })  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory, base, rows):
    folder = tmp_path_factory.mktemp("runs")
    return [
        train(spec_of(base, rows, seed=seed, **more), folder / name)
        for name, seed, more in (("one", 1, {}), ("two", 2, {"lora": {"r": 4, "lora_alpha": 8}}))
    ]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    out = tmp_path_factory.mktemp("tasks") / "lab"
    export_tasks(out, n=24)
    return out


def test_every_checkpoint_and_the_output_are_candidates(runs):
    for run in runs:
        found = candidates(run)
        assert [one.step for one in found] == [2, 4, 6, 8]
        assert found[-1].folder == str(run)
        assert all(one.loss is not None and math.isfinite(one.loss) for one in found)
        assert found[-1].loss < found[0].loss


def test_the_best_are_kept_but_not_all_of_one_run(runs):
    spread = select(runs, keep=3)
    losses = [one.loss for one in spread.ranked]
    assert losses == sorted(losses)
    assert len(spread.ranked) == 8
    per_run = [sum(one.run == str(run) for one in spread.chosen) for run in runs]
    assert sorted(per_run) == [1, 2]
    free = select(runs, keep=3, of_any_run=True)
    assert free.chosen == free.ranked[:3]
    assert len(json.loads(spread.to_json())["chosen"]) == 3


def test_checkpoints_and_adapters_are_scored_on_lm_eval_tasks(runs, tasks):
    score = scorer(["lab_problem_basu"], include=[tasks], limit=12)
    found = select(runs, keep=2, score=score)
    assert all(0 <= one.scores["lab_problem_basu"] <= 1 for one in found.ranked)
    assert {one.run for one in found.chosen} == set(map(str, runs))


def test_an_unknown_task_fails_before_a_run_is_opened(tmp_path):
    done = CliRunner().invoke(app, ["select", str(tmp_path / "no-run"), "--task", "belebele_swh"])
    assert str(done.exception).startswith("no task 'belebele_swh'; did you mean ")


def test_without_a_validation_loss_tasks_are_asked_for(tmp_path, base, rows):
    spec = spec_of(base, rows, data={"train": str(rows / "task-train.jsonl")}, limit=32)
    run = train(spec, tmp_path / "run")
    with pytest.raises(TrainingError, match="select by tasks instead"):
        select([run])
    with pytest.raises(TrainingError, match="did not write it"):
        select([tmp_path])


@pytest.mark.slow
@pytest.mark.usefixtures("whole_index")
def test_the_signals_of_the_second_paper():
    assert signal_tasks("language", "Swahili") == ["belebele_swh_Latn", "global_mmlu_full_sw"]
    assert signal_tasks("language", "te") == ["belebele_tel_Telu", "global_mmlu_full_te"]
    assert signal_tasks("task") == ["mgsm_direct_en"]
    with pytest.raises(EvaluationError, match="give --language"):
        signal_tasks("language")
    with pytest.raises(EvaluationError, match="neither Belebele nor Global-MMLU has la"):
        signal_tasks("language", "la")


@pytest.mark.slow
def test_freeze_against_revert_evaluates_both_ways(tmp_path, base, rows, tasks):
    import torch

    from layerswap.checkpoint import open_checkpoint

    judged = []

    def score(plan):
        judged.append({t.name: plan_tensor(plan, t.name) for t in plan.tensors})
        return {"task": 0.5}

    def plan_tensor(plan, name):
        from layerswap.merge.loading import load_tensor
        from layerswap.merge.writer import measure_tensors

        tensor = next(t for t in plan.tensors if t.name == name)
        return load_tensor(tensor, measure_tensors(plan.tensors)).float()

    spec = spec_of(base, rows, limit=32)
    found = freeze_or_revert(spec, tmp_path, part="task", score=score, partitions=["A", "C"])
    assert [(row.partition, row.treatment) for row in found] == [
        (None, "the base"), (None, "all trained"),
        ("A", "reverted"), ("A", "frozen"), ("C", "reverted"), ("C", "frozen"),
    ]  # fmt: skip
    opened = open_checkpoint(str(base))
    start = {name: opened.read(name).float() for name in opened.tensors}
    moved = [{n for n in start if not torch.equal(w[n], start[n])} for w in judged]
    assert moved[0] == set()
    assert moved[1] == set(start)
    assert moved[2] == moved[3] != moved[1]
    assert moved[4] == moved[5] != moved[2]
    assert any(not torch.equal(judged[2][n], judged[3][n]) for n in moved[2])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    freeze_or_revert(spec, tmp_path, part="task", score=score, partitions=["A", "C"])
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
