"""What the steps of a study take while they run, which a cluster places them by."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from layerswap.compose.schema import Strict
from layerswap.study.steps import Resources
from layerswap.train.expert_schema import Text

Kind = Literal["data", "train", "select", "change", "judge"]
USUAL: dict[Kind, Resources] = {
    "train": Resources(cpus=4, gpus=1, memory_gb=64),
    "select": Resources(cpus=4, gpus=1, memory_gb=64),
    "judge": Resources(cpus=4, gpus=1, memory_gb=96),
}
"""Of the kinds of step that run models, where there are devices."""


class Takes(Strict):
    """What a step takes while it runs; what is not given is left as it is.

    Attributes:
        cpus: processors.
        gpus: devices; a fraction shares one.
        memory_gb: of main memory.
    """

    cpus: Annotated[float, Field(gt=0, strict=False)] | None = None
    gpus: Annotated[float, Field(ge=0, strict=False)] | None = None
    memory_gb: Annotated[float, Field(gt=0, strict=False)] | None = None


class TrainingTakes(Takes):
    """The same of a training, which accelerate may launch in several processes.

    Attributes:
        processes: of one training; the effective batch grows with them, unless it is given.
        launch: accelerate's configuration for them: `ddp`, `fsdp2`, `zero3` or a file.
    """

    processes: PositiveInt = 1
    launch: Text = "ddp"


class Takings(Strict):
    """What the steps of each kind take, which a cluster places them by."""

    data: Takes = Takes()
    train: TrainingTakes = TrainingTakes()
    select: Takes = Takes()
    change: Takes = Takes()
    judge: Takes = Takes()

    def of(self, kind: Kind, *, device: str) -> Resources:
        """What the steps of a kind take: what is said here, and what is usual where it is not.

        Args:
            kind: of step.
            device: where models run.
        """
        usual = Resources() if device == "cpu" else USUAL.get(kind, Resources())
        takes: Takes = getattr(self, kind)
        given = {name: getattr(takes, name) for name in ("cpus", "gpus", "memory_gb")}
        if kind == "train" and device != "cpu" and self.train.processes > 1:
            usual = replace(usual, gpus=self.train.processes)
        return replace(usual, **{name: value for name, value in given.items() if value is not None})
