"""The lab's questions as lm-eval tasks: the lab's own judgement, and lm-eval's on disk."""

from __future__ import annotations

import json
import warnings

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from layerswap.cli import app
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate
from layerswap.lab.assets import shipped
from layerswap.lab.scoring import correct, load
from layerswap.lab.tasks import examples
from layerswap.merge import swap

N = 24


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab") / "tasks"
    done = CliRunner().invoke(app, ["lab", "export", "--out", str(out), "--n", str(N)])
    assert done.exit_code == 0, done.output
    return out


def test_every_language_has_both_skills(tasks):
    lab = shipped()
    languages = (lab.world.source.name, *lab.languages)
    expected = [f"lab_{skill}_{one}" for one in languages for skill in ("problem", "comprehension")]
    assert json.loads((tasks / "lab_tasks.json").read_text()) == expected
    for name in expected:
        assert len((tasks / f"{name}.jsonl").read_text().splitlines()) == N


@pytest.mark.slow
def test_a_sweep_gives_what_lm_eval_gives_the_merged_checkpoint(tasks, tmp_path):
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    lab = shipped()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts["furo"][0], dtype="float32")
    plans = plan.grid(bottom=[0, 2, 4], top=[0, 3])
    names = ["lab_problem_furo", "lab_comprehension_furo"]
    tokenizer = AutoTokenizer.from_pretrained(lab.base)
    found = evaluate(Sweep(plans), tokenizer, names, include=[tasks])
    scores = {tuple(one["results"][name]["exact_match,whole"] for name in names) for one in found}
    assert len(scores) > 1, "the compositions differ"
    for index in (0, 3):
        folder = plans[index].save(tmp_path / str(index))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = lm_eval.simple_evaluate(
                model=HFLM(pretrained=str(folder), batch_size=8, device="cpu", dtype="float32"),
                tasks=names, bootstrap_iters=0, log_samples=True,
                task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
            )  # fmt: skip
        for name in names:
            mine, theirs = found[index]["samples"][name], expected["samples"][name]
            assert [one["resps"] for one in mine] == [one["resps"] for one in theirs]
            assert [one["exact_match"] for one in mine] == [one["exact_match"] for one in theirs]


def test_the_tasks_score_as_the_lab_does(tasks):
    lab = shipped()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts["nela"][0], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(lab.base)
    (found,) = evaluate(Sweep([plan]), tokenizer, ["lab_problem_nela"], include=[tasks])
    asked = examples(lab.world, "nela", "problem", "test", N)
    right = correct(plan.load(), load(lab.base)[1], asked)
    rows = sorted(found["samples"]["lab_problem_nela"], key=lambda one: one["doc_id"])
    assert [bool(one["exact_match"]) for one in rows] == right.tolist()
