"""`layerswap adapters`: N + M adapters as N x M compositions over one base."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from merging import save_tokenizer, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import save_expert
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import layerswap as ls
from layerswap.cli import app
from layerswap.engine.sweep import Sweep
from layerswap.evaluation.harness import open_models

IDS = torch.arange(3, 13).reshape(2, 5)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    """A base, two task adapters and two language adapters."""
    root = tmp_path_factory.mktemp("served")
    save_tokenizer(save_expert(root / "base", tiny_llama(), 0))
    for seed, name in enumerate(("math", "code", "sw", "te"), start=1):
        torch.manual_seed(seed)
        config = LoraConfig(
            task_type="CAUSAL_LM", r=2, lora_alpha=4, init_lora_weights=False,
            target_modules=["q_proj", "up_proj"], use_rslora=name == "te",
        )  # fmt: skip
        model = AutoModelForCausalLM.from_pretrained(root / "base")
        get_peft_model(model, config).save_pretrained(root / name)
        save_tokenizer(root / name)
    return root


def run(world: Path, out: Path, *more: object):
    asked = ["adapters", "--tasks", world / "math", "--tasks", f"programs={world / 'code'}"]
    asked += ["--languages", world / "sw", "--languages", world / "te", "--out", out]
    return CliRunner().invoke(app, [str(part) for part in (*asked, *more)])


@pytest.fixture(scope="module")
def served(world) -> Path:
    done = run(world, world / "out", "--bottom", 1, "--top", 1)
    assert not done.exit_code, done.output
    return world / "out"


def adapted(world: Path, adapter: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(world / "base")
    with torch.no_grad():
        return PeftModel.from_pretrained(model, adapter)(IDS).logits


def test_each_is_the_swap_of_its_two_adapters(world, served):
    names = {path.name for path in served.iterdir() if path.is_dir()}
    assert names == {"math--sw", "math--te", "programs--sw", "programs--te"}
    for task, folder in (("math", "math"), ("programs", "code")):
        for language in ("sw", "te"):
            plan = ls.swap(task=world / folder, language=world / language, bottom=1, top=1)
            with torch.no_grad():
                expected = plan.load()(IDS).logits
            result = adapted(world, served / f"{task}--{language}")
            torch.testing.assert_close(result, expected)
            config = json.loads((served / f"{task}--{language}/adapter_config.json").read_text())
            assert config["r"] == 2  # verbatim places keep the rank


def test_the_manifest_serves_them(world, served):
    manifest = json.loads((served / "serve.json").read_text())
    assert manifest["base"] == str(world / "base")
    assert manifest["max_lora_rank"] == 8
    script = (served / "serve.sh").read_text()
    assert f"vllm serve {world / 'base'} --enable-lora --max-lora-rank 8" in script
    assert 'math--sw="$here/"math--sw' in script
    assert [path.name for path in served.rglob("README.md")] == ["README.md"]


def test_the_script_runs_from_any_folder(world, tmp_path, monkeypatch):
    monkeypatch.chdir(world)
    out = tmp_path / "a folder" / "out"
    assert not run(world, out, "--base", "base").exit_code
    called = tmp_path / "vllm"
    called.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    called.chmod(0o755)
    path = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", out / "serve.sh", "--port", "1"], cwd="/", env=path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    _, base, *words = done.stdout.splitlines()
    assert Path(base).samefile(world / "base")
    assert f"math--sw={out}/math--sw" in words
    assert words[-2:] == ["--port", "1"]


def test_blended_places_grow_to_both_ranks(world, tmp_path):
    done = run(world, tmp_path / "out", "--bottom", 1, "--bottom-transition", 1)
    assert not done.exit_code, done.output
    config = json.loads((tmp_path / "out" / "math--sw" / "adapter_config.json").read_text())
    assert config["r"] == 4
    assert set(config["rank_pattern"].values()) == {2}


def test_a_folder_of_them_is_evaluated_in_one_sweep(world, served):
    plans = open_models([str(served)])
    assert set(plans) == {"math--sw", "math--te", "programs--sw", "programs--te"}
    sweep = Sweep(list(plans.values()))
    counts = sweep.counts()
    assert counts.distinct < counts.naive
    for (name, _), (_, logits) in zip(plans.items(), sorted(sweep.logits(IDS)), strict=True):
        torch.testing.assert_close(logits, adapted(world, served / name), rtol=1e-4, atol=1e-5)


def test_each_mistake_is_one_line(world, served, tmp_path):
    twice = run(world, tmp_path / "a", "--languages", world / "sw")
    assert "two are called 'sw'; write NAME=FOLDER" in str(twice.exception)
    full = run(world, tmp_path / "b", "--tasks", world / "base")
    assert "base, sw: both must be adapters" in str(full.exception)
    assert "exists already" in str(run(world, served).exception)
    assert not list(tmp_path.iterdir())
