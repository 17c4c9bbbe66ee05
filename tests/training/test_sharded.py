"""Equality of FSDP2 in two processes over gloo and of one process.

accelerate runs FSDP2 on CPUs only with the shim `fsdp_on_cpu`. The launch configuration is the
shipped one; where all digits are compared, the specifications turn its bfloat16 off.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from merging import tensors_of
from small_experts import FAST, changed, data_files

from layerswap.ground.commit import write_json
from layerswap.ground.errors import TrainingError
from layerswap.training.expert.hyperparameters import (
    PRECISION,
    launch_configuration,
    launch_training,
    sft_config,
)
from layerswap.training.expert.job import plan_training
from layerswap.training.expert.save import read_training
from layerswap.training.expert.spec import check_expert
from layerswap.training.expert.trainer import train

SHIM = Path(__file__).parents[1] / "helpers" / "fsdp_on_cpu"


@pytest.fixture
def sharded(tmp_path, monkeypatch):
    """Trains in two processes under FSDP2; returns the output."""
    path = os.pathsep.join([str(SHIM), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    launch = {"processes": 2, "configuration": launch_configuration("fsdp2")}
    folder = tmp_path / "sharded"
    folder.mkdir()

    def run(spec, *, resume=False):
        launch_training(spec, folder / "out", launch, resume=resume)
        return folder / "out"

    return run


def specification(base, rows, *, batch, more, bf16=False):
    hyperparameters = {**FAST, "per_device_train_batch_size": batch, "max_steps": 6,
                       "adam_epsilon": 1e-3} | ({} if bf16 else {"bf16": False})  # fmt: skip
    return {"base": str(base), "data": data_files(rows, "task", validation=True), "save_every": 32,
            "hyperparameters": hyperparameters} | more  # fmt: skip


def losses(folder):
    log = read_training(folder)["log"]
    return [entry[key] for entry in log for key in ("loss", "eval_loss") if key in entry]


CASES = {
    "full": {},
    "partial": {"train": {"places": [{"layers": "0-1"}]}},
    "lora": {"lora": {"r": 4, "lora_alpha": 8}},
    "simultaneous": {"train": {"partition": "C"}},
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "bf16"), [*((case, False) for case in CASES),
                                            ("simultaneous", True)])  # fmt: skip
def test_sharded_training_equals_one_process(tmp_path, base, rows, sharded, case, bf16):
    """The rows are no multiple of the batch, and the second process has none of the last."""
    more = dict(CASES[case])
    if case == "simultaneous":
        sets = {name: data_files(rows, name, validation=True) for name in ("task", "language")}
        more |= {"simultaneous": sets, "data": None}
    else:
        more["limit"] = 28
    alone = specification(base, rows, batch=8, more=more, bf16=bf16)
    alone["hyperparameters"]["bf16"] = bf16
    alone = train(alone, tmp_path / "alone")
    spec = specification(base, rows, batch=4, more=more, bf16=bf16)
    both = sharded(spec)
    record = read_training(both)
    assert (record["processes"], record["batch"]) == (2, 8)
    assert losses(both) == pytest.approx(losses(alone), rel=2e-2 if bf16 else 1e-4)
    assert record["hyperparameters"]["bf16"] is bf16
    weights = [tensors_of(out) for out in (alone, both)]
    assert case == "lora" or changed(both, base) == changed(alone, base)
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        far = (tensor - weights[1][name]).abs()
        assert far.mean() < 5e-3 if bf16 else far.max() < 1e-4, name
    if case == "simultaneous":
        resumed(both, spec, sharded, weights[1])


def resumed(out, spec, sharded, whole):
    """Resume from the only checkpoint; refuse what cannot resume from it."""
    (checkpoint,) = (out / "checkpoints").iterdir()
    assert {"pytorch_model_fsdp.bin", "optimizer.bin"} <= {p.name for p in checkpoint.iterdir()}
    write_json(out / "layerswap-training.json", read_training(out) | {"finished": False})
    (out / "model.safetensors").unlink()
    refused = "was saved with FSDP; resume with the launch"
    copy = out.parent / "copy"
    shutil.copytree(out, copy)
    halved = "started with 8 examples in a step, and 1 processes would make 4; give"
    with pytest.raises(TrainingError, match=halved):
        train(spec, copy, resume=True)
    with pytest.raises(TrainingError, match=refused):
        train({**spec, "effective_batch": 8}, copy, resume=True)
    again = tensors_of(sharded(spec, resume=True))
    for name, tensor in whole.items():
        assert torch.equal(tensor, again[name]), name


@pytest.mark.slow
def test_bfloat16_rounds_no_loss(base, rows, sharded):
    more = {"train": {"places": [{"layers": "0-1"}]}}
    spec = specification(base, rows, batch=4, more=more, bf16=True)
    out = sharded(spec)
    assert read_training(out)["hyperparameters"]["bf16"] is True
    values = torch.tensor(losses(out))
    assert len(values) == 8
    assert (values != values.bfloat16().float()).sum() > 4


@pytest.mark.parametrize(("launched", "chosen", "precision"), [
    ("bf16", {"bf16": False}, "no"), ("bf16", {}, "bf16"), ("fp16", {}, "fp16"),
    ("no", {"bf16": True}, "bf16"), ("bf16", {"fp16": True}, "fp16"),
    ("fp16", {"bf16": True}, "bf16"),
])  # fmt: skip
def test_the_specification_decides_on_precision(tmp_path, monkeypatch, launched, chosen, precision):
    monkeypatch.setenv(PRECISION, launched)
    spec = check_expert({"base": "b", "data": {"train": "d"}, "hyperparameters": chosen})
    config, _ = sft_config(spec, tmp_path, rows="prompt")
    assert (config.bf16, config.fp16) == (precision == "bf16", precision == "fp16")
    assert config.mixed_precision == os.environ[PRECISION] == precision


def test_the_batch_is_part_of_a_trainings_key(tmp_path, base, rows):
    def job(**more):
        spec = specification(base, rows, batch=4, more=more)
        return plan_training(check_expert(spec), tmp_path / "out")

    assert job().key == job(effective_batch=4).key != job(effective_batch=8).key
    assert job(effective_batch=8).record["batch"] == 8


def test_shards_are_refused_before_training(tmp_path, base, rows, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "SHARDED_STATE_DICT")
    spec = check_expert(specification(base, rows, batch=4, more={}))
    with pytest.raises(TrainingError, match="set fsdp_config: fsdp_state_dict_type: FULL"):
        plan_training(spec, tmp_path / "out")
