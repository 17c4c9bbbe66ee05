"""Before and after every command: its extras, and the commands that it names as next ones."""

import json
import re
import shlex
from pathlib import Path

import pytest
from merging import save_adapter
from processes import run
from test_output import COMMANDS
from typer.main import get_command

from layerswap.cli import app
from layerswap.cli.commands import NEEDS
from layerswap.merge.metadata import study_uses, uses
from layerswap.versions import EXTRAS

CORE = {
    "plan", "merge", "instruct", "revert", "verify", "study list",
    "study show", "study merge", "study status", "lab models",
}  # fmt: skip
"""Commands that need no extra."""
ASKED = {
    "quickstart": ["--out", "out"],
    "new": ["demo", "--base", "{base}", "--language", "sw", "--text", "t.txt", "--task", "t.tsv"],
    "play": ["--no-browser"],
    "data": ["swahili", "--out", "out"],
    "train": ["e.yaml", "--out", "out"],
    "sweep": ["s.yaml", "--out", "out"],
    "eval": ["{base}", "--tasks", "x", "--out", "out"],
    "compare": ["results"],
    "bases": ["t.txt", "{base}"],
    "ask label": ["t.txt", "--labels", "a,b", "--out", "out"],
    "ask answer": ["t.tsv", "--out", "out"],
    "ask prefer": ["t.tsv", "--models", "a,b", "--out", "out"],
    "ask read": ["asked", "back.jsonl"],
    "study run": ["unreasonable", "--out", "out"],
    "study report": ["results"],
    "study list": [],
    "study show": ["unreasonable"],
    "lab models": ["--out", "lab"],
    "plan": ["--task", "{task}", "--language", "{language}"],
    "merge": ["--task", "{task}", "--language", "{language}", "--out", "merged"],
    "verify": ["merged"],
    "deploy": ["{base}"],
    "delta": ["--base", "{base}", "--expert", "{task}", "--out", "map"],
    "analyse linearity": ["--base", "{base}", "--task-expert", "{task}", "--language-expert",
                          "{language}", "--text", "t.txt", "--out", "out"],
    "analyse composability": ["m.csv", "--merged", "x"],
    "analyse fisher": ["{base}", "--data", "t.txt", "--out", "out"],
    "analyse freeze-or-revert": ["e.yaml", "--out", "out", "--part", "task", "--task", "x"],
    "analyse select": ["runs", "--task", "x"],
}  # fmt: skip

