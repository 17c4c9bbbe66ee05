"""Views of checkpoints: layers in a new order, GGUF files, and adapters over their base.

A view is a `Checkpoint` whose tensors are read from the files of others. Nothing is converted
beforehand. A GGUF file is viewed as its transformers model. llama.cpp's converter changes more than
names: for some families it reorders the rows of rotary queries and keys, and separates fused
projections into queries, keys and values; it adds 1 to norms to which transformers adds 1 itself,
and it stacks experts. All of that is undone as tensors are read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from layerswap.checkpoint.adapter import Adapter, LowRank, match_tensors, read_adapter
from layerswap.checkpoint.folder import (
    CONV1D_TYPES,
    LAYER_COUNTS,
    Checkpoint,
    fetch_checkpoint,
    is_adapter,
    open_checkpoint,
    text_config,
)
from layerswap.checkpoint.header import RowOrder, TensorInfo, Translated, byte_length, is_gguf
from layerswap.checkpoint.places import Pattern, Place, place, restacked_names
from layerswap.checkpoint.read import gguf_package
from layerswap.ground.errors import CheckpointError, MergeError, error_context
from layerswap.ground.strict_json import quoted

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
    if text is config:
        return {**config, **changed}
    return {**config, "text_config": {**text, **changed}}


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


# --- GGUF files as transformers models ---


@dataclass(frozen=True)
class Family:
    """llama.cpp's conversion of the models of one `model_type`.

    `order` gives the tensors whose rows are reordered: queries and keys for rotary embeddings, or
    fused projections, cut from heads (`heads`) or from groups of heads (`groups`). If `shifted`,
    llama.cpp adds 1 to norms.
    """

    architecture: str
    order: Literal["rotary", "heads", "groups"] | None = None
    shifted: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family("llama", "rotary"),
    "mistral": Family("llama", "rotary"),
    "mixtral": Family("llama", "rotary"),
    "granite": Family("granite", "rotary"),
    "smollm3": Family("smollm3", "rotary"),
    "qwen2": Family("qwen2"),
    "qwen2_moe": Family("qwen2moe"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3moe"),
    "gemma": Family("gemma", shifted=True),
    "gemma2": Family("gemma2", shifted=True),
    "gemma3_text": Family("gemma3", shifted=True),
    "phi3": Family("phi3"),
    "falcon": Family("falcon", "groups"),
    "bloom": Family("bloom", "heads"),
    "gpt_neox": Family("gptneox", "heads"),
    "cohere": Family("command-r"),
    "cohere2": Family("cohere2"),
    "olmo2": Family("olmo2"),
    "starcoder2": Family("starcoder2"),
    "stablelm": Family("stablelm"),
    "nemotron": Family("nemotron", shifted=True),
}
SETTINGS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "layer_norm_eps": "attention.layer_norm_epsilon",
    "rope_theta": "rope.freq_base",
}
"""Settings of `config.json`, with their keys in a GGUF header."""
NOT_OF_TRANSFORMERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*rot_embd.*")
"""Tensors that transformers computes from its configuration."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def as_transformers(checkpoint: Checkpoint, like: Checkpoint) -> Checkpoint:
    """View a GGUF file under another checkpoint's names, shapes, dtypes and configuration."""
    with error_context(checkpoint.source):
        family = _family(checkpoint, like)
        _check_settings(checkpoint.config, text_config(like.config))
        tensors = _translate(checkpoint, like, family)
    return replace(checkpoint, config=like.config, tensors=tensors, places=like.places)


def _family(checkpoint: Checkpoint, like: Checkpoint) -> Family:
    kind = str(text_config(like.config).get("model_type"))
    if kind not in FAMILIES:
        raise CheckpointError(
            f"GGUF beside safetensors is not supported for {quoted(kind, 40)}; supported: "
            f"{', '.join(FAMILIES)}"
        )
    architecture = checkpoint.config["model_type"]
    if architecture != FAMILIES[kind].architecture:
        raise CheckpointError(
            f"GGUF architecture is {architecture!r}; the safetensors model is {kind!r}"
        )
    return FAMILIES[kind]


