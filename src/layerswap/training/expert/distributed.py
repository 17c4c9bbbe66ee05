"""Configurations of accelerate for training on several devices, and their limits."""

from __future__ import annotations

import os
from importlib import resources

from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError, TrainingError
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
