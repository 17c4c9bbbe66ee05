"""Names of stored tensors as transformers reads them: kept, renamed or ignored.

One tensor has several names: bare (`h.0`), with the prefix of its class (`transformer.h.0`), with
the prefix of a version of transformers (`language_model.model` or `model.language_model`), and with
words of a training wrapper (`_orig_mod`). The tables here need neither torch nor transformers;
`tests/checkpoint/test_places.py` compares them with transformers' own mapping.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import takewhile
from typing import Any

from layerswap.checkpoint.classes import CLASSES, HEADS
from layerswap.checkpoint.places import WRAPPERS, parse_name
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import quoted

TRAINING_WORDS = frozenset(
    {
        "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_fpw_module",
        "_forward_module", "_ddp_module",
    }
)  # fmt: skip
"""Words that torch.compile, FSDP, activation checkpointing and DeepSpeed add anywhere in a name."""
TRAINING_PREFIXES = ("module.", "base_model.model.")
"""Prefixes that DataParallel and PEFT add to every name of a model."""
SAME_WORDS = {"embed_out": "lm_head", "block_sparse_moe": "mlp"}
"""Words of stored names that transformers 5 replaces in memory (GPT-NeoX, Mixtral)."""
SAME_ENDS = {
    "LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias",
    "predictions.decoder.bias": "predictions.bias", "lm_head.decoder.bias": "lm_head.bias",
    "block_sparse_moe.input_linear.weight": "block_sparse_moe.experts.gate_up_proj",
    "block_sparse_moe.output_linear.weight": "block_sparse_moe.experts.down_proj",
    "block_sparse_moe.router.layer.weight": "block_sparse_moe.router.weight",
}  # fmt: skip
"""Ends of two names that transformers reads as one: in the oldest files of BERT, of tied biases,
and of GraniteMoE in memory."""
TOWERS = frozenset(["vision_tower", "audio_tower", "vision_model"])
PREDICTION = re.compile(r"(?:^|\.)mtp(?:_\w+)?\.")
"""Matches names of multi-token prediction (Qwen3.5 and later, MiMo, ERNIE 4.5)."""
PREDICTION_WORDS = frozenset(["eh_proj", "enorm", "hnorm", "shared_head", "nextn"])
"""Words of the layer behind the last one, which predicts further tokens (DeepSeek V3, GLM-4.5)."""
BUFFERS = re.compile(r".*\.(?:rotary_emb\.(?:inv_freq|(?:cos|sin)_cached)|position_ids|version)")
"""Matches buffers of older checkpoints, which transformers computes or ignores."""
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
SHARES = re.compile(r"layers\.(\d+)\.self_attn\.(\w+)")
MASKS = re.compile(r".*\.(?:attn|attention)\.(?:masked_)?bias")
MASKED_TYPES = ("gpt2", "gpt_neo", "gpt_neox", "gptj", "codegen", "gpt_bigcode", "imagegpt")
"""Model types whose older checkpoints store the causal mask as `attn.bias`."""
COPIED = ("fp8", "mxfp4", "compressed-tensors", "gptq", "awq")
"""Quantisation methods whose tensors a swap can copy."""
PROVENANCE = frozenset(
    {
        "version", "dataset", "damp_percent", "damp_auto_increment", "meta", "tokenizer",
        "quantization_status", "global_compression_ratio", "true_sequential", "static_groups",
        "model_name_or_path", "model_file_base_name", "checkpoint_format", "pack_dtype",
    }
)  # fmt: skip
"""Quantisation settings that record how weights were made and do not affect reading."""
PARTS = {
    re.compile(
        r"\.weight_(?:scale_inv|scale|packed|shape|zero_point|g_idx|global_scale)$"
    ): ".weight",
    re.compile(r"\.(?:input|output)_(?:scale|zero_point|global_scale)$"): ".weight",
    re.compile(r"\.(?:qweight|qzeros|scales|g_idx)$"): ".weight",
    # The experts of gpt-oss in one tensor.
    re.compile(r"_proj_(?:blocks|scales|scale_inv|scale)$"): "_proj",
    re.compile(r"\.([kqv])_scale$"): r".\1_proj.weight",  # of the KV cache
}
UNMERGED = re.compile(
    r"\.(?:lora_(?:embedding_)?[AB]|base_layer|lora_magnitude_vector|modules_to_save)(?:\.|$)"
)


def canonical(name: str) -> str:
    """Return the part of a name that does not depend on class, version or layout.

    Example: `language_model.model.layers.0.mlp.up_proj.weight` and
    `model.language_model.layers.0.mlp.up_proj.weight` give `layers.0.mlp.up_proj.weight`.
    """
    for old, new in SAME_ENDS.items():
        if name.endswith(old):
            name = name.removesuffix(old) + new
    words = name.split(".")
    while len(words) > 1 and words[0] in WRAPPERS:
        del words[0]
    if len(words) > 1 and words[0] in TOWERS and words[1] == "vision_model":
        del words[1]
    return ".".join(SAME_WORDS.get(word, word) for word in words)


def in_memory(name: str, model_type: object) -> list[str]:
    """Return the canonical names in memory; several if a stored weight is several tensors there.

    Example: of EXAONE 3.5, `transformer.h.0.mlp.c_fc_0.weight` gives
    `layers.0.mlp.gate_proj.weight`.
    """
    core = canonical(name)
    words = CLASSES["renamed"].get(str(model_type))
    if words is None:
        return [core]
    numbers = re.findall(NUMBER, core)
    listed = words.get(re.sub(NUMBER, "#", core), ())
    return [name.replace("#", "{}").format(*numbers) for name in listed] or [core]


def in_layers(name: str) -> bool:
    """True for the name of a module or a tensor in a layer of the language model."""
    return parse_name(name).layer is not None


def wrappers_of(name: str) -> tuple[str, ...]:
    """The words before a module of the base model; `decoder` is one of its modules."""
    return tuple(takewhile((WRAPPERS - {"decoder"}).__contains__, name.split(".")))


def renaming(names: Collection[str], like: Collection[str]) -> dict[str, str]:
    """Map names to the names that another checkpoint has for the same tensors.

    Names that both have, and names without exactly one counterpart, stay.
    """
    left, taken = [n for n in names if n not in like], [n for n in like if n not in names]
    ours, theirs = (Counter(map(canonical, several)) for several in (left, taken))
    by_core = {core: n for n in taken if theirs[core := canonical(n)] == 1}
    return {n: by_core[core] for n in left if ours[core := canonical(n)] == 1 and core in by_core}


def unwrapped(names: Collection[str], config: Mapping[str, Any]) -> dict[str, str]:
    """Map stored names to names without training wrappers around a class of transformers.

    Raises a CheckpointError for two names that differ by wrappers only, and for unmerged adapters.
    """
    inner = {name: without_training_words(name) for name in names}
    removed = sorted({w for name in names for w in name.split(".")} & TRAINING_WORDS)
    while prefix := _common_prefix(inner.values(), config):
        removed.append(prefix.rstrip("."))
        inner = {stored: name.removeprefix(prefix) for stored, name in inner.items()}
    unmerged = next((name for name in names if UNMERGED.search(name)), None)
    if unmerged is not None:
        raise CheckpointError(
            f"holds an adapter that is not merged ({quoted(unmerged)}); merge it with PEFT's "
            "merge_and_unload and save the model again"
        )
    twice = next((name for name, n in Counter(inner.values()).items() if n > 1), None)
    if twice is not None:
        raise CheckpointError(
            f"stores {quoted(twice)} twice, with and without the words of a training wrapper "
            f"({', '.join(removed)}); save the unwrapped model again"
        )
    return inner


def without_training_words(name: str) -> str:
    """Remove the words that training wrappers add inside a name."""
    return ".".join(word for word in name.split(".") if word not in TRAINING_WORDS)


def start_of(name: str) -> str:
    """The first two words of a tensor's canonical name, behind `#.` in a layer."""
    parsed = parse_name(canonical(name))
    words = ["#" if word.isdecimal() else word for word in parsed.rest[:2]]
    return ".".join(words if parsed.layer is None else ["#", *words])


