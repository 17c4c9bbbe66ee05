"""Compares a composition with the places that its experts trained, by the records of training.

An expert that was trained at some places equals the base elsewhere. A composition that takes
those places from another expert loses, or dilutes, the effect of the training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, Place, fingerprints, read_json_object
from layerswap.checkpoint.hub import TRAINING
from layerswap.compose import Composition, Recipe
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES, all_places
from layerswap.compose.presets import PARTITIONS
from layerswap.compose.schema import PartitionMethod

OPEN = frozenset({"task", "language"})
"""Keys of a swap that do not decide the source of any place."""


@dataclass(frozen=True)
class TrainedPlaces:
    """The places that a record names as trained.

    Attributes:
        partition: the partition that chose them, and the owner of the places outside the layers;
            None if something else chose them.
        contaminated: rows of the training data that contain an evaluation item, by evaluation set.
        partial: True if other places were frozen.
        base: the base that was trained, and the fingerprints of its weights.
    """

    places: frozenset[Place]
    partition: tuple[str, str | None] | None
    contaminated: Mapping[str, int]
    partial: bool
    base: tuple[str, frozenset[str]] | None = None


def read_trained_places(expert: Checkpoint) -> TrainedPlaces | None:
    """The places in the record of an expert's training; None without a readable record.

    A checkpoint of a training has the record of its training, two folders above.
    """
    folder = expert.folder
    above = [folder.parent.parent] if folder.parent.name == "checkpoints" else []
    path = next((p for f in (folder, *above) if (p := f / TRAINING).is_file()), None)
    if path is None:
        return None
    record = read_json_object(path)
    try:
        named = {Place(layer, role) for trained in record["places"] for layer, role in trained}
        contaminated = {
            str(name): int(count)
            for data in record["data"]
            for name, count in data.get("contaminated", {}).items()
        }
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
    partition = (name, outside) if complete else None
    partial = bool(set(all_places(expert.layers)) - named)
    places = frozenset(named & _stored(expert))
    return TrainedPlaces(places, partition, contaminated, partial, base)


def base_notes(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> list[str]:
    """A note if the experts' bases differ, by the records of training or by the adapters."""
    records: dict[str, tuple[str, frozenset[str]]] = {}
    adapters: dict[str, str] = {}
    for name, expert in experts.items():
        training, (named, revision) = read_trained_places(expert), expert.named_base
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
    recorded = _recorded(experts)
    if recorded is None:
        return None
    name, outside = recorded
    pair = {"task": swap.task, "language": swap.language}
    return PartitionMethod.model_validate({"name": name, "outside": outside, **pair})


def training_notes(
    recipe: Recipe, composition: Composition, experts: Mapping[str, Checkpoint]
) -> list[str]:
    """Notes on partition, unused trained places and contamination, from records of training."""
    if composition.taken is not None:
        return []  # The record's layers are those before the move.
    records = {name: record for name, c in experts.items() if (record := read_trained_places(c))}
    notes, chosen = [], recipe.partition
    if chosen is not None and _recorded(experts) == (chosen.name, chosen.outside):
        notes.append(f"along partition {chosen.name}, on which the experts were trained")
    for name, training in records.items():
        if training.places and training.partial:
            notes += _lost(name, composition, records, _stored(experts[name]))
        for items, count in training.contaminated.items():
            notes.append(
                f"{name}: {count:,} rows of its training data contain an item of {items}; scores "
                "on it are inflated"
            )
    return notes


def _lost(
    name: str,
    composition: Composition,
    records: Mapping[str, TrainedPlaces],
    stored: frozenset[Place],
) -> list[str]:
    """Note trained places where the composition takes too little of the expert."""
    trained = records[name].places
    alike = {expert for expert, record in records.items() if record.places == trained}
    shares: dict[Place, float] = {}
    for place in trained:
        weights = composition[place].weights
        if all(isinstance(member, str) for member, _ in weights):
            shares[place] = sum(weight for member, weight in weights if member in alike)
    out = [place for place, share in shares.items() if not share]
    diluted = {place: share for place, share in shares.items() if 0 < share < 1 - 1e-9}
    losses = []
    if out:
        losses.append(f"leaves out {places_in_words(out, stored)}")
    if diluted:
        least = min(diluted.values())
        losses.append(f"dilutes {places_in_words(diluted, stored)} to {least:.0%}")
    where = f"{name} was trained at {places_in_words(trained, stored)}"
    return [f"{where}; this composition {' and '.join(losses)}"] if losses else []


def _recorded(experts: Mapping[str, Checkpoint]) -> tuple[str, str | None] | None:
    """The one partition that the records name; None if they name none or several."""
    records = map(read_trained_places, experts.values())
    named = {record.partition for record in records if record and record.partition}
    return named.pop() if len(named) == 1 else None


def _stored(expert: Checkpoint) -> frozenset[Place]:
    """Return the places of an expert's tensors; for an adapter, without the base's."""
    return frozenset(expert.places[name] for name in expert.changed)


def places_in_words(places: Iterable[Place], stored: Iterable[Place]) -> str:
    """Places in few words, such as `layers 0-1, attention of layers 2-6, embedding`."""
    chosen, every = set(places), set(stored)
    by_roles: dict[tuple[str, ...], list[int]] = {}
    for layer in sorted({place.layer for place in chosen if place.layer is not None}):
        whole = not any(Place(layer, role) in every - chosen for role in LAYER_ROLES)
        roles = [role for role in LAYER_ROLES if Place(layer, role) in chosen and not whole]
        by_roles.setdefault(tuple(roles), []).append(layer)
    words = [
        f"{', '.join(roles)}{' of ' if roles else ''}layer{'s'[: len(layers) > 1]} {_runs(layers)}"
        for roles, layers in sorted(by_roles.items())
    ]
    outside = [role for role in OUTSIDE_ROLES if Place(None, role) in chosen]
    return ", ".join([*words, *(role.replace("_", " ") for role in outside)])


def _runs(numbers: Iterable[int]) -> str:
    """Write ascending numbers as runs: `0-1, 7`."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), lambda item: item[1] - item[0])
    ]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
