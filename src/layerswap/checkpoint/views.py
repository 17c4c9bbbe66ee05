"""Views of checkpoints, which read nothing: experts over their base, and layers in a new order.

An adapter over its base is one checkpoint. Layers are repeated, dropped or moved. A GGUF file is
seen as transformers has its model: llama.cpp's converter changes more than names. It orders the
rows of rotary queries and keys anew for some families, cuts fused projections into queries, keys
and values, adds 1 to norms that transformers adds it to when it computes, and stacks experts. All
of it is undone as tensors are read; nothing is converted beforehand.
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
from layerswap.checkpoint.strict_json import clipped
from layerswap.errors import CheckpointError, MergeError

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


@dataclass(frozen=True)
class Family:
    """How llama.cpp stores the models of one `model_type`.

    Attributes:
        architecture: its name for them.
        order: the tensors whose rows it orders anew: queries and keys for rotary embeddings, or
            fused projections, cut from heads (`heads`) or from groups of heads (`groups`).
        shifted: whether 1 is added to norms.
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
"""Settings of `config.json` that a GGUF header has too, under its own name."""
NOT_OF_TRANSFORMERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*rot_embd.*")
"""Tensors that transformers computes from its configuration."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def as_transformers(checkpoint: Checkpoint, like: Checkpoint) -> Checkpoint:
    """A GGUF file under the names, shapes and dtypes of a safetensors checkpoint of its kind.

    Args:
        checkpoint: the GGUF file.
        like: the checkpoint; its configuration is taken over.

    Raises:
        LayerswapError: the two are not of one architecture, one of them has tensors that the
            other lacks, or the `gguf` package is not installed.
    """
    try:
        family = _family(checkpoint, like)
        _check_settings(checkpoint.config, text_config(like.config))
        return replace(
            checkpoint,
            config=like.config,
            tensors=_tensors(checkpoint, like, family),
            places=like.places,
        )
    except CheckpointError as error:
        raise error.within(checkpoint.source) from None


def _family(checkpoint: Checkpoint, like: Checkpoint) -> Family:
    kind = str(text_config(like.config).get("model_type"))
    if kind not in FAMILIES:
        raise CheckpointError(
            f"a GGUF file beside safetensors of {clipped(repr(kind), 40)} cannot be read; these "
            f"can: {', '.join(FAMILIES)}"
        )
    found = checkpoint.config["model_type"]
    if found != FAMILIES[kind].architecture:
        raise CheckpointError(f"of architecture {found!r}, beside safetensors of {kind!r}")
    return FAMILIES[kind]


def _check_settings(found: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    rope = config.get("rope_parameters")
    config = {**(rope if isinstance(rope, dict) else {}), **config}
    for key, name in SETTINGS.items():
        ours, theirs = config.get(key), found.get(name)
        if not isinstance(ours, int | float) or not isinstance(theirs, int | float):
            continue
        if not math.isclose(ours, theirs, rel_tol=1e-5):
            raise CheckpointError(f"{name} is {theirs:g}, where {key} is {ours:g} elsewhere")


def _tensors(checkpoint: Checkpoint, like: Checkpoint, family: Family) -> dict[str, TensorInfo]:
    package = gguf_package()
    architectures = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    names = package.get_tensor_name_map(architectures[family.architecture], like.layers)
    tensors: dict[str, TensorInfo] = {}
    used = set()
    for name, info in like.tensors.items():
        expert = _EXPERT.search(name)
        plain = _EXPERT.sub(".experts.", name)
        spellings = (plain, plain.removeprefix("transformer."))  # BLOOM's are without it
        known = (names.get_name(text, try_suffixes=(".weight", ".bias")) for text in spellings)
        found = next(filter(None, known), None)
        if found == "output.weight" and found not in checkpoint.tensors:
            found = "token_embd.weight"  # a head that is tied, and stored beside all the same
        if found is None or found not in checkpoint.tensors:
            raise CheckpointError(f"lacks {clipped(repr(name))} of {like.identity}")
        stored = checkpoint.tensors[found]
        if expert is not None:
            stored = _expert(stored, int(expert[1]))
        if stored.shape != info.shape and math.prod(stored.shape) != math.prod(info.shape):
            raise CheckpointError(
                f"tensor {found!r} is {list(stored.shape)}; {name!r} of {like.identity} is "
                f"{list(info.shape)}"
            )
        used.add(found)
        tensors[name] = Translated(
            name,
            info.dtype,
            info.shape,
            stored.file,
            stored.offset,
            stored.nbytes,
            stored,
            _order(found, info.shape, family, checkpoint.config),
            -1.0 if family.shifted and name.endswith("norm.weight") else 0.0,
        )
    left = sorted(
        name
        for name in checkpoint.tensors.keys() - used
        if name != "output.weight" and not NOT_OF_TRANSFORMERS.fullmatch(name)
    )
    if left:
        raise CheckpointError(f"has {clipped(repr(left[0]))}, which {like.identity} lacks")
    return tensors


def _expert(stored: TensorInfo, number: int) -> TensorInfo:
    """One expert of a stack of them: neighbouring bytes."""
    count, *shape = stored.shape
    if number >= count:
        raise CheckpointError(f"tensor {stored.name!r} has {count} experts, and not one {number}")
    nbytes = byte_length(stored.dtype, shape)
    offset = stored.offset + number * nbytes
    return replace(stored, shape=tuple(shape), offset=offset, nbytes=nbytes)


def _order(
    name: str, shape: tuple[int, ...], family: Family, config: Mapping[str, Any]
) -> RowOrder | None:
    heads = config.get("attention.head_count")
    groups = config.get("attention.head_count_kv", heads)
    if family.order is None or not isinstance(heads, int) or not isinstance(groups, int):
        return None
    if family.order == "rotary":
        owner = name.split(".")[-2]
        own = {"attn_q": heads, "attn_k": groups}.get(owner)
        return None if own is None else RowOrder("rotary", shape[0], own)
    if ".attn_qkv." not in name:
        return None
    return RowOrder(family.order, shape[0], heads, groups)


def adapt(
    base: Checkpoint,
    adapter: Adapter,
    *,
    source: str,
    revision: str | None = None,
    patterns: Sequence[Pattern] = (),
) -> Checkpoint:
    """An adapter over its base, as one checkpoint.

    Args:
        base: the base; without tensors (`open_configuration`) the adapter can only be composed
            with adapters.
        adapter: what is added to it.
        source: what the user called the adapter.
        revision: the Hub commit of the adapter.
        patterns: places of tensors whose names no built-in layout knows.

    Raises:
        CheckpointError: the adapter does not fit the base, or changes a head that is tied to the
            embedding.
    """
    try:
        _refuse_tied(base, adapter)
        weights = (
            match_tensors(adapter, base.tensors)
            if base.tensors
            else {path: f"{path}.weight" for path in adapter.modules}
        )
        low_rank = {weights[path]: low for path, low in adapter.modules.items()}
        tensors = {**base.tensors}
        places = base.places or _module_places({*low_rank, *adapter.saved}, patterns)
        low_rank = {
            name: replace(low, transposed=_is_transposed(adapter, low, places[name], base))
            for name, low in low_rank.items()
        }
        for name, info in low_rank.items():
            _check_shape(name, info.shape, base)
        for name, saved in adapter.saved.items():
            _check_shape(name, saved.shape, base)
            tensors[name] = saved
    except CheckpointError as error:
        raise error.within(source) from None
    return Checkpoint(
        source, revision, adapter.folder, base.config, tensors, places, adapter, low_rank
    )


def _is_transposed(adapter: Adapter, low: LowRank, where: Place, base: Checkpoint) -> bool:
    """True if a weight is stored as [in, out].

    The type of the base's layer decides, as in PEFT; a `fan_in_fan_out` that does not fit it
    would transpose a square delta unnoticed.
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
        raise CheckpointError(f"changes {clipped(repr(name))}, which the base does not have")
    expected = base.tensors[name].shape
    if shape != expected:
        raise CheckpointError(
            f"changes {name!r} of shape {list(shape)}; in {base.identity} it is {list(expected)}"
        )