def loaded(names: Iterable[str], config: Mapping[str, Any]) -> dict[str, bool]:
    """Tell of tensors if a class of transformers has some called so; empty for unknown classes.

    Compares the words before a layer and the first two words in it, not the whole name.
    """
    stems, kind = [f".{stem}" for stem in stems_of(config)], config.get("model_type")
    stacks = {name: parse_name(name).stack for name in names} if stems else {}
    found = {s: s is None or any(e.endswith(f".{s}") for e in stems) for s in {*stacks.values()}}
    starts = {start for start, kinds in CLASSES["starts"].items() if kind in kinds}
    return {name: found[stack] and start_of(name) in starts for name, stack in stacks.items()}


def stems_of(config: Mapping[str, Any]) -> list[str]:
    """The prefixes of layers that a configuration's class loads; empty for unknown classes."""
    class_name = class_of(config)
    return [stem for stem, classes in CLASSES["layers"].items() if class_name in classes]


def needed_starts(config: Mapping[str, Any]) -> set[str]:
    """The starts (`start_of`) of all tensors of a model type, without those of heads."""
    listed = CLASSES["starts"].items()
    kind = config.get("model_type")
    return {start for start, kinds in listed if kind in kinds and start.split(".")[0] not in HEADS}


def _common_prefix(names: Collection[str], config: Mapping[str, Any]) -> str | None:
    """Find the common prefix of all names that a wrapper added; None without a wrapper.

    A module that holds the model, whatever it is called, stands before the layers of its class.
    """
    own = sorted(stems_of(config) or ["model.layers"], key=len, reverse=True)
    layers = re.compile(rf"(.+?\.)??(?:{'|'.join(map(re.escape, own))})\.\d")
    held = next((match[1] for match in map(layers.match, names) if match), None)
    return next((prefix for prefix in (*TRAINING_PREFIXES, held)
                 if prefix and all(name.startswith(prefix) for name in names)), None)  # fmt: skip


