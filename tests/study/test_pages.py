"""The pages of a study: verdict and hostile names."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from accessibility import AXE, open_browser, violations

from layerswap.checkpoint.hub import TRAINING
from layerswap.compose.presets import Zones
from layerswap.experiment.answers import ANSWERS_TABLE, Answer, write_answers
from layerswap.experiment.benchmarks import BenchmarkScores, StudyResults, benchmark_result
from layerswap.experiment.conditions import DEFAULT, SOUP, TASK_EXPERT, Condition, finished
from layerswap.experiment.runs import compare
from layerswap.experiment.tables import comparison_tables, scores_table
from layerswap.ground.commit import write_json
from layerswap.lab.assets import shipped
from layerswap.report.page import write_report
from layerswap.report.tables import words_of
from layerswap.study.evaluating import EvaluateStep, TablesStep
from layerswap.study.journal import PAGE, StudyJournal
from layerswap.study.kinds import run_study_step
from layerswap.study.report import FinishedSteps, study_opening
from layerswap.study.runner import run_graph
from layerswap.study.spec import Benchmarks
from layerswap.study.steps import Graph
from layerswap.study.trainings import EXPERT, TrainedOn, TrainStep

HOSTILE = "<script>window.hacked=1</script>&\"'<img src=x onerror=window.hacked=2>|[a](b)"
RECIPES = (DEFAULT, TASK_EXPERT, SOUP, Condition("swap", zones=Zones(1, 0)),
           Condition("swap", zones=Zones(2, 0)))  # fmt: skip


def result(language, better=0.0, pairs=("0-0",)):
    """The default swap is right on half of 60 documents, the task expert on fewer by `better`."""
    half = np.tile([0.0, 1.0], 30)
    worse = half.copy()
    worse[: round(60 * abs(better))] = better < 0
    scores = {replace(one, pair=pair): values for pair in pairs
              for one, values in ((DEFAULT, half), (TASK_EXPERT, worse), (SOUP, half))}  # fmt: skip
    return benchmark_result(language, "maths", BenchmarkScores(scores), None)


def test_models_above_the_selected_swap_are_named():
    level, below, root = result("sw"), result("ha", better=-0.5), Path("study")
    assert len(study_opening([level], root)) == 1
    assert len(study_opening([result("sw", better=0.5)], root)) == 1
    assert study_opening([level, below], root)[1] == (
        "On the test documents of maths, ha, models are clearly above the selected "
        "default swap: task expert (75.0 [63.3, 85.0]%). "
        "layerswap study merge study --model 'task expert' writes the task expert."
    )


def test_the_model_that_was_finished_is_the_one_that_is_saved_marked_and_asked_for_its_worth():
    labels = np.array(["sport", "health"] * 60)
    chosen = finished("swap", chosen=True)
    right = {replace(DEFAULT, pair="0-0"): 60, chosen: 90, finished("base", chosen=False): 120}
    answers = {one: np.where(np.arange(120) < n, labels, "none") for one, n in right.items()}
    scores = {one: (given == labels) * 1.0 for one, given in answers.items()}
    texts = [f"{label} {i}" for i, label in enumerate(labels)]
    found = benchmark_result("sw", "news", BenchmarkScores(scores, 0, labels, answers, texts), None)
    assert found.selected == found.choice.saved == chosen
    assert found.saved_score.mean == 0.75
    table = scores_table(found)
    assert table.rows[table.highlight][0] == "finished, from the swap"
    assert found.worth_in_labels == found.worth_of(chosen)
    assert study_opening([found], Path("study"))[1].endswith(
        "clearly above the selected model finished from the swap: finished, from the base (100.0 "
        "[97.0, 100.0]%). layerswap study merge study --model 'finished, from the base' writes the "
        "model finished from the base."
    )


def test_balanced_accuracy_is_reported_beside_accuracy():
    labels = np.array(["sport"] * 80 + ["health"] * 20)
    answers = {DEFAULT: labels[:1].repeat(100), TASK_EXPERT: labels.copy(), SOUP: labels.copy()}
    answers[TASK_EXPERT][:26] = "health"  # 74 right: 54 of 80, and 20 of 20
    answers[SOUP][:40] = "health"
    of_pair = {replace(one, pair=pair): given for pair in "ab" for one, given in answers.items()}
    scores = {one: (given == labels) * 1.0 for one, given in of_pair.items()}
    found = benchmark_result("sw", "topics", BenchmarkScores(scores, 0, labels, of_pair), None)
    results = StudyResults([found])
    assert found.selected == DEFAULT
    balanced = found.classified[DEFAULT].balanced
    assert balanced.balanced_accuracy.mean == 0.5
    assert results.to_dict()["languages"]["sw"]["topics"][str(SOUP)]["balanced_accuracy"][
        "mean"
    ] == pytest.approx(0.75)
    table = results.tables["topics, sw: balanced by label"]
    assert [row[0] for row in table.rows] == [*map(str, answers), "commonest label"]
    assert str(words_of(table.rows[1][-1])).startswith("+33.8 [")


@pytest.mark.slow
def test_one_pair_has_no_extremes_and_few_results_no_ranks():
    one, two = result("sw"), result("sw", pairs=("0-0", "0-1"))
    (alone, both) = (StudyResults([found]).tables["maths, sw"] for found in (one, two))
    assert list(alone.columns) == ["treatment", "score, %", "minus swap, default"]
    assert list(both.columns)[2:4] == ["lowest pair", "highest pair"]
    assert alone.highlight == 0
    assert (0, 1) in alone.bold
    several = [result(str(number)) for number in range(5)]
    assert "Ranks" in StudyResults(several).tables
    assert "Ranks" not in StudyResults(several[1:]).tables


def test_the_measure_of_written_answers_stands_above_their_scores():
    written = [replace(result(language), likeness="chrf++") for language in ("sw", "ha")]
    tables = StudyResults(written).tables
    assert tables["maths, sw"].columns[1] == "chrf++, %"
    assert tables["maths, all languages"].caption.startswith("maths, chrf++: mean over pairs")


def hostile_study(root):
    """A study whose names, questions and answers are `HOSTILE`, evaluated without a model."""
    rows = root / "rows.jsonl"
    rows.write_text(json.dumps({"text": "other words"}))
    name, base = f"evaluate/{HOSTILE}", str(shipped().base)
    training = TrainStep(base=base, data=[TrainedOn(given={"train": str(rows)})], seed=1)
    asked = EvaluateStep(language=HOSTILE, base=base, kinds=[], evaluate=Benchmarks(suite=HOSTILE))
    tables = TablesStep(languages=[HOSTILE], development=0.5, name=HOSTILE,
                        description=f"A study of {HOSTILE}.")  # fmt: skip
    graph = Graph(
        [
            training.plan("train/task/0"),
            asked.plan(name, ["train/task/0"]),
            tables.plan("tables", [name]),
        ]
    )

    def evaluate(context):
        folder = context.folder / "results"
        folder.mkdir(parents=True)
        answers = []
        rng = np.random.default_rng(0)
        for recipe in RECIPES:
            one = replace(recipe, pair="0-0")
            for document in range(20):
                right = float(rng.random() < 0.5)
                answered = HOSTILE if right else "other"
                question = f"What is said here? {document} {HOSTILE}"
                answers.append(Answer(
                    str(one), HOSTILE, document, "acc", "none", right, True, HOSTILE, "sw",
                    HOSTILE, answered, question=question, target="7", answer=HOSTILE,
                    condition=one,
                ))  # fmt: skip
        write_answers(folder / ANSWERS_TABLE, answers)

    def train(context):
        (context.folder / EXPERT).mkdir()
        data = [{"name": "other", "contaminated": {"mgsm_sw": 1200}}]
        write_json(context.folder / EXPERT / TRAINING, {"key": "k", "data": data})

    functions = {"train": train, "evaluate": evaluate, "tables": run_study_step}
    return StudyJournal(root / "out", graph), functions


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The journal of the hostile study, finished, with its page."""
    root = tmp_path_factory.mktemp("hostile")
    journal, functions = hostile_study(root)
    assert not run_graph(journal.graph, journal.root, functions).failed
    study = FinishedSteps(journal)
    return journal, write_report(journal.root / PAGE, study.report()), study


