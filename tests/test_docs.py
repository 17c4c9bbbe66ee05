"""Shell blocks: each is a command that there is; the README's and the tutorial's are also run."""

import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer import Exit
from typer.main import get_command

import layerswap as ls
from layerswap.cli import app
from layerswap.lab.assets import shipped
from layerswap.lab.questions import questions, write_tasks
from layerswap.study.spec import find_study

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(bash|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *(str(p.relative_to(ROOT)) for p in sorted(ROOT.glob("docs/**/*.md")))]
NEEDS_HUB = ("layerswap data ", "layerswap eval ")
"""Commands that fetch data sets; without a net they are one clear line."""


def blocks(file):
    return BLOCK.findall((ROOT / file).read_text("utf-8"))


def commands(file):
    """The lines of the shell blocks, without installations."""
    found = []
    for kind, text in blocks(file):
        for line in text.replace("\\\n", " ").splitlines() if kind == "bash" else ():
            command = line.partition("  #")[0].strip()
            if "pip install" in command:  # of the README's first command the quickstart stays
                command = command.rpartition("&&")[2].strip()
            if command.startswith(("layerswap ", "python -m research.lab ")):
                found.append(command)
    return found


def run(command, folder):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120"}
    words = shlex.split(command.removeprefix("python -m "))
    if words[0] == "research.lab":
        environment["PYTHONPATH"] = str(ROOT)
    return subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def check(command, folder):
    ended = run(command, folder)
    if command.startswith(NEEDS_HUB) and "--include" not in command:
        assert ended.returncode == 2, ended.stderr
        assert ended.stderr.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in ended.stderr
    else:
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"


@pytest.mark.slow
def test_every_command_on_the_pages_is_one_that_there_is():
    """Its name, its options and the number of its arguments."""
    every = [command for file in PAGES for command in commands(file)]
    asked = [c for c in every if c.startswith("layerswap ") and "..." not in c]
    assert len(asked) > 60
    for command in asked:
        words = shlex.split(re.split(r" [>|] ", command)[0], comments=True)[1:]
        try:
            context = get_command(app).make_context("layerswap", words)
            while hasattr(context.command, "resolve_command"):
                name, inner, words = context.command.resolve_command(
                    context, [*context._protected_args, *context.args]
                )
                context = inner.make_context(name, words, parent=context)
        except Exit:  # an option such as --version has answered
            pass
        except Exception as error:
            pytest.fail(f"{command}: {error}")


OF_ALL = {"--help", "--install-completion"}
INLINE = re.compile(r"`((?:layerswap|python -m) [^`]+)`")


@pytest.mark.slow
def test_every_command_within_a_sentence_and_every_script_is_one_that_there_is():
    """The names and options of commands, and the modules of `python -m`, in blocks too."""
    found = 0
    for page in (*PAGES, "CONTRIBUTING.md", "AGENTS.md", "research/README.md"):
        text = (ROOT / page).read_text("utf-8")
        for module in re.findall(r"python -m (research\S*?)[`\s,]", text):
            assert importlib.util.find_spec(module), (page, module)
        sentences = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
        for line in INLINE.findall(sentences):
            if line.startswith("layerswap "):
                command, words = get_command(app), shlex.split(line)[1:]
                while words and words[0] in getattr(command, "commands", {}):
                    command = command.commands[words.pop(0)]
                if hasattr(command, "commands"):
                    assert not words or words[0].startswith("-"), (page, line)
                given = {word for word in words if word.startswith("--")}
                known = {option for parameter in command.params for option in parameter.opts}
                assert given <= known | OF_ALL, (page, line)
                if line.startswith("layerswap study run ") and words[0][0] != "-":
                    find_study(words[0])
                found += 1
    assert found > 60


@pytest.mark.slow
def test_every_command_of_the_tutorial_works(tmp_path):
    pytest.importorskip("trl")
    for kind, text in blocks("docs/tutorial.md"):
        if kind == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            (tmp_path / named[1]).write_text(text, "utf-8")
    found = commands("docs/tutorial.md")
    assert len(found) > 10
    for command in found:
        check(command, tmp_path)
    for made in ("map/map.svg", "swept/report.html", "study/study/report.html",
                 "merged/model.safetensors", "expert/model.safetensors"):  # fmt: skip
        assert (tmp_path / made).is_file(), made


