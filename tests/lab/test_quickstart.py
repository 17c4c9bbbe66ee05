"""The quickstart, on the models that ship."""

from __future__ import annotations

import json

import pytest
import torch

from layerswap.checkpoint.loading import load_tokenizer
from layerswap.cli.output import step_progress
from layerswap.engine import Sweep
from layerswap.experiment.conditions import JOINT, TASK_EXPERT, Condition
from layerswap.ground.errors import LayerswapError
from layerswap.lab import quickstart
from layerswap.lab.questions import questions
from layerswap.lab.scoring import sweep_correct
from layerswap.merge.api import soup

MODELS = (
    "swap, chosen on development", "base", "task expert", "language expert", "soup",
    "TIES, density 0.2", "TIES, density 0.5", "swap, default", "joint training",
)  # fmt: skip
MEASURES = ("task_target", "task_source", "comprehension_target", "comprehension_source")


@pytest.fixture(scope="module")
def smaller():
    """Fewer compositions and questions, the rest as users run it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "BOTTOMS", (0, 3))
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
            right = outcome.tests[measure].scores[Condition.from_dict(row)]
            assert row["n"] == len(right) == 80
            assert row["mean"] == pytest.approx(sum(right) / 80)
            assert 0 <= row["low"] <= row["mean"] <= row["high"] <= 1
    for measure, name in (("task_target", "task"), ("comprehension_source", "comprehension")):
        recorded = quickstart.shipped().record["models"]["joint-furo"]["test"][measure][:80]
        assert results[measure][-1]["mean"] == recorded.count("1") / 80, name
    assert len(results["grid"]) == 4
    best = max(cell["task_target"] for cell in results["grid"])
    chosen = Condition.from_dict(results["chosen"])
    (cell,) = (cell for cell in results["grid"] if Condition.from_dict(cell) == chosen)
    assert cell["task_target"] == best


def test_the_merged_checkpoint_is_the_model_that_was_scored(finished):
    folder, outcome, _ = finished
    merged = Sweep([soup({"merged": folder / "merged"})], dtype="float32")
    asked = questions("problem", outcome.language, "test")[:80]
    (right,) = sweep_correct(merged, load_tokenizer(folder / "merged"), asked)
    assert right.tolist() == outcome.board.scores[outcome.board.selected].tolist()


def test_report_and_drawing_show_the_composition(finished):
    folder, outcome, said = finished
    page = (folder / "report.html").read_text()
    best = outcome.board.intervals[outcome.board.selected].mean
    assert f"A swap answers {best:.1%}" in page
    assert page.count("<svg ") == 4
    zones = outcome.board.best.recipe.swap
    assert f"--bottom {zones.bottom} --top {zones.top} --outside blend --out merged" in page
    assert "language-furo-1" in page
    lead = page.partition("</header>")[0]
    for whole in ("Use the chosen swap", "both languages are invented", "model on both data sets"):
        assert whole in lead
    alone = outcome.board.intervals[TASK_EXPERT].mean
    assert f"of furo problems; the task expert {alone:.1%}</title>" in page
    joint = outcome.board.intervals[JOINT].mean
    assert f"for as many steps as both experts) answers {joint:.1%}" in lead
    assert all("\n" not in line for line in said)  # or the terminal shows it as it is written
    assert str(outcome.board.best) in "\n".join(said)
    assert f"torch {torch.__version__}".partition("+")[0] in page


def test_a_finished_quickstart_is_replaced_only_when_asked(finished):
    folder, _, _ = finished
    before = (folder / "results.json").read_bytes()
    with pytest.raises(LayerswapError, match=r"exists already.*--overwrite"):
        quickstart.run(folder, language="nela", log=print, progress=step_progress)
    assert (folder / "results.json").read_bytes() == before


def test_other_files_are_left_alone(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(LayerswapError, match="thesis"):
            quickstart.run(
                tmp_path / "thesis", overwrite=overwrite, log=print, progress=step_progress
            )
    with pytest.raises(LayerswapError, match=r"no target language 'klingon' in the lab; it has "):
        quickstart.run(tmp_path / "out", language="klingon", log=print, progress=step_progress)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "thesis.tex"]
