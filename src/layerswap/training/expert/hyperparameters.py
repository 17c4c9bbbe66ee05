"""Makes TRL's `SFTConfig` from an expert's specification."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.compose.yaml_file import nearest
from layerswap.errors import TrainingError
from layerswap.training.expert.distributed import launched_with
from layerswap.training.expert.spec import DECAY, EFFECTIVE_BATCH, PRESETS, ExpertSpec

OURS = {
    "output_dir": "--out", "seed": "`seed`", "data_seed": "`seed`", "save_steps": "`save_every`",
    "save_strategy": "`save_every`", "eval_strategy": "`save_every`", "eval_steps": "`save_every`",
    "resume_from_checkpoint": "--resume", "load_best_model_at_end": "`layerswap select`",
    "push_to_hub": "`layerswap merge --push`", "model_init_kwargs": "`dtype`",
    "chat_template_path": "the base's own", "trust_remote_code": "no code of a repository",
    "dataset_text_field": "`data`", "dataset_kwargs": "`data`",
}  # fmt: skip
"""Names of `SFTConfig` that another setting of layerswap decides, and that setting."""
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size",
          "gradient_accumulation_steps", "max_length")  # fmt: skip
POSITIVE = ("learning_rate", "num_train_epochs")
SWITCHES = ("<class 'bool'>", "bool", "bool | None")
SCHEDULE = "lr_scheduler_kwargs"


def sft_config(
    spec: ExpertSpec,
    folder: Path,
    *,
    rows: str,
    processes: int | None = None,
    parameters: int = 0,
    begun_in: bool | None = None,
) -> tuple[Any, float | None]:
    """The configuration of a training.

    Args:
        spec: the specification.
        folder: folder of the checkpoints.
        rows: form of the data: `prompt`, `messages` or `text`; texts are packed by default.
        processes: number of training processes; the launcher's `WORLD_SIZE` when None.
        parameters: of the model.
        begun_in: whether a training that goes on was begun with products in bfloat16, which this
            machine's default then is no choice for.

    Returns:
        A `trl.SFTConfig`, and the fraction of the steps in which a stable schedule decays, where
        it is not given in steps.

    Raises:
        TrainingError: a name that SFTConfig does not have or that another setting decides, or a
            value that does not fit it.
    """
    from trl import SFTConfig

    known = _known()
    chosen = check_hyperparameters(spec)
    share = chosen.pop(DECAY, None)
    values = {**_defaults(spec, rows, known, parameters), **chosen}
    if "bf16" not in chosen:
        values["bf16"] &= not chosen.get("fp16")
        values["bf16"] = values["bf16"] if begun_in is None else begun_in
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
    """The hyperparameters of the preset and of the specification, by the names of `SFTConfig`.

    Raises:
        TrainingError: as `sft_config`.
    """
    known = _known()
    asked = {**PRESETS.get(spec.preset or "", {}), **spec.hyperparameters}
    return {
        name: value if name == DECAY else _value(name, value, known)
        for name, value in asked.items()
    }


def _known() -> dict[str, Any]:
    from trl import SFTConfig

    return {field.name: field for field in dataclasses.fields(SFTConfig) if field.init}


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
    wrong = None
    if number and (isinstance(value, bool) or not isinstance(value, int | float)):
        wrong = "not a number"
    elif name in COUNTS and value is not None and value < 1:
        wrong = "not at least 1"
    elif name in POSITIVE and not value > 0:
        wrong = "not above 0"
    elif name == "max_steps" and value < 1 and value != -1:
        wrong = "not at least 1, nor -1 for all"
    elif str(known[name].type) in SWITCHES and not isinstance(value, bool | None):
        wrong = "neither true nor false"
    if wrong:
        raise TrainingError(f"hyperparameters.{name}: {value!r} is {wrong}")
    return value


def _defaults(
    spec: ExpertSpec, rows: str, known: Mapping[str, Any], parameters: int
) -> dict[str, Any]:
    import torch

    device = torch.cuda.is_available()
    lower = torch.cuda.is_bf16_supported() if device else autocast_pays(parameters)
    saving = "activation_checkpointing"
    values: dict[str, Any] = {
        "num_train_epochs": 1,
        "report_to": "none",
        "logging_steps": 10,
        "disable_tqdm": True,
        "save_strategy": "no",
        "eval_strategy": "no",
        "use_cpu": not device,
        # Autocast keeps weights and steps in float32; DeepSpeed's mode of that name would not.
        "bf16": lower and not launched_with("deepspeed"),
        saving if saving in known else "gradient_checkpointing": device,
        "dataloader_pin_memory": device,
        "seed": spec.seed,
        "data_seed": spec.seed,
    }
    if device and launched_with("deepspeed"):
        values["tf32"] = True
    if rows == "text":
        values |= {"packing": True, "packing_strategy": "bfd_split"}
    if spec.simultaneous:
        # In each step half of the weights have no gradient.
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


LARGE = 50_000_000
"""Parameters from which the matrix products are what a step costs."""


def autocast_pays(parameters: int) -> bool:
    """Whether a training on this processor is faster with products in bfloat16.

    That is so where it has instructions for them (AVX-512 BF16 or AMX, as far as torch can say;
    Arm's were not measured) and the model is not tiny.

    Args:
        parameters: of the model.
    """
    import torch

    # Older versions of torch lack it.
    found: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    able = any(found.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return able and parameters >= LARGE
