"""Checkpoints whose layers are repeated, dropped or moved, as views that read nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerswap.checkpoint.folder import LAYER_COUNTS, Checkpoint, text_config
from layerswap.checkpoint.places import restacked_names
from layerswap.errors import MergeError

PERIODS = (
    "sliding_window_pattern", "full_attention_interval", "decoder_sparse_step", "attn_layer_period",
    "expert_layer_period", "no_rope_layer_interval", "interleave_moe_layer_step",
)  # fmt: skip
"""Keys that say of every n-th layer what it is."""
STARTS = ("first_k_dense_replace", "max_window_layers")
"""Keys that say from which layer on layers are of another kind."""
INDICES = ("mlp_only_layers", "full_attn_idxs", "cross_attention_layers", "moe_layers")
"""Keys that list layers by their number."""


def restack(checkpoint: Checkpoint, taken: Sequence[int]) -> Checkpoint:
    """The checkpoint whose layer l is layer `taken[l]` of the given one.

    Tensors are named by their new layers and read where they are; the configuration is of the new
    depth.

    Raises:
        MergeError: a layer does not exist, or would become one of another kind; or layers are known
            by their numbers alone.
    """
    if max(taken) >= checkpoint.layers:
        raise MergeError(
            f"{checkpoint.identity}: no layer {max(taken)}; there are {checkpoint.layers}"
        )
    if checkpoint.numbered is not None:
        raise MergeError(
            f"{checkpoint.identity}: its layers are known by their numbers alone, so none can be "
            "moved; place its tensors with `patterns` in the recipe"
        )
    names = restacked_names(checkpoint.places, taken)
    return replace(
        checkpoint,
        config=restacked_config(checkpoint.config, taken, checkpoint.identity),
        tensors={
            n: checkpoint.tensors[o] for n, (o, _) in names.items() if o in checkpoint.tensors
        },
        places={new: place for new, (_, place) in names.items()},
        low_rank={
            n: checkpoint.low_rank[o] for n, (o, _) in names.items() if o in checkpoint.low_rank
        },
    )


def restacked_config(
    config: Mapping[str, Any], taken: Sequence[int], source: str
) -> dict[str, Any]:
    """The configuration of the new stack: its depth, and everything that is said layer by layer.

    Raises:
        MergeError: what a layer is depends on its number, and a layer would become another kind.
    """
    text = text_config(config)
    layers = max(
        (int(text[key]) for key in LAYER_COUNTS if isinstance(text.get(key), int)), default=0
    )
    changed: dict[str, Any] = {key: len(taken) for key in LAYER_COUNTS if key in text}
    if text.get("num_kv_shared_layers"):
        raise MergeError(f"{source}: its last layers share keys and values, so none can be moved")
    explicit = any(_by_layer(key, value, layers) for key, value in text.items())
    for key, value in text.items():
        if _by_layer(key, value, layers):
            changed[key] = [value[layer] for layer in taken]
        elif key in INDICES and isinstance(value, list):
            changed[key] = [layer for layer, own in enumerate(taken) if own in value]
        elif key in PERIODS and isinstance(value, int) and value > 1 and not explicit:
            _same_kind(key, [layer % value for layer in range(len(taken))],
                       [layer % value for layer in taken], source)  # fmt: skip
        elif key in STARTS and isinstance(value, int) and not explicit and _counts(key, text):
            _same_kind(key, [layer < value for layer in range(len(taken))],
                       [layer < value for layer in taken], source)  # fmt: skip
    if text is config:
        return {**config, **changed}
    return {**config, "text_config": {**text, **changed}}


def _by_layer(key: str, value: object, layers: int) -> bool:
    """True for a list with one entry per layer."""
    listed = isinstance(value, list) and len(value) == layers and layers > 0
    return listed and key not in INDICES and ("layer" in key or "block" in key)


def _counts(key: str, text: Mapping[str, Any]) -> bool:
    return key != "max_window_layers" or bool(text.get("use_sliding_window"))


def _same_kind(key: str, wanted: Sequence[object], found: Sequence[object], source: str) -> None:
    for layer, (new, old) in enumerate(zip(wanted, found, strict=True)):
        if new != old:
            raise MergeError(f"{source}: by `{key}` layer {layer} would be of another kind")