def _module_places(names: set[str], patterns: Sequence[Pattern]) -> dict[str, Place]:
    found = {name: place(name, patterns) for name in sorted(names)}
    unknown = next((name for name, where in found.items() if where is None), None)
    if unknown is not None:
        raise CheckpointError(
            f"cannot tell the layer and role of {clipped(repr(unknown))}; place it with "
            "`patterns` in the recipe"
        )
    return {name: where for name, where in found.items() if where is not None}


def open_expert(
    source: str, base: Checkpoint, *, revision: str | None = None, patterns: Sequence[Pattern] = ()
) -> Checkpoint:
    """Open a full checkpoint, or an adapter over `base`, whichever the source holds.

    A GGUF file beside a base of safetensors is read under the base's names.

    Raises:
        CheckpointError: as `open_checkpoint`, `read_adapter` and `adapt`.
    """
    if is_gguf(source):
        opened = open_checkpoint(source, revision=revision, patterns=patterns)
        return opened if base.gguf is not None else as_transformers(opened, base)
    folder, commit = fetch_checkpoint(source, revision)
    if not is_adapter(folder):
        return open_checkpoint(source, revision=revision, patterns=patterns)
    name = source.partition("@")[0] if commit else source
    return adapt(base, read_adapter(folder), source=name, revision=commit, patterns=patterns)
