"""Reads the records of the experts' training: partition, base and contaminated rows.

An expert that was trained at some places equals the base elsewhere. A composition that takes
those places from another expert loses, or dilutes, the effect of the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, fingerprints, read_json_object
from layerswap.checkpoint.hub import TRAINING
from layerswap.compose.presets import PARTITIONS
from layerswap.compose.recipe import Recipe
from layerswap.compose.schema import PartitionMethod
from layerswap.ground.types import counted

OPEN = frozenset({"task", "language"})
"""Keys of a swap that do not decide the source of any place."""


@dataclass(frozen=True)
class Training:
    """The facts of an expert's training that a merge needs.

    Attributes:
        partition: the partition that chose the trained places, and the owner of the places outside
            the layers; None if something else chose them.
        contaminated: rows of the training data that contain an evaluation item, by evaluation set.
        rows: rows of the training data; 0 if unknown.
        base: the base that was trained, and the fingerprints of its weights.
    """

    partition: tuple[str, str | None] | None
    contaminated: Mapping[str, int]
    rows: int
    base: tuple[str, frozenset[str]] | None = None


def read_training(expert: Checkpoint) -> Training | None:
    """The record of an expert's training; None without a readable record.

    A checkpoint of a training has the record of its training, two folders above.
    """
    folder = expert.folder
    above = [folder.parent.parent] if folder.parent.name == "checkpoints" else []
    path = next((p for f in (folder, *above) if (p := f / TRAINING).is_file()), None)
    if path is None:
        return None
    record = read_json_object(path)
    try:
        contaminated = {
            str(name): int(count)
            for data in record["data"]
            for name, count in data.get("contaminated", {}).items()
        }
        rows = sum(data.get("train", 0) for data in record["data"])
        chosen = record["spec"].get("train") or {}
        name: Any = chosen.get("partition")
        outside: Any = chosen.get("outside")
        start = record.get("base") or {}
        marks = frozenset(map(str, start.get("fingerprints", {}).values()))
        base = (with_revision(start["source"], start.get("revision")), marks) if marks else None
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    complete = (
        isinstance(name, str) and name in PARTITIONS and outside in ("task", "language", None)
    )
    return Training((name, outside) if complete else None, contaminated, rows, base)


def base_notes(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> list[str]:
    """A note if the experts' bases differ, by the records of training or by the adapters."""
    records: dict[str, tuple[str, frozenset[str]]] = {}
    adapters: dict[str, str] = {}
    for name, expert in experts.items():
        training, (named, revision) = read_training(expert), expert.named_base
        if training is not None and training.base is not None:
            records[name] = training.base
        elif named is not None:
            adapters[name] = with_revision(os.path.normpath(named), revision)
    local = [file for file in base.files if isinstance(file, Path)] if base is not None else []
    if records and base is not None and local:
        where = with_revision(base.source, base.revision)
        records["the base"] = where, frozenset(fingerprints(local).values())
    notes = []
    if len({marks for _, marks in records.values()}) > 1:
        each = ", ".join(
            f"{name} is {where}" if name == "the base" else f"{name} was trained from {where}"
            for name, (where, _) in records.items()
        )
        notes.append(f"the bases are different files, by dtype or revision perhaps: {each}")
    if len(set(adapters.values())) > 1:
        each = ", ".join(f"{name} adapts {where}" for name, where in adapters.items())
        notes.append(f"{each}: all are added to {base.identity if base else 'one base'}")
    return notes


def with_revision(source: object, revision: object) -> str:
    """A base with its revision."""
    return f"{source}@{revision}" if revision else str(source)


def trained_partition(recipe: Recipe, experts: Mapping[str, Checkpoint]) -> PartitionMethod | None:
    """The partition that the experts of a swap without settings were trained on.

    None if the recipe has zones, `outside` or weights, if no expert records a partition, or if two
    record different partitions.
    """
    swap = recipe.swap
    if swap is None or not swap.model_fields_set <= OPEN or recipe.weights != "uniform":
        return None
    recorded = _recorded(map(read_training, experts.values()))
    if recorded is None:
        return None
    name, outside = recorded
    pair = {"task": swap.task, "language": swap.language}
    return PartitionMethod.model_validate({"name": name, "outside": outside, **pair})


def training_notes(recipe: Recipe, experts: Mapping[str, Checkpoint]) -> list[str]:
    """Notes on the partition and on contamination, from records of training."""
    records = {name: record for name, c in experts.items() if (record := read_training(c))}
    notes, chosen, trained = [], recipe.partition, _recorded(records.values())
    if chosen is not None and trained == (chosen.name, chosen.outside):
        notes.append(f"along partition {chosen.name}, on which the experts were trained")
    elif trained is not None and len(experts) > 1:
        name, outside = trained
        also = f" --outside {outside}" if outside else ""
        notes.append(
            f"not along partition {name}, on which the experts were trained "
            f"(--partition {name}{also})"
        )
    for name, training in records.items():
        for items, count in training.contaminated.items():
            notes.append(
                f"{name}: its training data has {counted(count, 'row')} with an item of {items}; "
                "scores on it are inflated"
            )
    return notes


def _recorded(records: Iterable[Training | None]) -> tuple[str, str | None] | None:
    """The one partition that the records name; None if they name none or several."""
    named = {record.partition for record in records if record and record.partition}
    return named.pop() if len(named) == 1 else None
