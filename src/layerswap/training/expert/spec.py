"""Hyperparameters of the papers, under the names of TRL's `SFTConfig`.

Paper 1, table 4 ("Hyperparameters for the training runs that led to each of our experts"), and
paper 2, appendix A.4. What the papers do not say is TRL's default, but for one epoch (paper 2,
section 3.4). Table 4 does not say for how long the stable schedule decays; TRL needs a number, and
the last tenth of the steps is ours (Hägele et al., 2024, find 10 to 20%).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt, field_validator, model_validator

from layerswap.compose.schema import DTYPES, Strict, Where
from layerswap.compose.yaml_file import KeyPath, nearest, parse_yaml, read_text, validate

DECAY = "decay"
"""Share of the steps over which warmup-stable-decay falls; ours, and no name of TRL's."""


def _rows(text: str) -> dict[str, dict[str, Any]]:
    return {name: _row(*values) for name, *values in map(str.split, text.strip().splitlines())}


def _row(*values: str) -> dict[str, Any]:
    rate, batch, length, decay, clip, schedule, warmup, beta2 = values
    return {
        "learning_rate": float(rate),
        "per_device_train_batch_size": int(batch),
        "max_length": int(length),
        "weight_decay": float(decay),
        "max_grad_norm": float(clip),
        "lr_scheduler_type": "linear" if schedule == "Linear" else "warmup_stable_decay",
        "warmup_steps": int(warmup),
        "adam_beta2": float(beta2),
        **({DECAY: 0.1} if schedule == "WSD" else {}),
    }


_TABLE_4 = """
math-1  2e-8  4  2048  0.1   1.0  Linear  1000  0.99
math-2  1e-7  4  2048  0.01  0.5  Linear  1000  0.99
math-3  4e-8  4  2048  0.1   1.0  Linear  500   0.999
jpn-1   1e-7  8  1024  0.1   0.5  WSD     1000  0.995
jpn-2   1e-7  8  1024  0.1   0.5  WSD     1000  0.99
jpn-3   2e-7  8  1024  0.01  0.5  WSD     1000  0.99
swh-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
swh-2   2e-7  8  1024  0.05  0.5  WSD     1000  0.99
swh-3   1e-7  8  1024  0.1   1.0  WSD     1000  0.999
tel-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
tel-2   5e-8  8  1024  0.05  0.5  WSD     300   0.99
tel-3   1e-7  4  2048  0.1   0.5  WSD     1000  0.99
ben-1   7e-8  8  1024  0.1   0.5  WSD     1000  0.99
ben-2   5e-8  8  1024  0.05  0.5  WSD     300   0.99
ben-3   1e-7  4  2048  0.1   0.5  WSD     1000  0.99
"""

PRESETS: dict[str, dict[str, Any]] = {
    **_rows(_TABLE_4),
    "unreasonable": {"max_length": 1024},
    "unreasonable-simultaneous": {
        "max_length": 1024,
        "lr_scheduler_type": "constant_with_warmup",
    },
}
"""By name. Paper 2's have no rate and no clipping norm: its published text has lost them."""

EFFECTIVE_BATCH = {"unreasonable": 32, "unreasonable-simultaneous": 64}
"""Examples in an optimiser step, where the paper says it (paper 2, appendix A.4)."""


Text = Annotated[str, Field(min_length=1)]
Side = Literal["task", "language"]


class Files(Strict):
    """Training rows in files of one's own: jsonl, json, csv, parquet or text.

    Columns are `prompt` and `completion` (texts, or lists of messages), `messages`, or `text`.

    Attributes:
        train: a file, or a pattern of files.
        validation: the same, for the validation loss.
    """

    train: Text
    validation: Text | None = None


Data = Text | Files
"""A folder that `layerswap data` wrote, or files."""


class Trained(Strict):
    """Which places train; what is not named is frozen (paper 2, section 3.3 and 4.4).

    Either a partition, or the two experts of a recipe's composition, or places one by one.

    Attributes:
        partition: `A`, `B`, `C` or `Z` of the second paper, scaled by depth.
        outside: who gets the places outside the layers; the rest of the partition by default.
        recipe: a recipe file; every place trains that takes something from this expert.
        part: of a partition, whose part trains.
        expert: of a recipe, whose places train.
        places: layers and roles.
    """

    partition: Literal["A", "B", "C", "Z"] | None = None
    outside: Side | None = None
    recipe: Text | None = None
    part: Side | None = None
    expert: Text | None = None
    places: Annotated[list[Where], Field(min_length=1)] | None = None

    @model_validator(mode="after")
    def _one_way(self) -> Trained:
        if [self.partition, self.recipe, self.places].count(None) != 2:
            raise ValueError("say what trains in one way: partition, recipe or places")
        if self.partition is None and (self.part or self.outside):
            raise ValueError("part and outside go with a partition")
        if self.recipe is None and self.expert:
            raise ValueError("expert goes with a recipe")
        return self


class Rate(Where):
    """A learning rate of its own for some places (Howard and Ruder, 2018, section 3.2).

    Attributes:
        scale: what the learning rate is multiplied by there; to freeze places, use `train`.
    """

    scale: Annotated[float, Field(gt=0, le=100, strict=False)]


