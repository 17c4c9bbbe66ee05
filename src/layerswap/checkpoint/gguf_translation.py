"""A GGUF file as transformers has its model: names, order of rows, norms, and experts apart.

llama.cpp's converter changes more than names: it orders the rows of rotary queries and keys anew
for some families, cuts fused projections into queries, keys and values, adds 1 to norms that
transformers adds it to when it computes, and stacks experts. All of it is undone as tensors are
read; nothing is converted beforehand.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from layerswap.checkpoint.folder import Checkpoint, text_config
from layerswap.checkpoint.header import RowOrder, TensorInfo, Translated, byte_length
from layerswap.checkpoint.read import gguf_package
from layerswap.checkpoint.strict_json import clipped
from layerswap.errors import CheckpointError


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
