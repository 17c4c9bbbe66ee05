"""Settings for TRL and accelerate: `SFTConfig`, and training in several processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from layerswap.ground.commit import write_json
from layerswap.ground.errors import RecipeError, StudyError, TrainingError, one_line
from layerswap.ground.yaml_file import nearest
from layerswap.training.expert.spec import DECAY, EFFECTIVE_BATCH, PRESETS, ExpertSpec

PRECISION = "ACCELERATE_MIXED_PRECISION"
"""Variable in which accelerate passes `mixed_precision` of its launch configuration."""
LARGE = 50_000_000
"""Parameters from which the matrix products are the main cost of a step."""
REPEATED = 500
"""Characters of the last line of a launch that an error message repeats."""
_INSTEAD = {
    **dict.fromkeys(("save_steps", "save_strategy", "eval_strategy", "eval_steps"),
                    "give `save_every`"),
    **dict.fromkeys(("seed", "data_seed"), "give `seed`"),
    **dict.fromkeys(("dataset_text_field", "dataset_kwargs"), "give `data`"),
    "output_dir": "give --out", "resume_from_checkpoint": "give --resume",
    "model_init_kwargs": "give `dtype`", "load_best_model_at_end": "run `layerswap analyse select`",
    "push_to_hub": "run `layerswap merge --push`",
    "chat_template_path": "the base's own template is used",
    "trust_remote_code": "code of a repository is never run",
}  # fmt: skip
"""Names of `SFTConfig` that cannot be set, and what to do instead."""
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", re.ASCII)
_COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size",
           "gradient_accumulation_steps", "max_length")  # fmt: skip
_POSITIVE = ("learning_rate", "num_train_epochs")


def sft_config(
    spec: ExpertSpec,
    folder: Path,
    *,
    rows: str,
    processes: int | None = None,
    parameters: int = 0,
    bf16: bool | None = None,
) -> tuple[Any, float | None]:
    """Make a training's `trl.SFTConfig`, with its checkpoints in `folder`.

    Rows of the form `text` are packed by default. `bf16` is the precision in which a resumed
    training was started. Also returns the fraction of the steps in which a stable schedule decays,
    unless that is given in steps.
    """
    from trl import SFTConfig

    chosen = check_hyperparameters(spec)
    decay = chosen.pop(DECAY, None)
    values = {**_defaults(spec, rows, parameters), **chosen}
    if chosen.get("bf16") and "fp16" not in chosen:
        values["fp16"] = False
    if "bf16" not in chosen:
        values["bf16"] = values["bf16"] and not values.get("fp16") if bf16 is None else bf16
    if os.environ.get(PRECISION) in ("no", "fp16", "bf16"):  # accelerate obeys it before SFTConfig
        os.environ[PRECISION] = next((name for name in ("fp16", "bf16") if values.get(name)), "no")
    values |= _batch_sizes(spec, chosen, processes)
    if values.get("lr_scheduler_type") == "warmup_stable_decay":
        schedule = values.get("lr_scheduler_kwargs") or {}
        if "num_decay_steps" in schedule:
            decay = None
        else:
            decay = 0.1 if decay is None else decay
            values["lr_scheduler_kwargs"] = {"num_decay_steps": 0, **schedule}
    try:
        config = SFTConfig(output_dir=str(folder), **values)
        _try_libraries(config)
    except Exception as error:  # of accelerate, bitsandbytes and others
        why = one_line(error, 300) or type(error).__name__
        raise TrainingError(f"hyperparameters: {why}") from None
    return config, decay


def _try_libraries(config: Any) -> None:
    """Ask for the optimizer, the schedule and the kernels, which the trainer makes much later."""
    from importlib.util import find_spec

    import torch
    from transformers import Trainer, get_scheduler

    weight = torch.nn.Parameter(torch.zeros(2, 2))
    Trainer.get_optimizer_cls_and_kwargs(config)
    get_scheduler(
        config.lr_scheduler_type, torch.optim.SGD([weight]), num_warmup_steps=1,
        num_training_steps=9, scheduler_specific_kwargs=dict(config.lr_scheduler_kwargs or {}),
    )  # fmt: skip
    if config.use_liger_kernel and find_spec("liger_kernel") is None:
        raise TrainingError("use_liger_kernel needs liger_kernel; run `pip install liger_kernel`")


def check_hyperparameters(spec: ExpertSpec) -> dict[str, Any]:
    """Check the hyperparameters of the preset and of the specification."""
    from trl import SFTConfig

    hints = get_type_hints(SFTConfig)
    types = {field.name: hints[field.name] for field in fields(SFTConfig) if field.init}
    given = {**PRESETS.get(spec.preset or "", {}), **spec.hyperparameters}
    return {
        name: value if name == DECAY else _check(name, value, types)
        for name, value in given.items()
    }


def _check(name: str, value: Any, types: Mapping[str, Any]) -> Any:
    if name in _INSTEAD:
        raise TrainingError(f"hyperparameters.{name}: cannot be set here; {_INSTEAD[name]}")
    if name not in types:
        hint = nearest(name, list(types))
        raise TrainingError(f"hyperparameters.{name}: TRL's SFTConfig has no such name{hint}")
    wanted, adapter = None, TypeAdapter(types[name])
    try:
        read = adapter.validate_python(value)
        is_text = isinstance(value, str) and not _NUMBER.fullmatch(value)
        # Pydantic reads 1 as true, and "nan" and "1_000" as numbers.
        if isinstance(read, bool) != isinstance(value, bool) or (
            is_text and not isinstance(read, str)
        ):
            read = adapter.validate_python(value, strict=True)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise TrainingError(f"hyperparameters.{name}: must be {reason}; found {value!r}") from None
    if type(value) is not int:  # YAML 1.1 reads 1e-7 as a text; a whole number stays one
        value = read
    if name in _COUNTS and value is not None and value < 1:
        wanted = "at least 1"
    elif name in _POSITIVE and not value > 0:
        wanted = "above 0"
    elif name == "max_steps" and value < 1 and value != -1:
        wanted = "at least 1, or -1 for all"
    if wanted:
        raise TrainingError(f"hyperparameters.{name}: must be {wanted}; found {value!r}")
    return value


def _defaults(spec: ExpertSpec, rows: str, parameters: int) -> dict[str, Any]:
    import torch
    from transformers.utils import is_torch_bf16_gpu_available  # type: ignore[attr-defined]
    from trl import SFTConfig

    device = torch.accelerator.current_accelerator(check_available=True)
    bf16 = is_torch_bf16_gpu_available() if device else autocast_pays(parameters)
    checkpointing = "activation_checkpointing"  # older versions of TRL have the other name
    if checkpointing not in SFTConfig.__dataclass_fields__:
        checkpointing = "gradient_checkpointing"
    values: dict[str, Any] = {
        "num_train_epochs": 1,
        "report_to": "none",
        "logging_steps": 10,
        "disable_tqdm": True,
        "save_strategy": "no",
        "eval_strategy": "no",
        "use_cpu": device is None,
        "bf16": bf16,
        checkpointing: device is not None,
        "dataloader_pin_memory": device is not None and device.type in ("cuda", "xpu"),
        "seed": spec.seed,
        "data_seed": spec.seed,
    }
    if (launched := os.environ.get(PRECISION)) in ("fp16", "bf16"):
        values |= {"bf16": False, launched: True}
    if rows == "text":
        values |= {"packing": True, "packing_strategy": "bfd_split"}
    if spec.simultaneous:
        # In each step half of the weights have no gradient.
        values |= {"ddp_find_unused_parameters": True, "lr_scheduler_type": "constant_with_warmup"}
    return values


def _batch_sizes(
    spec: ExpertSpec, chosen: Mapping[str, Any], processes: int | None
) -> dict[str, int]:
    """Divide the examples of an optimiser step over processes and accumulated passes."""
    batch = spec.effective_batch or EFFECTIVE_BATCH.get(spec.preset or "")
    if batch is None:
        return {}
    if "gradient_accumulation_steps" in chosen:
        raise TrainingError(
            "give effective_batch or hyperparameters.gradient_accumulation_steps, not both"
        )
    # In one process TRL refuses several GPUs.
    world = int(os.environ.get("WORLD_SIZE") or 1) if processes is None else processes
    each, rest = divmod(batch, world)
    if rest:
        raise TrainingError(f"effective_batch: {batch} is not a multiple of {world} processes")
    default = next(size for size in range(min(8, each), 0, -1) if each % size == 0)
    device = int(chosen.get("per_device_train_batch_size", default))
    if each % device:
        raise TrainingError(
            f"effective_batch: {batch} is not a multiple of {world} processes x "
            f"per_device_train_batch_size {device}"
        )
    return {"per_device_train_batch_size": device, "gradient_accumulation_steps": each // device}


def rows_of_step(config: Any) -> int:
    """Count the rows in an optimiser step, over all processes."""
    return int(config.train_batch_size * config.gradient_accumulation_steps * config.world_size)


def autocast_pays(parameters: int) -> bool:
    """Return true if training on this processor is faster with products in bfloat16.

    The processor needs instructions for them (AVX-512 BF16 or AMX, as far as torch can say; Arm's
    were not measured), and the model must not be tiny.
    """
    import torch

    capabilities = torch.cpu.get_capabilities()
    able = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16"))
    return able and parameters >= LARGE


def launch_configuration(name: str, folder: Path | None = None) -> str:
    """Return the YAML of `ddp` or `fsdp2` for `accelerate launch --config_file`.

    With a folder, `name` may be a file relative to it too.
    """
    if folder is not None and name.endswith((".yaml", ".yml", ".json")):
        path = folder / Path(name).expanduser()
        if not path.is_file():
            raise RecipeError(f"resources: train: launch: {path}: no such file")
        return path.read_text("utf-8")
    shipped = resources.files("layerswap.training.expert") / "launch"
    known = sorted(file.name.removesuffix(".yaml") for file in shipped.iterdir())
    if name not in known:
        raise RecipeError(f"no configuration {name!r}{nearest(name, known)}")
    return (shipped / f"{name}.yaml").read_text("utf-8")


def launched_with(engine: str) -> bool:
    """Return true if accelerate launched this process with `fsdp` or `deepspeed`."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}") == "true"


