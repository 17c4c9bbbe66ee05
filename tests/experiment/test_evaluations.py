"""`ls.evaluate` and `ls.compare`: the scores that the commands write, as tables."""

import json

import pytest
from lm_eval_world import write_languages
from typer.testing import CliRunner

import layerswap as ls
from layerswap.cli import app
from layerswap.evaluation.metrics import NORMALISED
from layerswap.evaluation.suites.suites import WrittenTask
from layerswap.experiment.answers import Answer
from layerswap.experiment.evaluations import _compared, _of_baselines
from layerswap.experiment.results import Results

TASK = "maembe_choose"


@pytest.fixture(scope="module")
def done(world, tmp_path_factory):
    models = [world["task"], world["language"]]
    out = tmp_path_factory.mktemp("evaluated") / "results"
    return ls.evaluate(models, TASK, include=world["tasks"], out=out, limit=4)


def test_an_evaluation_is_that_of_the_command(done, world, tmp_path):
    words = ["eval", world["task"], world["language"], "--tasks", TASK, "--include", world["tasks"],
             "--limit", "4", "--out", tmp_path / "results", "--json"]  # fmt: skip
    told = json.loads(CliRunner().invoke(app, [*map(str, words)]).stdout)
    assert list(done.records()) == told["scores"]
    table = done.to_pandas()
    assert set(table.model) == {"task", "language", "chance"}
    assert set(table.n) == {4}
    assert repr(done) == f"task, language on 1 results in {done.folder}"
    assert done._repr_html_().startswith("<table")


def test_one_metric_over_two_filters_is_not_averaged():
    main = ("exact_match", "number")
    rows = [Answer("m", "t", i, metric, name, score, main=(metric, name) == main)
            for i in range(6) for metric in ("exact_match", NORMALISED)
            for name, score in (("number", 1.0), ("flexible-extract", 0.0))]  # fmt: skip
    results = {"m": {"results": {"t": {"exact_match,number": 1.0}}}}
    found = Results([*_compared(results, [WrittenTask("t", "t", "sw", main)], rows, {})], ["m"])
    assert {row["metric"]: row["score"] for row in found.records()} == {
        "exact_match": 1.0,
        NORMALISED: 1.0,
    }


@pytest.mark.slow
def test_the_language_of_answers_is_learned_from_texts_and_its_error_printed(world, tmp_path):
    write_languages(tmp_path, "wo", "en")
    given = ["eval", world["task"], world["language"], "--tasks", "maembe_generate",
             "--include", world["tasks"], "--gen-kwargs", "max_gen_toks=60,until=@@"]  # fmt: skip

    def run(name, *more):
        words = map(str, [*given, *more, "--out", tmp_path / name])
        return CliRunner().invoke(app, [*words], env={"COLUMNS": "300"})

    texts = [f"--answer-text=wo={tmp_path}/wo.txt", f"--answer-text=en={tmp_path}/en.txt"]
    learned = run("results", "--answer-language", "wo", *texts)
    assert learned.exit_code == 0, learned.output
    assert "answer_language_share" in learned.output
    assert "note: wo: 0.0% of 13 held-out lines are taken for another language" in learned.output
    for more, why in (
        (["--answer-language", "wo"], "py3langid cannot identify 'wo'.*--answer-text"),
        (["--answer-language", "fr", *texts], "wo, en has no text of the answer language 'fr'"),
        (["--answer-language", "wo", texts[0]], "needs texts in at least two languages"),
        (texts, "--answer-text belongs to --answer-language"),
    ):
        with pytest.raises(ls.LayerswapError, match=why):
            raise run("refused", *more).exception
        assert not (tmp_path / "refused").exists()


def test_models_are_compared_on_the_same_documents(done):
    compared = ls.compare(done.folder, models=["language", "task"])
    reference, other = compared.to_pandas().to_dict("records")
    assert [reference["model"], other["model"]] == ["language", "task"]
    assert other["difference"] == pytest.approx(other["score"] - reference["score"])
    assert other["lower"] <= other["difference"] <= other["upper"]
    assert reference["difference"] != reference["difference"]  # not a number
    assert repr(compared) == "language, task on 1 results"
    assert compared._repr_html_().startswith("<table")


def test_an_unknown_setting_is_one_line(world, tmp_path):
    with pytest.raises(ls.LayerswapError, match=r"evaluate: limits: .*; did you mean 'limit'\?"):
        ls.evaluate(world["task"], TASK, out=tmp_path / "out", limits=3)
    assert not (tmp_path / "out").exists()


def test_what_models_are_worth_in_labels_is_said():
    """A model that knows the words that tell the labels, and one that guesses."""
    labels = [("yes", "no", "maybe")[i % 3] for i in range(60)]
    words = {"yes": "nzuri", "no": "mbaya", "maybe": "labda"}
    rows = {
        name: [
            Answer(name, "t", i, "acc", "none", float(given == label), main=True, benchmark="t",
                   text=f"{words[label]} {words[label]} {i}", document_hash=str(i), label=label,
                   predicted=given, answer=given, choices=3, weights=name)
            for i, (label, given) in enumerate(zip(labels, answered, strict=True))
        ]
        for name, answered in (("knows", labels), ("guesses", ["yes"] * 60))
    }  # fmt: skip
    tasks, free = [WrittenTask("t", "t", "", ("acc", "none"))], {}
    every = [row for by in rows.values() for row in by]
    assert {row.model for row in _of_baselines(tasks, free, every)} >= {"chance"}
    whole = {name: {"results": {"t": {"acc,none": 0.5}}} for name in rows}
    found = Results([*_compared(whole, tasks, every, free)], [*rows])
    worth = [line for line in found.said if " is worth " in line]
    assert [line.split(" is worth ")[0] for line in worth] == ["t: knows", "t: guesses"]
    assert "fewer than 10 labels in accuracy" in worth[1]
    assert "fewer than 10" not in worth[0].split("[")[0]
    told = {row["model"]: row for row in found.records() if row["metric"] == "acc"}
    assert told["knows"]["worth_in_labels"]["accuracy"]["labels"] > 10
    assert "worth_in_labels" not in next(
        row for row in found.records() if "balanced" in row["metric"]
    )
