import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import processes
import pytest
import torch
from merging import tensors_of

import layerswap as ls
from layerswap.versions import __version__

ROOT = Path(__file__).parents[2]


def test_the_commands_of_the_help(layerswap):
    shown = layerswap("--help").out
    panels = re.findall(r"^(\S.*):$", shown, re.MULTILINE)
    assert panels == ["Options", "Start here", "Try it", "Merge experts", "Train experts",
                      "Choose and evaluate", "Analyse and experiment"]  # fmt: skip
    first = re.findall(r"^  (\w+)  ", shown.partition("Start here")[2].partition("Try it")[0], re.M)
    assert first == ["new", "study", "merge", "eval", "ask", "deploy"]
    assert "--install-completion" in shown


def test_module_runs_as_the_command():
    done = processes.layerswap("--version")
    assert (done.returncode, done.stdout) == (0, f"layerswap {__version__}\n")


def test_plan_draws_and_writes_nothing(layerswap, experts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = layerswap.done("plan", *experts.pair, "--bottom", 2)
    rows = result.out.splitlines()
    assert rows[1].split() == ["7", "██████████", "language"]
    assert rows[2].split() == ["6", "░░░░░░░░░░", "task"]
    assert rows[7].split() == ["1", "██████████", "language"]
    assert f"task: {experts.task}" in rows
    assert rows[-1] == "75 tensors, 82.4 kB in 1 file; 94% copied bit for bit"
    assert list(tmp_path.iterdir()) == []


def test_plan_for_machines(layerswap, experts):
    result = layerswap("plan", *experts.pair, "--top", 0, "--json")
    facts = json.loads(result.out)
    assert facts["experts"] == {"task": experts.task, "language": experts.language}
    assert facts["composition"]["layers"] == 8
    at = {(p["layer"], p["role"]): p["weights"] for p in facts["composition"]["places"]}
    assert at[0, "mlp"] == {"language": 1.0}
    assert at[7, "mlp"] == {"task": 1.0}
    assert at[None, "embedding"] == {"language": 0.5, "task": 0.5}


def test_merge_swaps_what_it_says(layerswap, experts, tmp_path):
    out = tmp_path / "merged"
    result = layerswap.done(
        "merge", *experts.pair, "--base", experts.base, "--bottom", 2, "--top", 1,
        "--top-transition", 1, "--weights", "3,1", "--outside", "task", "--out", out,
    )  # fmt: skip
    assert f"wrote {out}" in result.out
    zones = {"bottom": 2, "top": 1, "top_transition": 1, "outside": "task"}
    shares = {"task": 3, "language": 1}
    plan = ls.swap(task=experts.task, language=experts.language, weights=shares, **zones)
    wanted, merged = tensors_of(plan.save(tmp_path / "same")), tensors_of(out)
    assert merged.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in merged.items())


def test_partition_of_the_training_is_the_default(layerswap, experts, tmp_path):
    for kind in ("task", "language"):
        shutil.copytree(getattr(experts, kind), tmp_path / kind)
        record = {"spec": {"train": {"partition": "B", "part": kind}}, "data": [], "places": []}
        (tmp_path / kind / "layerswap-training.json").write_text(json.dumps(record))
    pair = ("--task", tmp_path / "task", "--language", tmp_path / "language")
    result = layerswap("plan", *pair)
    assert "note: along partition B, on which the experts were trained" in result.out
    out = tmp_path / "merged"
    layerswap.done("merge", *pair, "--out", out)
    recipe = json.loads((out / "layerswap.json").read_text())["recipe"]
    assert recipe["partition"] == {"name": "B"}
    chosen = layerswap("plan", *pair, "--partition", "A", "--outside", "language", "--json")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"experts: {{task: {pair[1]}, language: {pair[3]}}}\n"
                      "partition: {name: A, outside: language}")  # fmt: skip
    assert json.loads(layerswap("plan", recipe, "--json").out) == json.loads(chosen.out)
    result = layerswap("plan", *pair, "--partition", "A", "--bottom-transition", 2)
    assert (result.code, result.err) == (
        2, "error: --bottom-transition cannot be combined with --partition\n"
    )  # fmt: skip


def test_merge_a_recipe_as_a_person_writes_it(layerswap, experts, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"experts:\n  math: {experts.task}\n  swahili: {experts.language}\n"
        "swap: {task: math, language: swahili, bottom: 1, top: 1}\n"
    )
    out = tmp_path / "merged"
    layerswap.done("merge", recipe, "--out", out, "--dtype", "bfloat16")
    swap = json.loads((out / "layerswap.json").read_text())["recipe"]["swap"]
    assert swap == {"task": "math", "language": "swahili", "bottom": 1, "top": 1}
    merged = tensors_of(out)
    assert {tensor.dtype for tensor in merged.values()} == {torch.bfloat16}
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(merged[name], tensors_of(experts.language)[name].bfloat16())


def test_an_output_is_overwritten_only_with_the_option(layerswap, experts, tmp_path):
    out = tmp_path / "merged"
    layerswap.done("merge", *experts.pair, "--out", out)
    again = layerswap.refused("merge", *experts.pair, "--out", out)
    assert again.err == (
        f"error: {out}: exists already; choose another output or pass --overwrite\n"
    )
    before = tensors_of(out)
    layerswap.done("merge", *experts.pair, "--bottom", 4, "--out", out, "--overwrite")
    name = "model.layers.3.mlp.up_proj.weight"
    assert not torch.equal(before[name], tensors_of(out)[name])


