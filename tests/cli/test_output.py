"""The options of every command's output, and words that mean one thing each."""

import json
import os
import pickle
import re
import shutil
import time

import pytest
from typer.main import get_command

from layerswap.checkpoint import open_checkpoint
from layerswap.cli import app, output
from layerswap.ground.errors import MergeError
from layerswap.versions import __version__


@pytest.mark.parametrize("command", ["plan", "merge", "delta", "analyse linearity"])
def test_experts_have_the_same_options_everywhere(command):
    root = get_command(app)
    for name in command.split():
        root = root.commands[name]
    options = {param.name: param for param in root.params}
    shown = [options[name].opts for name in ("task_expert", "language_expert", "base")]
    assert shown == [["--task-expert", "--task"], ["--language-expert", "--language"], ["--base"]]


def test_json_is_one_document_and_nothing_else(layerswap, experts, tmp_path):
    merged = layerswap.done("merge", *experts.pair, "--out", tmp_path / "m", "--json")
    facts = json.loads(merged.out)
    head = {"command": "merge", "schema": 2, "layerswap_version": __version__}
    assert facts.items() >= {**head, "folder": str(tmp_path / "m")}.items()
    verified = json.loads(layerswap("verify", tmp_path / "m", "--json").out)
    assert (verified["command"], verified["passed"]) == ("verify", True)


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_shell_completes_commands_and_options(layerswap, monkeypatch, shell):
    line = "layerswap merge --over"
    monkeypatch.setenv("_LAYERSWAP_COMPLETE", f"complete_{shell}")
    for name, value in {"COMP_WORDS": line, "COMP_CWORD": "2"}.items():
        monkeypatch.setenv(name, value)
    for name, value in {"ARGS": line, "ACTION": "get-args"}.items():
        monkeypatch.setenv(f"_TYPER_COMPLETE_{name}", value)
    assert "--overwrite" in layerswap().out


def test_quiet_prints_nothing_but_writes(layerswap, experts, tmp_path):
    done = layerswap("merge", *experts.pair, "--out", tmp_path / "m", "--quiet")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert open_checkpoint(tmp_path / "m").tensors
    wrong = layerswap("merge", *experts.pair, "--out", tmp_path / "m", "-q")
    assert wrong.err.startswith("error: ")


def test_verbose_shows_the_traceback_of_an_error(layerswap, tmp_path):
    short, long = (layerswap("plan", tmp_path / "no.yaml", *more) for more in ((), ("-v",)))
    assert "Traceback" not in short.err
    assert "Traceback" in long.err
    assert long.err.splitlines()[-1] == short.err.strip()


def lines_that_begin(result, word):
    return [line for line in (result.out + result.err).splitlines() if line.startswith(word)]


def test_no_path_forges_a_line(layerswap, experts, tmp_path):
    folder = shutil.copytree(experts.task, tmp_path / "x\nok: all good")
    shown = str(folder).replace("\n", "\\n")
    pair = ("--task", folder, "--language", experts.language)
    good = layerswap.done("plan", *pair)
    assert f"task: {shown}" in good.out.splitlines()
    (folder / "config.json").unlink()
    bad = layerswap("plan", *pair)
    message = f"error: task: {shown}: no config.json; not a Hugging Face checkpoint\n"
    assert (bad.code, bad.out, bad.err) == (2, "", message)
    out = tmp_path / "out\nerror: all lost"
    for words in (("merge", *experts.pair, "--out", out), ("verify", out)):
        done = layerswap.done(*words)
        assert not lines_that_begin(done, "error:")


def test_no_name_in_a_recipe_forges_a_line(layerswap, experts, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f'experts: {{"a\\nok: \\e[31m": {experts.task}, b: {experts.language}}}\n'
        'swap: {task: "a\\nok: \\e[31m", language: b, bottom: 1, top: 1}\n'
    )
    for result in (
        layerswap("plan", recipe),
        layerswap("merge", recipe, "--out", tmp_path / "out"),
        layerswap("verify", tmp_path / "out"),
    ):
        assert not lines_that_begin(result, "ok")
        assert "\x1b" not in result.out + result.err
    recipe.write_text('experts: {a: b}\nswap: {"a\\nerror: c": 1, "e\\nf": 1}\n')
    result = layerswap.refused("plan", recipe)
    assert len(result.err.splitlines()) > 1
    assert len(lines_that_begin(result, f"error: {recipe}, ")) == len(result.err.splitlines())


