"""What trainings and evaluations cost: hours, memory and disk.

Costs follow from the parameters of the base, the device, the rows of the data and the documents of
the benchmarks. Nothing is fetched; of local data that is not built yet the first rows are read.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from layerswap.checkpoint import open_checkpoint
from layerswap.compose.composition import LAYER_ROLES, all_places
from layerswap.compose.presets import partition
from layerswap.evaluation.suites.suites import Size as BenchmarkSize
from layerswap.evaluation.suites.suites import parts_of
from layerswap.ground import system
from layerswap.ground.errors import LayerswapError, RecipeError
from layerswap.reading.origins import open_rows
from layerswap.study.inputs import files_of
from layerswap.study.spec import Benchmarks, StudySpec, TrainingRun, named_billions
from layerswap.training.expert.hyperparameters import autocast_pays
from layerswap.training.expert.spec import PRESETS
from layerswap.training.mix.card import CARD
from layerswap.training.mix.examples import ExampleMaker
from layerswap.training.mix.schema import Mix, parse_mix

ADAPTER = 0.02
"""Share of the parameters that an adapter of a usual rank trains."""
LAYERS, OUTSIDE, ATTENTION = 32, 0.1, 0.3
"""Assumed layers of a base of unknown shape, and shares of its parameters outside the layers and in
attention."""
UNKNOWN = 8.0
"""Assumed billions of parameters of a base of unknown size."""
BATCH = 32
"""Texts that are generated at a time."""
STARTING = 15.0
"""Seconds until a training or an evaluation has imported its libraries and loaded its models."""
AUTOCAST = 3
"""Speed-up of training on a processor that multiplies in bfloat16."""


LONGEST = 1024
"""TRL's default of `max_length`, in tokens."""
SAMPLE = 100
"""Rows of a local source that are read to estimate their length."""


class Speed(NamedTuple):
    """The usual speed of a device."""

    train: float  # floating-point operations a second in training
    read: float  # floating-point operations a second in evaluation
    loaded: float  # bytes of weights that it loads a second when it generates
    name: str  # words for the caption of a plan
    gpu: bool = False


GPU = Speed(1.2e14, 1.2e14, 1e12, "on an A100", gpu=True)
"""About 40% of its peak in bfloat16, and half of its memory bandwidth."""
CORE = Speed(4e10, 1.2e11, 5e9, "")
"""One processor in float32; training also runs the head, the optimiser and padding."""


