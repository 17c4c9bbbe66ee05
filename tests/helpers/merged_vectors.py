"""Merges of one small matrix by any method, from recipe to file, for checks against formulas."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from plain_checkpoints import write_checkpoint, write_fisher
from safetensors.numpy import load_file

from layerswap.compose.recipe import check_recipe
from layerswap.merge.api import make_plan
from layerswap.methods import METHODS

NAME = "model.layers.0.mlp.up_proj.weight"
SHAPE = (17, 59)
SIZE = 17 * 59


def deltas(count: int, seed: int = 0, scale: float = 1e-3) -> list[np.ndarray]:
    """Random deltas, the later ones larger."""
    draws = np.random.RandomState(seed)
    parts = [draws.standard_normal(SIZE) * scale * (i + 1) for i in range(count)]
    return [part.astype(np.float32) for part in parts]


def fishers_of(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """A diagonal Fisher for each part: uneven, and 0 in places."""
    return [np.maximum(part * 3e-4 + np.roll(part, 5) * 1e-4, 0) for part in parts]


def draws_of(expert: int, seed: int = 0, name: str = NAME) -> np.ndarray:
    """The uniform draws in [0, 1) of one expert."""
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}/{expert}".encode()).digest()[:16], np.uint64)
    return np.random.Philox(key=key).random_raw(SIZE) / 2.0**64


def merged(
    method: str,
    parts: Sequence[np.ndarray],
    weights: Sequence[float] | None = None,
    *,
    base: np.ndarray | None = None,
    fishers: Sequence[np.ndarray] | None = None,
    name: str = NAME,
    shape: tuple[int, ...] = SHAPE,
    **parameters: Any,
) -> np.ndarray:
    """The merged weights of one matrix, flat; without `base` it is 0, so that parts are deltas."""
    base = np.zeros(len(parts[0]), np.float32) if base is None else base
    weights = weights or [1.0] * len(parts)
    names = [f"e{i}" for i in range(len(parts))]
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        write = {
            folder: write_checkpoint(
                root / folder, _tensors(values, name, shape), num_hidden_layers=1,
                hidden_size=shape[-1], intermediate_size=shape[0], tie_word_embeddings=True,
            )
            for folder, values in {"base": base, **dict(zip(names, parts, strict=True))}.items()
        }  # fmt: skip
        experts: dict[str, Any] = {expert: {"source": str(write[expert])} for expert in names}
        if METHODS[method].fisher:
            for expert, values in zip(names, fishers or fishers_of(parts), strict=True):
                fisher = _tensors(values, NAME, SHAPE)
                folder = write_fisher(root / f"{expert}-fisher", write[expert], fisher)
                experts[expert]["fisher"] = str(folder)
        merge = {
            "method": method, "experts": dict(zip(names, weights, strict=True)), **parameters,
        }  # fmt: skip
        recipe = {"base": str(write["base"]), "experts": experts, "merge": merge}
        out = make_plan(check_recipe(recipe, where=method)).save(root / "out", threads=1)
        return load_file(out / "model.safetensors")[name].ravel()


def _tensors(values: np.ndarray, name: str, shape: tuple[int, ...]) -> Mapping[str, np.ndarray]:
    return {"model.embed_tokens.weight": np.zeros((4, 8), np.float32), name: values.reshape(shape)}


def close(result: np.ndarray, reference: np.ndarray) -> None:
    """Raise unless the result is the reference within float32's rounding."""
    room = 1e-6 * np.abs(reference).max()
    np.testing.assert_allclose(result.astype(np.float64), reference, rtol=2e-6, atol=room)


def wide(parts: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The parts in float64."""
    return [part.astype(np.float64) for part in parts]