def test_an_error_of_several_lines_keeps_them():
    error = MergeError("a\nb", "c").within("d\ne")
    assert str(error) == "d\\ne: a\\nb\nc"
    assert pickle.loads(pickle.dumps(error)).args == error.args


@pytest.fixture
def slow_clock(monkeypatch):
    """Six seconds pass between two looks at the clock."""
    output.choose(quiet=False, verbose=False, as_json=False)
    clock = iter(range(0, 10_000, 6))
    monkeypatch.setattr(output.time, "monotonic", lambda: next(clock))


def test_progress_is_lines_where_there_is_no_terminal(slow_clock, capsys):
    with output.step_progress("evaluating [v2]", 24, "models") as advance:
        for _ in range(24):
            advance(1)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("evaluating [v2]: 3 of 24 models, ")
    assert lines[0].endswith(" s left")
    assert lines[-1].startswith("evaluating [v2]: 24 of 24 models, ")
    assert len(lines) == 8
    output.choose(quiet=True, verbose=False, as_json=False)
    with output.step_progress("merging", 10, "bytes") as advance:
        advance(10)
    assert capsys.readouterr().err == ""
    output.choose(quiet=False, verbose=False, as_json=False)


def test_bars_say_loading_and_leave_notes_alone(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    output.choose(quiet=False, verbose=False, as_json=False)
    with output.step_progress("scoring", 2, "models") as advance:
        output.log("a note: [bold]:smile:")
        advance(1)
        time.sleep(0.2)
        advance(1)
    shown = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", capsys.readouterr().err)
    lines = [frame.strip() for frame in re.split(r"[\r\n]+", shown)]
    frames = list(filter(None, lines))
    assert frames[0].startswith("scoring ")
    assert "loading" in frames[0]
    assert "a note: [bold]:smile:" in frames
    assert any("1 of 2 models" in frame for frame in frames)
    assert not any(" 0%" in frame or "0 of 2" in frame for frame in frames)
    assert lines[-1] == ""  # the bar is gone


def test_answers_of_all_compositions_are_counted_from_the_start(slow_clock, capsys, tmp_path):
    requests = [f"r{i}" for i in range(4)]
    for members, new in ((["a", "b"], ["a", "b"]), (["a", "b", "c"], ["c"])):
        with output.answer_progress("evaluating", tmp_path / "answers.sqlite") as store:
            for member in members:
                store.known(member, requests)
            for member in new:
                for request in requests:
                    store.keep([(member, request, [1])])
                assert len(store.known(member, requests)) == 4
            store.close()
        shown = capsys.readouterr().err
        total = 4 * len(new)
        assert f" of {total} answers" in shown
        assert f"{total} of {total} answers" in shown


def commands_of(command, name=()):
    """Every command below a group, by its whole name."""
    if not hasattr(command, "commands"):
        yield " ".join(name), command
    for key, one in getattr(command, "commands", {}).items():
        yield from commands_of(one, (*name, key))


COMMANDS = dict(commands_of(get_command(app)))


@pytest.mark.parametrize("name", COMMANDS)
def test_every_help_stands_alone(name):
    """An example, the output's place, no semicolon, and no sentence of more than 25 words."""
    command = COMMANDS[name]
    prose, _, example = command.help.partition("Example:")
    assert example.split()[: 1 + len(name.split())] == ["layerswap", *name.split()]
    assert re.search(r"into|[Ww]rites|[Pp]rint|[Ss]how|[Cc]opy|Write", prose)
    for sentence in prose.replace("\n", " ").split(". "):
        assert len(sentence.split()) <= 25, sentence
    for option in command.params:
        text = option.help
        assert text, option.name
        assert len(text.split()) <= 16, text
        assert text.endswith((".", "]")), text
        assert ";" not in text, text
        assert "efault:" not in text, text


def test_the_public_name_of_an_error_shows_control_characters():
    from layerswap.ground.errors import visible

    assert visible("a\nb\x1b\u202e\u2028\ud800") == "a\\nb\\x1b\\u202e\\u2028\\ud800"
    assert visible("नमस्\u200dते, مثال, 例, e\u0301") == "नमस्\u200dते, مثال, 例, e\u0301"


@pytest.mark.parametrize(("given", "then"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_threads_wait_passively_unless_the_user_says_otherwise(layerswap, monkeypatch, given, then):
    monkeypatch.setenv("OMP_WAIT_POLICY", given or "")
    if given is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    layerswap("--version")
    assert os.environ["OMP_WAIT_POLICY"] == then