def test_names_and_answers_with_markup_are_text(hostile):
    _, page, study = hostile
    text = page.read_text()
    assert "layerswap ask prefer ANSWERS.tsv --models A,B --out asked" in text
    without = re.sub(r'href="data:[^"]*"', "", text)
    assert "window.hacked" in without
    assert "<script>window" not in without
    assert "<img" not in without
    assert without.count("<script") == 0
    assert 'd="<' not in without
    compared, *_ = comparison_tables(compare([study.evaluations[HOSTILE] / "results"]))
    assert "<script>" not in compared.markdown()


def test_the_page_has_the_cautions_of_the_trainings(hostile):
    _, page, _ = hostile
    assert (
        "train/task/0 trained on 1,200 rows of other with an item of mgsm_sw: scores on "
        "it are flattered." in page.read_text()
    )


def test_every_section_stands_once(hostile):
    headings = [one.heading for one in hostile[2].report().sections]
    assert any(one.endswith("balanced by label") for one in headings)
    assert len(headings) == len(set(headings))


@pytest.mark.slow
def test_a_browser_runs_nothing_of_a_hostile_study(hostile):
    _, path, _ = hostile
    with open_browser() as browser:
        for width in (390, 1280):
            page = browser.new_page(viewport={"width": width, "height": 800})
            page.goto(path.as_uri())
            for one in page.locator("details").all():
                one.evaluate("one => one.open = true")
            assert page.evaluate("window.hacked") is None
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert HOSTILE in page.locator("dd").first.inner_text() + page.title()
        assert page.locator(".command").first.inner_text().startswith("layerswap study merge")
        if AXE is not None:
            assert violations(browser, path) == []
