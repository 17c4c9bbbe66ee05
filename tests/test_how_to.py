"""The pages on your own language: the commands run, the files are complete, the costs are right."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from lab_files import write_lab_files
from processes import layerswap

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
ROAD, PAGE = DOCS / "laptop.md", DOCS / "gpu.md"
FILES = {
    match[1]: match[0].partition("\n")[2]
    for match in re.finditer(r"# (\S+\.yaml)\n.*?(?=^```)", PAGE.read_text("utf-8"), re.M | re.S)
}
LARGEST = {
    "task expert, in full": {"train": None},
    "evaluating all of them on MGSM": {"lora": Lora()},
}
"""The step that needs most memory, where every expert is trained in one way."""


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
    assert kinds == {"base": 3, "sources": 1, "recipe": 1, "name": 0}


@pytest.mark.parametrize("step", LARGEST)
def test_the_memory_is_that_of_the_plan(study, step):
    spec, folder = study

    def changed(experts):
        runs = [run.model_copy(update=LARGEST[step]) for run in experts.runs]
        return experts.model_copy(update={"runs": runs})

    languages = {name: changed(experts) for name, experts in spec.languages.items()}
    task, none = changed(spec.task), {"partitions": [], "baselines": []}
    one = spec.model_copy(update={"task": task, "languages": languages, **none})
    costs = cost_study(one, plan_study(one, folder))
    assert f"| {step} | {float(f'{costs.memory_gb:.2g}'):.0f} |" in PAGE.read_text("utf-8")


def test_the_road_is_short():
    assert len(ROAD.read_text("utf-8").split()) <= 900


NEEDS_MORE = ("layerswap ask read", "layerswap deploy")
"""Need a speaker's answers or a GGUF file; tests/evaluation and tests/deploy run them."""


@pytest.mark.slow
def test_every_command_of_the_road_runs_on_the_labs_files(tmp_path):
    """Word for word: the lab's base and files have the names of the page."""
    write_lab_files(tmp_path, code="ig", task="headlines", rows=100, tests=8)
    (tmp_path / "ig.txt").rename(tmp_path / "igbo.txt")
    (tmp_path / "luganda.txt").write_text((tmp_path / "news.ig").read_text())
    (tmp_path / "gemma-3-270m").symlink_to(shipped().base)
    (tmp_path / "igbo-news.txt").write_text((tmp_path / "news.en").read_text())
    text = "".join(re.findall(r"^```bash\n(.*?)^```", ROAD.read_text("utf-8"), re.M | re.S))
    commands = [
        line for line in text.replace("\\\n", " ").splitlines() if line.startswith("layerswap ")
    ]
    assert len(commands) == 10
    for command in commands:
        if command.startswith(NEEDS_MORE):
            continue
        ended = layerswap(*shlex.split(command, comments=True)[1:], cwd=tmp_path)
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    assert (tmp_path / "igbo/results/report.html").is_file()
    assert "can prove nothing there" in (tmp_path / "both/README.md").read_text()
