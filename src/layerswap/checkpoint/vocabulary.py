"""The tokens of a `tokenizer.json`, with their ids."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import clipped, read_json_object

LARGEST_VOCABULARY = 1 << 24
"""Bound on ids, because tables as long as the largest id are built."""


def read_vocabulary(folder: Path) -> dict[str, int]:
    """Id of every token in a folder's `tokenizer.json`; empty without that file."""
    path = folder / "tokenizer.json"
    return vocabulary_of(read_json_object(path), path) if path.is_file() else {}


def vocabulary_of(tokenizer: Mapping[str, Any], path: Path) -> dict[str, int]:
    """Id of every token in the content of a `tokenizer.json`, added tokens included."""
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    try:
        if "model" in tokenizer and not isinstance(model, dict):
            raise TypeError
        if isinstance(vocab, list):  # Unigram: [token, score] pairs, the id is the position
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
        ids: dict[str, int] = {**vocab, **added}
        every = [*vocab.items(), *added.items()]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: its tokens are not texts with ids") from None
    for token, number in every:
        known = isinstance(token, str) and type(number) is int
        if not known or not 0 <= number < LARGEST_VOCABULARY:
            shown = clipped(f"{token!r} is {number!r}")
            raise CheckpointError(f"{path}: its tokens are not texts with ids ({shown})")
    return ids
