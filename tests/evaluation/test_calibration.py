"""Batch calibration: what it does to answers, and where it is offered."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from lm_eval_world import LABELS, QUESTIONS, write_sweep
from transformers import AutoTokenizer
from typer.testing import CliRunner

import layerswap as ls
from layerswap.cli import app
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate
from layerswap.evaluation.metrics import CALIBRATED, add_calibrated, calibrate


def test_calibration_corrects_a_preferred_label():
    logprobs = np.log([[0.72, 0.18, 0.1], [0.6, 0.3, 0.1], [0.8, 0.1, 0.1]])
    assert logprobs.argmax(axis=1).tolist() == [0, 0, 0]
    assert calibrate(logprobs).argmax(axis=1).tolist() == [0, 1, 0]
    assert np.exp(calibrate(logprobs))[1] == pytest.approx([3 * 0.6 / 2.12, 3 * 0.3 / 0.58, 1.0])
    scaled = logprobs - np.arange(3)[:, None] * 100
    assert calibrate(scaled) == pytest.approx(calibrate(logprobs))
    assert calibrate(logprobs[:1], logprobs) == pytest.approx(calibrate(logprobs)[:1])


def test_an_impossible_label_stays_impossible():
    logprobs = np.log([[0.9, 0.1, 1e-300], [0.6, 0.4, 1e-300]])
    logprobs[:, 2] = -np.inf
    found = calibrate(logprobs)
    assert found.argmax(axis=1).tolist() == [0, 1]
    assert np.isneginf(found[:, 2]).all()


def test_a_task_with_labels_has_the_metric(world):
    plan = ls.swap(task=world["task"], language=world["language"])
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    asked = ["maembe_label", "maembe_choose", "maembe_generate"]
    found = evaluate(
        Sweep(plan.grid(bottom=[0, 1], top=[0])), tokenizer, asked, include=[world["tasks"]]
    )
    for result in found:
        samples = result["samples"]["maembe_label"]
        shares = []
        for sample in samples:
            odds = [math.exp(logprob) for logprob, _ in sample["filtered_resps"]]
            shares.append([one / sum(odds) for one in odds])
        means = [sum(column) / len(column) for column in zip(*shares, strict=True)]
        for sample, row in zip(samples, shares, strict=True):
            best = max(range(3), key=lambda i, row=row: row[i] / means[i])
            assert sample[CALIBRATED] == float(LABELS[best] == sample["target"])
        own = result["results"]["maembe_label"]
        assert own[f"{CALIBRATED},none"] == np.mean([sample[CALIBRATED] for sample in samples])
        for other in asked[1:]:  # its choices differ; it writes
            assert all(CALIBRATED not in sample for sample in result["samples"][other])
            assert not any(CALIBRATED in key for key in result["results"][other])
    assert any(
        sample[CALIBRATED] != sample["acc"]
        for result in found for sample in result["samples"]["maembe_label"]
    )  # fmt: skip


def test_a_task_that_counts_otherwise_is_left_alone(world):
    tokenizer = AutoTokenizer.from_pretrained(world["task"])
    plan = ls.swap(task=world["task"], language=world["language"])
    (result,) = evaluate(Sweep([plan]), tokenizer, ["maembe_label"], include=[world["tasks"]])
    for sample in result["samples"]["maembe_label"]:
        sample["metrics"] = ["acc"]
        del sample[CALIBRATED]
    result["samples"]["maembe_label"][0]["acc"] = 1 - result["samples"]["maembe_label"][0]["acc"]
    add_calibrated(result)
    assert not any(CALIBRATED in sample for sample in result["samples"]["maembe_label"])


def test_eval_shows_calibrated_accuracy_on_request(world, tmp_path):
    def rows(*more):
        model, include, out = (str(x) for x in (world["task"], world["tasks"], tmp_path / "out"))
        given = ["eval", model, "--tasks", "maembe_label", "--include", include, "--out", out]
        done = CliRunner().invoke(app, [*given, "--json", *more])
        assert done.exit_code == 0, done.output
        return {one["metric"]: one for one in json.loads(done.stdout)["scores"]}

    plain = {"acc", "balanced_accuracy", "macro_f1"}
    assert set(rows()) == plain
    shown = rows("--calibrate")
    assert set(shown) == {*plain, CALIBRATED}
    assert shown[CALIBRATED]["n"] == len(QUESTIONS)


def test_a_sweep_chooses_by_it(world, tmp_path):
    sweep = write_sweep(
        world, tmp_path / "sweep.yaml", tasks=["maembe_label"],
        choose_by={"task": "maembe_label", "metric": CALIBRATED},
    )  # fmt: skip
    asked = ["sweep", str(sweep), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, asked, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    assert CALIBRATED in done.output
    assert "balanced accuracy, %" in done.output
    board = json.loads((tmp_path / "out" / "board.json").read_text())
    one = next(row for row in board["test"] if row["selected_minus"])
    assert set(one["selected_minus_balanced"]) == {"balanced_accuracy", "macro_f1"}
    assert 0 <= one["macro_f1"]["mean"] <= 1
