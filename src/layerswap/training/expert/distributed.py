"""Training in several processes by accelerate: configurations, their limits, and the launch."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from layerswap.checkpoint.commit import write_json
from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError, StudyError, TrainingError
from layerswap.training.expert.spec import ExpertSpec

REPEATED = 500
"""Characters of the last line of a launch that an error message repeats."""


def accelerate_configuration(name: str) -> str:
    """Return the YAML for `accelerate launch --config_file`: `ddp`, `fsdp2` or `zero3`."""
    folder = resources.files("layerswap.training.expert") / "launch"
    known = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
    if name not in known:
        raise RecipeError(f"no configuration {name!r}{nearest(name, known)}")
    return (folder / f"{name}.yaml").read_text("utf-8")


def launch_configuration(name: str, folder: Path) -> str:
    """Return the YAML of `ddp`, `fsdp2`, `zero3` or of a file, relative to `folder`."""
    if not name.endswith((".yaml", ".yml", ".json")):
        return accelerate_configuration(name)
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"resources: train: launch: {path}: no such file")
    return path.read_text("utf-8")


def launched_with(engine: str) -> bool:
    """Return true if accelerate launched this process with `deepspeed` or `fsdp`."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}") == "true"


def check_distributed(spec: ExpertSpec) -> None:
    """Refuse trainings that need whole parameters where parameters are sharded."""
    if spec.simultaneous and launched_with("deepspeed"):
        raise TrainingError(
            "simultaneous: DeepSpeed fixes what trains at its start; launch with ddp or fsdp2"
        )
    if spec.sparse and (launched_with("deepspeed") or launched_with("fsdp")):
        raise TrainingError("sparse: masks need whole parameters; launch with ddp")


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
        (folder / "accelerate.yaml").write_text(launch["configuration"], "utf-8")
        options += ["--config_file", str(folder / "accelerate.yaml")]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    command += ["-m", "layerswap", "train", str(folder / "expert.yaml"), "--out", str(out)]
    command += ["--resume"] if resume else []
    log = folder / "training.txt"
    with log.open("a", encoding="utf-8") as output:
        ended = subprocess.run(
            command, check=False, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    if ended.returncode:
        text = log.read_text("utf-8", errors="replace")
        raise StudyError(
            f"the training failed with exit status {ended.returncode}; its log is {log}, "
            f"last line: {_last_line(text)}"
        )


def _last_line(text: str) -> str:
    """Return the error that a process wrote, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:REPEATED]