def _check_settings(header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters")
    config = {**(rope if isinstance(rope, dict) else {}), **config}
    for key, gguf_key in SETTINGS.items():
        value, gguf_value = config.get(key), header.get(gguf_key)
        if not isinstance(value, int | float) or not isinstance(gguf_value, int | float):
            continue
        if not math.isclose(value, gguf_value, rel_tol=1e-5):
            raise CheckpointError(
                f"{gguf_key} is {gguf_value:g}; in the safetensors model {key} is {value:g}"
            )


def _translate(checkpoint: Checkpoint, like: Checkpoint, family: Family) -> dict[str, TensorInfo]:
    """Find every tensor of `like` in the GGUF file; refuse tensors that only one of them has."""
    package = gguf_package()
    architectures = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    names = package.get_tensor_name_map(architectures[family.architecture], like.layers)
    tensors: dict[str, TensorInfo] = {}
    used = set()
    for name, info in like.tensors.items():
        stored = _find_stored(name, info, names, checkpoint, like)
        used.add(stored.name)
        tensors[name] = Translated(
            name, info.dtype, info.shape, stored.file, stored.offset, stored.nbytes, stored,
            _row_order(stored.name, info.shape, family, checkpoint.config),
            -1.0 if family.shifted and name.endswith("norm.weight") else 0.0,
        )  # fmt: skip
    extra = sorted(
        name
        for name in checkpoint.tensors.keys() - used
        if name != "output.weight" and not NOT_OF_TRANSFORMERS.fullmatch(name)
    )
    if extra:
        raise CheckpointError(f"has {quoted(extra[0])}, which {like.identity} lacks")
    return tensors


def _find_stored(
    name: str, info: TensorInfo, names: Any, checkpoint: Checkpoint, like: Checkpoint
) -> TensorInfo:
    """Find the GGUF tensor, or the part of it, that holds transformers' tensor `name`."""
    expert = _EXPERT.search(name)
    stem = _EXPERT.sub(".experts.", name)
    stems = (stem, stem.removeprefix("transformer."))  # the package knows BLOOM's without it
    known = (names.get_name(text, try_suffixes=(".weight", ".bias")) for text in stems)
    gguf_name = next(filter(None, known), None)
    if gguf_name == "output.weight" and gguf_name not in checkpoint.tensors:
        gguf_name = "token_embd.weight"  # a tied head that transformers stores all the same
    if gguf_name is None or gguf_name not in checkpoint.tensors:
        raise CheckpointError(f"lacks {quoted(name)} of {like.identity}")
    stored = checkpoint.tensors[gguf_name]
    if expert is not None:
        stored = _expert(stored, int(expert[1]))
    if stored.shape != info.shape and math.prod(stored.shape) != math.prod(info.shape):
        raise CheckpointError(
            f"tensor {gguf_name!r} is {list(stored.shape)}; {name!r} of {like.identity} is "
            f"{list(info.shape)}"
        )
    return stored


def _expert(stored: TensorInfo, number: int) -> TensorInfo:
    """Return one expert of a stack of experts."""
    count, *shape = stored.shape
    if number >= count:
        raise CheckpointError(f"tensor {stored.name!r} has {count} experts, and no expert {number}")
    nbytes = byte_length(stored.dtype, shape)
    offset = stored.offset + number * nbytes
    return replace(stored, shape=tuple(shape), offset=offset, nbytes=nbytes)


def _row_order(
    gguf_name: str, shape: tuple[int, ...], family: Family, header: Mapping[str, Any]
) -> RowOrder | None:
    heads = header.get("attention.head_count")
    groups = header.get("attention.head_count_kv", heads)
    if family.order is None or not isinstance(heads, int) or not isinstance(groups, int):
        return None
    if family.order == "rotary":
        own_heads = {"attn_q": heads, "attn_k": groups}.get(gguf_name.split(".")[-2])
        return None if own_heads is None else RowOrder("rotary", shape[0], own_heads)
    if ".attn_qkv." not in gguf_name:
        return None
    return RowOrder(family.order, shape[0], heads, groups)


# --- adapters over their base ---


def adapt(
    base: Checkpoint,
    adapter: Adapter,
    *,
    source: str,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
) -> Checkpoint:
    """View an adapter over its base as one checkpoint.

    Over a base without tensors (`open_configuration`) it can only be composed with other adapters.
    """
    with error_context(source):
        _refuse_tied(base, adapter)
        weights = (
            match_tensors(adapter, base.tensors)
            if base.tensors
            else {path: f"{path}.weight" for path in adapter.modules}
        )
        low_rank = {weights[path]: low for path, low in adapter.modules.items()}
        places = base.places or _module_places({*low_rank, *adapter.saved}, patterns)
        low_rank = {
            name: replace(low, transposed=_is_transposed(adapter, low, places[name], base))
            for name, low in low_rank.items()
        }
        for name, shape in (
            *((name, low.shape) for name, low in low_rank.items()),
            *((name, saved.shape) for name, saved in adapter.saved.items()),
        ):
            _check_shape(name, shape, base)
    tensors = {**base.tensors, **adapter.saved}
    return Checkpoint(
        source, revision, adapter.folder, base.config, tensors, places, adapter, low_rank
    )


def _is_transposed(adapter: Adapter, low: LowRank, where: Place, base: Checkpoint) -> bool:
    """True if a weight is stored as [in, out].

    The type of the base's layer decides, as in PEFT. A wrong `fan_in_fan_out` would transpose a
    square delta unnoticed.
    """
    if where.layer is not None:
        return base.config.get("model_type") in CONV1D_TYPES
    return low.transposed and (
        where.role == "embedding" or not adapter.config.get("fan_in_fan_out")
    )


def _refuse_tied(base: Checkpoint, adapter: Adapter) -> None:
    text = text_config(base.config)
    if not base.config.get("tie_word_embeddings", text.get("tie_word_embeddings")):
        return
    for path in (*adapter.modules, *(name.removesuffix(".weight") for name in adapter.saved)):
        where = place(f"{path}.weight")
        if where is not None and where.role in ("embedding", "head"):
            raise CheckpointError(
                f"changes {path!r}, but embedding and head are one tensor here (tied); merge it "
                "into its base with PEFT's merge_and_unload first"
            )


def _check_shape(name: str, shape: tuple[int, ...], base: Checkpoint) -> None:
    if not base.tensors:
        return
    if name not in base.tensors:
        raise CheckpointError(f"changes {quoted(name)}, which the base does not have")
    expected = base.tensors[name].shape
    if shape != expected:
        raise CheckpointError(
            f"changes {name!r} of shape {list(shape)}; in {base.identity} it is {list(expected)}"
        )


def _module_places(names: set[str], patterns: Sequence[Pattern]) -> dict[str, Place]:
    places = {}
    for name in sorted(names):
        where = place(name, patterns)
        if where is None:
            raise CheckpointError(
                f"cannot tell the layer and role of {quoted(name)}; place it with `patterns` in "
                "the recipe"
            )
        places[name] = where
    return places


def open_expert(
    source: str, base: Checkpoint, *, revision: str | None = None, patterns: Sequence[Pattern] = ()
) -> Checkpoint:
    """Open a source: a full checkpoint, or an adapter over `base`.

    A GGUF file beside a base of safetensors is viewed with the base's names.
    """
    if is_gguf(source):
        opened = open_checkpoint(source, revision=revision, patterns=patterns)
        return opened if base.gguf is not None else as_transformers(opened, base)
    folder, commit = fetch_checkpoint(source, revision)
    if not is_adapter(folder):
        return open_checkpoint(source, revision=revision, patterns=patterns)
    name = source.partition("@")[0] if commit else source
    return adapt(base, read_adapter(folder), source=name, revision=commit, patterns=patterns)
