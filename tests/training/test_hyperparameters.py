"""Presets are the papers' rows; what a user says reaches TRL under its own names."""

import json
from pathlib import Path

import pytest
from tiny_models import config_of

from layerswap.engine.rows import learns_positions
from layerswap.ground.errors import RecipeError, TrainingError
from layerswap.training.expert.hyperparameters import (
    check_distributed,
    launch_configuration,
    sft_config,
)
from layerswap.training.expert.spec import PRESETS, check_expert

TABLE_4 = json.loads((Path(__file__).parents[1] / "helpers" / "data" / "table4.json").read_text())


def config(tmp_path, *, processes=1, rows="prompt", **spec):
    checked = check_expert({"base": "b", "data": "d", **spec})
    return sft_config(checked, tmp_path, rows=rows, processes=processes)


@pytest.mark.parametrize("row", TABLE_4)
def test_presets_are_the_rows_of_table_4(tmp_path, row):
    published = TABLE_4[row]
    settings, decay = config(tmp_path, preset=row.replace(" #", "-"))
    assert settings.learning_rate == published["learning_rate"]
    assert settings.per_device_train_batch_size == published["batch_size"]
    assert settings.max_length == published["seq_length"]
    assert settings.weight_decay == published["weight_decay"]
    assert settings.max_grad_norm == published["clip_max_norm"]
    assert settings.warmup_steps == published["warmup"]
    assert settings.adam_beta2 == published["beta2"]
    stable = published["scheduler"] == "WSD"
    assert settings.lr_scheduler_type == ("warmup_stable_decay" if stable else "linear")
    assert decay == (0.1 if stable else None)
    assert settings.num_train_epochs == 1
    papers = {row.replace(" #", "-") for row in TABLE_4}
    assert set(PRESETS) == papers | {"unreasonable", "unreasonable-simultaneous"}


def test_the_second_papers_batches(tmp_path):
    alone, _ = config(tmp_path, preset="unreasonable")
    assert alone.per_device_train_batch_size * alone.gradient_accumulation_steps == 32
    both, _ = config(tmp_path, preset="unreasonable-simultaneous", processes=2)
    assert both.per_device_train_batch_size * both.gradient_accumulation_steps == 32
    assert both.lr_scheduler_type == "constant_with_warmup"


def test_hyperparameters_override_the_preset_and_may_be_texts(tmp_path):
    settings, _ = config(tmp_path, preset="math-1", hyperparameters={"learning_rate": "3e-5"})
    assert settings.learning_rate == 3e-5
    assert settings.max_length == 2048
    texts = {"max_steps": "3", "gradient_accumulation_steps": 2.0}
    settings, _ = config(tmp_path, hyperparameters=texts)
    assert repr([settings.max_steps, settings.gradient_accumulation_steps]) == "[3, 2]"
    steps = {"lr_scheduler_kwargs": {"num_decay_steps": 7}}
    settings, decay = config(tmp_path, preset="swh-1", hyperparameters=steps, seed=9)
    assert decay is None
    assert settings.lr_scheduler_kwargs == {"num_decay_steps": 7}
    assert (settings.seed, settings.data_seed) == (9, 9)


@pytest.mark.parametrize(
    ("spec", "processes", "message"),
    [
        ({"effective_batch": 3}, 2, "3 is not a multiple of 2 processes"),
        ({"effective_batch": 8, "hyperparameters": {"gradient_accumulation_steps": 2}}, 1,
         "not both"),
        ({"hyperparameters": {"learning_rate": -1}}, 1, "learning_rate: must be above 0; found -1"),
        ({"hyperparameters": {"max_steps": -3}}, 1, "must be at least 1, or -1 for all; fo"),
        ({"hyperparameters": {"max_length": "6.5"}}, 1, "must be a valid integer, .*; found '6.5'"),
        ({"hyperparameters": {"bf16": 3}}, 1, "bf16: must be a valid boolean, .*; found 3"),
        *(({"hyperparameters": {name: value}}, 1,
           f"{name}: must be a valid {kind}; found {value!r}")
          for name, value, kind in (
              ("learning_rate", True, "number"), ("weight_decay", "nan", "number"),
              ("max_grad_norm", "Infinity", "number"), ("max_steps", True, "integer"),
              ("max_length", "1_000", "integer"), ("bf16", 1, "boolean"), ("bf16", 1.0, "boolean"),
              ("bf16", "1", "boolean"), ("bf16", "true", "boolean"))),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(tmp_path, spec, processes, message):
    with pytest.raises(TrainingError, match=message):
        config(tmp_path, processes=processes, **spec)


def test_a_warm_up_that_takes_the_whole_training_is_named(tmp_path):
    from transformers import TrainerState

    from layerswap.training.expert.sft import ProgressLines

    lines: list[str] = []
    settings, _ = config(tmp_path, preset="math-1")
    for steps in (1000, 1001):
        state = TrainerState(max_steps=steps)
        ProgressLines(lines.append, int).on_train_begin(settings, state, None)
    assert lines == [
        "warning: the learning rate never reaches its value, because warmup_steps is 1,000 of "
        "1,000 steps; set hyperparameters.warmup_steps"
    ]


@pytest.mark.parametrize(("family", "learns"), [("gpt2", True), ("opt", True), ("llama", False)])
def test_models_with_an_embedding_of_positions(family, learns):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config_of(family))
    assert learns_positions(model, 128) is learns


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_accelerate_reads_the_configurations_that_ship(name, tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    file = tmp_path / "config.yaml"
    file.write_text(launch_configuration(name))
    read = load_config_from_file(str(file))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert read.distributed_type.value == kinds[name]
    if name == "fsdp2":
        assert read.fsdp_config["fsdp_version"] == 2
        assert read.fsdp_config["fsdp_state_dict_type"] == "FULL_STATE_DICT"
    with pytest.raises(RecipeError, match="did you mean 'fsdp2'"):
        launch_configuration("fsdp")


def test_deepspeed_is_refused(monkeypatch):
    check_distributed()
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(TrainingError, match="launch with ddp or fsdp2"):
        check_distributed()
