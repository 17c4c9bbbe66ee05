"""Data models of an expert's specification, and the papers' hyperparameters as presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from layerswap.compose.schema import DTYPES, Where
from layerswap.ground.strict import Extended, Strict
from layerswap.ground.yaml_file import nearest, parse_yaml, read_text, read_yaml, validate
from layerswap.reading.origins import NonEmpty

Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
"""A seed that NumPy takes too."""
DECAY = "decay"
"""Fraction of the steps in which warmup-stable-decay decays; not a name of TRL's."""
_PRESETS = Path(__file__).with_name("presets.yaml")
PRESETS: dict[str, dict[str, Any]] = parse_yaml(read_text(_PRESETS), str(_PRESETS))[0]
"""Hyperparameters by name: rows of paper 1, table 4, and those of paper 2, appendix A.4."""
EFFECTIVE_BATCH = {"unreasonable": 32, "unreasonable-simultaneous": 64}
"""Examples in an optimiser step, where the paper states it (paper 2, appendix A.4)."""
RSLORA = frozenset({"unreasonable", "unreasonable-simultaneous"})
"""Presets whose adapters are rsLoRA (paper 2, section 3.4)."""

Side = Literal["task", "language"]


class Files(Strict):
    """Training and validation rows in jsonl, json, csv, parquet or text files.

    Each is a file or a pattern of files. Columns are `prompt` and `completion` (texts, or lists of
    messages), `messages`, or `text`.
    """

    train: NonEmpty
    validation: NonEmpty | None = None


Data = NonEmpty | Files
"""A folder that `layerswap data` wrote, or files."""


class Trained(Strict):
    """The places that train; the others are frozen (paper 2, sections 3.3 and 4.4).

    A part of a partition trains, or the places that take something from an expert of a recipe.
    `places` narrows them, or names the places by itself.
    """

    partition: Literal["A", "B", "C", "Z"] | None = None  # of the second paper, scaled by depth
    outside: Side | None = None  # owner of the places outside the layers; None: as in the partition
    recipe: NonEmpty | None = None  # file
    part: Side | None = None  # of the partition
    expert: NonEmpty | None = None  # of the recipe
    places: Annotated[list[Where], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Trained:
        if self.partition and self.recipe:
            raise ValueError("give a partition or a recipe, not both")
        if not (self.partition or self.recipe or self.places):
            raise ValueError("give the places that train: partition, recipe or places")
        if self.partition is None and (self.part or self.outside):
            raise ValueError("part and outside need a partition")
        if self.recipe is None and self.expert:
            raise ValueError("expert needs a recipe")
        return self


class Lora(Strict):
    """Low-rank adapters on attention and mlp, by the keys of PEFT's `LoraConfig`.

    Rank and alpha default to the second paper's, section 3.4; the rest is PEFT's
    default, except that the presets of that paper turn rsLoRA on. `target_modules` and
    `exclude_modules` restrict the adapters among the attention and mlp matrices at the places
    that train.
    """

    r: PositiveInt = 64
    lora_alpha: Annotated[float, Field(gt=0, strict=False)] = 64.0
    lora_dropout: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.0
    use_rslora: bool | None = None  # None: the preset's, or PEFT's default, which is False
    target_modules: list[NonEmpty] | NonEmpty | None = None
    exclude_modules: list[NonEmpty] | NonEmpty | None = None
    rank_pattern: dict[NonEmpty, PositiveInt] = {}
    alpha_pattern: dict[NonEmpty, Annotated[float, Field(gt=0, strict=False)]] = {}
    init_lora_weights: bool | Literal["gaussian", "orthogonal"] = True


class Simultaneous(Strict):
    """Simultaneous partition SFT (paper 2, section 4.5): data for each part of the places."""

    task: Data
    language: Data
    every: PositiveInt = 1  # optimiser steps in a turn (paper 2, appendix A.3)


class ExpertSpec(Extended):
    """One training, on exactly one of `data`, `mix` and `simultaneous`."""

    new_fields = frozenset({"think"})

    base: NonEmpty  # folder or Hub id owner/name[@revision] of the model to fine-tune
    data: Data | None = None
    # Several data sets in one random order (paper 2, section 4.2).
    mix: Annotated[list[Data], Field(min_length=2)] | None = None
    simultaneous: Simultaneous | None = None  # two data sets in turns
    train: Trained | None = None  # None: all places
    lora: Lora | None = None
    load_in_4bit: bool = False  # under LoRA, hold the frozen base in 4 bits (needs bitsandbytes)
    # What a chat template with a switch writes before answers; the expert's template keeps it.
    think: Literal["on", "off"] | None = None
    preset: str | None = None  # a row of paper 1, table 4, or of paper 2, appendix A.4
    hyperparameters: dict[str, Any] = {}  # of TRL's SFTConfig; they override the preset
    effective_batch: PositiveInt | None = None  # examples in an optimiser step, all processes
    save_every: PositiveInt = 5000  # examples between checkpoints (paper 1: 5,000)
    save_minutes: Annotated[float, Field(gt=0, strict=False)] = 10.0  # maximum between checkpoints
    limit: PositiveInt | None = None  # maximum number of examples of each data set
    # Of the training weights; None: float32, or the stored dtype under LoRA.
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    seed: Seed = 0  # of the data order, of dropout and of new adapters

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"no preset {name!r}{nearest(name, list(PRESETS))}")
        return name

    @model_validator(mode="after")
    def _consistent(self) -> ExpertSpec:
        if [self.data, self.mix, self.simultaneous].count(None) != 2:
            raise ValueError("give one of data, mix and simultaneous")
        if self.load_in_4bit and not self.lora:
            raise ValueError("load_in_4bit belongs to lora; give lora as well")
        train = self.train
        if self.simultaneous:
            if train is None or not (train.partition or train.recipe):
                raise ValueError("simultaneous needs train.partition or train.recipe for its parts")
            if train.part or train.expert:
                raise ValueError(
                    "simultaneous trains both parts; leave train.part and train.expert out"
                )
        elif train and train.partition and train.part is None:
            raise ValueError("train.part: give the part that trains, task or language")
        elif train and train.recipe and train.expert is None:
            raise ValueError("train.expert: give the expert whose places train")
        return self

    @property
    def rslora(self) -> bool:
        """True if adapters have the scale `lora_alpha / sqrt(r)` in place of `lora_alpha / r`."""
        given = self.lora.use_rslora if self.lora else None
        return self.preset in RSLORA if given is None else given

    @property
    def data_sets(self) -> list[Data]:
        """Every data set, the task's first where there are two in turns."""
        if self.simultaneous:
            return [self.simultaneous.task, self.simultaneous.language]
        return list(self.mix) if self.mix else [self.data] if self.data else []


_EXPECTED = "an expert is a mapping with `base` and `data`"


def read_expert(path: Path) -> ExpertSpec:
    """Read the expert in a YAML file; paths in it are relative to the file."""
    return read_yaml(path, ExpertSpec, _EXPECTED)


def check_expert(data: Any, *, where: str = "expert") -> ExpertSpec:
    """Validate an expert in plain data; errors name `where`. See `read_expert`."""
    return validate(ExpertSpec, data, where=where, expected=_EXPECTED)