ELSEWHERE = ("layerswap new ", "layerswap study run ", "layerswap deploy ")
"""Commands that tests of the road on a laptop and of deploy run."""


@pytest.mark.slow
def test_every_command_of_the_readme_works(tmp_path):
    lab = shipped()
    for name, folder in (("math-expert", lab.task_experts[0]),
                         ("swahili-expert", lab.language_experts["furo"][0])):  # fmt: skip
        (tmp_path / name).symlink_to(folder)
    lines = [f"{one.prompt} {one.answer}\n" for one in questions("comprehension", "furo", "test")]
    (tmp_path / "igbo-news.txt").write_text("".join(lines))
    found = commands("README.md")
    assert sum(command.startswith(ELSEWHERE) for command in found) == 3
    for command in found:
        if not command.startswith(ELSEWHERE):
            check(command, tmp_path)
    assert (tmp_path / "topics/ask.html").is_file()


STANDINS = {
    'tasks="mgsm_direct_sw", limit=200': 'tasks="lab_problem_furo", include="tasks", limit=4',
    'suite="mgsm", language="sw"': 'tasks="lab_problem_furo", include="tasks"',
    "limit=100": "limit=4",
    "max_new_tokens=256": "max_new_tokens=8",
}
"""What the pages' Python asks of the Hub or leaves out, by what the lab has of it."""


@pytest.mark.parametrize(
    "file",
    ["docs/method.md", "docs/gpu.md",
     pytest.param("docs/evaluation.md", marks=pytest.mark.slow)],
)  # fmt: skip
def test_the_python_of_a_page_runs(file, tmp_path, monkeypatch):
    """Block after block in one session, as a notebook would."""
    import torch
    from tiny_models import config_of
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Gemma3Config

    from layerswap.checkpoint.loading import load_tokenizer

    lab = shipped()
    (tmp_path / "org").mkdir()
    for name, folder in (("llama", lab.base), ("math-expert", lab.task_experts[0]),
                         ("org/math-expert", lab.task_experts[0]),
                         ("swahili-expert", lab.language_experts["furo"][0])):  # fmt: skip
        (tmp_path / name).symlink_to(folder)
    (tmp_path / "swap.yaml").write_text(
        "experts: {task: math-expert, language: swahili-expert}\nswap: {}\n"
    )
    write_tasks(tmp_path / "tasks", 8)
    monkeypatch.chdir(tmp_path)
    tokenizer = load_tokenizer(lab.base)
    ids = tokenizer("nela bufo", return_tensors="pt").input_ids
    text = ids[0].tolist()
    plan = ls.swap(task="math-expert", language="swahili-expert")
    session = {
        "tokenizer": tokenizer, "ids": ids, "bos": text[0], "texts": [text], "prompts": [text],
        "context_ids": text, "continuation_ids": text[:2], "compositions": [plan.composition],
    }  # fmt: skip
    if file == "docs/gpu.md":
        text = config_of("gemma3", vocab_size=len(tokenizer)).to_dict()
        vision = {"hidden_size": 24, "intermediate_size": 8, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "image_size": 28}  # fmt: skip
        whole = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
        for name in ("google/gemma-3-4b-pt", "google/gemma-3-4b-it"):
            tokenizer.save_pretrained(name)
            AutoModelForImageTextToText.from_config(whole).save_pretrained(name)
    found = re.findall(r"^```python\n(.*?)^```$", (ROOT / file).read_text("utf-8"), re.M | re.S)
    assert found
    for block in found:
        code = block
        for of_the_page, here in STANDINS.items():
            code = code.replace(of_the_page, here)
        exec(code, session)
    if file == "docs/gpu.md":
        saved = AutoModelForCausalLM.from_pretrained("text/gemma-3-4b-it", dtype="auto")
        torch.testing.assert_close(saved(ids).logits, session["whole"](ids).logits)


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs/reference/python.md").read_text("utf-8")
    documented = []
    for path in re.findall(r"^::: (layerswap\S+)$", page, re.M):
        module, _, name = path.rpartition(".")
        documented.append(getattr(importlib.import_module(module), name))
    for name in set(ls.__all__) - {"__version__"}:
        found = getattr(ls, name)
        found = getattr(found, "play", found)  # the room is called as its function
        assert any(found is one for one in documented), name
    assert set(re.findall(r"`ls\.(\w+)`", page)) == set(ls.__all__)


