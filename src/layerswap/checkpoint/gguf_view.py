"""GGUF files as transformers models, and the reverse: names, rows and shifts of both forms.

llama.cpp's converter changes more than names: for some families it reorders the rows of rotary
queries and keys, and separates fused projections into queries, keys and values; it adds 1 to norms
to which transformers adds 1 itself, and it stacks experts. All of that is undone, or done, as
tensors are read.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from layerswap.checkpoint.checkpoint import Checkpoint
from layerswap.checkpoint.header import RowOrder, TensorInfo, Translated, byte_length
from layerswap.checkpoint.names import text_config
from layerswap.checkpoint.read import gguf_package
from layerswap.ground.errors import CheckpointError
from layerswap.ground.strict_json import quoted


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


_TABLES = json.loads(Path(__file__).with_name("gguf_families.json").read_text("utf-8"))
FAMILIES = {kind: Family(**family) for kind, family in _TABLES["families"].items()}
"""By the `model_type` of transformers."""
SETTINGS: Mapping[str, str] = _TABLES["settings"]
"""Settings of `config.json`, with their keys in a GGUF header."""
NOT_OF_TRANSFORMERS = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight|.*rot_embd.*")
"""Tensors that transformers computes from its configuration."""
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def check_family(checkpoint: Checkpoint, like: Checkpoint) -> Family:
    """Find the conversion of a GGUF file to a transformers model, or refuse the pair."""
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


def check_settings(header: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Refuse hyperparameters of a GGUF file that differ from a `config.json`'s."""
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


def translated(checkpoint: Checkpoint, like: Checkpoint, family: Family) -> dict[str, TensorInfo]:
    """Find every tensor of `like` in the GGUF file; refuse tensors that only one of them has."""
    tensors: dict[str, TensorInfo] = {}
    used = set()
    names = _gguf_names(like, family)
    for name, info in like.tensors.items():
        stored = _find_stored(name, info, names[name], checkpoint, like)
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


def _gguf_names(checkpoint: Checkpoint, family: Family) -> dict[str, str | None]:
    """The name of each tensor of a transformers model in a GGUF file; None if it has none."""
    package = gguf_package()
    architectures = {name: arch for arch, name in package.MODEL_ARCH_NAMES.items()}
    names = package.get_tensor_name_map(architectures[family.architecture], checkpoint.layers)
    stems = {name: _EXPERT.sub(".experts.", name) for name in checkpoint.tensors}
    endings = (".weight", ".bias")
    return {
        # The package knows BLOOM's names without their first part.
        name: names.get_name(stem, try_suffixes=endings)
        or names.get_name(stem.removeprefix("transformer."), try_suffixes=endings)
        for name, stem in stems.items()
    }


def as_gguf(checkpoint: Checkpoint, like: Checkpoint) -> dict[str, list[TensorInfo]]:
    """View a transformers model as the tensors of a GGUF file, in that file's order.

    Each tensor is one tensor of the model, or the experts to stack. Tensors that llama.cpp adds
    and computes from the configuration, such as `rope_freqs.weight`, are those of `like`.

    Raises:
        CheckpointError: the family has no names in GGUF, or a tensor is missing on a side.
    """
    family = check_family(like, checkpoint)
    sources: dict[str, dict[int, TensorInfo]] = {}
    for name, gguf_name in _gguf_names(checkpoint, family).items():
        if gguf_name is None:
            raise CheckpointError(f"{checkpoint.identity}: GGUF has no name for {quoted(name)}")
        expert = _EXPERT.search(name)
        sources.setdefault(gguf_name, {})[int(expert[1]) if expert else 0] = checkpoint.tensors[
            name
        ]
    if checkpoint.tied:
        sources.pop("output.weight", None)
    if "output.weight" in like.tensors and "token_embd.weight" in sources:
        sources.setdefault("output.weight", sources["token_embd.weight"])
    tensors: dict[str, list[TensorInfo]] = {}
    for gguf_name in (*like.tensors, *(sources.keys() - like.tensors.keys())):
        if gguf_name in sources:
            stack = sources[gguf_name]
            tensors[gguf_name] = [
                _as_gguf(gguf_name, stack[number], family, like.config) for number in sorted(stack)
            ]
        elif NOT_OF_TRANSFORMERS.fullmatch(gguf_name):
            tensors[gguf_name] = [like.tensors[gguf_name]]
        else:
            raise CheckpointError(
                f"{checkpoint.identity}: lacks {quoted(gguf_name)} of {like.identity}"
            )
    return tensors


def _as_gguf(
    gguf_name: str, info: TensorInfo, family: Family, header: Mapping[str, Any]
) -> TensorInfo:
    """View one tensor with the rows and the norms of a GGUF file."""
    order = _row_order(gguf_name, info.shape, family, header)
    shift = 1.0 if family.shifted and info.name.endswith("norm.weight") else 0.0
    if order is None and not shift:
        return info
    order = order and replace(order, inverse=True)
    return Translated(
        info.name, info.dtype, info.shape, info.file, info.offset, info.nbytes, info, order, shift
    )


def _find_stored(
    name: str, info: TensorInfo, gguf_name: str | None, checkpoint: Checkpoint, like: Checkpoint
) -> TensorInfo:
    """Find the GGUF tensor, or the part of it, that holds transformers' tensor `name`."""
    expert = _EXPERT.search(name)
    if gguf_name == "output.weight" and gguf_name not in checkpoint.tensors:
        gguf_name = "token_embd.weight"  # a tied head that transformers stores all the same
    if gguf_name is None or gguf_name not in checkpoint.tensors:
        raise CheckpointError(f"lacks {quoted(name)} of {like.identity}")
    stored = checkpoint.tensors[gguf_name]
    if expert is not None:
        number, (count, *shape) = int(expert[1]), stored.shape
        if number >= count:
            raise CheckpointError(
                f"tensor {stored.name!r} has {count} experts, and no expert {number}"
            )
        nbytes = byte_length(stored.dtype, shape)
        offset = stored.offset + number * nbytes
        stored = replace(stored, shape=tuple(shape), offset=offset, nbytes=nbytes)
    if stored.shape != info.shape and math.prod(stored.shape) != math.prod(info.shape):
        raise CheckpointError(
            f"tensor {gguf_name!r} is {list(stored.shape)}; {name!r} of {like.identity} is "
            f"{list(info.shape)}"
        )
    return stored


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
