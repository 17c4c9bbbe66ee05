"""A whole study on the lab's base, from one file to its tables; the ready ones without a net."""

import json
import shutil
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accessibility import AXE, open_browser, violations
from lab_files import write_rows
from merging import change_config, copied
from safetensors.torch import load_file
from typer.testing import CliRunner

from layerswap.checkpoint import open_checkpoint
from layerswap.checkpoint.hub import TRAINING
from layerswap.cli import app
from layerswap.compose.presets import Zones
from layerswap.evaluation.settings import EvaluationSettings
from layerswap.evaluation.statistics import student_interval
from layerswap.experiment import benchmarks as study_results
from layerswap.experiment.answers import Answer, read_answers
from layerswap.experiment.benchmarks import (
    BenchmarkScores,
    StudyResults,
    benchmark_result,
    in_other_languages,
)
from layerswap.experiment.compare import over_languages, split_documents
from layerswap.experiment.conditions import BASE, CHOSEN, DEFAULT, FLATTERED, SOUP, Condition
from layerswap.experiment.runs import compare
from layerswap.experiment.tables import scores_table
from layerswap.ground.commit import write_json
from layerswap.ground.errors import EvaluationError, LayerswapError, RecipeError, StudyError
from layerswap.lab.assets import shipped
from layerswap.lab.questions import write_tasks
from layerswap.study.conditions import recipes
from layerswap.study.estimate import (
    GPU,
    INSIDE,
    STARTING,
    UNKNOWN,
    Measured,
    cost_study,
    models_to_run,
    size_of,
)
from layerswap.study.evaluating import EvaluateStep
from layerswap.study.finishing import FinishStep
from layerswap.study.inputs import mix_fingerprints
from layerswap.study.journal import StudyJournal, read_journal
from layerswap.study.kinds import kind_of, step_functions
from layerswap.study.plan import plan_study
from layerswap.study.preflight import check_data, check_here, check_plan, refuse_other_study
from layerswap.study.report import _recipe_of, _sentence, merge_models, write_study_report
from layerswap.study.runner import Context, run_graph
from layerswap.study.spec import find_study, read_study, ready_studies
from layerswap.study.steps import Graph, Resources
from layerswap.study.trainings import TrainStep
from layerswap.training.expert.save import read_training
from layerswap.training.expert.select import candidates
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainable import trained_parts