def test_the_page_of_support_is_that_of_the_tests():
    import support_page

    assert support_page.PAGE.read_text("utf-8") == support_page.page()


def test_the_pages_are_at_most_22_with_28000_words():
    counts = {page: len((ROOT / page).read_text("utf-8").split()) for page in PAGES}
    assert len(counts) <= 22
    assert max(counts.values()) <= 3000, max(counts, key=lambda page: counts[page])
    assert sum(counts.values()) <= 28_000


MERGES = {
    "README.md": {
        "layerswap swap, nothing blended": "1.4 s, 0.04 GB",
        "mergekit passthrough slices": "5.9 s, 2.5 GB", "mergekit ties": "150 s, 5.0 GB",
        "layerswap ties per tensor": "12 s, 0.1 GB",
    },
    "docs/mergekit.md": {
        "layerswap swap, nothing blended": "1.4 s, 0.04 GB",
        "mergekit passthrough slices": "5.9 s, 2.5 GB", "mergekit ties": "150 s, 5.0 GB",
        "layerswap soup": "2.1 s, 0.07 GB", "mergekit linear": "13.6 s, 3.8 GB",
        "layerswap ties per tensor": "12 s, 0.1 GB",
    },
}  # fmt: skip
"""Medians and peak memory of bench/results/merge.md, as pages round them."""


@pytest.mark.parametrize("page", MERGES)
def test_the_figures_of_merges_are_those_measured(page):
    measured = (ROOT / "bench/results/merge.md").read_text("utf-8")
    for name, words in MERGES[page].items():
        assert words in (ROOT / page).read_text("utf-8")
        row, *_ = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", measured, re.MULTILINE)
        median, *_, peak = row.replace(",", "").split(" | ")
        for number, value in zip(re.findall(r"[\d.]+", words), (median, peak), strict=True):
            found = float(value) / (1000 if value == peak else 1)
            digits = len(number.partition(".")[2])
            assert round(found, digits) == float(number), (name, number)


def test_the_home_page_is_the_readme_with_links_of_the_site():
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    links = re.findall(r"\]\((?!http)([^)#]+)", hooks.home())
    assert len(links) > 10
    for link in links:
        assert (ROOT / "docs" / link).exists(), link


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "AGENTS.md", "research/README.md", "bench/RESULTS.md"]
)
def test_links_of_pages_outside_the_site_lead_to_files(page):
    path = ROOT / page
    for link in re.findall(r"\]\((?!http|#)([^)#]+)", path.read_text("utf-8")):
        assert (path.parent / link).exists(), link


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    out = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return out


@pytest.mark.slow
def test_the_site_builds_without_a_warning(site):
    assert "Compose, search, write" in (site / "reference/cli/index.html").read_text()
    assert "magnitude" in (site / "reference/python/index.html").read_text()
    home = (site / "index.html").read_text()
    for part in ("images/summary.svg", "md-footer__link--next"):
        assert part in home
    assert "md-footer__link--prev" in (site / "faq/index.html").read_text()
    assert (site / "notebooks/quickstart.ipynb").is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="the search runs in Node")
@pytest.mark.parametrize(
    ("query", "page"),
    [("--outside", "reference/cli/#layerswap-merge"), ("partition C", "method/#partitions")],
)
def test_the_search_finds(site, query, page):
    """The site's own worker, on the built index, asked as the search field asks it."""
    script = ROOT / "tests/helpers/search.js"
    done = subprocess.run(["node", script, site, query], capture_output=True, text=True, check=True)
    assert page in json.loads(done.stdout)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """In a kernel, cell after cell but the installation; the files are written elsewhere."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(ROOT / "docs/notebooks/quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    install, *notebook.cells[1:] = notebook.cells[1:]
    assert install.metadata.tags == ["install"]
    here = [str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(here))
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = json.dumps([cell.outputs for cell in notebook.cells if cell.cell_type == "code"])
    assert shown.count("<iframe srcdoc=") == 2
    assert "merged: verified" in shown
    assert (tmp_path / "merged" / "model.safetensors").is_file()
