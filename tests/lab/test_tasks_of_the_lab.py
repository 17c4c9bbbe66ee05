"""The shipped questions, as lm-eval asks them and as the quickstart does."""

import warnings

import pytest
from transformers import AutoTokenizer

from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import evaluate
from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions, write_tasks
from layerswap.lab.scoring import sweep_correct
from layerswap.merge import swap

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
    (right,) = sweep_correct(Sweep([plan]), tokenizer, questions("problem", "nela", "test")[:N])
    rows = sorted(found["samples"]["lab_problem_nela"], key=lambda one: one["doc_id"])
    assert [bool(one["exact_match"]) for one in rows] == right.tolist()