LAB = {
    "tasks": ["lab_problem_{language}"],
    "include": ["tasks"],
    "metric": ["exact_match", "whole"],
}
ALONE = {"baselines": [], "grid": None, "partitions": [], "lora": None}
"""Changes that leave the default swap alone."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("study")
    write_rows(root, 64, 16)
    write_tasks(root / "tasks", 20)
    return root


def spec(folder, **changes):
    def experts(name, seeds):
        run = {"hyperparameters": {"learning_rate": "1e-4", "per_device_train_batch_size": 16},
               "save_every": 32}  # fmt: skip
        data = {part: f"{name}-{part}.jsonl" for part in ("train", "validation")}
        return {"data": data, "keep": 2, "runs": [{**run, "seed": seed} for seed in seeds]}

    data = {
        "name": "a small study",
        "base": str(shipped().base),
        "task": experts("task", [1, 2]),
        "languages": {"nela": experts("nela", [1]), "furo": experts("furo", [1])},
        "grid": {"bottom": [0, 2], "top": 0},
        "baselines": ["base", "experts", "soup", "magnitude soup", "ties", "joint",
                      "simultaneous", "partial", "partial task", "reverted", "soups",
                      "multilingual soup"],
        "partitions": ["C"],
        "lora": {"r": 4, "lora_alpha": 4},
        "evaluate": {**LAB, "limit": 12, "other_languages": {"languages": ["basu", "nela"]}},
        "dtype": "float32",
        **changes,
    }  # fmt: skip
    path = folder / "study.yaml"
    path.write_text(json.dumps(data, indent=1))  # JSON is YAML, and has no aliases
    return plan_study(read_study(path), folder)


def completed(graph, out, **settings):
    """The journal of a graph whose steps all ran."""
    assert not run_graph(graph, out, step_functions(), **settings).failed
    return StudyJournal(out, graph)


def numbers_of(journal):
    return json.loads((journal.folder("tables") / "tables.json").read_text())


@pytest.fixture(scope="module")
def finished(folder, tmp_path_factory):
    """The graph of a study that ran, and its folder."""
    graph, out = spec(folder), tmp_path_factory.mktemp("finished") / "out"
    completed(graph, out)
    (out / "figures").mkdir()
    (out / "figures" / "of-before.svg").touch()
    write_study_report(out)
    return graph, out


@pytest.mark.slow
def test_a_study_evaluates_every_condition(finished):
    graph, out = finished
    journal = StudyJournal(out, graph)
    tables, numbers = journal.folder("tables"), numbers_of(journal)
    for language in ("nela", "furo"):
        (rows,) = numbers["languages"][language].values()
        assert set(rows) == {
            "base", "joint training", *map(str, (DEFAULT, CHOSEN, FLATTERED)), "task expert",
            "language expert", "soup",
            "magnitude soup", "TIES, density 0.2", "simultaneous training", "partition C",
            "swap of soups",
            "swap, multilingual soup", "task expert, partial C", "language expert, partial C",
            "swap of partial SFT, C", "swap of partial task expert, C",
            "task expert, reverted C", "language expert, reverted C",
            "task expert, LoRA", "language expert, LoRA", "swap, LoRA",
            "partition C, LoRA", "joint training, LoRA", "simultaneous training, LoRA",
            "task expert, partial C, LoRA", "language expert, partial C, LoRA",
            "swap of partial SFT, C, LoRA", "swap of partial task expert, C, LoRA",
        }  # fmt: skip
        assert all(0 <= row["low"] <= row["mean"] <= row["high"] <= 1 for row in rows.values())
        there = numbers["other_languages"][language]["lab_problem"]
        assert set(there) == set(rows)
        asked = {"basu", "nela"} - {language}
        assert all(set(row) == asked for row in there.values())
        assert there["base"]["basu"]["n"] == rows["base"]["n"]
        answers = read_answers(journal.folder(f"evaluate/{language}") / "results")
        assert all(answer.weights for answer in answers)
    assert "friedman" not in numbers  # two languages are too few to rank the treatments
    grid = numbers["grids"]["furo"]["lab_problem"]
    assert [one["bottom"] for one in grid["development"]] == [0, 2]
    assert set(grid["chosen"]) == {"0-0", "0-1", "1-0", "1-1"}
    text = (tables / "tables.md").read_text()
    assert "## lab\\_problem, furo" in text
    assert "chosen by the documents that it is evaluated on" in text
    assert "## lab\\_problem, the models of furo in other languages" in text
    assert "\\toprule" in (tables / "tables.tex").read_text()


@pytest.mark.slow
def test_the_page_of_a_study(finished):
    path = finished[1] / "report.html"
    if AXE is not None:
        with open_browser() as browser:
            assert violations(browser, path) == []
    page = path.read_text()
    assert '<th scope="col"></th>' not in page
    for fact in ("Models and evaluation", str(shipped().base),
                 "at most 12 of a task, drawn by label", "lab_problem_{language}",
                 "layerswap study merge", "The road to take, of 2 results", "Selected in nela: ",
                 "<details>",
                 "The compositions, lab_problem, nela"):  # fmt: skip
        assert fact in page
    figures = {figure.name for figure in (finished[1] / "figures").iterdir()}
    assert "of-before.svg" not in figures
    assert figures >= {
        "differences.svg", "differences.pdf", "what-fine-tuning-changed--nela.svg", "stack.svg",
    }  # fmt: skip
    assert "ranks.svg" not in figures  # of two languages


@pytest.mark.slow
def test_the_selected_composition_of_a_study_is_merged(finished):
    out = finished[1]
    assert (out / "best" / "furo.yaml").read_text().startswith("# lab_problem in furo")
    (merged,) = merge_models(out, ["nela"], log=print)
    assert open_checkpoint(str(merged)).layers == 8
    assert (merged / "README.md").is_file()
    with pytest.raises(StudyError, match="has no 'sw'; its languages are furo, nela"):
        list(merge_models(out, ["sw"], log=print))
    (average,) = merge_models(out, ["nela"], "soup", log=print)
    experts = [one.source for one in _recipe_of(out, "nela", "soup").experts.values()]
    soup, *each = (load_file(f"{path}/model.safetensors") for path in (average, *experts))
    assert len(each) == 2
    for name, weights in soup.items():
        mean = (each[0][name].float() + each[1][name].float()) / 2
        torch.testing.assert_close(weights.float(), mean, rtol=1e-2, atol=1e-3)
    with pytest.raises(StudyError, match="no model is called 'mean' in nela; there are base; "):
        list(merge_models(out, ["nela"], "mean", log=print))


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_one_line(finished, tmp_path):
    out = shutil.copytree(finished[1], tmp_path / "out")
    shutil.rmtree(out / "tables")
    (out / "tables").touch()
    with pytest.raises(StudyError, match="the report cannot be written"):
        write_study_report(out)


@pytest.mark.slow
def test_a_finished_study_runs_no_step_again(folder, finished):
    graph, out = finished
    assert read_journal(out).graph.keys == graph.keys
    lines = []
    run_graph(spec(folder), out, step_functions(), log=lines.append)
    assert lines == [f"{len(graph)} steps, {len(graph)} of them done before"]
    changed = spec(folder, evaluate={**LAB, "limit": 14})
    same = {name for name in graph.keys if graph.keys[name] == changed.keys[name]}
    assert {name.partition("/")[0] for name in set(graph.keys) - same} == {"evaluate", "tables"}


def test_other_trainings_stay_in_the_places_of_the_first_run(folder):
    places = [{"layers": "0-5"}]

    def with_places(kind):
        return {**kind, "keep": 1, "runs": [{**kind["runs"][0], "train": {"places": places}}]}

    spec(folder)
    plain = json.loads((folder / "study.yaml").read_text())
    task = with_places(plain["task"])
    languages = {name: with_places(kind) for name, kind in plain["languages"].items()}
    graph = spec(folder, task=task, languages=languages, lora=None)
    trainings = [step for step in graph if step.kind == "train"]
    assert len(trainings) == 3 + 3 + 4
    for step in trainings:
        training = TrainStep.of(step)
        expert = check_expert(training.expert(["D"] * len(training.data)))
        parts = trained_parts(expert, 8, folder)
        trained = {place.layer for part in parts for place in part}
        assert trained <= set(range(6))
        if not step.name.startswith("partial/"):
            assert trained == set(range(6))


@pytest.mark.parametrize("regime", ["", "LoRA"])
def test_a_partial_task_expert_is_swapped_with_a_whole_language_expert(folder, regime):
    graph = spec(folder, baselines=["partial task"], lora={} if regime else None)
    prefix = "lora-" if regime else ""
    names = [step.name for step in graph if "partial/" in step.name]
    assert names == ["partial/task/C", *(["lora-partial/task/C"] if regime else [])]
    settings = EvaluateStep.of(graph["evaluate/nela"])
    kept = {"task": ["t0", "t1"], "nela": ["l0", "l1"]}
    found = dict(recipes(settings, kept, {step.name: step.name for step in graph}, 8))
    assert found[Condition("swap of partial task expert", "C", regime=regime)] == {
        "base": settings.base,
        "experts": {
            "task": f"{prefix}partial/task/C",
            "language": "lora-train/nela" if regime else "l0",
        },
        "partition": {"name": "C", "outside": None},
    }
    assert {one.regime for one in found if one.method == "task expert"} == {"", regime}
    assert not [one for one in found if one.method == "swap of partial SFT"]


def test_changed_data_is_trained_on_again(folder):
    before = spec(folder).keys
    path = folder / "furo-train.jsonl"
    text = path.read_text()
    path.write_text(text + text.splitlines()[0] + "\n")
    after = spec(folder).keys
    path.write_text(text)
    assert {name for name in before if before[name] != after[name]} == {
        "train/furo/0", "both/furo/joint", "both/furo/simultaneous", "partial/furo/C",
        "lora-train/furo", "lora-partial/furo/C", "lora-both/furo/joint",
        "lora-both/furo/simultaneous", "select/furo", "change/furo", "evaluate/furo", "tables",
        "evaluate/nela",  # whose multilingual soup has its experts
    }  # fmt: skip


def swapped(bottom, pair=""):
    return Condition("swap", zones=Zones(bottom, 0), pair=pair)


def test_the_choice_is_made_on_other_documents_than_the_score():
    rng = np.random.default_rng(1)
    names = [DEFAULT, *(swapped(b) for b in range(30)), SOUP]
    scores = {replace(name, pair=f"0-{i}"): (rng.random(400) < 0.5).astype(float)
              for i in range(3) for name in names}  # fmt: skip
    found = benchmark_result("sw", "mgsm", BenchmarkScores(scores), 0.5)
    assert abs(found.intervals[CHOSEN].mean - 0.5) < 0.04  # nothing is better, and it says so
    assert found.intervals[FLATTERED].mean > 0.54
    assert {CHOSEN, DEFAULT} & found.against(DEFAULT).keys() == {CHOSEN}
    assert found.intervals[SOUP].n == 200


def disagreeing(development, test):
    """Scores of two pairs: the default swap has 0.5, another has these on the two splits."""
    split = split_documents(40, 0.5)
    other = np.empty(40)
    other[split.development], other[split.test] = development, test
    pairs = ("0-0", "0-1")
    scores = {replace(DEFAULT, pair=pair): np.full(40, 0.5) for pair in pairs}
    scores |= {swapped(1, pair): other for pair in pairs}
    scores[swapped(2, "0-1")] = other + 0.01  # best of all, on both splits
    return benchmark_result("sw", "mgsm", BenchmarkScores(scores), 0.5)


def test_the_best_of_all_models_on_development_is_saved():
    """An average or the task expert may win, and no test score plays a part."""
    split = split_documents(40, 0.5)
    better = np.empty(40)
    better[split.development], better[split.test] = 0.9, 0.1
    scores = {replace(DEFAULT, pair="0-0"): np.full(40, 0.5), BASE: np.ones(40)}
    scores |= {swapped(1, "0-0"): np.full(40, 0.6), replace(SOUP, pair="0-0"): better}
    found = benchmark_result("sw", "mgsm", BenchmarkScores(scores), 0.5)
    assert found.selected == SOUP
    assert found.choice.saved == replace(SOUP, pair="0-0")
    assert found.saved_score.mean == pytest.approx(0.1)
    tuned = {Condition("weighted soup", f"task {share}", pair="0-0"): better + share / 100
             for share in (0.3, 0.7)}  # fmt: skip
    found = benchmark_result("sw", "mgsm", BenchmarkScores({**scores, **tuned}), 0.5)
    assert str(found.selected) == "weighted soup, chosen on development"
    assert str(found.choice.saved) == "0-0: weighted soup, task 0.7"
    alone = {**scores, replace(SOUP, pair=""): better + 0.05}
    found = benchmark_result("sw", "mgsm", BenchmarkScores(alone), 0.5)
    assert found.saved_score.n == 20


def test_development_alone_decides_what_is_saved_and_headed():
    found = disagreeing(development=0.6, test=0.1)
    assert found.selected == found.choice.selected == CHOSEN
    assert found.choice.saved == swapped(2, "0-1")
    assert found.saved_score.mean == pytest.approx(0.11)
    assert _sentence(found).startswith("mgsm in sw: the chosen swap reaches 10.5")
    found = disagreeing(development=0.4, test=0.9)
    assert found.selected == found.choice.selected == DEFAULT
    assert found.choice.saved == replace(DEFAULT, pair="0-0")
    assert found.saved_score.mean == 0.5
    assert _sentence(found).startswith("mgsm in sw: the default swap reaches 50.0")


def test_the_headline_names_what_it_differs_from():
    half = np.tile([0.0, 1.0], 20)
    scores = {replace(DEFAULT, pair="0-0"): half, swapped(1, "0-0"): half.copy(), BASE: 0 * half,
              SOUP: half}  # fmt: skip
    found = benchmark_result("sw", "mgsm", BenchmarkScores(scores), 0.5)
    said = _sentence(found)
    assert "Higher than: base. No difference detected from: soup; " in said


def test_a_difference_over_languages_is_paired_by_document():
    rng = np.random.default_rng(1)
    hard = rng.random(400) < 0.5  # in every language alike
    languages = []
    for language in ("sw", "ha"):
        swap, soup = hard.astype(float), hard & (rng.random(400) < 0.8)
        scores = {replace(DEFAULT, pair="0-0"): swap, SOUP: soup.astype(float)}
        languages.append(benchmark_result(language, "sib200", BenchmarkScores(scores, 100), 0.5))
    found = over_languages(languages, SOUP, DEFAULT)
    means = [one.intervals for one in languages]
    assert found.mean == pytest.approx(np.mean([by[SOUP].mean - by[DEFAULT].mean for by in means]))
    assert found.n == 300
    assert found.high < 0
    apart = [one.against(DEFAULT)[SOUP] for one in languages]
    assert found.high - found.low < min(one.high - one.low for one in apart)
    whole = over_languages(languages, DEFAULT)
    # Translations of one document are not as good as two documents.
    assert whole.high - whole.low > 0.9 * (means[0][DEFAULT].high - means[0][DEFAULT].low)
    assert over_languages(languages, BASE) is None
    short = replace(languages[1], test=languages[1].test[:200], scores={
        one: values[:200] for one, values in languages[1].scores.items()
    })  # fmt: skip
    assert over_languages([languages[0], short], SOUP, DEFAULT).n == 500
    # Equal answers show as little as `paired_difference` says, in both directions.
    for pair in languages, [languages[0], short]:
        none = over_languages(pair, DEFAULT, DEFAULT)
        assert (none.mean, none.low) == (0, -none.high)


def test_the_interval_of_five_languages_is_over_languages():
    rng = np.random.default_rng(1)
    languages, means = [], []
    for language in ("sw", "ha", "yo", "sn", "ln"):
        swap, soup = ((rng.random(200) < rng.random()) * 1.0 for _ in range(2))
        scores = {replace(DEFAULT, pair="0-0"): swap, SOUP: soup}
        languages.append(benchmark_result(language, "news", BenchmarkScores(scores, 100), 0.5))
        means.append(soup[100:].mean() - swap[100:].mean())
    found = over_languages(languages, SOUP, DEFAULT)
    assert found == student_interval(np.array(means))
    assert (
        "over languages (Student)" in StudyResults(languages).tables["news, all languages"].caption
    )
    assert over_languages(languages[:4], SOUP, DEFAULT).n == 100  # documents


@pytest.mark.parametrize(
    ("benchmark", "tasks", "published"),
    [("sib200", ["sib200_swh_Latn_0shot", "sib200_swh_Latn_0shot_dev"], 4),
     ("topics_dev", ["topics_dev"], 0), ("mgsm", ["mgsm_sw_dev"], 0)],
)  # fmt: skip
def test_only_a_published_development_split_is_chosen_on_whole(benchmark, tasks, published):
    columns = ("acc", "none")
    rows = [
        Answer("base", task, n, *columns, 1.0, True, benchmark, "sw", condition=BASE)
        for task in tasks for n in range(4)
    ]  # fmt: skip
    (scores,) = study_results.condition_scores(rows).values()
    assert scores.published == published


def test_baselines_with_a_setting_are_chosen_on_development_too():
    soups = [Condition("weighted soup", f"task {share}", pair="0-0") for share in (0.3, 0.7)]
    sparse = [Condition("ties", f"density {density}", pair="0-0") for density in (0.2, 1.0)]
    scores = {
        one: np.r_[np.full(10, on_development), np.full(30, on_test)]
        for one, on_development, on_test in zip(
            [*soups, *sparse, replace(DEFAULT, pair="0-0")],
            [0.9, 0.2, 0.4, 0.5, 0.6],
            [0.3, 0.8, 0.7, 0.1, 0.5],
            strict=True,
        )
    }
    found = benchmark_result("sw", "sib200", BenchmarkScores(scores, published=10), 0.5)
    means = {str(one): i.mean for one, i in found.intervals.items()}
    assert means == pytest.approx(
        {
            "weighted soup, chosen on development": 0.3,
            "TIES, chosen on development": 0.1,
            "TIES, density 0.2": 0.7,
            "TIES, density 1.0": 0.1,
            "swap, default": 0.5,
        }
    )
    assert found.intervals[DEFAULT].n == 30


def test_a_choice_that_is_the_default_is_not_compared_with_it():
    half = np.tile([0.0, 1.0], 20)
    default, again, other = (replace(one, pair="0-0") for one in (DEFAULT, swapped(2), swapped(1)))
    scores = {default: half, again: half, other: 0 * half, replace(SOUP, pair="0-0"): 0 * half}
    same = dict.fromkeys((default, again), "abc") | {other: "def"}
    for weights in (same, {}):
        found = benchmark_result("sw", "mgsm", BenchmarkScores(scores, weights=weights), 0.5)
        table, whole = scores_table(found), StudyResults([found, found]).parts[0].table
        assert (CHOSEN in found.differences) == (FLATTERED in found.differences) == (not weights)
        for columns in (table.columns, whole.columns):
            assert (f"minus {CHOSEN}" in columns) == (not weights)
        words = f"The same model as {DEFAULT}: {CHOSEN}; {FLATTERED}."
        assert (words in table.caption) == bool(weights)
        assert (str(CHOSEN) in _sentence(found)) == (not weights)


def test_in_other_languages_nothing_is_chosen_anew():
    rng = np.random.default_rng(0)
    names = [*map(swapped, range(3)), SOUP]
    own = {replace(n, pair=f"0-{i}"): rng.random(100) for i in range(2) for n in names}
    own[swapped(1, "0-0")] += 1
    own[swapped(2, "0-1")] += 1
    one = benchmark_result("sw", "mgsm", BenchmarkScores(own), 0.5)
    there = {
        swapped(0, "0-0"): np.ones(80),
        swapped(1, "0-0"): np.full(80, 0.25),
        swapped(2, "0-1"): np.full(80, 0.75),
        swapped(1, "0-1"): np.ones(80),
        BASE: np.full(80, 0.1),
    }
    others = {("mgsm", code): BenchmarkScores(there) for code in ("en", "de")}
    (found,) = in_other_languages([one], others, 0.5).values()
    english, german = found
    assert (english.language, german.language, german.benchmark) == ("en", "de", "mgsm")
    assert set(german.scores) == {CHOSEN, FLATTERED, BASE}
    assert english.intervals[CHOSEN].mean == german.intervals[FLATTERED].mean == 0.5
    assert german.intervals[BASE].mean == pytest.approx(0.1)
    assert german.intervals[BASE].n == 40


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate": {"suite": "mgsm"}}, "no language 'nela'"),
        ({"evaluate": {**LAB, "other_languages": {"languages": ["zu"], "suites": ["mgsm"]}}},
         "mgsm does not have zu"),
        ({"evaluate": {**LAB, "tasks": ["lab_problen_{language}"]}},
         "no task 'lab_problen_nela'.*lab_problem_nela"),
        ({"evaluate": {**LAB, "other_languages": {"languages": ["klingon"]}}},
         "no task 'lab_problem_kl"),
        ({"grid": {"bottom": 9, "top": 9}}, "no composition fits into the 8 layers"),
        ({"both": {"hyperparameters": {"lerning_rate": 1}}}, "lerning_rate.*learning_rate"),
        ({"task": {"data": {"train": "task-train.jsonl", "validation": "task-validation.jsonl"},
                   "by": {"tasks": ["sel_nela"]}}}, "no task 'sel_nela'"),
        ({"both": {"hyperparameters": {"max_steps": "many"}}}, "max_steps: must be a valid int"),
        ({"both": {"preset": "math-9"}}, "no preset 'math-9'; there are math-1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_before_training(folder, changes, said):
    with pytest.raises(LayerswapError, match=said):
        check_plan(spec(folder, **changes))


@pytest.mark.parametrize(
    ("source", "said"),
    [({"path": "gone.jsonl"}, "gone.jsonl: no such file"),
     ({"path": "task-train.jsonl", "config": "swa"}, "config: is for a Hub data set"),
     ({"path": "task-train.jsonl", "prompt": "{text}"}, "prompt and completion go together")],
)  # fmt: skip
def test_a_mix_that_cannot_be_built_is_refused_before_training(folder, source, said):
    mix = {"name": "own", "kind": "text", "sources": {"own": {"text": "{prompt}", **source}}}
    (folder / "own.yaml").write_text(json.dumps(mix))
    with pytest.raises(LayerswapError, match=said):
        check_plan(spec(folder, task={"data": "own.yaml", "runs": [{"seed": 1}]}))


def test_a_plan_that_can_work_is_not_refused(folder):
    check_plan(spec(folder))
    check_plan(plan_study(*find_study("layer-swapping")))


def test_this_machine_is_asked_for_benchmarks_and_devices(folder, tmp_path, monkeypatch):
    there = {"languages": ["en"], "suites": ["mgsm"]}
    graph = spec(folder, evaluate={**LAB, "other_languages": there}, device="cuba")
    monkeypatch.setenv("LAYERSWAP_DATA", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EvaluationError, match="device 'cuba' cannot be used"):
        check_here(list(graph), device=True)
    with pytest.raises(EvaluationError, match=r"mgsm_en\.tsv|MGSM"):
        check_here(list(graph), device=False)


@pytest.mark.parametrize("metric", [["exact_matc", "whole"], ["exact_match", "hole"]])
def test_a_metric_that_a_task_lacks_is_named_before_training(folder, metric):
    graph = spec(folder, evaluate={**LAB, "metric": metric})
    with pytest.raises(
        EvaluationError, match=r"evaluate.metric: lab_problem_nela has no .*exact_match"
    ):
        check_here(list(graph), device=True)


def test_missing_data_of_a_task_are_named_before_training(folder, tmp_path):
    shutil.copytree(folder / "tasks", tmp_path / "tasks")
    path = tmp_path / "tasks" / "lab_problem_nela.yaml"
    path.write_text(path.read_text().replace("lab_problem_nela.jsonl", "nowhere.jsonl"))
    graph = spec(folder, evaluate={**LAB, "include": [str(tmp_path / "tasks")]})
    for check in (partial(check_here, device=True), partial(check_data, fetch=False)):
        with pytest.raises(EvaluationError, match="lab_problem_nela"):
            check(list(graph))


def test_a_folder_of_another_study_is_left_alone(folder, tmp_path):
    graph = spec(folder, name="one")
    StudyJournal(tmp_path, graph).open()
    refuse_other_study(spec(folder, name="one", pairs="same"), tmp_path)
    with pytest.raises(StudyError, match="holds the study 'one'"):
        refuse_other_study(spec(folder, name="other"), tmp_path)
    StudyJournal(tmp_path / "steps", Graph([graph["train/task/0"]])).open()
    with pytest.raises(StudyError, match="holds the steps of another command"):
        refuse_other_study(graph, tmp_path / "steps")
    (tmp_path / "study.json").write_text('{"steps": [')
    with pytest.raises(StudyError, match=r"study\.json is damaged"):
        refuse_other_study(graph, tmp_path)


def test_files_outside_the_study_are_part_of_the_keys(folder, tmp_path, monkeypatch):
    there = tmp_path / "copy"
    shutil.copytree(folder, there)
    shutil.copytree(shipped().base, there / "base")
    train = {"train": "task-*.jsonl", "validation": "task-validation.jsonl"}
    recipe = there / "places.yaml"
    recipe.write_text("experts: {task: a, language: b}\nswap: {bottom: 2, top: 1}\n")
    changes = {
        "base": "./base",
        "task": {"data": train, "runs": [{"train": {"recipe": "places.yaml", "expert": "task"}}]},
        "baselines": ["base"],
    }
    before = spec(there, **changes).keys

    def changed():
        after = spec(there, **changes).keys
        kinds = {name.partition("/")[0] for name in after if after[name] != before[name]}
        return kinds - {"lora-train"}

    assert not changed()
    monkeypatch.chdir(there)
    assert not changed()
    follow = {"select", "change", "evaluate", "tables"}
    (there / "outside.jsonl").write_text("{}")
    task = there / "tasks" / "lab_problem_nela.yaml"
    task.write_text(task.read_text() + f"metadata: {{more: {there / 'outside.jsonl'}}}\n")
    before = spec(there, **changes).keys
    for path, kinds in (
        ("tasks/lab_problem_nela.jsonl", {"evaluate", "tables"}),
        ("outside.jsonl", {"evaluate", "tables"}),
        ("places.yaml", {"train", *follow}),
        ("task-more.jsonl", {"train", *follow}),
        ("base/model.safetensors", {"train", *follow}),
    ):
        was = (there / path).read_bytes() if (there / path).exists() else None
        kept = was[:-1] if was and path.endswith(".safetensors") else (was or b"")
        (there / path).write_bytes(kept + b" ")
        assert changed() == kinds
        (there / path).write_bytes(was) if was is not None else (there / path).unlink()
    assert not changed()


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ready_studies()))
def test_ready_studies_are_planned_without_a_net(name, monkeypatch):
    import socket

    def refuse(*arguments, **settings):
        raise AssertionError("a dry run reached for the net")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    study, folder = find_study(name)
    graph = plan_study(study, folder)
    hours = sum(cost_study(study, graph).hours.values())
    assert hours > (0.01 if name.endswith("-transfer") else 10)
    assert [step.name for step in graph][-1] == "tables"


def selections(root, **experts):
    """The folders of finished selections, each of one expert."""
    folders = {}
    for kind, expert in experts.items():
        folders[f"select/{kind}"] = root / f"select-{kind}"
        folders[f"select/{kind}"].mkdir()
        write_json(folders[f"select/{kind}"] / "selection.json", [str(expert)])
    return folders


def answers_of(step, folder, inputs, log=print):
    """What the models of a step of evaluation answered."""
    folder.mkdir()
    kind_of(step).run(Context(step, folder, inputs, log))
    return read_answers(folder / "results")


TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant] "


def test_prompts_of_a_study_go_through_the_chat_template(folder, tmp_path):
    """With examples and generation settings in lm-eval's words."""
    chats = {}
    for name in ("base", "task-1", "language-nela-1"):
        chats[name] = shutil.copytree(shipped().base.parent / name, tmp_path / name)
        (chats[name] / "chat_template.jinja").write_text(TEMPLATE)
    tasks = shutil.copytree(folder / "tasks", tmp_path / "tasks")
    yaml = tasks / "lab_problem_nela.yaml"
    yaml.write_text(yaml.read_text().replace("num_fewshot: 0", "fewshot_split: test"))
    options = {"apply_chat_template": True, "system_instruction": "Be brief.", "num_fewshot": 1,
               "gen_kwargs": "max_gen_toks=2"}  # fmt: skip
    asked = {**LAB, "include": [str(tasks)], "limit": 2}
    changes = {**ALONE, "base": str(chats["base"]), "evaluate": {**asked, **options}}
    graph = spec(folder, **changes)
    check_plan(graph)
    inputs = selections(tmp_path, task=chats["task-1"], nela=chats["language-nela-1"])
    answers = answers_of(graph["evaluate/nela"], tmp_path / "evaluate", inputs)
    assert len({answer.document for answer in answers}) == 2
    sample = answers[0]
    (results,) = (tmp_path / "evaluate" / "results").glob("*/results.json")
    facts = json.loads(results.read_text())
    assert facts["configs"]["lab_problem_nela"]["num_fewshot"] == 1
    assert sample.question.startswith("[system] Be brief.\n[user] ")
    assert sample.question.count("[user]") == 2
    assert sample.question.endswith("[assistant]")
    with pytest.raises(RecipeError, match="gen_kwargs: 'nonsense' is not name=value"):
        check_plan(spec(folder, **changes | {"evaluate": {**asked, "gen_kwargs": "nonsense"}}))
    with pytest.raises(EvaluationError, match="has no chat template to apply"):
        check_plan(spec(folder, **changes | {"base": str(shipped().base)}))


