"""Estimated costs of steps, for a plan that is not run: hours, memory and disk.

They follow from the parameters of the base, the device, the rows of the data and the documents of
the benchmarks.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.composition import LAYER_ROLES, all_places
from layerswap.compose.presets import partition
from layerswap.errors import RecipeError
from layerswap.evaluation.suites.suites import parts_of
from layerswap.study.inputs import DataSize
from layerswap.study.spec import EvaluationSpec, StudySpec, TrainingRun
from layerswap.training.expert.hyperparameters import autocast_pays
from layerswap.training.expert.spec import PRESETS

BATCH = 32
"""Texts that are written at a time."""
ADAPTER = 0.02
"""Share of the parameters that an adapter of a usual rank trains."""
USUAL = DataSize(80_000, 512)
"""Rows of a data set and tokens of a row, where nothing better is known (paper 2, section 3.4)."""
LAYERS, OUTSIDE, ATTENTION = 32, 0.1, 0.3
"""Of a base of which only the size is known: layers, and the shares of the parameters outside the
layers and in attention."""
IN_NAME = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![A-Za-z])", re.IGNORECASE)
"""A number of parameters in a model's name, such as `8B` or `135M`."""
STARTING = 15.0
"""Seconds until a training or an evaluation has imported its libraries and loaded its models."""
UNKNOWN = 8.0
"""Billions of parameters of a base that says nothing of its size."""


class Speed(NamedTuple):
    """The usual speed of a device.

    Attributes:
        read: floating-point operations a second in training and in reading.
        loaded: bytes of weights a second that writing a token has to load.
        name: in the caption of a plan.
    """

    read: float
    loaded: float
    name: str


AUTOCAST = 3
"""How many times as fast a processor that multiplies in bfloat16 trains."""
GPU = Speed(1.2e14, 1e12, "on an A100")
"""About 40% of its peak in bfloat16, and half of its peak of loading."""


def speed_of(device: str) -> Speed:
    """The speed of a device: of this machine's processors in float32, or of a GPU."""
    if device != "cpu":
        return GPU
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Speed(4e10 * (cores or 1), 5e9, f"on {cores or 1} processors")


@dataclass(frozen=True)
class Size:
    """The size of a base.

    Attributes:
        billions: parameters.
        shares: share of the parameters by layer (None outside) and role.
        known_by: what it is known by, in words.
    """

    billions: float
    shares: Mapping[tuple[int | None, str], float]
    known_by: str

    @property
    def layers(self) -> int:
        """Number of layers."""
        return 1 + max(layer for layer, _ in self.shares if layer is not None)

    def trained(self, run: TrainingRun) -> float:
        """The share of the parameters that a training changes."""
        if run.lora:
            return ADAPTER
        chosen = run.train
        if chosen is None:
            return 1.0
        places = set(all_places(self.layers))
        try:
            if chosen.places:
                places = {place for where in chosen.places for place in where.places(self.layers)}
        except RecipeError:
            return 1.0  # The depth of a base that was not read is a guess.
        if chosen.partition is not None and chosen.part is not None:
            parts = partition(chosen.partition, self.layers, outside=chosen.outside)
            places = {one for one in places if chosen.part in parts[one].experts}
        return sum(self.shares.get((place.layer, place.role), 0.0) for place in places)


def size_of(spec: StudySpec, base: str) -> Size:
    """The size of a study's base: as the study says, by its header, or by its name.

    Args:
        spec: the study.
        base: a local folder, whose headers are read, or a Hub id, of which nothing is fetched.
    """
    if Path(base).is_dir():
        opened = open_checkpoint(base)
        counts: dict[tuple[int | None, str], int] = {}
        for name, tensor in opened.tensors.items():
            place = opened.places[name]
            key = (place.layer, place.role)
            counts[key] = counts.get(key, 0) + prod(tensor.shape)
        total = sum(counts.values()) or 1
        shares = {key: count / total for key, count in counts.items()}
        return Size(spec.billions or total / 1e9, shares, "its header")
    inside = {"attention": ATTENTION, "mlp": 1 - ATTENTION}
    shares = {
        (layer, role): (1 - OUTSIDE) / LAYERS * inside.get(role, 0)
        for layer in range(LAYERS)
        for role in LAYER_ROLES
    }
    shares[None, "embedding"] = OUTSIDE
    named = IN_NAME.search(base.rpartition("/")[2])
    if spec.billions is not None:
        return Size(spec.billions, shares, "the study")
    if named is None:
        return Size(UNKNOWN, shares, "no more than a guess; give `billions`")
    return Size(float(named[1]) / (1000 if named[2] in "mM" else 1), shares, "its name")


@dataclass(frozen=True)
class Documents:
    """The size of a benchmark.

    Attributes:
        number: of documents.
        read: tokens of one document, and of one exemplar.
        written: tokens that are written for it; none where answers are only scored.
    """

    number: int
    read: int
    written: int = 0


