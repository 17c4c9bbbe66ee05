"""Opens diagonal Fishers: tensors named as the model's, and a record of their estimation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerswap.checkpoint import (
    Checkpoint,
    TensorInfo,
    fingerprint,
    read_header,
    read_json_object,
)
from layerswap.checkpoint.folder import fetch_checkpoint
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.compose import Recipe
from layerswap.errors import LayerswapError, MergeError

FISHER_WEIGHTS = "fisher.safetensors"
FISHER_RECORD = "fisher.json"
"""The record beside the weights: checkpoint, data, and norm of the whole Fisher."""


@dataclass(frozen=True)
class Fisher:
    """The diagonal Fisher information of an expert, opened by its header.

    Attributes:
        stored: its tensors, one for every tensor of the expert that can be blended.
        norm: Euclidean norm over all of them together.
    """

    stored: Checkpoint
    norm: float

    def terms(self, name: str, normalised: bool) -> tuple[tuple[TensorInfo, float], ...]:
        """One of its tensors as a weighted sum; empty if the tensor cannot be blended."""
        info = self.stored.tensors.get(name)
        if info is None:
            return ()
        return ((info, 1 / self.norm if normalised else 1.0),)


def open_fishers(
    recipe: Recipe, experts: Mapping[str, Checkpoint], drop: frozenset[str], *, aligned: bool
) -> dict[str, Fisher]:
    """The diagonal Fishers of the recipe, by expert.

    Args:
        recipe: the recipe.
        experts: the experts that have a source.
        drop: stored copies of tied embeddings.
        aligned: embeddings and heads are brought to one vocabulary.
    """
    fishers = {}
    for name, expert in recipe.experts.items():
        if expert.fisher is None:
            continue
        if aligned:
            raise MergeError(f"{name}: a Fisher needs experts of one vocabulary")
        like = experts.get(name, next(iter(experts.values())))
        try:
            fishers[name] = _open(expert.fisher, like, drop, own=name in experts)
        except LayerswapError as error:
            raise error.within(f"fisher of {name}") from None
    return fishers


def _open(source: str, expert: Checkpoint, drop: frozenset[str], *, own: bool) -> Fisher:
    folder, commit = fetch_checkpoint(source)
    path = folder / FISHER_WEIGHTS
    if not path.is_file():
        raise MergeError(
            f"{folder}: has no {FISHER_WEIGHTS}; make it with `layerswap analyse fisher`"
        )
    record = read_json_object(folder / FISHER_RECORD)
    tensors = read_header(path)
    blendable = {n: t for n, t in expert.tensors.items() if t.dtype in FLOAT_DTYPES}
    wrong = set(blendable).symmetric_difference(tensors) - drop
    if wrong:
        first = min(wrong)
        lacks = "lacks" if first in blendable else "holds"
        raise MergeError(f"{path}: {lacks} {first!r}, unlike {expert.identity}")
    for name, info in tensors.items():
        if name in blendable and info.shape != blendable[name].shape:
            shapes = f"{list(info.shape)}, not {list(blendable[name].shape)}"
            raise MergeError(f"{path}: {name!r} is {shapes} as in {expert.identity}")
        if info.dtype not in FLOAT_DTYPES:
            raise MergeError(f"{path}: {name!r} is {info.dtype}; a Fisher is float32")
    if own and expert.adapter is None:
        _check_estimated_on(expert, record, folder)
    name = source.partition("@")[0] if commit else source
    return Fisher(Checkpoint(name, commit, folder, {}, tensors, {}), _norm(record, folder))


def _norm(record: Mapping[str, Any], folder: Path) -> float:
    norm = record.get("norm")
    if not isinstance(norm, int | float) or not 0 < norm < math.inf:
        raise MergeError(f"{folder / FISHER_RECORD}: norm is {norm!r:.40}, not a number above 0")
    return float(norm)


def _check_estimated_on(expert: Checkpoint, record: Mapping[str, Any], folder: Path) -> None:
    """Refuse the Fisher of another checkpoint; soups and adapters cannot be checked."""
    about = record.get("checkpoint")
    expected = about.get("fingerprints") if isinstance(about, dict) else None
    if expected != {file.name: fingerprint(file) for file in expert.files}:
        raise MergeError(
            f"{folder}: was not estimated on the present {expert.identity}; estimate it again"
        )
