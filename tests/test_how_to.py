"""The pages on your own language: the commands run, the files are complete, the costs are right."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from lab_files import write_lab_files

from layerswap.cli.tables import amount
from layerswap.experiment.spec import SweepSpec
from layerswap.lab.assets import shipped
from layerswap.study.estimate import cost_study
from layerswap.study.plan import plan_study
from layerswap.study.preflight import check_plan
from layerswap.study.spec import read_study
from layerswap.training.expert.hyperparameters import check_hyperparameters
from layerswap.training.expert.spec import Lora, check_expert
from layerswap.training.mix.schema import parse_mix

DOCS = Path(__file__).parent.parent / "docs"
ROAD, PAGE = DOCS / "how-to.md", DOCS / "by-hand.md"
FILES = {
    match[1]: match[0].partition("\n")[2]
    for match in re.finditer(r"# (\S+\.yaml)\n.*?(?=^```)", PAGE.read_text("utf-8"), re.M | re.S)
}
WAYS = {"in full": {"train": None}, "along partition C": {}, "LoRA of rank 64": {"lora": Lora()}}


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "my-study.yaml"
    path.write_text(FILES["my-study.yaml"])
    return read_study(path), tmp_path


def test_every_file_of_the_page_is_complete(study):
    kinds = {"base": 0, "sources": 0, "recipe": 0, "name": 0}
    for name, text in FILES.items():
        data = yaml.safe_load(text)
        kinds[next(kind for kind in kinds if kind in data)] += 1
        if "languages" in data and "sources" in data:
            parse_mix(text, where=name)
        elif "recipe" in data:
            SweepSpec.model_validate(data)
        elif "evaluate" in data:
            check_plan(plan_study(*study))
        else:
            check_hyperparameters(check_expert(data, where=name))
    assert kinds == {"base": 4, "sources": 1, "recipe": 1, "name": 0}


def test_the_costs_are_those_of_the_plan(study):
    spec, folder = study
    rows = ["| step | hours | memory, GB | disk, GB |", "|---|---:|---:|---:|"]

    def changed(experts, change):
        runs = [run.model_copy(update=change) for run in experts.runs]
        return experts.model_copy(update={"runs": runs})

    for kind, label in (("train/task/0", "task"), ("train/sw/0", "language")):
        for way, change in WAYS.items():
            languages = {name: changed(one, change) for name, one in spec.languages.items()}
            both = {"task": changed(spec.task, change), "languages": languages, "partitions": []}
            rows.append(_row(f"{label} expert, {way}", spec.model_copy(update=both), folder, kind))
    rows.append(_row("evaluating all of them on MGSM", spec, folder, "evaluate/sw"))
    assert "\n".join(rows) in PAGE.read_text("utf-8")


def _row(name, spec, folder, step):
    cost = cost_study(spec, plan_study(spec, folder)).steps[step]
    return f"| {name} | {amount(cost.hours)} | {amount(cost.memory_gb)} | {amount(cost.disk_gb)} |"


def test_the_road_is_short():
    assert len(ROAD.read_text("utf-8").split()) <= 900


@pytest.mark.slow
def test_every_command_of_the_road_runs_on_the_labs_files(tmp_path):
    """Word for word: the lab's base and files have the names of the page."""
    write_lab_files(tmp_path, code="ig", task="headlines", rows=100, tests=8)
    (tmp_path / "ig.txt").rename(tmp_path / "igbo.txt")
    (tmp_path / "luganda.txt").write_text((tmp_path / "news.ig").read_text())
    (tmp_path / "gemma-3-270m").symlink_to(shipped().base)
    text = "".join(re.findall(r"^```bash\n(.*?)^```", ROAD.read_text("utf-8"), re.M | re.S))
    commands = [
        line for line in text.replace("\\\n", " ").splitlines() if "pip install" not in line
    ]
    assert len(commands) == 8
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "layerswap"
        ended = subprocess.run(
            [sys.executable, "-m", *words], cwd=tmp_path, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    assert (tmp_path / "igbo/results/report.html").is_file()
    assert "can prove nothing there" in (tmp_path / "both/README.md").read_text()
