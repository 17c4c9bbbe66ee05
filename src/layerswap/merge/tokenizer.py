"""Whether two experts read text the same way, told from their tokenizer files alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.errors import MergeError

RAW_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt",
)  # fmt: skip
"""Files that define a vocabulary where there is no `tokenizer.json`."""
COMPONENTS = ("normalizer", "pre_tokenizer", "model")
"""Parts of `tokenizer.json` that decide which tokens a text becomes."""


def check_tokenizers(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse experts whose tokenizers differ: their embedding rows mean different things.

    A checkpoint without a tokenizer is taken to use the others'.

    Raises:
        MergeError: how they differ, with the number of tokens and examples.
    """
    seen: list[tuple[str, Path]] = []
    for name, checkpoint in checkpoints.items():
        folder = checkpoint.folder
        if not any((folder / file).is_file() for file in ("tokenizer.json", *RAW_FILES)):
            continue
        if seen:
            difference = _difference(seen[0][1], folder)
            if difference:
                raise MergeError(f"tokenizers of {seen[0][0]} and {name} differ: {difference}")
        seen.append((name, folder))


def _difference(first: Path, second: Path) -> str | None:
    paths = first / "tokenizer.json", second / "tokenizer.json"
    if all(path.is_file() for path in paths):
        return _json_difference(read_json_object(paths[0]), read_json_object(paths[1]))
    for file in RAW_FILES:
        a, b = first / file, second / file
        if a.is_file() and b.is_file() and a.read_bytes() != b.read_bytes():
            return f"{file} is not the same"
    return None


def _json_difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    a, b = _vocabulary(first), _vocabulary(second)
    if a != b:
        changed = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
        examples = ", ".join(
            f"{token!r} is {_id(a.get(token))} and {_id(b.get(token))}" for token in changed[:3]
        )
        return f"{len(changed)} tokens of {len(a)} and {len(b)} ({examples})"
    if all(first.get(component) == second.get(component) for component in COMPONENTS):
        return None
    first, second = _canonical(first), _canonical(second)
    for component in COMPONENTS:
        if first.get(component) != second.get(component):
            return f"the {component.replace('_', '-')} is not the same"
    return None


def _canonical(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer as today's library writes it: older ones wrote merges another way."""
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_str(json.dumps(tokenizer)).to_str()
    except Exception:  # what the library cannot read is compared as it stands
        return tokenizer
    return cast("dict[str, Any]", json.loads(written))


def _vocabulary(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Id of every token, added tokens included."""
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, list):  # Unigram: [token, score] pairs, the id is the position
        vocab = {pair[0]: i for i, pair in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    return {**vocab, **added}


def _id(value: int | None) -> str:
    return "missing" if value is None else f"id {value}"