OTHER = Documents(1000, 300, 128)
"""Usual size of a task whose benchmark states none."""


@dataclass(frozen=True)
class Costs:
    """Costs of the steps of one study.

    Attributes:
        size: of the base.
        speed: of the device.
        bytes_each: bytes of a weight where models are evaluated.
        documents: of the study's own tasks, by their file's name for them.
    """

    size: Size
    speed: Speed
    bytes_each: int
    documents: Mapping[str, Documents] = field(default_factory=dict)

    def training_hours(self, run: TrainingRun, sets: Sequence[DataSize]) -> float:
        """Hours of a training.

        2 operations a parameter and token forward, 2 backward, and 2 for each gradient of a
        weight that trains.

        Args:
            run: the training.
            sets: the data that it trains on, one after the other or mixed.
        """
        longest = _setting(run, "max_length")
        rows = [min(one.rows, run.limit or one.rows) for one in sets]
        tokens = sum(
            count * min(one.tokens, longest or one.tokens)
            for count, one in zip(rows, sets, strict=True)
        )
        times = _examples(run, sets) / (sum(rows) or 1)
        each = 4 + 2 * self.size.trained(run)
        able = self.speed != GPU and autocast_pays(round(self.size.billions * 1e9))
        lower = able and run.hyperparameters.get("bf16", True) is not False
        speed = self.speed.read * (AUTOCAST if lower else 1)
        seconds = each * self.size.billions * 1e9 * tokens * times / speed
        return (STARTING + seconds) / 3600

    def checkpoints(self, run: TrainingRun, sets: Sequence[DataSize]) -> int:
        """The number of checkpoints that a training leaves to choose from."""
        return max(1, _examples(run, sets) // run.save_every)

    def checkpoint_gb(self, run: TrainingRun) -> float:
        """Disk of one checkpoint of a training: whole weights in float32, or an adapter."""
        return 4 * self.size.billions * (ADAPTER if run.lora else 1)

    def training_disk_gb(self, run: TrainingRun, sets: Sequence[DataSize]) -> float:
        """Disk of a training: its output and checkpoints, and one optimiser's two moments."""
        many = 1 + self.checkpoints(run, sets)
        moments = 8 * self.size.billions * self.size.trained(run)
        return many * self.checkpoint_gb(run) + moments

    def training_memory_gb(self, run: TrainingRun) -> float:
        """Memory of a training without activations: weights, gradients and two moments.

        The frozen weights of LoRA are held as they are stored, in two bytes on a GPU.
        """
        held = 2 if run.lora and self.speed == GPU else 4
        return self.size.billions * (held + 12 * self.size.trained(run))

    def evaluation_hours(self, spec: EvaluationSpec, models: float) -> float:
        """Hours of evaluating models in one language.

        2 operations a parameter and token that is read; the weights loaded once for each token
        that a batch writes.

        Args:
            spec: the benchmarks.
            models: how many; compositions that share layers count as less.
        """
        seconds = 0.0
        for documents, shots in self._benchmarks(spec):
            number = min(documents.number, spec.limit or documents.number)
            read = number * documents.read * (1 + shots) * 2 * self.size.billions * 1e9
            loaded = self.bytes_each * self.size.billions * 1e9
            seconds += read / self.speed.read
            seconds += number * documents.written * loaded / self.speed.loaded / BATCH
        return (STARTING + models * seconds) / 3600 if seconds else 0.0

    def evaluation_memory_gb(self) -> float:
        """Memory of two experts and what is composed of them, whose layers are theirs."""
        return 2.5 * self.bytes_each * self.size.billions

    def _benchmarks(self, spec: EvaluationSpec) -> Iterator[tuple[Documents, int]]:
        """The documents of each benchmark, and the exemplars that come with one."""
        if spec.suite is None:
            yield from (
                (self.documents.get(one, OTHER), spec.num_fewshot or 0) for one in spec.tasks
            )
            return
        for part in parts_of(spec.suite):
            if not part.benchmark.runs_code or spec.allow_code:
                shots = part.shots if spec.num_fewshot is None else spec.num_fewshot
                size = part.benchmark.size
                yield Documents(size.documents, size.read, size.written), shots


def _examples(run: TrainingRun, sets: Sequence[DataSize]) -> int:
    """Examples that a training sees."""
    steps, epochs = _setting(run, "max_steps"), run.hyperparameters.get("num_train_epochs", 1)
    if steps is not None:
        batch = run.effective_batch or _setting(run, "per_device_train_batch_size") or 8
        return steps * batch
    times = epochs if isinstance(epochs, int | float) and epochs > 0 else 1
    return int(times * sum(min(one.rows, run.limit or one.rows) for one in sets))


def _setting(run: TrainingRun, name: str) -> int | None:
    """A positive hyperparameter; other values are refused where hyperparameters are checked."""
    value = {**PRESETS.get(run.preset or "", {}), **run.hyperparameters}.get(name)
    return value if isinstance(value, int) and value > 0 else None