@pytest.mark.slow
def test_models_that_were_evaluated_before_give_their_answers_again(folder, tmp_path):
    asked = {**LAB, "limit": 3}
    few, models = {**ALONE, "evaluate": asked}, shipped().base.parent
    inputs = selections(tmp_path, task=models / "task-1", nela=models / "language-nela-1")

    def evaluated(name, **changes):
        step, lines = spec(folder, **few | changes)["evaluate/nela"], []
        scores = {
            (one.model, one.metric, one.document): one.score
            for one in answers_of(step, tmp_path / name, inputs, lines.append)
        }
        return scores, sum("answers are known" in line for line in lines)

    before, known = evaluated("evaluate-1")
    assert known == 0
    # What it answered shows that it was taken over, and not computed again.
    with sqlite3.connect(tmp_path / "evaluate-1" / "answers.sqlite") as database:
        (answers,) = database.execute("SELECT count(*) FROM answers").fetchone()
        database.execute("UPDATE answers SET answer = '[1, 1, 1]'")
    more, known = evaluated("evaluate-2", baselines=["soup"])
    assert known == 1
    assert set(before) < set(more)
    with sqlite3.connect(tmp_path / "evaluate-2" / "answers.sqlite") as database:
        same = "SELECT count(*) FROM answers WHERE answer = '[1, 1, 1]'"
        assert database.execute(same).fetchone() == (answers,)
    assert evaluated("evaluate-3", dtype="bfloat16")[1] == 0
    (tmp_path / "evaluate-1" / "answers.sqlite").write_text("damaged")
    (tmp_path / "evaluate-2" / "answered_by.json").write_text("{")
    after, known = evaluated("evaluate-4", baselines=["soup"])
    assert known == 0
    assert {key: after[key] for key in before} == before


