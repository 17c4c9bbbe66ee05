"""A run of training: its inputs, progress, checkpoints, resumption, processes and precision."""

import doctest
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import psutil
import pytest
import torch
import yaml
from merging import tensors_of
from small_experts import FAST, changed, data_files, train_expert
from transformers import AutoModelForCausalLM, AutoTokenizer

import layerswap as ls
from layerswap.ground import lease, system
from layerswap.ground.errors import LayerswapError
from layerswap.ground.lease import Owner
from layerswap.training.expert import hyperparameters, sft
from layerswap.training.expert.job import plan_training
from layerswap.training.expert.save import checkpoints, read_training
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

COMMAND = [sys.executable, "-m", "layerswap", "train"]
LAUNCH = """
import json, signal, sys
from pathlib import Path
from layerswap.ground import system
from layerswap.training.expert.hyperparameters import launch_training
system.interrupt_on(signal.SIGTERM)
launch = {"processes": 2, "configuration": None}
launch_training(json.loads(sys.argv[1]), Path(sys.argv[2]), launch, resume=False)
"""
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def spec_of(base, rows, **settings):
    """A short training on the task, with these settings."""
    usual = {"base": str(base), "data": data_files(rows, "task"), "hyperparameters": FAST}
    return usual | settings


def test_the_example_of_the_public_function_runs(tmp_path, base, rows, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base").symlink_to(base)
    lines = (rows / "task-train.jsonl").read_text().splitlines()[:8]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    runner = doctest.DocTestRunner()
    for example in doctest.DocTestFinder(recurse=False).find(ls.train, globs={}):
        runner.run(example)
    assert runner.summarize().attempted == 3
    assert runner.failures == 0
    assert (tmp_path / "copy" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_file_a_mapping_and_a_specification_train_the_same(tmp_path, base, rows):
    spec = spec_of(base, rows, limit=16)
    (tmp_path / "expert.yaml").write_text(yaml.safe_dump(spec))
    forms = (tmp_path / "expert.yaml", str(tmp_path / "expert.yaml"), spec, check_expert(spec))
    outs = [ls.train(form, tmp_path / f"{i}", seed=2) for i, form in enumerate(forms)]
    records = [read_training(out) for out in outs]
    assert len({record["key"] for record in records}) == 1
    assert records[0]["spec"]["seed"] == 2
    with pytest.raises(LayerswapError, match=r"seeds: unknown key; did you mean 'seed'"):
        ls.train(spec, tmp_path / "none", seeds=2)


@pytest.mark.slow
def test_a_training_saves_by_time_and_logs_progress(tmp_path, base, rows, capfd, monkeypatch):
    lines, steps = [], []
    save = sft.Checkpointing.on_save

    def watched(self, args, state, *rest, **kwargs):
        save(self, args, state, *rest, **kwargs)
        steps.append(sorted(int(p.name[11:]) for p in (out / "checkpoints").glob("checkpoint-*")))

    monkeypatch.setattr(sft.Checkpointing, "on_save", watched)
    monkeypatch.setattr(sft.ProgressLines.__init__, "__defaults__", (0.0,))
    out = tmp_path / "out"

    spec = spec_of(base, rows, limit=96, save_minutes=1e-9, save_every=48)
    train(spec, out, log=lines.append)
    # By samples after steps 3 and 6 (the output itself); by time after every other step.
    assert steps == [[1], [2], [3], [3, 4], [3, 5]]
    assert [p.name for p in (out / "checkpoints").iterdir()] == ["checkpoint-3"]
    progress = [line for line in lines if line.startswith("step")]
    assert len(progress) == 6
    assert re.fullmatch(r"step 2 of 6, loss \d+\.\d{3}, [\d,]+ tokens/s, \d+ s left", progress[1])
    printed = capfd.readouterr()
    assert printed.out == ""
    assert "model shards" not in printed.err
    assert "FutureWarning" not in printed.err


@pytest.fixture
def terminable():
    """SIGTERM is handled as the command line handles it."""
    before = signal.getsignal(signal.SIGTERM)
    system.interrupt_on(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "step", "saved"), [
    (signal.SIGTERM, 2, [2]), pytest.param(signal.SIGINT, 2, [2], marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, 6, [], marks=pytest.mark.slow),
])  # fmt: skip
@pytest.mark.usefixtures("terminable")
def test_the_first_interrupt_saves_a_checkpoint_to_resume_from(
    tmp_path, base, rows, monkeypatch, capsys, number, step, saved
):
    """Six steps, interrupted in one of them; what is resumed equals what was never stopped."""
    monkeypatch.setattr(sft.ProgressLines.__init__, "__defaults__", (0.0,))
    spec = spec_of(base, rows, limit=96, seed=3)
    whole, out, lines = train(spec, tmp_path / "whole"), tmp_path / "out", []

    def log(line):
        lines.append(line)
        if line.startswith(f"step {step} of 6"):
            signal.raise_signal(number)

    with pytest.raises(KeyboardInterrupt) as interrupt:
        train(spec, out, log=log)
    assert isinstance(interrupt.value, system.Terminated) == (number == signal.SIGTERM)
    assert "Ctrl-C again stops at once" in capsys.readouterr().err
    assert [int(p.name[11:]) for p in (out / "checkpoints").glob("checkpoint-*")] == saved
    assert (lines[-1] == f"saved step {step}, from which the training can resume") == bool(saved)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not (tmp_path / ".out.lease.json").exists()
    train(spec, out, resume=True)
    assert (out / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.usefixtures("terminable")
def test_the_second_interrupt_and_a_lost_lease_stop_at_once():
    interrupts = (lambda: signal.raise_signal(signal.SIGINT), system.interrupt_main,
                  lambda: signal.raise_signal(signal.SIGTERM))  # fmt: skip
    for urgent in interrupts:
        with system.first_interrupt("stopping") as asked:
            signal.raise_signal(signal.SIGINT)
            assert asked.is_set()
            with pytest.raises(KeyboardInterrupt):
                urgent()
    with pytest.raises(KeyboardInterrupt), system.first_interrupt("stopping"):
        system.interrupt_main()


def test_two_trainings_never_share_a_folder(tmp_path, base, rows, monkeypatch):
    """The second one is refused; a process that lost the folder leaves it to the winner."""
    monkeypatch.setattr(lease, "HEARTBEAT", 0.05)
    spec = spec_of(base, rows, limit=16)
    out, winner = tmp_path / "out", Owner(where="elsewhere")

    def log(line):
        if line.startswith("tokenising"):
            with pytest.raises(lease.InUse, match=rf"{out}: process \d+ on .* writes into it"):
                train(spec, out, overwrite=True)
            assert (out / "layerswap-training.json").is_file()
            (tmp_path / ".out.lease.json").write_text(json.dumps(asdict(winner)))
            time.sleep(10)

    with pytest.raises(KeyboardInterrupt):
        train(spec, out, log=log)
    assert (out / "layerswap-training.json").is_file()


@pytest.mark.slow
def test_a_terminated_training_in_two_processes_ends_with_a_checkpoint(tmp_path, base, rows):
    """SIGTERM at the process that launched it, as a study does, stops all and saves."""
    fast = {**FAST, "max_steps": 10_000}
    spec = spec_of(base, rows, seed=3, save_every=320, hyperparameters=fast)
    study = tmp_path / "study"
    study.mkdir()
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, json.dumps(spec), str(study / "out")], env=OFFLINE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    log = study / "training.txt"
    saved = study / "out" / "checkpoints"
    while not (saved / "checkpoint-10" / "trainer_state.json").exists():
        assert launcher.poll() is None
        time.sleep(0.1)
    with pytest.raises(lease.InUse):
        train(spec, study / "out", resume=True)
    children = psutil.Process(launcher.pid).children(recursive=True)
    assert len(children) >= 3
    launcher.send_signal(signal.SIGTERM)
    assert "Terminated" in launcher.communicate(timeout=60)[1]
    assert not psutil.wait_procs(children, timeout=1)[1]
    step, checkpoint = [*checkpoints(saved).items()][-1]
    assert f"saved step {step:,}, from which" in log.read_text()
    assert (checkpoint / "optimizer.pt").exists()
    assert not (study / ".out.lease.json").exists()


@pytest.mark.slow
def test_a_killed_training_resumes_bit_for_bit(tmp_path, base, rows):
    spec = tmp_path / "expert.yaml"
    sets = {name: data_files(rows, name) for name in ("task", "language")}
    spec.write_text(yaml.safe_dump({
        "base": str(base), "save_every": 64, "seed": 4, "simultaneous": sets,
        "train": {"partition": "C"}, "hyperparameters": {**FAST, "num_train_epochs": 16},
    }))  # fmt: skip

    def run(spec, out, *options):
        command = [*COMMAND, str(spec), "--out", str(out), *options]
        return subprocess.run(
            command, check=False, capture_output=True, text=True, env=OFFLINE
        )  # fmt: skip

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert run(spec, whole).returncode == 0
    process = subprocess.Popen(
        [*COMMAND, str(spec), "--out", str(cut)], stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, env=OFFLINE,
    )  # fmt: skip
    while not (cut / "checkpoints" / "checkpoint-100" / "trainer_state.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (cut / "config.json").exists()
    refused = run(spec, cut)
    assert refused.returncode == 2
    assert "unfinished training; pass --resume" in refused.stderr
    other = spec.with_name("other.yaml")
    other.write_text(spec.read_text().replace("seed: 4", "seed: 5"))
    refused = run(other, cut, "--resume")
    assert refused.returncode == 2
    assert "holds another training" in refused.stderr
    assert run(spec, cut, "--resume").returncode == 0
    assert (cut / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    losses = [
        [(e["step"], e["loss"]) for e in read_training(folder)["log"] if "loss" in e]
        for folder in (whole, cut)
    ]
    assert losses[0] == losses[1]
    with_state = [p for p in (cut / "checkpoints").iterdir() if (p / "optimizer.pt").exists()]
    assert [p.name for p in with_state] == ["checkpoint-252"]


@pytest.mark.slow
@pytest.mark.parametrize("turns", [True, False])
def test_two_processes_train_as_one_with_twice_the_batch(tmp_path, base, rows, turns):
    """Also where the rows are no multiple of the batch, to train on or to validate on."""
    sets = {name: data_files(rows, name) for name in ("task", "language")}
    if turns:
        data = {"simultaneous": sets, "train": {"partition": "B"}}
    else:
        data = {"data": data_files(rows, "task", validation=True), "limit": 50}

    def run(processes, batch, accumulate):
        spec, out = tmp_path / f"{processes}.yaml", tmp_path / f"{processes}"
        spec.write_text(yaml.safe_dump({
            "base": str(base), "save_every": 64, **data,
            "hyperparameters": {**FAST, "per_device_train_batch_size": batch,
                                "num_train_epochs": 1 if turns else 4,
                                "per_device_eval_batch_size": 3 * batch,
                                "gradient_accumulation_steps": accumulate},
        }))  # fmt: skip
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(processes),
                    "--master_port", "0", "--standalone"] if processes > 1 else []  # fmt: skip
        command = [sys.executable, *launcher, *COMMAND[1:], str(spec), "--out", str(out)]
        ended = subprocess.run(command, check=False, capture_output=True, text=True, env=OFFLINE)
        assert ended.returncode == 0, ended.stderr
        log = read_training(out)["log"]
        return tensors_of(out), [e[key] for e in log for key in ("loss", "eval_loss") if key in e]

    first, losses = run(1, 8, 2)
    second, same = run(2, 8, 1)
    assert len(losses) == (16 if turns else 20)
    assert same == pytest.approx(losses, rel=1e-4)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=2e-3)


def test_the_validation_loss_is_in_nats_per_token_for_any_batch(tmp_path, base, rows):
    found = []
    for size in (1, 7, 32):
        out = train_expert(tmp_path, base, data=data_files(rows, "task", validation=True), limit=16,
                           hyperparameters={"learning_rate": 1e-30, "max_steps": 1,
                                            "per_device_eval_batch_size": size},
                           name=f"{size}")  # fmt: skip
        found.append(read_training(out)["losses"]["validation"])
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    losses = []
    for line in (rows / "task-validation.jsonl").read_text().splitlines():
        row = json.loads(line)
        prompt = len(tokenizer(row["prompt"])["input_ids"])
        ids = tokenizer(row["prompt"] + row["completion"] + tokenizer.eos_token,
                        return_tensors="pt")["input_ids"]  # fmt: skip
        with torch.no_grad():
            logits = model(ids).logits[0, prompt - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, ids[0, prompt:], reduction="none")
    assert found == pytest.approx([float(torch.stack(losses).mean())] * 3, rel=1e-5)


@pytest.fixture
def processor(monkeypatch):
    """Sets what the processor can do, and counts every model as large."""
    monkeypatch.setattr(hyperparameters, "LARGE", 1)
    return lambda **able: monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)


