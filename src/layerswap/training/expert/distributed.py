"""Training on several devices: configurations for accelerate, and what does not go with them."""

from __future__ import annotations

import os
from importlib import resources

from layerswap.compose.yaml_file import nearest
from layerswap.errors import RecipeError, TrainingError
from layerswap.training.expert.spec import ExpertSpec


def launch_configuration(name: str) -> str:
    """The YAML for `accelerate launch --config_file`: `ddp`, `fsdp2` or `zero3`.

    Raises:
        RecipeError: there is none of that name.
    """
    folder = resources.files("layerswap.training.expert") / "launch"
    known = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
    if name not in known:
        hint = nearest(name, known) or f"; there are {', '.join(known)}"
        raise RecipeError(f"no configuration {name!r}{hint}")
    return (folder / f"{name}.yaml").read_text("utf-8")


def under_deepspeed() -> bool:
    """Whether accelerate launched this process with DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


def under_fsdp() -> bool:
    """Whether accelerate launched this process with FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP") == "true"


def check_distributed(spec: ExpertSpec) -> None:
    """Refuse what needs every parameter whole where parameters are cut over devices.

    Raises:
        TrainingError: turns under DeepSpeed, or a sparse training under DeepSpeed or FSDP.
    """
    if spec.simultaneous and under_deepspeed():
        raise TrainingError(
            "simultaneous: DeepSpeed fixes what trains at its start; launch with ddp or fsdp2"
        )
    if spec.sparse and (under_deepspeed() or under_fsdp()):
        raise TrainingError("sparse: masks need whole parameters; launch with ddp")