CHILD = """
import contextlib, io, json, sys

for name in {blocked}:
    sys.modules[name] = None  # importing it fails as if it were not installed
from layerswap.cli import main

found = {{}}
for name, arguments in {commands}.items():
    sys.argv = ["layerswap", *name.split(), *arguments]
    error, code = io.StringIO(), 0
    try:
        with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
            main()
    except SystemExit as stop:
        code = stop.code or 0
    except BaseException as raised:
        code, error = repr(raised), error
    found[name] = code, error.getvalue()
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_every_command_without_its_extras(experts, tmp_path, monkeypatch):
    """In a process that has the core alone: one line that works in a clone too, or the work."""
    monkeypatch.chdir(tmp_path)
    recipe = f"{{experts: {{task: {experts.task}, language: {experts.language}}}, swap: {{}}}}"
    (tmp_path / "s.yaml").write_text(
        f"recipe: {recipe}\ngrid: {{bottom: [0], top: [0]}}\ntasks: [x]\n"
    )
    (tmp_path / "e.yaml").write_text(f"base: {experts.base}\ndata: d\n")
    (tmp_path / "t.tsv").write_text("text\tlabel\na\tb\n")
    for name in ("t.txt", "m.csv"):
        (tmp_path / name).write_text("words\n")
    commands = {name: [one.format(**vars(experts)) for one in words]
                for name, words in ASKED.items()}  # fmt: skip
    blocked = sorted({package for packages in EXTRAS.values() for package in packages})
    blocked.remove("safetensors")  # in the core of some versions of huggingface_hub
    code = CHILD.format(blocked=blocked, commands=commands)
    found = json.loads(run(code))
    assert set(COMMANDS) == set(found) | CORE
    for name, (rc, error) in found.items():
        if name in CORE:
            assert rc == 0, f"{name}: {rc}\n{error}"
            continue
        assert rc == 2, f"{name}: {rc}\n{error}"
        lines = [line for line in error.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1, error
        assert re.search(
            r'run pip install -e "\.\[\w+(,\w+)*\]" in the clone of layerswap$', lines[0]
        )
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "demo").exists()


def test_a_table_names_commands_that_exist():
    assert set(NEEDS) <= set(COMMANDS) - CORE


def parsed(line):
    """The command and the options of a line, as Typer reads them; fails if it cannot."""
    command, words = get_command(app), shlex.split(line)
    name = []
    while hasattr(command, "commands"):
        name.append(words.pop(0))
        command = command.commands[name[-1]]
    return " ".join(name), command.make_context("layerswap", words).params


def test_the_uses_of_a_model_can_be_typed(tmp_path):
    """The same lines are in the reports; an upload is the command again."""
    found = [parsed(shlex.join(words)) for words in
             [*study_uses(tmp_path, "sw"), *uses(tmp_path / "a b", [], gguf=False)]]  # fmt: skip
    assert [name for name, _ in found] == [
        "play", "deploy", "merge", "ask prefer", "play", "deploy", "ask prefer",
    ]  # fmt: skip
    assert found[1][1]["merged"] == str(tmp_path / "merged" / "sw")
    assert found[2][1]["push"] == "OWNER/NAME"
    assert (found[5][1]["merged"], found[5][1]["like"]) == (str(tmp_path / "a b"), None)


def test_the_next_command_is_on_standard_error(layerswap, experts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = layerswap("plan", *experts.pair)
    assert done.err == f"next: layerswap merge {' '.join(experts.pair)} --out merged\n"
    done = layerswap("merge", *experts.pair, "--out", "merged")
    lines = done.err.splitlines()
    assert lines[-5] == "next: layerswap verify merged"
    both = f"--task-expert {experts.task} --language-expert {experts.language}"
    assert lines[-4] == f"next: layerswap play {both}"
    assert lines[-3].startswith("next: layerswap deploy merged --like BASE.gguf ")
    assert layerswap("plan", *experts.pair).err.endswith(" --out merged-2\n")
    for flag in ("--json", "--quiet"):
        assert layerswap("plan", *experts.pair, flag).err == ""


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_every_printed_command_can_be_run(
    kind, layerswap, experts, with_tokenizer, tmp_path, monkeypatch
):
    """Typed as printed, and what these print too; a page and an upload are only planned."""
    monkeypatch.chdir(tmp_path)
    with_tokenizer(experts.base, "base")
    for seed, name in enumerate(("task", "language")):
        if kind == "full":
            with_tokenizer(vars(experts)[name], name)
        else:
            folder = save_adapter(
                tmp_path / name, Path("base"), seed, r=2, target_modules="all-linear"
            )
            config = folder / "adapter_config.json"
            config.write_text(config.read_text().replace('"base"', '"moved"'))
    left = ["merge --task task --language language --bottom 2 --base base --out merged"]
    for line in left:  # grows
        words = shlex.split(line)
        if words[0] == "play":
            words = ["plan", *words[1:]]
        elif words[0] == "deploy":
            words = words[:2]
        elif "--push" in words:
            words = words[: words.index("--push")]
        elif words[0] == "ask":
            continue
        done = layerswap(*words)
        assert done.code == 0, (line, done.err)
        if words[0] != "plan" and "--overwrite" not in words:
            left += re.findall("^next: layerswap (.*)", done.err, re.MULTILINE)
    deployed = {"full": "merged", "adapters": "merged-full"}[kind]
    assert [line.split()[1] for line in left if line.startswith("deploy")] == [deployed]