class Lora(Strict):
    """Low-rank adapters on attention and mlp (Hu et al., 2022; Kalajdzievski, 2023).

    Attributes:
        r: the rank.
        alpha: what is learned is scaled by alpha / sqrt(r), or by alpha / r without `rslora`.
        rslora: rank-stabilised scaling, as in the second paper.
        dropout: of the adapter's input.
    """

    r: PositiveInt = 64
    alpha: Annotated[float, Field(gt=0, strict=False)] = 64.0
    rslora: bool = True
    dropout: Annotated[float, Field(ge=0, lt=1, strict=False)] = 0.0


class Sparse(Strict):
    """Composable sparse fine-tuning (Ansell et al., 2022): train, keep, reset, train again.

    Attributes:
        keep: share of the trained parameters that the second training may change: those that the
            first changed most.
    """

    keep: Annotated[float, Field(gt=0, lt=1)]


class Simultaneous(Strict):
    """Simultaneous partition SFT (paper 2, section 4.5).

    Attributes:
        task: data whose batches train the task's part.
        language: data whose batches train the language's part.
        every: optimiser steps on one before the other has its turn (paper 2, appendix A.3).
    """

    task: Data
    language: Data
    every: PositiveInt = 1


class ExpertSpec(Strict):
    """One training. Exactly one of `data`, `mix` and `simultaneous` says on what.

    Attributes:
        base: folder or Hub id `owner/name[@revision]` of the model to start from.
        data: what to train on.
        mix: several data sets, trained on together in random order (paper 2, section 4.2).
        simultaneous: two data sets in turns, each with a part of the places.
        train: which places train; everything if not given.
        rates: places that learn faster or slower than the others; the last that names one wins.
        lora: train adapters instead of the weights.
        sparse: train twice, the second time only what changed most.
        preset: hyperparameters of a row of paper 1, table 4, or of paper 2, appendix A.4.
        hyperparameters: any of TRL's `SFTConfig` by its own name; they win over the preset.
        effective_batch: examples in an optimiser step over all processes; sets how many
            forward passes are accumulated.
        save_every: training examples between checkpoints (paper 1: 5,000).
        limit: most examples of each data set.
        dtype: of the weights while they train; float32 for whole weights, as stored under LoRA.
        seed: of the order of the data, of dropout and of new adapters.
    """

    base: Text
    data: Data | None = None
    mix: Annotated[list[Data], Field(min_length=2)] | None = None
    simultaneous: Simultaneous | None = None
    train: Trained | None = None
    rates: list[Rate] = []
    lora: Lora | None = None
    sparse: Sparse | None = None
    preset: str | None = None
    hyperparameters: dict[str, Any] = {}
    effective_batch: PositiveInt | None = None
    save_every: PositiveInt = 5000
    limit: PositiveInt | None = None
    dtype: Literal[DTYPES] | None = None  # type: ignore[valid-type]
    seed: int = 0

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str | None) -> str | None:
        if name is not None and name not in PRESETS:
            raise ValueError(f"no preset {name!r}{nearest(name, list(PRESETS))}")
        return name

    @model_validator(mode="after")
    def _hangs_together(self) -> ExpertSpec:
        if [self.data, self.mix, self.simultaneous].count(None) != 2:
            raise ValueError("give one of data, mix and simultaneous")
        if self.lora and self.sparse:
            raise ValueError("sparse is for whole weights, not for adapters")
        if self.simultaneous:
            _check_simultaneous(self)
        elif self.train and self.train.partition and self.train.part is None:
            raise ValueError("train.part: say whose part of the partition trains, task or language")
        elif self.train and self.train.recipe and self.train.expert is None:
            raise ValueError("train.expert: say whose places of the recipe train")
        return self

    @property
    def data_sets(self) -> list[Data]:
        """Every data set, the task's first where there are two in turns."""
        if self.simultaneous:
            return [self.simultaneous.task, self.simultaneous.language]
        return list(self.mix) if self.mix else [self.data] if self.data else []


def _check_simultaneous(spec: ExpertSpec) -> None:
    if spec.sparse:
        raise ValueError("sparse does not go with simultaneous")
    if spec.train is None or spec.train.places:
        raise ValueError("simultaneous needs train.partition, or train.recipe, to share the places")
    if spec.train.part or spec.train.expert:
        raise ValueError("simultaneous trains both parts; leave train.part and train.expert out")


def read_expert(path: Path) -> ExpertSpec:
    """The expert in a YAML file; paths in it are relative to the file.

    Raises:
        RecipeError: the file cannot be read, or what is wrong in it, each on a line with its key
            path.
    """
    data, lines = parse_yaml(read_text(path), str(path))
    return check_expert(data, where=str(path), lines=lines)


def check_expert(
    data: Any, *, where: str = "expert", lines: dict[KeyPath, int] | None = None
) -> ExpertSpec:
    """The expert in plain data; errors name `where`. See `read_expert`."""
    expected = "an expert is a mapping with `base` and `data`"
    return validate(ExpertSpec, data, where=where, expected=expected, lines=lines)
