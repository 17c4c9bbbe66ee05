"""Whether checkpoints fit together; everything that headers and JSON can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from layerswap.checkpoint import Checkpoint, Place, text_config
from layerswap.checkpoint.read import same_bytes
from layerswap.compose import Composition
from layerswap.errors import MergeError
from layerswap.merge.vocabulary import vocabulary_tensors

NOT_COMPUTED = frozenset(
    {
        "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_position_embeddings",
        "_attn_implementation", "tie_word_embeddings", "vocab_size", "initializer_range",
        "text_config", "id2label", "label2id", "num_labels", "problem_type", "pretraining_tp",
        "output_router_logits", "router_aux_loss_coef", "unsloth_version", "unsloth_fixed",
        "rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq",
    }
)  # fmt: skip
"""Configuration keys that may differ: they do not change what a layer computes, or are checked
in another way. So may those of dropout, which only training sees."""


def check_together(
    checkpoints: Mapping[str, Checkpoint], *, aligned: bool = False
) -> frozenset[str]:
    """Refuse checkpoints that were not fine-tuned from one base.

    Compares the architecture, the settings that change what a layer computes, the number of
    layers, and the names and shapes of all tensors.

    Args:
        checkpoints: two or more, by the name to use in messages.
        aligned: whether embeddings and heads are brought to one vocabulary, so that their
            numbers of rows may differ.

    Returns:
        Names of tensors to leave out of the output: heads that are stored copies of tied
        embeddings.

    Raises:
        MergeError: the first difference, naming both checkpoints.
    """
    names = list(checkpoints)
    for name, checkpoint in checkpoints.items():
        _check_itself(name, checkpoint)
    drop = _tied_heads(checkpoints)
    for other in names[1:]:
        pair = (names[0], checkpoints[names[0]]), (other, checkpoints[other])
        _check_configs(*pair)
        _check_tensors(*pair, drop, aligned=aligned)
    return drop


def check_tied(composition: Composition, reference: Checkpoint, drop: frozenset[str]) -> None:
    """Refuse a head from elsewhere than the embedding where both are one tensor.

    Raises:
        MergeError: what each of the two would take.
    """
    head, embedding = composition[Place(None, "head")], composition[Place(None, "embedding")]
    heads = {name for name, place in reference.places.items() if place.role == "head"} - drop
    if not heads and head != embedding:
        raise MergeError(
            f"the head cannot take {head} and the embedding {embedding}: they are one tensor "
            "here (tied); give both the same"
        )


def _check_itself(name: str, checkpoint: Checkpoint) -> None:
    """Refuse weights and a configuration that do not go together: nothing could load the output."""
    text, places = text_config(checkpoint.config), checkpoint.places
    writes = any("CausalLM" in str(c) for c in checkpoint.config.get("architectures") or ())
    headless = checkpoint.tensors and not any(p.role == "head" for p in places.values())
    if writes and headless and _tied(checkpoint.config) is False:
        raise MergeError(
            f"{name} has no head, but its config does not tie it to the embedding "
            "(tie_word_embeddings is false): the output's head would be random"
        )
    rows = {
        tensor: info.shape[0]
        for tensor, info in checkpoint.tensors.items()
        if places[tensor].role == "embedding" and len(info.shape) == 2
    }
    size = text.get("vocab_size")
    if rows and isinstance(size, int) and size not in rows.values():
        tensor, found = next(iter(rows.items()))
        raise MergeError(f"{name}: its config has vocab_size {size}, but {tensor!r} {found} rows")


def _check_configs(first: tuple[str, Checkpoint], second: tuple[str, Checkpoint]) -> None:
    (a_name, a), (b_name, b) = first, second
    for key in ("model_type", "architectures"):
        _same(key, a.config.get(key), b.config.get(key), a_name, b_name)
    _same("number of layers", a.layers, b.layers, a_name, b_name)
    a_text, b_text = text_config(a.config), text_config(b.config)
    for key in sorted((set(a_text) & set(b_text)) - NOT_COMPUTED):
        if "drop" not in key:
            _same(key, a_text[key], b_text[key], a_name, b_name)
    a_rope, b_rope = _rope(a_text), _rope(b_text)
    for key in sorted(set(a_rope) & set(b_rope)):
        _same(key, a_rope[key], b_rope[key], a_name, b_name)


def _check_tensors(
    first: tuple[str, Checkpoint],
    second: tuple[str, Checkpoint],
    drop: frozenset[str],
    *,
    aligned: bool,
) -> None:
    (a_name, a), (b_name, b) = first, second
    for lacks, has, missing in (
        (b_name, a_name, set(a.tensors) - set(b.tensors) - drop),
        (a_name, b_name, set(b.tensors) - set(a.tensors) - drop),
    ):
        if missing:
            raise MergeError(
                f"{lacks} lacks {_some(missing)} that {has} has; they are not fine-tuned from "
                "one base"
            )
    rows = set(vocabulary_tensors(a)) if aligned else set()
    for name, info in a.tensors.items():
        skip = 1 if name in rows else 0
        if name not in drop and info.shape[skip:] != b.tensors[name].shape[skip:]:
            shapes = f"{list(info.shape)} in {a_name}, {list(b.tensors[name].shape)} in {b_name}"
            kind = "vocabularies" if a.places[name].role in ("embedding", "head") else "shapes"
            raise MergeError(f"{kind} differ: {name!r} is {shapes}")


def _tied_heads(checkpoints: Mapping[str, Checkpoint]) -> frozenset[str]:
    """Heads that some checkpoint ties to its embedding, proven to be copies where stored."""
    # Of a base that only adapters are composed over, no tensor may be at hand.
    checkpoints = {name: c for name, c in checkpoints.items() if c.tensors}
    heads = {
        name: {t for t, place in c.places.items() if place.role == "head"}
        for name, c in checkpoints.items()
    }
    stored = set().union(*heads.values())
    if not stored:
        return frozenset()
    tied = [name for name, c in checkpoints.items() if not heads[name] or _tied(c.config)]
    if not tied:
        return frozenset()
    for name, checkpoint in checkpoints.items():
        for head in heads[name]:
            if not any(same_bytes(checkpoint.tensors[head], e) for e in _embeddings(checkpoint)):
                raise MergeError(
                    f"{name} has a head of its own ({head!r}) but the config of {name} ties it to "
                    "the embedding; set tie_word_embeddings to false if the head is meant"
                    if name in tied
                    else f"{name} has a head of its own ({head!r}) but {tied[0]} ties its head to "
                    "the embedding; they are not fine-tuned from one base"
                )
    return frozenset(stored)


def _tied(config: Mapping[str, Any]) -> Any:
    """What a configuration says of tying head and embedding; None where it does not."""
    return config.get("tie_word_embeddings", text_config(config).get("tie_word_embeddings"))


def _embeddings(checkpoint: Checkpoint) -> Iterable[Any]:
    return (
        checkpoint.tensors[name]
        for name, place in checkpoint.places.items()
        if place.role == "embedding"
    )


def _rope(config: Mapping[str, Any]) -> dict[str, object]:
    """The settings of RoPE, flat, whether transformers 4 or 5 wrote them.

    Where layers differ in kind, those of full attention have the bare names.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, dict):
        scaling = config.get("rope_scaling")
        parameters = {**(scaling if isinstance(scaling, dict) else {})}
        parameters["rope_theta"] = config.get("rope_theta")
        local = config.get("rope_local_base_freq")
        parameters = {"full_attention": parameters, "sliding_attention": {"rope_theta": local}}
    kinds = parameters if _nested(parameters) else {"full_attention": parameters}
    flat: dict[str, object] = {}
    for kind, settings in kinds.items():
        prefix = "" if kind == "full_attention" else f"{kind} "
        typed = {"rope_type": settings.get("type") or "default", **settings}
        flat.update({prefix + key: value for key, value in typed.items() if key != "type"})
    return flat


def _nested(parameters: Mapping[str, Any]) -> bool:
    return bool(parameters) and all(isinstance(value, dict) for value in parameters.values())


def _same(what: str, a: object, b: object, a_name: str, b_name: str) -> None:
    if a is not None and b is not None and a != b:
        raise MergeError(f"{what} differs: {_short(a)} in {a_name}, {_short(b)} in {b_name}")


def _short(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _some(names: set[str]) -> str:
    first = min(names)
    return f"{first!r}" + (f" and {len(names) - 1} more tensors" if len(names) > 1 else "")
