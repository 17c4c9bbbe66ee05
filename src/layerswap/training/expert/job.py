"""Checks a training before anything is written: base, data, places and settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layerswap._types import PathLike
from layerswap.checkpoint import Checkpoint, Place, fingerprint, open_checkpoint
from layerswap.checkpoint.loading import load_tokenizer
from layerswap.checkpoint.remote import TRAINING
from layerswap.compose.composition import all_places
from layerswap.errors import TrainingError
from layerswap.merge.target import check_apart
from layerswap.training.expert.distributed import check_distributed
from layerswap.training.expert.hyperparameters import sft_config
from layerswap.training.expert.rows import TrainingRows, load_rows
from layerswap.training.expert.save import CHECKPOINTS, LIBRARIES, read_training
from layerswap.training.expert.spec import ExpertSpec
from layerswap.training.expert.trainable import Part, rates_by_place, trained_parts
from layerswap.versions import need_extras, versions

_PATHS = ("output_dir", "logging_dir", "run_name", "hub_token", "local_rank")


@dataclass(frozen=True)
class TrainingJob:
    """A checked training."""

    spec: ExpertSpec
    base: Checkpoint  # only its headers have been read
    tokenizer: Any
    sets: tuple[TrainingRows, ...]
    parts: tuple[Part, ...]  # the places that train; two where two data sets take turns
    rates: Mapping[Place, float]  # factors of the learning rate where they are not 1
    config: Any  # a trl.SFTConfig
    decay: float | None  # fraction of the steps in which a stable schedule decays
    out: Path

    @cached_property
    def base_fingerprints(self) -> dict[str, str]:
        """Fingerprints of the base's weight files, by name; reads 4 MiB of each."""
        return {file.name: fingerprint(file) for file in self.base.files}

    @property
    def key(self) -> str:
        """SHA-256 of everything that determines the trained weights."""
        inputs = {
            "spec": self.spec.model_dump(mode="json", exclude={"base", "save_minutes"}),
            "base": self.base_fingerprints,
            "data": [rows.fingerprints for rows in self.sets],
            "parts": [sorted(map(str, part)) for part in self.parts],
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()

    @property
    def record(self) -> dict[str, Any]:
        """The record of the training before its first step."""
        ordered = all_places(self.base.layers)
        return {
            "key": self.key,
            "finished": False,
            "spec": self.spec.model_dump(mode="json", exclude_defaults=True),
            "base": {
                "source": self.base.source,
                "revision": self.base.revision,
                "fingerprints": self.base_fingerprints,
            },
            "data": [
                {
                    "name": rows.name,
                    "train": len(rows.train),
                    "validation": len(rows.validation) if rows.validation is not None else 0,
                    "fingerprints": rows.fingerprints,
                    "contaminated": rows.contaminated,
                }
                for rows in self.sets
            ],
            "places": [
                [[place.layer, place.role] for place in ordered if place in part]
                for part in self.parts
            ],
            "hyperparameters": {
                key: value for key, value in self.config.to_dict().items() if key not in _PATHS
            },
            "versions": versions(*LIBRARIES),
        }


def plan_training(
    spec: ExpertSpec, out: PathLike, *, folder: PathLike | None = None, resume: bool = False
) -> TrainingJob:
    """Check a training without writing or training anything; see `train`."""
    need_extras("training", "train")
    if spec.load_in_4bit and find_spec("bitsandbytes") is None:
        raise TrainingError("load_in_4bit: needs bitsandbytes; run `pip install bitsandbytes`")
    check_distributed(spec)
    folder, target = Path(folder or ""), Path(out).expanduser().absolute()
    local = not spec.base.startswith(("/", "~")) and (folder / spec.base).is_dir()
    base = open_checkpoint(str(folder / spec.base) if local else spec.base)
    check_apart(target, {"the base": base})
    parts = trained_parts(spec, base.layers, folder)
    rates = rates_by_place(spec.rates, base.layers)
    sets = tuple(load_rows(data, folder=folder, limit=spec.limit) for data in spec.data_sets)
    form = "text" if all(rows.form == "text" for rows in sets) else sets[0].form
    started = resume and (target / TRAINING).is_file()
    config, decay = sft_config(
        spec, target / CHECKPOINTS, rows=form,
        parameters=sum(math.prod(tensor.shape) for tensor in base.tensors.values()),
        bf16=read_training(target)["hyperparameters"].get("bf16") if started else None,
    )  # fmt: skip
    tokenizer = load_tokenizer(base.folder, named=base.source)
    if tokenizer.eos_token is None:
        raise TrainingError(f"{base.source}: its tokenizer has no end-of-sequence token")
    for rows in sets:
        _check_template(base, tokenizer, rows)
    return TrainingJob(spec, base, tokenizer, sets, tuple(parts), rates, config, decay, target)


def _check_template(base: Checkpoint, tokenizer: Any, rows: TrainingRows) -> None:
    """Refuse messages that the chat template refuses, by their roles or by their content."""
    if not rows.conversational:
        return
    remedy = "build the mix with kind: prompt-completion, or give it a chat_template"
    if not tokenizer.chat_template:
        raise TrainingError(
            f"{base.source}: its tokenizer has no chat template, and {rows.name} is made of "
            f"messages; {remedy}"
        )
    for kind, split in (("row", rows.train), ("validation row", rows.validation or ())):
        for number, row in enumerate(split, start=1):
            turns = [turn for column in row.values() for turn in column]
            try:
                tokenizer.apply_chat_template(turns, tokenize=False)
                if "prompt" in row:
                    tokenizer.apply_chat_template(
                        row["prompt"], tokenize=False, add_generation_prompt=True
                    )
            except Exception as error:  # a template is a program, and may raise anything
                reason = " ".join(str(error).split())[:200] or type(error).__name__
                raise TrainingError(
                    f"{base.source}: its chat template fails on {kind} {number} of {rows.name}, "
                    f"with the roles {', '.join(turn['role'] for turn in turns)} ({reason}); "
                    f"{remedy}"
                ) from None
