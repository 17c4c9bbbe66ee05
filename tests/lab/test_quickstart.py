"""The quickstart, on the models that ship."""

from __future__ import annotations

import json
import shutil

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from layerswap.cli.output import step_progress
from layerswap.errors import LayerswapError
from layerswap.lab import quickstart
from layerswap.lab.scoring import correct, questions, score_folders
from layerswap.search.conditions import CHOSEN, DEFAULT, JOINT, TASK_EXPERT, Condition
from layerswap.study.journal import StudyJournal
from layerswap.study.steps import Graph, Step

MODELS = (
    "base", "task expert", "language expert", "soup", "TIES, density 0.2", "TIES, density 0.5",
    "swap, default", "swap, chosen on development", "joint training",
)  # fmt: skip
MEASURES = ("task_target", "task_source", "comprehension_target", "comprehension_source")


@pytest.fixture(scope="module")
def smaller():
    """Fewer compositions and questions, the rest as users run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "BOTTOMS", range(2))
        patch.setattr(quickstart, "TOPS", range(2))
        patch.setattr(quickstart, "DEVELOPMENT_QUESTIONS", 60)
        patch.setattr(quickstart, "TEST_QUESTIONS", 80)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, smaller):
    """A quickstart."""
    out = tmp_path_factory.mktemp("quickstart") / "out"
    said: list[str] = []
    folder, outcome = quickstart.run(out, log=said.append, progress=step_progress)
    return folder, outcome, said


def test_results_hold_what_was_measured(finished):
    folder, outcome, _ = finished
    results = json.loads((folder / "results.json").read_text())
    for measure in MEASURES:
        assert [row["condition"] for row in results[measure]] == list(MODELS)
        for row in results[measure]:
            right = outcome.answers[measure][Condition.from_dict(row)]
            assert row["n"] == len(right) == 80
            assert row["mean"] == pytest.approx(sum(right) / 80)
            assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1
    assert len(results["grid"]) == 4
    best = max(cell["task_target"] for cell in results["grid"])
    chosen = Condition.from_dict(results["chosen"])
    (cell,) = (cell for cell in results["grid"] if Condition.from_dict(cell) == chosen)
    assert cell["task_target"] == best


def test_the_merged_checkpoint_is_the_model_that_was_scored(finished):
    folder, outcome, _ = finished
    model = AutoModelForCausalLM.from_pretrained(folder / "merged").float()
    tokenizer = AutoTokenizer.from_pretrained(folder / "merged")
    world = quickstart.shipped().world
    asked = questions("task_target", outcome.language, "test", 80, world=world)
    answers = correct(model, tokenizer, asked)
    assert answers.tolist() == outcome.answers["task_target"][outcome.task.selected]


def test_report_and_drawing_show_the_composition(finished):
    folder, outcome, said = finished
    page = (folder / "report.html").read_text()
    best = outcome.task.intervals[outcome.task.selected].mean
    assert f"A swap answers {best:.1%}" in page
    assert page.count("<svg ") == 3
    zones = outcome.selected.zones
    assert f"--bottom {zones.bottom} --top {zones.top} --outside blend --out merged" in page
    assert "language-furo-1" in page
    lead = page.partition("</header>")[0]
    for whole in ("both languages are invented", "TIES, density 0.5: ", "model on both data sets"):
        assert whole in lead
    alone = outcome.task.intervals[TASK_EXPERT].mean
    assert f"of furo problems; the task expert {alone:.1%}</title>" in page
    joint = outcome.task.intervals[JOINT].mean
    assert f"for as many steps as both experts) answers {joint:.1%}" in lead
    assert all("\n" not in line for line in said)  # or the terminal shows it as it is written
    assert str(outcome.composition) in "\n".join(said)
    assert "Where the numbers come from" in page
    for entry in outcome.entries:
        assert entry.key[:16] in page
        assert entry.versions["torch"] in page


@pytest.mark.parametrize(
    ("development", "test", "zones"),
    [({(0, 1): 60}, {(1, 1): 80}, (0, 1)), ({(0, 1): 31, (1, 1): 30}, {(0, 1): 80}, (1, 1))],
)
def test_development_alone_decides_what_is_merged_and_headed(
    finished, smaller, tmp_path, development, test, zones
):
    """Right answers by zones are planted; the default is bottom 1, top 1."""
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    (grid,) = folder.glob("steps/grid-*/grid.json")
    rows = json.loads(grid.read_text())
    for row in rows:
        right = development.get((row["bottom"], row["top"]), 0)
        row["right"] = [1] * right + [0] * (60 - right)
    grid.write_text(json.dumps(rows))
    (answers,) = folder.glob("steps/test-*/answers.json")
    data = json.loads(answers.read_text())
    for row in data["answers"]["task_target"]:
        swap = {str(CHOSEN): (0, 1), str(DEFAULT): (1, 1)}.get(str(Condition.from_dict(row)))
        right = test.get(swap, 8)
        row["right"] = [1] * right + [0] * (80 - right)
    answers.write_text(json.dumps(data))
    for step in ("merge", "report"):
        (record,) = folder.glob(f"steps/{step}-*/step.json")
        record.unlink()
    _, outcome = quickstart.run(folder, log=print, progress=step_progress)
    assert (outcome.selected.zones.bottom, outcome.selected.zones.top) == zones
    swap = json.loads((folder / "merged" / "layerswap.json").read_text())["recipe"]["swap"]
    assert (swap["bottom"], swap["top"]) == zones
    page = (folder / "report.html").read_text()
    assert f"A swap answers {test.get(zones, 8) / 80:.1%} of furo problems" in page
    assert f"--bottom {zones[0]} --top {zones[1]} --outside blend" in page


def test_done_steps_are_shown_again_and_missing_ones_done(finished, smaller):
    folder, outcome, _ = finished
    (report,) = folder.glob("steps/report-*/report.html")
    (grid,) = folder.glob("steps/grid-*/grid.json")
    before, tried = report.stat().st_mtime_ns, grid.stat().st_mtime_ns
    (folder / "report.html").unlink()
    _, again = quickstart.run(folder, log=print, progress=step_progress)
    assert again.shares == outcome.shares
    assert again.results() == outcome.results()
    assert report.stat().st_mtime_ns == before
    assert (folder / "report.html").read_bytes() == report.read_bytes()
    (report.parent / "step.json").unlink()
    quickstart.run(folder, log=print, progress=step_progress)
    assert report.stat().st_mtime_ns > before
    assert grid.stat().st_mtime_ns == tried


def test_another_language_does_not_replace_the_first(finished):
    folder, outcome, _ = finished
    before = (folder / "results.json").read_bytes()
    with pytest.raises(LayerswapError, match=f"holds a quickstart in {outcome.language}; choose"):
        quickstart.run(folder, language="nela", log=print, progress=step_progress)
    assert (folder / "results.json").read_bytes() == before


def test_a_damaged_step_is_one_line(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "copy")
    (grid,) = folder.glob("steps/grid-*/grid.json")
    grid.write_text("{")
    with pytest.raises(LayerswapError, match=r"cannot be read .* start again with --overwrite"):
        quickstart.run(folder, log=print, progress=step_progress)


def test_another_study_and_other_files_are_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    StudyJournal(tmp_path / "study", Graph([Step("train/task", "train", {})])).open()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.*")}
    for folder, message in (
        ("thesis", "thesis"),
        ("study", "holds another study; choose another outp"),
    ):
        for overwrite in (False, True):
            with pytest.raises(LayerswapError, match=message):
                quickstart.run(
                    tmp_path / folder, overwrite=overwrite, log=print, progress=step_progress
                )
    with pytest.raises(LayerswapError, match=r"no target language 'klingon' in the lab; it has "):
        quickstart.run(tmp_path / "out", language="klingon", log=print, progress=step_progress)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.*")} == before
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_scores_of_folders_and_of_a_whole_lab():
    lab = quickstart.shipped()
    settings = {"language": "nela", "split": "development", "n": 20, "progress": step_progress}
    scores = score_folders([lab.base.parent], **settings)
    assert list(scores) == list(lab.record["models"])
    alone = score_folders([lab.task_experts[1]], **settings)
    assert alone == {"task-2": scores["task-2"]}
