"""The shipped questions, as lm-eval asks them and as the quickstart does."""

import pytest
from transformers import AutoTokenizer

from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate
from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions, write_tasks
from layerswap.lab.scoring import sweep_correct
from layerswap.merge.api import swap

N = 24


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    out = tmp_path_factory.mktemp("lab") / "tasks"
    names = write_tasks(out, N)
    lab = shipped()
    assert sorted(names) == sorted(
        f"lab_{skill}_{language}" for language in (lab.source, *lab.languages)
        for skill in ("problem", "comprehension")
    )  # fmt: skip
    assert all(len((out / f"{name}.jsonl").read_text().splitlines()) == N for name in names)
    return out


def test_the_tasks_score_as_the_lab_does(tasks):
    lab = shipped()
    plan = swap(task=lab.task_experts[0], language=lab.language_experts["nela"][0], dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained(lab.base)
    (found,) = evaluate(Sweep([plan]), tokenizer, ["lab_problem_nela"], include=[tasks])
    (right,) = sweep_correct(Sweep([plan]), tokenizer, questions("problem", "nela", "test")[:N])
    rows = sorted(found["samples"]["lab_problem_nela"], key=lambda one: one["doc_id"])
    assert [bool(one["exact_match"]) for one in rows] == right.tolist()