@pytest.mark.slow
def test_experts_that_exist_are_studied_without_training(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("layerswap.engine.sweep.why_not_joint", lambda *given: "logits differ")
    models = shipped().base.parent
    asked = {**LAB, "limit": 4}
    other = shutil.copytree(models / "task-1", tmp_path / "task")
    base = {"source": "hub/base", "revision": "old", "fingerprints": {"model.safetensors": "1"}}
    record = {"key": "k", "places": [], "data": [], "spec": {}, "base": base}
    (other / TRAINING).write_text(json.dumps(record))
    graph = spec(
        folder, task={"experts": [str(other), str(models / "language-furo-1")]}, pairs="same",
        languages={"nela": {"experts": [str(models / "language-nela-1"), str(models / "task-1")]}},
        baselines=["experts", "soup"], grid={"bottom": [2, 4], "top": 0}, partitions=[], lora=None,
        evaluate=asked,
    )  # fmt: skip
    assert [step.name for step in graph] == [
        "select/task", "select/nela", "evaluate/nela", "change/nela", "tables",
    ]  # fmt: skip
    check_plan(graph)
    lines: list[str] = []
    with pytest.warns(UserWarning, match="every composition"):
        journal = completed(graph, tmp_path / "out", log=lines.append)
    (note,) = [line for line in lines if "different files" in line]
    assert f"{other} was trained from hub/base@old, the base is " in note
    (rows,) = numbers_of(journal)["languages"]["nela"].values()
    assert {"swap, default", "task expert", "language expert", "soup"} < set(rows)
    page = write_study_report(tmp_path / "out").read_text()
    assert f"{models / 'language-nela-1'}, {models / 'task-1'}" in page
    (merged,) = merge_models(tmp_path / "out", ["nela"], log=lambda line: None)
    assert open_checkpoint(str(merged)).layers == 8


def test_an_expert_that_does_not_fit_or_is_nowhere_is_refused(folder, tmp_path, monkeypatch):
    other = change_config(copied(shipped().base, tmp_path / "other"), hidden_size=32)
    with pytest.raises(LayerswapError, match="hidden_size differs: 32 in expert-1"):
        check_plan(spec(folder, task={"experts": [str(other)]}, **ALONE))
    # What is no folder is asked of the Hub, as a mistyped path is.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    graph = spec(folder, task={"experts": ["experts/math"]}, **ALONE)
    check_plan(graph)
    with pytest.raises(LayerswapError, match="experts/math"):
        check_here(graph, device=True)


def small(rows, **changes):
    """A study of one language on `rows` for each expert, and its graph."""
    task, language = ({"data": {"train": str(rows)}, "runs": [{"save_every": 50, "seed": seed}]}
                      for seed in (1, 2))  # fmt: skip
    data = {"name": "x", "base": "a/base-1B", "task": task, "languages": {"sw": language},
            "baselines": ["base"], "evaluate": {"suite": "belebele", "num_fewshot": 0},
            "device": "cuda", **changes}  # fmt: skip
    (rows.parent / "small.yaml").write_text(json.dumps(data))
    spec = read_study(rows.parent / "small.yaml")
    return spec, plan_study(spec, rows.parent)


def test_an_estimate_is_tokens_at_one_speed(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text((json.dumps({"text": 288 * "x"}) + "\n") * 100)  # 300 characters, 100 tokens
    start, measured = STARTING / 3600, Measured(1000.0, 5000.0)
    costs = cost_study(*small(rows), measured)
    train, evaluate = (costs.hours[name] for name in ("train/task/0", "evaluate/sw"))
    assert train == pytest.approx(start + 100 * 100 / 1000 / 3600, rel=0.01)
    # The base and the default swap of one pair; a document of Belebele has 400 tokens.
    assert evaluate == pytest.approx(start + 2 * 900 * 400 / 5000 / 3600)
    assert str(costs).endswith("measured speed, 40.0 GB of disk and 16.0 GB of memory")
    assert "train/sw/0" not in cost_study(*small(rows), measured, ["train/sw/0"]).hours

    def hours(**run):
        experts = {"data": {"train": str(rows)}, "runs": [run]}
        return cost_study(*small(rows, task=experts), measured).hours["train/task/0"] - start

    once = train - start
    assert hours(limit=50, hyperparameters={"num_train_epochs": 4}) == pytest.approx(2 * once)
    assert hours(hyperparameters={"max_length": 50}) == pytest.approx(once / 2, rel=0.01)
    steps = {"effective_batch": 10, "hyperparameters": {"max_steps": 30}}
    assert hours(**steps) == pytest.approx(3 * once)
    # Unmeasured: 6 operations a parameter and token, on an A100.
    usual = cost_study(*small(rows))
    assert usual.hours["train/task/0"] - start == pytest.approx(once * 1000 * 6e9 / GPU)
    assert "at the usual speed of an A100 for 1 billion parameters" in str(usual)
    less = cost_study(*small(rows, keep_checkpoints="selected"), measured)
    assert less.disk_gb < costs.disk_gb
    finish = {"labels": {"sw": {"train": str(rows)}}, "starts": ["base", "swap"], "run": {}}
    ends = cost_study(*small(rows, finish=finish), measured)
    assert ends.hours["finish/sw/base"] - start == pytest.approx(4 * once)
    assert ends.hours["finished/sw"] == pytest.approx(evaluate)  # two models, as above
    lora = cost_study(*small(rows, finish={**finish, "run": {"lora": {}}}), measured)
    assert lora.disk_gb == ends.disk_gb == costs.disk_gb + 24


def test_compositions_that_share_layers_cost_less(tmp_path):
    (rows := tmp_path / "rows.jsonl").write_text('{"text": "x"}\n')
    wide = {name: [0, 1, 2] for name in ("top", "bottom_transition", "top_transition")}
    grid = {"bottom": [3, 4, 5], **wide}
    _, graph = small(rows, grid=grid, baselines=[])
    (step,) = EvaluateStep.all_of(graph).values()
    # 81 configurations of 32 layers take 398 layer evaluations (engine.trie); the default is one.
    assert models_to_run(step, 32) == 398 / 32


@pytest.mark.parametrize(
    ("base", "billions"),
    [("meta-llama/Llama-3.1-8B-Instruct", 8), ("HuggingFaceTB/SmolLM2-135M", 0.135),
     ("google/gemma-3-270m-it", 0.27), ("Qwen/Qwen2.5-0.5B", 0.5), ("a/b", UNKNOWN)],
)  # fmt: skip
def test_the_size_of_a_base_is_in_its_name(base, billions):
    assert size_of(base) == (billions, INSIDE)


def test_a_step_of_data_is_another_one_when_a_parallel_file_changes(tmp_path):
    for name in ("a.txt", "news.ig", "news.en"):
        (tmp_path / name).write_text(name)
    mix = "sources: {a: {path: a.txt}, b: {parallel: {ig: news.ig, en: news.en}}}"
    first = mix_fingerprints(mix, tmp_path)
    assert len(first) == 3
    (tmp_path / "news.en").write_text("changed")
    changed = mix_fingerprints(mix, tmp_path)
    assert {Path(file).name for file in first if first[file] != changed[file]} == {"news.en"}


def test_a_batch_size_is_used_and_older_keys_stay(folder, tmp_path):
    plain, given = (spec(folder, **ALONE, evaluate={**LAB, "limit": 2, **more})["evaluate/nela"]
                    for more in ({}, {"batch_size": 1}))  # fmt: skip
    assert "batch_size" not in plain.settings["evaluate"]
    assert given.settings["evaluate"] == {**plain.settings["evaluate"], "batch_size": 1}
    with pytest.raises(
        RecipeError, match=r"evaluate\.batch_size: write a whole number; found 'lots'"
    ):
        spec(folder, **ALONE, evaluate={**LAB, "batch_size": "lots"})
    step = EvaluateStep.of(given)
    how = EvaluationSettings.taken_from(step.evaluate.model_dump(mode="json"))
    assert (how.batch_size, EvaluateStep.of(plain).evaluate.batch_size) == (1, "auto")


def test_commands_in_a_study_file_are_shown(folder):
    spec(folder, slurm={"partition": "gpu", "setup": ["module load cuda"],
                        "train": {"setup": ["rm -rf ~", "x\n"]}})  # fmt: skip
    assert read_study(folder / "study.yaml").notes == [
        f"slurm: setup: jobs on Slurm run {line}"
        for line in ("'module load cuda'", "'rm -rf ~'", r"'x\n'")
    ]


@pytest.mark.slow
def test_a_plan_leaves_out_finished_steps(folder, tmp_path):
    def plan():
        given = ["study", "run", str(folder / "study.yaml"), "--out", str(tmp_path), "--dry-run"]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.output
        return done.output

    def trained(context):
        if context.step.name != "train/task/0":
            raise ValueError("enough")

    graph = spec(folder)
    printed = " ".join(plan().split())
    assert f"{len(graph)} steps, about" in printed
    assert "at the usual speed of this machine's processors" in printed
    assert not any(tmp_path.iterdir())
    run_graph(graph, tmp_path, dict.fromkeys({step.kind for step in graph}, trained))
    printed = plan()
    assert f"{len(graph)} steps, 1 of them done before; the others take" in " ".join(
        printed.split()
    )
    rows = [line.split() for line in printed.splitlines() if line.startswith("  train/task/0 ")]
    assert rows[0][1] == "done"
    run_graph(graph, tmp_path, dict.fromkeys({step.kind for step in graph}, lambda context: None))
    assert f"{len(graph)} steps, all of them done before." in " ".join(plan().split())


def test_only_the_command_line_allows_programs(tmp_path, monkeypatch):
    study = {"name": "s", "base": "a/b", "task": {"data": "d"}, "languages": {"sw": {"data": "d"}},
             "evaluate": {"suite": "mbpp", "allow_code": True}}  # fmt: skip
    path, planned = tmp_path / "study.yaml", []
    path.write_text(json.dumps(study))
    with pytest.raises(LayerswapError, match="a file cannot allow programs, only --allow-code"):
        read_study(path)
    path.write_text(json.dumps(study | {"evaluate": {"suite": "mbpp"}}))

    def plan(spec, folder):
        planned.append(spec.evaluate.allow_code)
        raise LayerswapError("enough")

    monkeypatch.setattr("layerswap.study.plan.plan_study", plan)
    for more in ([], ["--allow-code"]):
        CliRunner().invoke(app, ["study", "run", str(path), "--out", "o", *more])
    assert planned == [False, True]


@pytest.mark.slow
def test_checkpoints_that_were_not_selected_can_be_deleted(folder, tmp_path):
    """No key changes by it, what is left is evaluated, and nothing is selected from the rest."""
    less = {"lora": None, "partitions": [], "baselines": ["joint"], "grid": None,
            "languages": {"nela": {"data": {"train": "nela-train.jsonl"}}}}  # fmt: skip
    whole = spec(folder, **less)
    graph = spec(folder, **less, keep_checkpoints="selected")
    assert graph.keys == whole.keys
    journal = completed(graph, tmp_path / "out")
    chosen = json.loads((journal.folder("select/task") / "selection.json").read_text())
    runs = [journal.folder(f"train/task/{i}") / "expert" for i in (0, 1)]
    left = {path.parent for run in runs for path in run.rglob("*.safetensors")}
    assert left == {journal.folder("select/task").parent / one for one in chosen}
    assert not [path for run in runs for path in run.rglob("optimizer*")]
    found = compare([tmp_path / "out"], models=["joint training", "0-0: swap, default"])
    assert {by.language for by in found.results} == {"nela", "basu"}
    joint = journal.folder("both/nela/joint") / "expert"
    assert {path.parent for path in joint.rglob("*.safetensors")} == {joint}
    shutil.rmtree(journal.folder("select/task"))
    again = run_graph(graph, tmp_path / "out", step_functions())
    assert "train/task/0: an earlier selection deleted the other checkpoints" in again.failed[0].why


OTHERS = {"languages": ["basu"]}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"evaluate": {}}, "evaluate: give either a suite or tasks"),
        ({"evaluate": {"tasks": ["x"]}}, "evaluate: tasks: give their one folder"),
        ({"evaluate": {"suite": "mgms"}}, "no suite 'mgms'.*mgsm"),
        ({"evaluate": {"suite": "mgsm", "other_languages": {**OTHERS, "suites": ["x"]}}},
         "no suite 'x'"),
        ({"evaluate": {**LAB, "tasks": ["lab_{lang}"]}}, "only {language} can be filled in"),
        ({"evaluate": {**LAB, "tasks": ["x"], "other_languages": OTHERS}}, "x has no {language}"),
        ({"evaluate": {**LAB, "limit": 1}}, "limit: write a number from 2; found 1"),
        ({"evaluate": {**LAB, "metric": "acc"}},
         "evaluate.metric: write a metric of lm-eval and its filter, such as .exact_"),
        ({"languages": {"a/b": {"data": "x"}}}, "'a/b' cannot be the name of a language"),
        ({"languages": {"task": {"data": "x"}}}, "'task' cannot be the name of a language"),
        ({"languages": {}}, "languages: write at least one"),
        ({"baselines": ["soop"]}, "baselines"),
        ({"baselines": ["soup", "base", "soup"]}, "baselines: 'soup' is given twice"),
        ({"simultaneous": {"every": [2, 2]}}, "simultaneous.every: 2 is given twice"),
        ({"partitions": ["C", "C"]}, "partitions: 'C' is given twice"),
        ({"dtype": "float64"},
         "dtype: 'float64' is not allowed; there are float32, bfloat16, float16"),
        ({"task": {"data": "x", "run": []}}, "task.run: unknown key.*runs"),
        ({"task": {"data": "x", "runs": [{"sede": 1}]}}, "sede: unknown key.*seed"),
        ({"task": {}}, "task: give `data` to train on, or `experts` that exist"),
        ({"task": {"experts": ["a/b"], "keep": 2}}, "are not trained; remove `keep`"),
        ({"task": {"experts": ["a/b", "a/b"]}}, "task.experts: 'a/b' is given twice"),
        ({"task": {"experts": []}}, "task.experts"),
    ],
)  # fmt: skip
def test_mistakes_of_a_study_are_named_by_line_and_key(folder, changes, said):
    with pytest.raises(RecipeError, match=said) as caught:
        spec(folder, **changes)
    assert "study.yaml, line" in str(caught.value)


