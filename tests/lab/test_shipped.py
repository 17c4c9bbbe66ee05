"""The shipped lab is whole, small, and does what its record says."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict
from pkgutil import iter_modules

import pytest
from effort import mostly_slow

from layerswap import lab
from layerswap.lab.assets import models_of, shipped
from layerswap.lab.build import RECORDED_EXAMPLES, build
from layerswap.lab.scoring import SHOWN, TEST_QUESTIONS, questions, score_folder
from layerswap.lab.train import Trainings
from layerswap.lab.world import WorldSettings

LAB = shipped()
FOLDERS = [LAB.base, *LAB.task_experts, *(f for fs in LAB.language_experts.values() for f in fs)]


def test_the_lab_has_a_base_and_the_first_expert_of_each_kind():
    assert models_of(LAB.base.parent) == [folder.name for folder in FOLDERS]
    assert LAB.languages == ("nela", "furo")
    assert all((folder / "model.safetensors").is_file() for folder in FOLDERS)
    assert len(FOLDERS) == 4


@pytest.mark.parametrize(("language", "right"), [("nela", 433), ("furo", 330)])
def test_the_record_has_the_joint_models_answers_that_the_docs_report(language, right):
    joint = LAB.record["models"][f"joint-{language}"]
    assert {len(answers) for answers in joint["test"].values()} == {TEST_QUESTIONS}
    assert joint["test"]["task_target"].count("1") == right
    asked = questions("task_target", language, "test", SHOWN, world=LAB.world)
    written = joint["written"].split("\n")
    shown = [str(int(a == one.completion.strip())) for a, one in zip(written, asked, strict=True)]
    assert "".join(shown) == joint["test"]["task_target"][:SHOWN]


def test_shipped_models_were_made_with_the_codes_defaults():
    assert LAB.world.settings == WorldSettings()
    assert LAB.record["trainings"] == json.loads(json.dumps(asdict(Trainings())))


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", mostly_slow(FOLDERS, LAB.task_experts[0]), ids=lambda folder: folder.name
)
def test_a_model_reaches_the_scores_in_the_record(folder):
    n = 100
    for language, recorded in LAB.record["models"][folder.name]["development"].items():
        scores = score_folder(folder, language, "development", n, world=LAB.world)
        for measure, right in scores.items():
            noise = 4 * (recorded[measure] * (1 - recorded[measure]) / n) ** 0.5
            assert right.mean() == pytest.approx(recorded[measure], abs=noise + 0.02)


def test_looking_at_the_lab_imports_nothing_heavy():
    lines = [f"import layerswap.lab.{module.name}" for module in iter_modules(lab.__path__)]
    lines += ["layerswap.lab.assets.shipped().world", "import sys",
              "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"]  # fmt: skip
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.slow
@pytest.mark.retrain
def test_rebuilt_experts_reach_the_recorded_scores(tmp_path):
    recorded = LAB.record["models"]
    kept = {name: recorded[name] for name in ("base", "joint-nela", "joint-furo")}
    record = {**LAB.record, "models": kept, "runs": 1}
    (tmp_path / "record.json").write_text(json.dumps(record))
    shutil.copytree(LAB.base, tmp_path / "base")
    made = build(tmp_path, seed=record["seed"], runs=1)["models"]
    assert set(made) == {*kept, "task-1", "language-nela-1", "language-furo-1"}
    for name, model in made.items():
        for language, scores in model["development"].items():
            for measure, score in recorded[name]["development"][language].items():
                noise = 4 * (2 * score * (1 - score) / RECORDED_EXAMPLES) ** 0.5
                assert scores[measure] == pytest.approx(score, abs=noise + 0.02)
