"""The pages of a study: verdict, hostile names."""

import re
from dataclasses import replace

import numpy as np
import pytest
from accessibility import AXE, open_browser, violations

from layerswap.checkpoint.commit import write_json
from layerswap.checkpoint.remote import TRAINING
from layerswap.cli.tables import comparison_tables
from layerswap.compose import Zones
from layerswap.evaluation.results import (
    SAMPLES_TABLE,
    SCORES_TABLE,
    Sample,
    Score,
    compare_runs,
    write_rows,
)
from layerswap.lab.assets import shipped
from layerswap.report.page import write_report
from layerswap.search.conditions import DEFAULT, SOUP, TASK_EXPERT, Condition
from layerswap.study.journal import PAGE, StudyJournal
from layerswap.study.report import FinishedSteps, verdict
from layerswap.study.results import BenchmarkScores, StudyResults, benchmark_result
from layerswap.study.runner import run_graph
from layerswap.study.step_functions import EXPERT, write_study_tables
from layerswap.study.steps import Graph, Step

HOSTILE = "<script>window.hacked=1</script>&\"'<img src=x onerror=window.hacked=2>|[a](b)"
RECIPES = (DEFAULT, TASK_EXPERT, SOUP, Condition("swap", zones=Zones(1, 0)),
           Condition("swap", zones=Zones(2, 0)))  # fmt: skip


def result(language, better=0.0, pairs=("0-0",)):
    """The default swap is right on half of 60 documents, the task expert on fewer by `better`."""
    half = np.tile([0.0, 1.0], 30)
    worse = half.copy()
    worse[: round(60 * better)] = 0
    scores = {replace(one, pair=pair): values for pair in pairs
              for one, values in ((DEFAULT, half), (TASK_EXPERT, worse), (SOUP, half))}  # fmt: skip
    return benchmark_result(language, "maths", BenchmarkScores(scores), None)


def test_the_verdict_is_one_sentence():
    assert verdict([result("sw", better=0.5)]) == (
        "The swap, default, scores 50.0% on maths in sw: against the task expert, "
        "25.0 points higher."
    )
    assert verdict([result("sw", better=0.5), result("ha"), result("yo")]) == (
        "Of 3 results, the selected swap is above the task expert in 1 (maths, sw) and below it in "
        "none; no difference is detected in 2."
    )


def test_one_pair_has_no_extremes_and_few_results_no_ranks():
    one, two = result("sw"), result("sw", pairs=("0-0", "0-1"))
    (alone, both) = (StudyResults([found], []).tables["maths, sw"] for found in (one, two))
    assert list(alone.columns) == ["treatment", "score, %", "minus swap, default"]
    assert list(both.columns)[2:4] == ["lowest pair", "highest pair"]
    assert alone.highlight == 0
    assert (0, 1) in alone.bold
    several = [result(str(number)) for number in range(5)]
    assert "Ranks" in StudyResults(several, []).tables
    assert "Ranks" not in StudyResults(several[1:], []).tables


def hostile_study(root):
    """A study whose names, questions and answers are `HOSTILE`, evaluated without a model."""
    name = f"evaluate/{HOSTILE}"
    settings = {
        "language": HOSTILE, "base": str(shipped().base), "device": "cpu", "dtype": None,
        "evaluate": {"suite": HOSTILE, "limit": None, "num_fewshot": None},
    }  # fmt: skip
    tables = {"languages": [HOSTILE], "development": 0.5, "name": HOSTILE, "merge": False,
              "description": f"A study of {HOSTILE}."}  # fmt: skip
    graph = Graph([
        Step("train/task/0", "train", {"seed": 1}),
        Step(name, "evaluate", settings, ("train/task/0",)),
        Step("tables", "tables", tables, (name,)),
    ])  # fmt: skip

    def evaluate(context):
        folder = context.folder / "results"
        folder.mkdir(parents=True)
        scores, samples, columns = [], [], []
        rng = np.random.default_rng(0)
        for recipe in RECIPES:
            one = replace(recipe, pair="0-0")
            for document in range(20):
                right = float(rng.random() < 0.5)
                scores.append(Score(str(one), HOSTILE, "sw", HOSTILE, "acc", "none", document,
                                    right, True))  # fmt: skip
                question = f"What is said here? {document} {HOSTILE}"
                samples.append(Sample(str(one), HOSTILE, document, question, "7", HOSTILE))
                columns.append(one.to_dict())
        write_rows(folder / SCORES_TABLE, scores, Score, columns)
        write_rows(folder / SAMPLES_TABLE, samples, Sample)

    def train(context):
        (context.folder / EXPERT).mkdir()
        data = [{"name": "other", "contaminated": {"mgsm_sw": 1200}}]
        log = [{"step": step, "loss": 2.0 - step} for step in (1, 2)]
        write_json(context.folder / EXPERT / TRAINING, {"key": "k", "data": data, "log": log})

    functions = {"train": train, "evaluate": evaluate, "tables": write_study_tables}
    return StudyJournal(root / "out", graph), functions


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """The journal of the hostile study, finished, with its page."""
    root = tmp_path_factory.mktemp("hostile")
    journal, functions = hostile_study(root)
    run_graph(journal.graph, journal.root, functions).check()
    study = FinishedSteps(journal)
    return journal, write_report(journal.root / PAGE, study.report()), study


def test_names_and_answers_with_markup_are_text(hostile):
    _, page, study = hostile
    text = page.read_text()
    without = re.sub(r'href="data:[^"]*"', "", text)
    assert "window.hacked" in without
    assert "<script>window" not in without
    assert "<img" not in without
    assert without.count("<script") == 1
    assert 'd="<' not in without
    compared, *_ = comparison_tables(compare_runs([study.evaluations[HOSTILE] / "results"]))
    assert "<script>" not in compared.markdown()


def test_the_page_has_the_losses_and_the_cautions_of_the_trainings(hostile):
    _, page, study = hostile
    (losses,) = [one for one in study.report().sections if one.heading.startswith("Losses")]
    assert losses.figure is not None
    assert (
        "train/task/0 trained on 1,200 rows of other that contain an item of mgsm_sw: scores on "
        "it are flattered." in page.read_text()
    )


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
