"""Safetensors files and checkpoint folders made by hand, byte by byte, for the tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CONFIG = {"model_type": "llama", "num_hidden_layers": 1}
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def framed(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with this header, whatever it says, and this data."""
    return len(header).to_bytes(8, "little") + header + data


def entry(begin: int, end: int, dtype: str = "U8", shape: list[Any] | None = None) -> dict:
    """One tensor's entry of a header; by default bytes from `begin` to `end`."""
    shape = [end - begin] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_file(path: Path, tensors: Mapping[str, Any], data: bytes = b"") -> Path:
    """A safetensors file at `path` with these entries and this data."""
    path.write_bytes(framed(json.dumps(tensors).encode(), data))
    return path


def write_weights(path: Path, *names: str) -> Path:
    """A valid safetensors file: two bytes for each name."""
    entries = {name: entry(2 * i, 2 * i + 2) for i, name in enumerate(names)}
    return write_file(path, entries, bytes(2 * len(names)))


def write_config(folder: Path, config: Any = CONFIG) -> None:
    """A `config.json` in `folder`."""
    (folder / "config.json").write_text(json.dumps(config))


def write_index(folder: Path, weight_map: Any) -> Path:
    """An index in `folder`."""
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path
