"""Views of checkpoints: layers in a new order, and matrices in 4 bits.

A view is a `Checkpoint` whose tensors are read from the files of others. Nothing is converted
beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from layerswap.checkpoint.checkpoint import CONV1D_TYPES, Checkpoint
from layerswap.checkpoint.configuration import LAYER_COUNTS, encoder_layers
from layerswap.checkpoint.header import Requantised
from layerswap.checkpoint.names import canonical, text_config, with_text
from layerswap.checkpoint.places import restacked_names
from layerswap.checkpoint.read import FLOAT_DTYPES
from layerswap.ground.errors import CheckpointError, MergeError

# --- layers in a new order ---

PERIODS = (
    "sliding_window_pattern", "full_attention_interval", "decoder_sparse_step", "attn_layer_period",
    "expert_layer_period", "no_rope_layer_interval", "interleave_moe_layer_step",
)  # fmt: skip
"""Keys whose value n gives every n-th layer another kind."""
STARTS = ("first_k_dense_replace", "max_window_layers")
"""Keys for the first layer of another kind."""
INDICES = ("mlp_only_layers", "full_attn_idxs", "cross_attention_layers", "moe_layers")
"""Keys that list layers by their numbers."""


def restack(checkpoint: Checkpoint, taken: Sequence[int]) -> Checkpoint:
    """Reorder a checkpoint's layers: new layer l is old layer `taken[l]`.

    Tensors have the names of their new layers, and the configuration has the new depth.
    """
    if max(taken) >= checkpoint.layers:
        raise MergeError(
            f"{checkpoint.identity}: no layer {max(taken)}; it has {checkpoint.layers} layers"
        )
    if checkpoint.numbered is not None:
        raise MergeError(
            f"{checkpoint.identity}: its layers are identified by number alone, so none can move; "
            "place its tensors with `patterns` in the recipe"
        )
    if encoder_layers(checkpoint.config):
        raise MergeError(
            f"{checkpoint.identity}: is an encoder-decoder, whose layers cannot move between both"
        )
    behind = {n for n in checkpoint.ignored if canonical(n).startswith("layers.")}
    behind = {n for n in behind if checkpoint.places[n].layer is None}
    if behind:  # predicting layers, whose numbers another depth needs
        note = f"{min(behind)!r} and the other tensors behind its last layer are left out"
        checkpoint = checkpoint.without(behind, note)
    names = restacked_names(checkpoint.places, taken)
    tensors, low_rank = checkpoint.tensors, checkpoint.low_rank
    return replace(
        checkpoint,
        config=restacked_config(checkpoint.config, taken, checkpoint.identity),
        tensors={new: tensors[old] for new, (old, _) in names.items() if old in tensors},
        places={new: place for new, (_, place) in names.items()},
        low_rank={new: low_rank[old] for new, (old, _) in names.items() if old in low_rank},
    )


def restacked_config(
    config: Mapping[str, Any], taken: Sequence[int], source: str
) -> dict[str, Any]:
    """Return the configuration of a reordered stack, with its depth and per-layer settings.

    Refuses a stack in which a layer would change its kind.
    """
    text = text_config(config)
    layers = max((text[key] for key in LAYER_COUNTS if type(text.get(key)) is int), default=0)
    changed: dict[str, Any] = {key: len(taken) for key in LAYER_COUNTS if key in text}
    if text.get("num_kv_shared_layers"):
        raise MergeError(f"{source}: its last layers share keys and values, so none can move")
    explicit = any(_is_per_layer(key, value, layers) for key, value in text.items())
    for key, value in text.items():
        if _is_per_layer(key, value, layers):
            changed[key] = [value[layer] for layer in taken]
        elif key in INDICES and isinstance(value, list):
            changed[key] = [layer for layer, old in enumerate(taken) if old in value]
        elif isinstance(value, int) and not explicit:
            _check_kinds(key, value, text, taken, source)
    return with_text(config, changed)


def _is_per_layer(key: str, value: object, layers: int) -> bool:
    """True for a list with one entry per layer."""
    one_each = isinstance(value, list) and len(value) == layers and layers > 0
    return one_each and key not in INDICES and ("layer" in key or "block" in key)


def _check_kinds(
    key: str, value: int, text: Mapping[str, Any], taken: Sequence[int], source: str
) -> None:
    """Refuse a stack in which a layer's new number changes its kind."""
    if key in PERIODS and value > 1:
        changes = [new % value != old % value for new, old in enumerate(taken)]
    elif key in STARTS and (key != "max_window_layers" or text.get("use_sliding_window")):
        changes = [(new < value) != (old < value) for new, old in enumerate(taken)]
    else:
        return
    if any(changes):
        layer = changes.index(True)
        raise MergeError(f"{source}: moving layers changes the kind of layer {layer} (`{key}`)")


def as_4_bits(base: Checkpoint, *, double: bool) -> Checkpoint:
    """View the matrices of a base's layers through 4-bit rounding, as QLoRA trains over them.

    Embeddings, head, norms and routers keep their values. `double` rounds the scales to 8 bits.
    """
    if base.config.get("model_type") in CONV1D_TYPES or any(".experts." in n for n in base.tensors):
        raise CheckpointError(
            f"{base.identity}: versions of bitsandbytes differ in the weights of this family that "
            "they quantise; leave base_as out"
        )
    tensors = {
        name: Requantised(
            name, info.dtype, info.shape, info.file, info.offset, info.nbytes, info, None, 0.0,
            double,
        )
        if base.places[name].role in ("attention", "mlp")
        and name.endswith(".weight")
        and len(info.shape) == 2
        and info.dtype in FLOAT_DTYPES
        else info
        for name, info in base.tensors.items()
    }  # fmt: skip
    return replace(base, tensors=tensors)