def predicting(names: Iterable[str], layers: int | None) -> frozenset[str]:
    """Find the tensors of multi-token prediction, which transformers does not load.

    They are called `mtp`, or belong to layers behind the last of `layers`.
    """
    found, behind = set[str](), dict[int, list[str]]()
    for name in names:
        number = parse_name(name).layer
        if PREDICTION.search(name):
            found.add(name)
        elif layers is not None and number is not None and number >= layers:
            behind.setdefault(number, []).append(name)
    for layer in behind.values():
        if any(not PREDICTION_WORDS.isdisjoint(name.split(".")) for name in layer):
            found.update(layer)
    return frozenset(found)


def unloaded(names: Iterable[str], config: Mapping[str, Any]) -> frozenset[str]:
    """Find stored tensors that transformers does not load into the class of a configuration.

    They are buffers that it computes, modules of other classes, and keys and values of layers
    that take them from another layer (Gemma 3n, Gemma 4).
    """
    masked = config.get("model_type") in MASKED_TYPES
    unused, text = CLASSES["unused"].get(class_of(config) or "", ()), text_config(config)
    modules = tuple(f"{module}." for module in unused)
    layers, sharing = text.get("num_hidden_layers") or 0, text.get("num_kv_shared_layers") or 0

    def shares(name: str) -> bool:
        match = SHARES.match(canonical(name)) if layers and sharing else None
        return match is not None and (
            match[2] in CLASSES["shared"] and int(match[1]) >= layers - sharing
        )

    return frozenset(
        name
        for name in names
        if BUFFERS.fullmatch(name)
        or (masked and MASKS.fullmatch(name))
        or (modules and f"{canonical(name)}.".startswith(modules))
        or shares(name)
    )


# --- the configuration of the language model ---


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of a configuration for the language model.

    That is `text_config` in a multimodal wrapper, and elsewhere the whole configuration.
    """
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def with_text(config: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with changed settings of the language model."""
    text = text_config(config)
    if text is config:
        return {**config, **changed}
    return {**config, "text_config": {**text, **changed}}


def class_of(config: Mapping[str, Any]) -> str | None:
    """The first class in a configuration; None without one."""
    return next(iter(config.get("architectures") or ()), None)


def class_for(config: Mapping[str, Any], task: str | None) -> str | None:
    """The class for a task over the same base model; None if there is none."""
    return CLASSES["tasks"].get(str(config.get("model_type")), {}).get(str(task))


# --- quantised weights, which are copied and never computed with ---


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantisation that a configuration names; None for plain weights."""
    settings = settings_of(config)
    return None if settings is None else str(settings.get("quant_method", "unknown method"))


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The settings of the quantisation, also of a multimodal model's text part."""
    for part in (config, text_config(config)):
        settings = part.get("quantization_config")
        if settings is not None:
            return settings if isinstance(settings, dict) else {}
    return None


def weight_of(name: str) -> str:
    """Return the weight that a tensor is a part of; other names stay.

    Example: `mlp.up_proj.qzeros` and `mlp.up_proj.weight_scale_inv` give `mlp.up_proj.weight`.
    """
    for form, whole in PARTS.items():
        if form.search(name):
            return form.sub(whole, name)
    return name


def quantised_names(names: Iterable[str]) -> frozenset[str]:
    """Find the tensors of quantised weights, all parts of them."""
    weights = {name: weight_of(name) for name in names}
    whole = {weight for name, weight in weights.items() if weight != name}
    return frozenset(name for name, weight in weights.items() if weight in whole)
