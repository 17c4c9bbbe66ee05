"""A checkpoint's configuration, and the shapes and places of its tensors by it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerswap.checkpoint.adapter import ZERO3
from layerswap.checkpoint.given import CONFIG, is_adapter, other_kind
from layerswap.checkpoint.header import TensorInfo
from layerswap.checkpoint.names import method_of, predicting, stems_of, text_config, weight_of
from layerswap.checkpoint.places import Numbered, Pattern, Place, place_by_number, place_tensors
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import quoted, read_json_object

ENCODER_COUNTS = "encoder_layers", "num_encoder_layers", "num_layers"
LAYER_COUNTS = (
    "decoder_layers", "num_decoder_layers",  # BART: the other counts are its encoder's
    "num_hidden_layers", "n_layer", "num_layers", "n_layers",
)  # fmt: skip
"""Configuration keys for the number of layers, the decoder's own first."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read `config.json`; refuse a folder of another kind, and a configuration of no model."""
    if is_adapter(folder):
        raise CheckpointError(f"{folder}: a LoRA adapter, where a full checkpoint is needed")
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder}: no {CONFIG}; {other_kind(folder)}")
    config = read_json_object(folder / CONFIG, infinities=True)
    names = config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            f"{folder / CONFIG}: architectures is {quoted(names)}, not a list of class names"
        )
    if not isinstance(config.get("model_type") or "", str):
        raise CheckpointError(
            f"{folder / CONFIG}: model_type is {quoted(config['model_type'])}, not a name"
        )
    if names:  # torch's `fully_shard` puts FSDP before the names of classes
        config["architectures"] = [name.removeprefix("FSDP") for name in names]
    return config


def check_stored(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> None:
    """Refuse empty tensors, and packed matrices without a quantisation in the configuration."""
    weights = [name for name in tensors if name.endswith("weight")]
    empty = [name for name in weights if 0 in tensors[name].shape]
    if empty:
        raise CheckpointError(
            f"{len(empty)} of {len(tensors)} tensors have no elements, such as {quoted(empty[0])} "
            f"of shape {list(tensors[empty[0]].shape)}; {ZERO3}"
        )
    matrices = (name for name in weights if len(tensors[name].shape) == 2)
    packed = [name for name in matrices if tensors[name].dtype in ("U8", "I8", "I32", "U32")]
    if packed and method_of(config) is None:
        raise CheckpointError(
            f"{quoted(packed[0])} is {tensors[packed[0]].dtype}, as quantised weights are; use the "
            "unquantised checkpoint"
        )


def configured_layers(config: Mapping[str, Any]) -> int | None:
    """Return the number of layers by the configuration; None if it has none."""
    inner = config.get("decoder")
    text = inner if isinstance(inner, dict) else text_config(config)  # T5Gemma
    for key in ENCODER_COUNTS + LAYER_COUNTS if encoder_alone(config) else LAYER_COUNTS:
        if type(text.get(key)) is int:
            return int(text[key]) + encoder_layers(config)
    kinds = text.get("layers_block_type")  # Nemotron-H has no other count
    return len(kinds) if isinstance(kinds, list) and kinds else None


def encoder_alone(config: Mapping[str, Any]) -> bool:
    """True for the class of an encoder-decoder's encoder, whatever its configuration counts."""
    stems = stems_of(config)
    return bool(stems) and all("encoder." in stem and "decoder" not in stem for stem in stems)


def encoder_layers(config: Mapping[str, Any]) -> int:
    """Return the number of an encoder-decoder's encoder layers; 0 for other models."""
    if not config.get("is_encoder_decoder") or encoder_alone(config):
        return 0
    if isinstance(inner := config.get("encoder"), dict):  # T5Gemma
        return configured_layers(inner) or 0
    return next((config[key] for key in ENCODER_COUNTS if type(config.get(key)) is int), 0)


def place_all(
    names: Collection[str], config: Mapping[str, Any], patterns: Sequence[Pattern]
) -> tuple[dict[str, Place], Numbered | None, frozenset[str]]:
    """Place all tensors by patterns and tables; otherwise by the only list of layers.

    Returns the tensors of multi-token prediction too, which have no layer if no pattern gives one.
    """
    found = predicting(names, configured_layers(config))
    predicted = frozenset(n for n in found if not any(pattern.place(n) for pattern in patterns))
    quantised = method_of(config) is not None
    weights = {n: weight_of(n) if quantised else n for n in names if n not in predicted}
    stored, layers = [*dict.fromkeys(weights.values())], configured_layers(config)
    numbered: Numbered | None = None
    try:
        places = place_tensors(stored, layers=layers, patterns=patterns)
    except CheckpointError:
        # By its number alone, a layer could be the encoder's or the decoder's.
        if layers is None or encoder_layers(config):
            raise
        placed = place_by_number(stored, layers=layers, patterns=patterns)
        if placed is None:
            raise
        places, numbered = placed
    other = Place(None, "other")
    every = {name: places.get(weights.get(name, name), other) for name in names}
    return every, numbered, predicted
