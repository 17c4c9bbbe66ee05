"""Training in several processes, by accelerate: configurations, their limits, and the launch."""

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


def accelerate_configuration(name: str) -> str:
    """The YAML for `accelerate launch --config_file`: `ddp`, `fsdp2` or `zero3`.

    Raises:
        RecipeError: no configuration has that name.
    """
    folder = resources.files("layerswap.training.expert") / "launch"
    known = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
    if name not in known:
        hint = nearest(name, known) or f"; there are {', '.join(known)}"
        raise RecipeError(f"no configuration {name!r}{hint}")
    return (folder / f"{name}.yaml").read_text("utf-8")


def launched_with(engine: str) -> bool:
    """True if accelerate launched this process with `deepspeed` or `fsdp`."""
    return os.environ.get(f"ACCELERATE_USE_{engine.upper()}") == "true"


def check_distributed(spec: ExpertSpec) -> None:
    """Refuse trainings that need whole parameters where parameters are sharded.

    Raises:
        TrainingError: simultaneous training under DeepSpeed, or sparse training under DeepSpeed or
            FSDP.
    """
    if spec.simultaneous and launched_with("deepspeed"):
        raise TrainingError(
            "simultaneous: DeepSpeed fixes what trains at its start; launch with ddp or fsdp2"
        )
    if spec.sparse and (launched_with("deepspeed") or launched_with("fsdp")):
        raise TrainingError("sparse: masks need whole parameters; launch with ddp")


SPEC, CONFIGURATION, OUTPUT = "expert.yaml", "accelerate.yaml", "training.txt"
REPEATED = 500
"""Characters of the last line of a launch that a failure repeats."""


def launch_configuration(name: str, folder: Path) -> str:
    """The text of a configuration of accelerate.

    Args:
        name: `ddp`, `fsdp2`, `zero3` or a file.
        folder: what the file is relative to.

    Raises:
        RecipeError: there is no such name or file.
    """
    if not name.endswith((".yaml", ".yml", ".json")):
        return accelerate_configuration(name)
    path = folder / Path(name).expanduser()
    if not path.is_file():
        raise RecipeError(f"resources: train: launch: {path}: no such file")
    return path.read_text("utf-8")


def launch_training(
    spec: Mapping[str, Any], out: Path, launch: Mapping[str, Any], *, resume: bool
) -> None:
    """Train as `layerswap train` does, in the processes that accelerate starts.

    Their output goes to `training.txt` beside `out`.

    Args:
        spec: of the expert, as in its YAML.
        out: the folder of the expert.
        launch: `processes`, and accelerate's `configuration`; on the CPU when that is None.
        resume: start from the newest checkpoint.

    Raises:
        StudyError: a process ended with an error.
    """
    folder = out.parent
    write_json(folder / SPEC, dict(spec))  # JSON is YAML too
    # Port 0: accelerate takes a free one, so that several trainings can share a machine.
    how = ["--num_processes", str(launch["processes"]), "--main_process_port", "0"]
    environment = dict(os.environ)
    if launch["configuration"] is None:
        environment["ACCELERATE_USE_CPU"] = "true"
        how += ["--multi_gpu"]  # with the variable, gloo on the CPU; --cpu starts one process
    else:
        (folder / CONFIGURATION).write_text(launch["configuration"], "utf-8")
        how += ["--config_file", str(folder / CONFIGURATION)]
    command = [sys.executable, "-m", "accelerate.commands.launch", *how]
    command += ["-m", "layerswap", "train", str(folder / SPEC), "--out", str(out)]
    command += ["--resume"] if resume else []
    with (folder / OUTPUT).open("a", encoding="utf-8") as output:
        done = subprocess.run(
            command, check=False, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    if done.returncode:
        text = (folder / OUTPUT).read_text("utf-8", errors="replace")
        raise StudyError(
            f"the launched training ended with exit status {done.returncode}; its output is in "
            f"{folder / OUTPUT}, last: {_last_line(text)}"
        )


def _last_line(text: str) -> str:
    """The error that a process wrote, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    return (errors or lines or [""])[-1][:REPEATED]