@pytest.mark.slow
@pytest.mark.parametrize(("able", "large", "given", "bf16"), [
    (True, True, {}, True), (False, True, {}, False), (True, False, {}, False),
    (True, True, {"bf16": False}, False), (True, True, {"fp16": True}, False),
])  # fmt: skip
def test_bfloat16_is_the_default_where_it_is_faster(
    tmp_path, base, rows, monkeypatch, processor, able, large, given, bf16
):
    processor(avx512_bf16=able)
    if not large:
        monkeypatch.setattr(hyperparameters, "LARGE", 50_000_000)
    lines = []
    spec = spec_of(base, rows, limit=4, hyperparameters={"max_steps": 1, **given})
    out = train(spec, tmp_path / "out", log=lines.append)
    assert read_training(out)["hyperparameters"]["bf16"] == bf16
    assert any("bf16: false" in line for line in lines) == bf16


def test_training_with_bf16_saves_float32_weights(tmp_path, base, rows):
    out = train_expert(
        tmp_path, base, data=data_files(rows, "task"), limit=8,
        hyperparameters={"max_steps": 2, "bf16": True, "learning_rate": 1e-6},
    )  # fmt: skip
    saved, moved = tensors_of(out), changed(out, base)
    assert {t.dtype for t in saved.values()} == {torch.float32}
    assert moved
    assert any(not torch.equal(saved[name], saved[name].bfloat16().float()) for name in moved)


def test_a_training_resumes_in_the_precision_it_started_with(tmp_path, base, rows, processor):
    spec = check_expert({"base": str(base), "data": data_files(rows, "task")})
    out = tmp_path / "out"
    for able in (False, True):
        processor(amx_bf16=able)
        job = plan_training(spec, out)
        assert job.config.bf16 == able
        out.mkdir()
        (out / "layerswap-training.json").write_text(json.dumps(job.record))
        processor(amx_bf16=not able)
        assert plan_training(spec, out, resume=True).config.bf16 == able
        assert plan_training(spec, out).config.bf16 != able
        chosen = spec.model_copy(update={"hyperparameters": {"bf16": not able}})
        assert plan_training(chosen, out, resume=True).config.bf16 != able
        shutil.rmtree(out)