BOTH = "error: give a recipe file, or both --task-expert and --language-expert"
BAD = {
    "nothing to merge": ((), BOTH),
    "one expert": (("--task", "x"), BOTH),
    "no such recipe": (
        ("nope.yaml",), "error: nope.yaml: cannot be read (No such file or directory)"
    ),
    "recipe and flags": (
        ("nope.yaml", "--bottom", "3"),
        "error: --bottom cannot be combined with a recipe file; write it into nope.yaml",
    ),
    "weights": (
        ("--task", "x", "--language", "y", "--weights", "1,b"),
        "error: --weights: '1,b' is not uniform, magnitude or two numbers like 0.6,0.4",
    ),
    "outside": (
        ("--task", "x", "--language", "y", "--outside", "inside"),
        "error: command line: swap.outside: 'inside' is not allowed; there are blend, language, "
        "task",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("command", ["merge", "plan"])
def test_bad_arguments_get_one_line_and_code_2(layerswap, command, case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    out = ("--out", "merged") if command == "merge" else ()
    result = layerswap(command, *arguments, *out)
    assert (result.code, result.out, result.err) == (2, "", message + "\n")
    assert list(tmp_path.iterdir()) == []


USAGE = {
    "option value": (
        ("merge", "--bottom", "-1", "--out", "x"),
        "error: Invalid value for '--bottom': Input should be greater than or equal to 0",
    ),
    "missing option": (
        ("merge", "--task", "a", "--language", "b"),
        "error: Missing option '--out'",
    ),
    "missing option of an analysis": (
        ("analyse", "freeze-or-revert", "e.yaml", "--out", "out"),
        "error: Missing option '--part'",
    ),
    "wrong choice": (
        ("merge", "--layout", "plian", "--out", "x"),
        "error: Invalid value for '--layout': 'plian' is not one of 'auto', 'plain'",
    ),
    "unknown option": (("plan", "--botom", "3"), "error: No such option: --botom"),
    "unknown command": (("frobnicate",), "error: No such command 'frobnicate'"),
}


@pytest.mark.parametrize("case", USAGE)
def test_wrong_usage_is_one_line_too(layerswap, case):
    arguments, message = USAGE[case]
    result = layerswap(*arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(message)
    assert re.search(r"; see layerswap( [a-z-]+)* --help\n$", result.err)
    assert result.err.count("\n") == 1


def test_no_arguments_show_the_help(layerswap):
    result = layerswap.refused()
    assert "quickstart" in result.out + result.err
    assert "error" not in result.err


def test_an_interrupt_leaves_no_result_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "layerswap", "quickstart", "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while not any(tmp_path.iterdir()):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "interrupted"
    assert not any(tmp_path.iterdir())


def test_an_interrupt_while_modules_load_is_one_line(tmp_path):
    """Also where the import of a library takes the exception for its own."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts["layerswap"].partition(":")
    (tmp_path / "typer.py").write_text(
        "import signal\ntry:\n    signal.raise_signal(signal.SIGINT)\n"
        "except KeyboardInterrupt as error:\n    raise ImportError('half loaded') from error\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    starts = (["-c", f"from {module} import {function}; {function}()"], ["-m", "layerswap"])
    for start in starts:
        done = subprocess.run([sys.executable, *start, "--help"], env=environment, check=False,
                              capture_output=True, text=True, cwd=tmp_path)  # fmt: skip
        assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupt_within_a_finaliser_is_not_lost():
    program = """
import signal, sys, time
import layerswap.cli as cli

class Dying:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)

def application(name):
    def run(**settings):
        Dying()
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            return cli.INTERRUPTED
        return 0
    return run

signal.signal(signal.SIGINT, signal.default_int_handler)
cli.application = application
cli.main()
"""
    result = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=50
    )
    assert (result.returncode, result.stderr) == (130, "interrupted\n")


def test_one_expert_twice_is_refused(layerswap, experts, tmp_path):
    pair = ("--task", experts.task, "--language", f"{experts.task}/")
    result = layerswap("merge", *pair, "--out", tmp_path / "out")
    assert (result.code, result.err) == (2, (
        f"error: --task-expert and --language-expert are both {experts.task}; a merge needs two "
        "experts\n"
    ))  # fmt: skip
    reverting = ("--base", experts.base, "--task", experts.task, "--language", experts.base)
    warned = layerswap.done("plan", *reverting)
    assert "note: language has the weights of its base" in warned.out


def test_a_full_standard_output_is_one_line(experts):
    with Path("/dev/full").open("w") as full:
        pipes = {"capture_output": False, "stdout": full, "stderr": subprocess.PIPE}
        result = processes.layerswap("plan", *experts.pair, **pipes)
    assert result.returncode == 2
    assert result.stderr == (
        "error: standard output or a file cannot be written (No space left on device); make room "
        "and run it again\n"
    )


def test_our_own_mistakes_are_not_dressed_up_as_the_users(layerswap, monkeypatch, experts):
    def broken(recipe, **options):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("layerswap.merge.api.make_plan", broken)
    with pytest.raises(ZeroDivisionError):
        layerswap("plan", *experts.pair)


def test_a_path_too_long_for_a_file_is_one_line(layerswap, experts, tmp_path):
    recipe = f"{{experts: {{task: {experts.task}, language: {experts.language}}}, swap: {{}}}}"
    path = tmp_path / "sweep.yaml"
    rest = f"grid: {{bottom: 1, top: 0}}\ntasks: [x]\ninclude: [{'x' * 3000}]\n"
    path.write_text(f"recipe: {recipe}\n{rest}")
    done = layerswap("sweep", path, "--out", tmp_path / "out")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.endswith(": the name is too long for a file\n")
    assert len(done.err) < 300
    assert not (tmp_path / "out").exists()