def test_resources_are_the_studys_own(folder):
    graph = spec(folder, device="cuda", resources={
        "train": {"gpus": 2, "memory_gb": 200}, "evaluate": {"cpus": 8}, "data": {"memory_gb": 20},
    })  # fmt: skip
    assert graph["train/task/0"].resources == Resources(cpus=4, gpus=2, memory_gb=200)
    assert graph["evaluate/nela"].resources == Resources(cpus=8, gpus=1, memory_gb=96)
    assert graph["select/task"].resources == Resources()  # losses are only compared
    assert TrainStep.of(graph["train/task/0"]).launch is None
    same = spec(folder, device="cuda")
    assert same.keys == graph.keys  # where a step runs is not what it does
    by = {"data": {part: f"task-{part}.jsonl" for part in ("train", "validation")},
          "by": {"tasks": ["mgsm_direct_en"]}}  # fmt: skip
    (folder / "places.yaml").write_text("swap: {}\n")
    finish = {"labels": {"nela": {"train": "nela-train.jsonl"}}, "starts": ["swap"],
              "run": {"train": {"recipe": "places.yaml", "expert": "task"}}}  # fmt: skip
    several = {"train": {"processes": 4}}
    graph = spec(folder, device="cuda", task=by, finish=finish, resources=several)
    assert graph["select/task"].resources.gpus == 1
    assert graph["train/task/0"].resources.gpus == 4
    launch = TrainStep.of(graph["train/task/0"]).launch
    assert "MULTI_GPU" in launch.configuration
    labels = FinishStep.of(graph["finish/nela/swap"])
    assert (labels.launch, labels.train.recipe) == (launch, str(folder / "places.yaml"))
    assert str(folder / "places.yaml") in graph["finish/nela/swap"].inputs
    with pytest.raises(RecipeError, match=r"no configuration 'ddq'.*ddp"):
        spec(folder, device="cuda", resources={"train": {"processes": 2, "launch": "ddq"}})
    with pytest.raises(RecipeError, match=r"mine\.yaml: no such file"):
        spec(folder, device="cuda", resources={"train": {"processes": 2, "launch": "mine.yaml"}})
    with pytest.raises(RecipeError, match=r"resources\.train\.gpu: unknown key.*gpus"):
        spec(folder, resources={"train": {"gpu": 2}})