class DataSize(NamedTuple):
    """The number of training rows of a data set, and the mean tokens of a row."""

    rows: int
    tokens: int
    packed: bool = False  # raw text: TRL packs its rows into rows of `max_length` tokens

    def shown(self, run: TrainingRun) -> DataSize:
        """The rows as the model sees them: limited, and cut or packed."""
        rows = min(self.rows, run.limit or self.rows)
        longest = _setting(run, "max_length") or LONGEST
        if run.hyperparameters.get("packing", self.packed):
            return DataSize(max(1, rows * self.tokens // longest), longest)
        return DataSize(rows, min(self.tokens, longest))


USUAL = DataSize(80_000, 512)
"""Assumed size of a data set (paper 2, section 3.4)."""
OTHER = BenchmarkSize(documents=1000, read=300, written=128)
"""Assumed size of a task that is no benchmark of ours."""


@dataclass(frozen=True)
class Size:
    """The size of a base."""

    billions: float  # parameters
    shares: Mapping[tuple[int | None, str], float]  # of them, by layer (None outside) and role
    known_by: str  # the source of this knowledge, in words

    @property
    def layers(self) -> int:
        """The number of layers."""
        return 1 + max(layer for layer, _ in self.shares if layer is not None)

    @property
    def inside(self) -> float:
        """The share of the parameters in the layers."""
        return sum(share for (layer, _), share in self.shares.items() if layer is not None)

    def trained(self, run: TrainingRun) -> float:
        """The share of the parameters that a training changes."""
        if run.lora:
            return ADAPTER
        chosen = run.train
        if chosen is None:
            return 1.0
        layers = self.layers
        places = set(all_places(layers))
        try:
            if chosen.places:
                places = {place for where in chosen.places for place in where.places(layers)}
        except RecipeError:
            return 1.0  # the depth of a base that was not read is a guess
        if chosen.partition is not None and chosen.part is not None:
            parts = partition(chosen.partition, layers, outside=chosen.outside)
            places = {place for place in places if chosen.part in parts[place].experts}
        return sum(self.shares.get((place.layer, place.role), 0.0) for place in places)


@dataclass(frozen=True)
class Costs:
    """Costs of trainings and evaluations of one base on one device."""

    size: Size
    speed: Speed
    bytes_each: int  # of a weight where models are evaluated

    @property
    def model_gb(self) -> float:
        """Memory of one model that is evaluated, GB."""
        return self.bytes_each * self.size.billions

    def trained_tokens(self, share: float, *, bf16: bool = True) -> float:
        """Tokens a second in a training that changes a share of the parameters.

        2 operations a parameter and token forward, 2 backward, and 2 for each gradient of a
        weight that trains.
        """
        parameters = self.size.billions * 1e9
        faster = bf16 and not self.speed.gpu and autocast_pays(round(parameters))
        return self.speed.train * (AUTOCAST if faster else 1) / (parameters * (4 + 2 * share))

    @property
    def read_tokens(self) -> float:
        """Tokens a second that a model reads, by 2 operations a parameter of its layers.

        Embeddings are only looked up, and the head reads the answers alone.
        """
        return self.speed.read / (2 * self.size.billions * 1e9 * self.size.inside)

    def at(self, train: float, read: float) -> Costs:
        """The costs at a measured speed in tokens/s; generating is corrected as reading is.

        `train` is that of a training that changes the layers.
        """
        was, faster = self.speed, read / self.read_tokens
        speed = Speed(was.train * train / self.trained_tokens(self.size.inside), was.read * faster,
                      was.loaded * faster, "at this machine's measured speed", was.gpu)  # fmt: skip
        return replace(self, speed=speed)

    def training_hours(self, run: TrainingRun, sets: Sequence[DataSize]) -> float:
        """Hours of a training on data sets, one after the other or mixed."""
        shown = [size.shown(run) for size in sets]
        mean = sum(size.rows * size.tokens for size in shown) / (
            sum(size.rows for size in shown) or 1
        )
        bf16 = run.hyperparameters.get("bf16", True) is not False
        speed = self.trained_tokens(self.size.trained(run), bf16=bf16)
        return (STARTING + examples_seen(run, sets) * mean / speed) / 3600

    def evaluation_hours(self, spec: Benchmarks, models: float) -> float:
        """Hours of evaluating models in one language; compositions that share layers count less.

        The weights are loaded once for each token that a batch generates.
        """
        seconds = 0.0
        weights = self.bytes_each * self.size.billions * 1e9
        for size, shots in self._benchmarks(spec):
            number = min(size.documents, spec.limit or spec.limit_first or size.documents)
            seconds += number * size.read * (1 + shots) / self.read_tokens
            seconds += number * size.written * weights / self.speed.loaded / BATCH
        return (STARTING + models * seconds) / 3600 if seconds else 0.0

    def _benchmarks(self, spec: Benchmarks) -> Iterator[tuple[BenchmarkSize, int]]:
        """The size of each benchmark, and its examples in a prompt."""
        if spec.suite is None:
            for _ in spec.tasks:
                yield OTHER, spec.num_fewshot or 0
            return
        for part in parts_of(spec.suite):
            if not part.benchmark.runs_code or spec.allow_code:
                yield (
                    part.benchmark.size,
                    (part.shots if spec.num_fewshot is None else spec.num_fewshot),
                )


@dataclass(frozen=True)
class Estimate:
    """The estimated cost of a step."""

    hours: float = 0  # on the device that it is planned for
    disk_gb: float = 0  # of its output when the study has ended
    memory_gb: float = 0  # of the device, without activations
    passing_gb: float = 0  # further disk that is free again when the study has ended


def speed_of(device: str) -> Speed:
    """The speed of a device: of this machine's processors in float32, or of a GPU."""
    if device != "cpu":
        return GPU
    cores = system.processors()
    cores = cores or 1
    name = f"on {cores} processors"
    return Speed(CORE.train * cores, CORE.read * cores, CORE.loaded, name)


def size_of(spec: StudySpec, base: str) -> Size:
    """The size of a study's base: as the study says, by its header, or by its name."""
    if Path(base).is_dir():
        opened = open_checkpoint(base)
        counts: dict[tuple[int | None, str], int] = defaultdict(int)
        for name, tensor in opened.tensors.items():
            place = opened.places[name]
            counts[place.layer, place.role] += prod(tensor.shape)
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
    named = named_billions(base)
    if spec.billions is not None:
        return Size(spec.billions, shares, "the study")
    if named is None:
        return Size(UNKNOWN, shares, "a guess; give `billions`")
    return Size(named, shares, "its name")


def mix_size(mix: str, folder: str) -> DataSize:
    """The size of a mix that is not built yet.

    Its `total` and `row_tokens` count, else the first rows of its local sources.
    """
    try:
        parsed = parse_mix(mix)
        tokens = parsed.row_tokens or _sampled(parsed, Path(folder)) or USUAL.tokens
    except (LayerswapError, ImportError):  # refused elsewhere
        return USUAL
    return DataSize(parsed.total or USUAL.rows, tokens, parsed.kind == "text")


def _sampled(mix: Mix, folder: Path) -> int | None:
    """The mean tokens of the first rows of a mix's local sources; None without any."""
    lengths = []
    for name, source in mix.sources.items():
        if source.id is None:
            maker = ExampleMaker(source, name)
            examples = map(maker.make, open_rows(source, folder=folder, limit=SAMPLE).rows)
            lengths += [len(example.whole) for example in examples if example is not None]
    return _tokens(sum(lengths) / len(lengths)) if lengths else None


def data_size(given: Any) -> DataSize:
    """The size of data that exist: by the card of a built mix, or by lines of JSON."""
    if isinstance(given, str):
        try:
            card = json.loads((Path(given) / CARD).read_text("utf-8"))
            rows = int(card["rows"]["train"])
            kept = [source for source in card["sources"].values() if source["kept"]]
            characters = sum(
                source["kept"]
                * (source["mean_prompt_characters"] + source["mean_completion_characters"])
                for source in kept
            ) / sum(source["kept"] for source in kept)
        except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, AttributeError):
            return USUAL
        return DataSize(rows, _tokens(characters), card.get("kind") == "text")
    files = [file for file in files_of(Path(given["train"])) if file.suffix == ".jsonl"]
    rows, packed = 0, False
    for file in files:
        with file.open("rb") as lines:
            for line in filter(bytes.strip, lines):
                packed = packed or (not rows and b'"text":' in line)
                rows += 1
    if not rows:
        return USUAL
    return DataSize(rows, _tokens(sum(file.stat().st_size for file in files) / rows), packed)


def _tokens(characters: float) -> int:
    """Estimate a text's tokens, at about three characters each."""
    return max(1, round(characters / 3))


def checkpoints_of(run: TrainingRun, sets: Sequence[DataSize]) -> int:
    """The number of checkpoints that a training saves."""
    return max(1, examples_seen(run, sets) // run.save_every)


def examples_seen(run: TrainingRun, sets: Sequence[DataSize]) -> int:
    """The number of examples that a training sees."""
    steps, epochs = _setting(run, "max_steps"), run.hyperparameters.get("num_train_epochs", 1)
    if steps is not None:
        batch = run.effective_batch or _setting(run, "per_device_train_batch_size") or 8
        return steps * batch
    times = epochs if isinstance(epochs, int | float) and epochs > 0 else 1
    return int(times * sum(size.shown(run).rows for size in sets))


def _setting(run: TrainingRun, name: str) -> int | None:
    """A positive hyperparameter, or None; other values are refused elsewhere."""
    value = {**PRESETS.get(run.preset or "", {}), **run.hyperparameters}.get(name)
    return value if isinstance(value, int) and value > 0 else None
