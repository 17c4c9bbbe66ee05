"""From an expert's spec to TRL's `SFTConfig`."""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.compose.yaml_file import nearest
from layerswap.errors import TrainingError
from layerswap.training.expert.distributed import under_deepspeed
from layerswap.training.expert.spec import DECAY, EFFECTIVE_BATCH, PRESETS, ExpertSpec

OURS = {
    "output_dir": "--out", "seed": "`seed`", "data_seed": "`seed`", "save_steps": "`save_every`",
    "save_strategy": "`save_every`", "eval_strategy": "`save_every`", "eval_steps": "`save_every`",
    "resume_from_checkpoint": "--resume", "load_best_model_at_end": "`layerswap select`",
    "push_to_hub": "`layerswap merge --push`", "model_init_kwargs": "`dtype`",
    "chat_template_path": "the base's own", "trust_remote_code": "no code of a repository",
    "dataset_text_field": "`data`", "dataset_kwargs": "`data`",
}  # fmt: skip
"""Names of `SFTConfig` that something else of layerswap decides, and what."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size",
          "gradient_accumulation_steps", "max_length")  # fmt: skip
POSITIVE = ("learning_rate", "num_train_epochs")
SWITCHES = ("<class 'bool'>", "bool", "bool | None")
SCHEDULE = "lr_scheduler_kwargs"


def sft_config(
    spec: ExpertSpec, folder: Path, *, rows: str, processes: int | None = None
) -> tuple[Any, float | None]:
    """The configuration of a training.

    Args:
        spec: what the user asked for.
        folder: where checkpoints go.
        rows: what the data holds: `prompt`, `messages` or `text`; texts are packed by default.
        processes: how many train together; from the environment that the launcher set when None.

    Returns:
        A `trl.SFTConfig`, and the share of the steps over which a stable schedule decays, where
        it is not given in steps.

    Raises:
        TrainingError: a name that SFTConfig does not have, or that is decided elsewhere, or a
            value that does not go with it.
    """
    from trl import SFTConfig

    known = {field.name: field for field in dataclasses.fields(SFTConfig) if field.init}
    chosen = check_hyperparameters(spec)
    share = chosen.pop(DECAY, None)
    values = {**_defaults(spec, rows, known), **chosen}
    batch = spec.effective_batch or EFFECTIVE_BATCH.get(spec.preset or "")
    if batch is not None:
        world = int(os.environ.get("WORLD_SIZE", "1")) if processes is None else processes
        values |= _accumulated(batch, world, chosen)
    if values.get("lr_scheduler_type") == "warmup_stable_decay":
        if "num_decay_steps" in (values.get(SCHEDULE) or {}):
            share = None
        else:
            share = 0.1 if share is None else share
            values[SCHEDULE] = {"num_decay_steps": 0, **(values.get(SCHEDULE) or {})}
    try:
        return SFTConfig(output_dir=str(folder), **values), share
    except (TypeError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        raise TrainingError(f"hyperparameters: {why}") from None


def check_hyperparameters(spec: ExpertSpec) -> dict[str, Any]:
    """The preset's hyperparameters and the expert's own, by the names of `SFTConfig`.

    Raises:
        TrainingError: a name that it does not have, or that is decided elsewhere, or a value of
            another kind.
    """
    from trl import SFTConfig

    known = {field.name: field for field in dataclasses.fields(SFTConfig) if field.init}
    asked = {**PRESETS.get(spec.preset or "", {}), **spec.hyperparameters}
    return {
        name: value if name == DECAY else _value(name, value, known)
        for name, value in asked.items()
    }


def _value(name: str, value: Any, known: Mapping[str, Any]) -> Any:
    if name in OURS:
        raise TrainingError(f"hyperparameters.{name}: that is decided by {OURS[name]}")
    if name not in known:
        hint = nearest(name, list(known))
        raise TrainingError(f"hyperparameters.{name}: TRL's SFTConfig has no such name{hint}")
    if isinstance(value, str) and NUMBER.fullmatch(value):
        value = float(value)  # YAML 1.1 takes 1e-7 for a text
    default = known[name].default
    number = isinstance(default, int | float) and not isinstance(default, bool)
    if number and (isinstance(value, bool) or not isinstance(value, int | float)):
        raise TrainingError(f"hyperparameters.{name}: {value!r} is not a number")
    if name in COUNTS and value is not None and value < 1:
        raise TrainingError(f"hyperparameters.{name}: {value!r} is not at least 1")
    if name in POSITIVE and not value > 0:
        raise TrainingError(f"hyperparameters.{name}: {value!r} is not above 0")
    if name == "max_steps" and value < 1 and value != -1:
        raise TrainingError(f"hyperparameters.{name}: {value!r} is not at least 1, nor -1 for all")
    if str(known[name].type) in SWITCHES and not isinstance(value, bool | None):
        raise TrainingError(f"hyperparameters.{name}: {value!r} is neither true nor false")
    return value


def _defaults(spec: ExpertSpec, rows: str, known: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    device = torch.cuda.is_available()
    saving = "activation_checkpointing"
    values: dict[str, Any] = {
        "num_train_epochs": 1,
        "report_to": "none",
        "logging_steps": 10,
        "disable_tqdm": not sys.stderr.isatty(),
        "save_strategy": "no",
        "eval_strategy": "no",
        "use_cpu": not device,
        # Autocast: what is stored and stepped stays float32 where the weights are. DeepSpeed's
        # mode of that name would make them bfloat16.
        "bf16": device and torch.cuda.is_bf16_supported() and not under_deepspeed(),
        saving if saving in known else "gradient_checkpointing": device,
        "dataloader_pin_memory": device,
        "seed": spec.seed,
        "data_seed": spec.seed,
    }
    if device and under_deepspeed():
        values["tf32"] = True
    if rows == "text":
        values |= {"packing": True, "packing_strategy": "bfd_split"}
    if spec.simultaneous:
        # Half of the weights have no gradient in any step.
        values |= {"ddp_find_unused_parameters": True, "lr_scheduler_type": "constant_with_warmup"}
    return values


def _accumulated(batch: int, processes: int, chosen: Mapping[str, Any]) -> dict[str, Any]:
    if "gradient_accumulation_steps" in chosen:
        raise TrainingError(
            "effective_batch and hyperparameters.gradient_accumulation_steps say the same thing; "
            "give one of them"
        )
    if batch % processes:
        raise TrainingError(f"effective_batch: {batch} is no multiple of {processes} processes")
    each = batch // processes
    default = next(size for size in range(min(8, each), 0, -1) if each % size == 0)
    device = int(chosen.get("per_device_train_batch_size", default))
    if each % device:
        raise TrainingError(
            f"effective_batch: {batch} is no multiple of {processes} processes x "
            f"per_device_train_batch_size {device}"
        )
    return {
        "per_device_train_batch_size": device,
        "gradient_accumulation_steps": each // device,
    }
