"""Configurations for accelerate, as accelerate reads them."""

import pytest

from layerswap.errors import RecipeError, TrainingError
from layerswap.training.expert.distributed import accelerate_configuration, check_distributed
from layerswap.training.expert.spec import check_expert


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "zero3"])
def test_accelerate_reads_the_configurations_that_ship(name, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "config.yaml"
    file.write_text(accelerate_configuration(name))
    read = load_config_from_file(str(file))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "zero3": "DEEPSPEED"}
    assert read.distributed_type.value == kinds[name]
    if name == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2
        assert read.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    if name == "zero3":
        assert read.mixed_precision == "no"


def test_an_unknown_configuration_is_refused():
    with pytest.raises(RecipeError, match="did you mean 'fsdp2'"):
        accelerate_configuration("fsdp")


def test_sharded_parameters_refuse_turns_and_masks(monkeypatch):
    sets = {"task": "a", "language": "b"}
    turns = check_expert({"base": "b", "simultaneous": sets, "train": {"partition": "A"}})
    sparse = check_expert({"base": "b", "data": "d", "sparse": {"keep": 0.1}})
    check_distributed(turns)
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    for spec in (turns, sparse):
        with pytest.raises(TrainingError, match="launch with ddp"):
            check_distributed(spec)
    monkeypatch.delenv("ACCELERATE_USE_DEEPSPEED")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    check_distributed(turns)
    with pytest.raises(TrainingError, match="whole parameters"):
        check_distributed(sparse)


def test_under_deepspeed_weights_stay_float32(monkeypatch):
    import torch

    from layerswap.training.expert.hyperparameters import _defaults

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    spec = check_expert({"base": "b", "data": "d"})
    assert _defaults(spec, "prompt", 1)["bf16"]
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    values = _defaults(spec, "prompt", 1)
    assert (values["bf16"], values["tf32"]) == (False, True)
