"""Selecting among checkpoints: real runs, real scores, and not all of one run."""

import math

import pytest
import torch
from merging import tensors_of
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.ground.errors import EvaluationError, TrainingError
from layerswap.lab.questions import write_tasks
from layerswap.training.expert.select import (
    candidates,
    freeze_or_revert,
    scorer,
    select,
    signal_tasks,
)
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
    write_tasks(out, 24)
    return out


@pytest.mark.slow
def test_every_checkpoint_and_the_output_are_candidates(runs):
    for run in runs:
        steps = candidates(run)
        assert [candidate.step for candidate in steps] == [2, 4, 6, 8]
        assert steps[-1].folder == str(run)
        assert all(math.isfinite(candidate.loss) for candidate in steps)
        assert steps[-1].loss < steps[0].loss


def test_the_best_are_kept_but_not_all_of_one_run(runs):
    spread = select(runs, keep=3)
    losses = [candidate.loss for candidate in spread.ranked]
    assert losses == sorted(losses)
    assert len(spread.ranked) == 8
    assert sorted(sum(c.run == str(run) for c in spread.chosen) for run in runs) == [1, 2]
    assert len(spread.chosen) == 3


@pytest.mark.slow
def test_checkpoints_and_adapters_are_scored_on_lm_eval_tasks(runs, tasks):
    score = scorer(EvaluationSettings(tasks=["lab_problem_basu"], include=[str(tasks)], limit=12))
    selection = select(runs, keep=2, score=score)
    assert all(0 <= candidate.scores["lab_problem_basu"] <= 1 for candidate in selection.ranked)
    assert {candidate.run for candidate in selection.chosen} == set(map(str, runs))


def test_an_unknown_task_fails_before_a_run_is_opened(tmp_path):
    ended = CliRunner().invoke(
        app, ["analyse", "select", str(tmp_path / "no-run"), "--task", "belebele_swh"]
    )
    assert str(ended.exception).startswith("no task 'belebele_swh'; did you mean ")


@pytest.mark.slow
def test_without_a_validation_loss_selection_needs_tasks(tmp_path, base, rows):
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
def test_freeze_or_revert_evaluates_both_ways(tmp_path, base, rows):
    from layerswap.merge.folder import load_tensor
    from layerswap.merge.writer import measure_tensors

    weights = []

    def score(plan):
        facts = measure_tensors(plan.tensors)
        weights.append({t.name: load_tensor(t, facts).float() for t in plan.tensors})
        return {"task": 0.5}

    spec = spec_of(base, rows, limit=32)
    table = freeze_or_revert(spec, tmp_path, part="task", score=score, partitions=["A", "C"])
    assert [(row.partition, row.treatment) for row in table] == [
        (None, "the base"), (None, "all trained"),
        ("A", "reverted"), ("A", "frozen"), ("C", "reverted"), ("C", "frozen"),
    ]  # fmt: skip
    start = {name: tensor.float() for name, tensor in tensors_of(base).items()}
    moved = [{n for n in start if not torch.equal(w[n], start[n])} for w in weights]
    assert moved[0] == set()
    assert moved[1] == set(start)
    assert moved[2] == moved[3] != moved[1]
    assert moved[4] == moved[5] != moved[2]
    assert any(not torch.equal(weights[2][n], weights[3][n]) for n in moved[2])
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    freeze_or_revert(spec, tmp_path, part="task", score=score, partitions=["A", "C"])
    assert before == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