def check_distributed() -> None:
    """Reject DeepSpeed, which would save bfloat16 weights, and FSDP checkpoints in shards."""
    if launched_with("deepspeed"):
        raise TrainingError("DeepSpeed is not supported; launch with ddp or fsdp2")
    if launched_with("fsdp") and os.environ.get("FSDP_STATE_DICT_TYPE") != "FULL_STATE_DICT":
        raise TrainingError(
            "the launch configuration saves shards, which nothing loads; set fsdp_config: "
            "fsdp_state_dict_type: FULL_STATE_DICT"
        )


def launch_training(
    spec: Mapping[str, Any], out: Path, launch: Mapping[str, Any], *, resume: bool
) -> None:
    """Train as `layerswap train` does, in the processes that accelerate starts.

    Specification, configuration and output of the processes are files beside `out`. `launch` holds
    the number of `processes`, and accelerate's `configuration`; None is for the CPU.
    """
    folder = out.parent
    write_json(folder / "expert.yaml", dict(spec))  # JSON is YAML too
    # Port 0: accelerate takes a free one, so that several trainings can share a machine.
    options = ["--num_processes", str(launch["processes"]), "--main_process_port", "0"]
    environment = dict(os.environ)
    if launch["configuration"] is None:
        environment["ACCELERATE_USE_CPU"] = "true"
        options += ["--multi_gpu"]  # with the variable, gloo on the CPU; --cpu starts one process
    else:
        (folder / "accelerate.yaml").write_bytes(launch["configuration"].encode())
        options += ["--config_file", str(folder / "accelerate.yaml")]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    command += ["-m", "layerswap", "train", str(folder / "expert.yaml"), "--out", str(out)]
    command += ["--resume"] if resume else []
    log = folder / "training.txt"
    with log.open("a", encoding="utf-8", newline="\n") as output:
        # A Ctrl-C reaches the processes through the launcher alone, and so once.
        launcher = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            status = launcher.wait()
        except BaseException:
            launcher.terminate()
            launcher.wait()  # until they have saved, or for the seconds that it gives them
            raise
    if status:
        text = log.read_text("utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error:")]
        last = (errors or lines or [""])[-1][:REPEATED]
        raise StudyError(
            f"the training failed with exit status {status}; its log is {log}, last line: {last}"
        )