@pytest.mark.slow
def test_one_run_gives_its_best_checkpoint_and_no_more(folder, tmp_path):
    hot = {"hyperparameters": {"learning_rate": 0.1, "per_device_train_batch_size": 16,
                               "max_steps": 8, "warmup_steps": 8}, "save_every": 16}  # fmt: skip
    files = {part: f"nela-{part}.jsonl" for part in ("train", "validation")}

    def selected(keep):
        graph = spec(folder, languages={"nela": {"data": files, "runs": [hot], "keep": keep}})
        steps = Graph([graph["train/nela/0"], graph["select/nela"]])
        summary = run_graph(steps, tmp_path / "out", step_functions())
        return summary, StudyJournal(tmp_path / "out", steps)

    summary, journal = selected(1)
    assert not summary.failed
    run = journal.folder("train/nela/0") / "expert"
    (chosen,) = json.loads((journal.folder("select/nela") / "selection.json").read_text())
    best = min(candidates(run), key=lambda one: one.loss)
    assert journal.root / "steps" / chosen == Path(best.folder) != run  # it diverged
    summary, _ = selected(50)
    assert "`keep` is 50, but training saved only" in summary.failed[0].why


@pytest.mark.slow
def test_a_training_in_two_processes_is_launched_by_accelerate(folder, tmp_path):
    graph = spec(folder, resources={"train": {"processes": 2}})
    step = graph["train/nela/0"]
    context = Context(step, tmp_path, {}, print)
    step_functions()["train"](context)
    log = read_training(tmp_path / "expert")["log"]
    assert [entry["step"] for entry in log][-1] == 64 // (2 * 16)
    assert open_checkpoint(str(tmp_path / "expert")).layers == 8
    assert "64 rows" in (tmp_path / "training.txt").read_text()
    # The error of a process is its last line.
    (tmp_path / "expert" / TRAINING).unlink()
    with pytest.raises(StudyError, match=r"its log is .*, last line: error: .*expert"):
        step_functions()["train"](context)


