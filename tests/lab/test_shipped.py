"""The shipped lab is whole, small, and does what its record says."""

import subprocess
import sys
from pkgutil import iter_modules

import pytest

from layerswap import lab
from layerswap.lab.assets import models_of, shipped
from layerswap.lab.questions import questions
from layerswap.lab.quickstart import SHOWN, TEST_QUESTIONS

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
    asked = questions("problem", language, "test")[:SHOWN]
    written = joint["written"].split("\n")
    shown = [str(int(a == one.answer)) for a, one in zip(written, asked, strict=True)]
    assert "".join(shown) == joint["test"]["task_target"][:SHOWN]


def test_looking_at_the_lab_imports_nothing_heavy():
    lines = [f"import layerswap.lab.{module.name}" for module in iter_modules(lab.__path__)]
    lines += ["layerswap.lab.assets.shipped()", "import sys",
              "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"]  # fmt: skip
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)