def nela(runs, *parts):
    """A language that is trained on these parts of its data."""
    return {"nela": {"data": {part: f"nela-{part}.jsonl" for part in parts}, "runs": runs}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"base": "./nowhere"}, "base: .*/nowhere: no such folder"),
        ({"base": "./" + 3000 * "x"}, "base: .*: no such folder"),
        ({"base": "./a\0b"}, "line 3: .* holds NUL or half of a surrogate pair"),
        ({"base": "./a\ud800b"}, "line 3: .* holds NUL or half of a surrogate pair"),
        ({"task": {"experts": ["a/b"]}, "pairs": "same"}, "task keeps 1 and nela 2"),
        ({"pairs": "same", "languages": nela([{}], "train")}, "the task keeps 2 and nela 1"),
        ({"task": {"experts": ["a/b"]}}, "baseline `joint` needs training, but task has no data"),
        ({"task": {"experts": ["a/b"]}, "baselines": []}, "`lora` needs training, but task has"),
        ({"baselines": ["partial"], "partitions": []}, "`partial` needs `partitions`"),
        ({"baselines": ["partial task"], "partitions": []}, "`partial task` needs `partitions`"),
        ({"baselines": ["reverted"], "partitions": []}, "`reverted` needs `partitions`"),
        ({"task": {"experts": ["./none"]}, **ALONE}, "task.experts: .*none: no such folder"),
        ({"task": {"data": 3000 * "x"}}, "no such folder or ready mix"),
        ({"task": {"data": {"train": "a\0b.jsonl"}}}, "holds NUL or half of a surrogate pair"),
        ({"task": {"data": {"train": "no.jsonl"}}}, "no.jsonl: no such file"),
        ({"task": {"data": "nowhere"}}, "nowhere: no such folder or ready mix"),
        ({"evaluate": {"tasks": ["x"], "include": ["nowhere"]}}, "nowhere: no such folder"),
        ({"languages": nela([{"seed": 1}, {"seed": 2}], "train")},
         "nela: checkpoints are selected by validation loss"),
        ({"languages": nela([{"seed": 1}, {"seed": 1}], "train", "validation")},
         "train/nela/1 and train/nela/0 are the same"),
    ],
)  # fmt: skip
def test_a_study_that_cannot_be_planned_is_refused(folder, changes, said):
    with pytest.raises((RecipeError, StudyError), match=said):
        spec(folder, **changes)
