"""Refuses checkpoints that do not fit together, by their headers and configurations."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

from layerswap.checkpoint import Checkpoint, Place, TensorInfo, text_config
from layerswap.checkpoint.configuration import encoder_layers
from layerswap.checkpoint.loading import missing_tensors
from layerswap.checkpoint.names import in_layers, loaded, needed_starts, start_of, with_text
from layerswap.checkpoint.places import HEAD, pattern_advice
from layerswap.checkpoint.read import equal_anywhere, first_floats, same_sample
from layerswap.checkpoint.remote import RemoteFile
from layerswap.compose.blend import Operation
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES, Composition
from layerswap.ground.errors import MergeError, shortened
from layerswap.ground.strict_json import INFINITIES
from layerswap.merge.tokenizers import TOKEN_ID, VOCABULARY_SIZES

OFF_IF_NONE = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
"""Settings that None turns off. In others, None may mean a value derived from another setting."""
NOT_COMPUTED = frozenset(
    {
        "architectures", "_name_or_path", "transformers_version", "torch_dtype", "dtype",
        "use_cache", "auto_map",
        "max_length", "max_position_embeddings",
        "_attn_implementation", "attn_implementation", "_experts_implementation",
        "experts_implementation", "tie_word_embeddings", *VOCABULARY_SIZES, "initializer_range",
        "text_config", "id2label", "label2id", "num_labels", "problem_type", "pretraining_tp",
        "output_router_logits", "router_aux_loss_coef", "unsloth_version", "unsloth_fixed",
        "gradient_checkpointing", "output_attentions", "output_hidden_states", "return_dict",
        "torchscript", "chunk_size_feed_forward", "finetuning_task", "prefix", "tokenizer_class",
        "task_specific_params", "remove_invalid_values", "use_bfloat16", "pruned_heads",
        "model_max_length", "tokenizer_model_max_length", "temperature", "top_k", "top_p",
        "do_sample", "num_beams", "repetition_penalty", "max_new_tokens", "min_length",
        "num_nextn_predict_layers", "mtp_num_hidden_layers", "quantization_config", "name",
        "use_flash_attn", "_flash_attn_2_enabled", "keys_to_ignore_at_inference",
        "rope_theta", "rope_parameters", "rope_scaling", "rope_local_base_freq",
    }
)  # fmt: skip
"""Configuration keys that may differ: they do not change what a layer computes, or are checked
in another way. Keys of dropout, which only training uses, may differ too, and ids of tokens."""

WINDOWS = {"sliding_window", "max_window_layers"}
"""Settings without effect under `use_sliding_window: false`; models of Qwen differ in them."""
FUSED, ONE_BY_ONE = re.compile(r"\.experts\.[a-z]"), re.compile(r"\.experts\.\d+\.")
"""Names of a mixture's experts, as one tensor for all or as tensors of each."""


def check_together(
    checkpoints: Mapping[str, Checkpoint], *, aligned: bool = False
) -> tuple[dict[str, Checkpoint], frozenset[str]]:
    """Refuse checkpoints of one architecture that were not fine-tuned from one base.

    Compares the names and shapes of all tensors; `aligned` vocabularies may differ in rows.
    Returns the checkpoints with one kind of head, and the heads to leave out of the output, which
    are stored copies of embeddings.
    """
    placed = _placed(checkpoints)
    first, *others = placed
    placed, drop = _in_one_tie(placed)
    for other in others:
        _check_tensors({name: placed[name] for name in (first, other)}, drop, aligned=aligned)
    return {**checkpoints, **placed}, drop


def check_architecture(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse checkpoints with another architecture than the first's, or with other settings.

    Compares the number of layers, and the settings that change what a layer computes.
    """
    placed = _placed(checkpoints)
    first, *others = placed
    for other in others:
        placed[first].check_beside(first, placed[other], other)
    for name, checkpoint in placed.items():
        checkpoint.check(name)
    for other in others:
        _check_settings({name: placed[name] for name in (first, other)})


def _placed(checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """The checkpoints with weights here; of a base without, only the configuration is known."""
    return {name: checkpoint for name, checkpoint in checkpoints.items() if checkpoint.places}


def check_complete(checkpoint: Checkpoint) -> None:
    """Refuse weights that lack tensors of their class: transformers would fill them at random.

    Names that differ from those of the class are a reason to ask transformers, which takes seconds.
    """
    config, needed = checkpoint.config, needed_starts(checkpoint.config)
    known = loaded((n for n, p in checkpoint.places.items() if p.role != "other"), config)
    if checkpoint.quantised or not needed or not known:
        return
    layers: dict[int | None, set[str]] = {}
    for name in known:
        layers.setdefault(checkpoint.places[name].layer, set()).add(start_of(name))
    kinds = {frozenset(starts) for layer, starts in layers.items() if layer is not None}
    uneven = any(one < other for one in kinds for other in kinds)
    if all(known.values()) and not uneven and needed <= set().union(*layers.values()):
        return
    missing = missing_tensors(config, {n: i.shape for n, i in checkpoint.tensors.items()})
    lost = [name for name in missing or () if in_layers(name) or start_of(name) in needed]
    none = missing is None and not any(known[name] for name in filter(in_layers, known))
    if lost or none:
        other = next((name for name, has in known.items() if not has), None)
        remedy = f"convert names such as {other!r} to those of transformers" if other else (
            "export or download the checkpoint again"
        )  # fmt: skip
        raise MergeError(
            f"{checkpoint.source}: lacks {some_tensors(lost) if lost else 'all layers'} of "
            f"{checkpoint.class_name}, which transformers would fill at random; {remedy}"
        )


def check_tied(composition: Composition, reference: Checkpoint, drop: frozenset[str]) -> None:
    """Refuse different sources for head and embedding if both are one tensor."""
    head, embedding = composition[HEAD], composition[Place(None, "embedding")]
    if head != embedding and _reads_embedding(reference, drop):
        raise MergeError(
            f"the head cannot take {head} and the embedding {embedding}: they are one tensor "
            "here (tied); give both the same"
        )


def check_roles(composition: Composition, reference: Checkpoint) -> None:
    """Refuse a composition that separates roles if the roles of some tensors are unknown."""
    if reference.numbered is None:
        return
    roleless = [name for name in reference.places if name in reference.roleless]
    # One tensor of each layer, and one outside: thousands of others say the same.
    one_of = {reference.places[name].layer: name for name in reversed(roleless)}
    for layer, name in reversed(one_of.items()):
        roles = OUTSIDE_ROLES if layer is None else LAYER_ROLES
        first = composition[Place(layer, roles[0])]
        for role in roles[1:]:
            other = composition[Place(layer, role)]
            if other != first:
                where = "outside the layers" if layer is None else f"in layer {layer}"
                raise MergeError(
                    f"the roles of {len(roleless)} of {len(reference.places)} tensors are unknown, "
                    f"such as {name!r}, and the composition takes {first} for {roles[0]} and "
                    f"{other} for {role} {where}; {pattern_advice(name)}"
                )


def numbered_notes(reference: Checkpoint) -> list[str]:
    """A note on layers that were identified by their numbers alone."""
    if reference.numbered is None:
        return []
    stack, roleless = reference.numbered.stack, reference.roleless
    return [
        f"takes {stack!r}, the only list of {reference.layers}, for the layers; the roles of "
        f"{len(roleless)} of {len(reference.places)} tensors are unknown, so layers are composed "
        "whole"
    ]


def stack_notes(reference: Checkpoint) -> list[str]:
    """A note on the order of the layers of an encoder-decoder."""
    encoder = encoder_layers(reference.config)
    if not encoder:
        return []
    return [
        f"layers 0 to {encoder - 1} are the encoder's, {encoder} to {reference.layers - 1} the "
        "decoder's: bottom layers are at the encoder's input, top layers at the decoder's output"
    ]


def tied_notes(
    composition: Composition, reference: Checkpoint, drop: frozenset[str], equal: Collection[str]
) -> list[str]:
    """A note on a blended embedding that is the head too; `equal` are the tensors not blended."""
    blended = {place.role for name, place in reference.places.items() if name not in equal}
    embedding = composition[Place(None, "embedding")]
    if "embedding" not in blended or len(embedding.experts) < 2:
        return []
    # An adapter does not change the base's tied embedding.
    if reference.needs_base or not _reads_embedding(reference, drop):
        return []
    return [
        "embedding and head are one tensor (tied), so the blend changes both input and output; "
        "compare it with --outside language"
    ]


def sum_notes(composition: Composition) -> list[str]:
    """A note on weights of `linear`, which is no average unless they add up to 1."""
    members = (member for blend in composition.blends.values() for member in blend.members)
    linear = (m for m in members if isinstance(m, Operation) and m.method == "linear")
    sums = {sum(weight for _, weight in operation.inputs) for operation in linear}
    return [
        f"the weights of linear add up to {total:g}: for an average, give weights of 1 in all, "
        "or a soup"
        for total in sums
        if not math.isclose(total, 1)
    ][:1]


def _reads_embedding(checkpoint: Checkpoint, drop: frozenset[str]) -> bool:
    """True if the head is the embedding; base models and classifiers have no such head."""
    return not (checkpoint.heads - drop or checkpoint.labelled or checkpoint.headless)


def _check_settings(pair: Mapping[str, Checkpoint]) -> None:
    for key, values, given in _compared(pair):
        if values and values[0] != values[1] and (None not in values or key in OFF_IF_NONE):
            texts = [shortened(value) for value in values]
            if texts[0] == texts[1]:  # a number and its digits
                texts = [json.dumps(value) for value in values]
            each = ", ".join(
                f"{text}{'' if known else ' by default'} in {name}"
                for name, text, known in zip(pair, texts, given, strict=True)
            )
            raise MergeError(f"{key} differs: {each}{_remedy(pair, key, values, given)}")


def _remedy(
    pair: Mapping[str, Checkpoint], key: str, values: Sequence[Any], given: Sequence[bool]
) -> str:
    configs = {name: text_config(checkpoint.config) for name, checkpoint in pair.items()}
    if key == "model_type" and {c.get("model_type") for c in configs.values()} < {*values}:
        return "; save the multimodal one's model.language_model by itself, and give that"
    if lost := [name for name, known in zip(pair, given, strict=True) if not known]:
        return f"; if {lost[0]} was trained with it, add it to its config.json"
    if any(key in rope_settings(config) for config in configs.values()):
        both = (n for n, c in configs.items() if c.get("rope_parameters") and c.get("rope_scaling"))
        read = "".join(f"; {n} gives rope_scaling, which changes its rope_parameters" for n in both)
        return f"{read}; if both were trained with one RoPE, give it in both config.json"
    return ""


def _compared(pair: Mapping[str, Checkpoint]) -> Iterator[tuple[str, list[Any], list[bool]]]:
    """Each setting of two checkpoints: its key, both values, and which of them are given.

    If the files differ, the values are those that transformers reads from them, with the defaults
    of its class. Without them, a setting that only one file gives has no values.
    """
    texts = [[*_settings(checkpoint)] for checkpoint in pair.values()]
    read = _filled(pair) if texts[0][1:] != texts[1][1:] else []
    for kind, settings in enumerate(zip(*texts, strict=True)):
        known = [each[kind] for each in read] if kind else []
        for key in {key: None for each in (*settings, *known) for key in each}:
            given = [each.get(key) is not None for each in settings]
            values = [_number(each.get(key)) for each in known or settings]
            yield key, [] if kind and not known and given[0] != given[1] else values, given


def _filled(pair: Mapping[str, Checkpoint]) -> list[list[dict[str, Any]]]:
    """The settings with their classes' defaults; empty if those are unknown."""
    configs = [checkpoint.filled for checkpoint in pair.values()]
    views = zip(pair.values(), configs, strict=True)
    return [[*_settings(replace(c, config=full))] for c, full in views if full and all(configs)]


def default_notes(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Note the settings that only one configuration gives, if their defaults are unknown."""
    first, *others = checkpoints
    for other in others:
        pair = {name: checkpoints[name] for name in (first, other)}
        keys = [key for key, values, _ in _compared(pair) if not values]
        if keys:
            return [
                f"only one of {first} and {other} gives {', '.join(keys)}, and the default is not "
                "known without transformers' class; not compared"
            ]
    return []


def _number(value: Any) -> Any:
    """Read numbers as transformers 5 writes them, `{"__float__": "Infinity"}`, without versions."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    if isinstance(value, dict) and value.keys() == {"__float__"}:
        return INFINITIES.get(value["__float__"], value)
    if isinstance(value, dict) and "version" in value:  # of sentence-transformers
        return {key: entry for key, entry in value.items() if key != "version"} or None
    return value


def _settings(checkpoint: Checkpoint) -> Iterator[dict[str, Any]]:
    """Settings that change what a layer computes: of the model, of its text part, and of RoPE."""
    config, text = checkpoint.config, text_config(checkpoint.config)
    yield {"model_type": config.get("model_type"), "number of layers": checkpoint.layers}
    unused = NOT_COMPUTED | (WINDOWS if text.get("use_sliding_window") is False else set())
    keys = (key for key in sorted(text.keys() - unused) if not TOKEN_ID.search(key))
    yield {key: text[key] for key in keys if "drop" not in key}
    yield dict(sorted(rope_settings(text).items()))


def _check_tensors(pair: Mapping[str, Checkpoint], drop: frozenset[str], *, aligned: bool) -> None:
    (a_name, a), (b_name, b) = pair.items()
    extra = a.tensors.keys() - b.tensors.keys(), b.tensors.keys() - a.tensors.keys()
    _check_fused(a_name, extra[0], b_name, extra[1])
    _check_fused(b_name, extra[1], a_name, extra[0])
    for has, lacks, names in ((a_name, b_name, extra[0]), (b_name, a_name, extra[1])):
        if missing := names - drop:
            raise MergeError(
                f"{lacks} lacks {some_tensors(missing)} that {has} has; they are not one model"
            )
    rows = set(a.vocabulary_tensors) if aligned else set()
    drop |= {*a.vocabulary_rows} - rows if aligned else set()
    for name, info in a.tensors.items():
        skip = 1 if name in rows else 0
        if name not in drop and info.shape[skip:] != b.tensors[name].shape[skip:]:
            shapes = f"{list(info.shape)} in {a_name}, {list(b.tensors[name].shape)} in {b_name}"
            kind = "vocabularies" if a.places[name].role in ("embedding", "head") else "shapes"
            raise MergeError(f"{kind} differ: {name!r} is {shapes}")


def _nearest(a: Checkpoint, b: Checkpoint) -> tuple[str, float] | None:
    """Find the most similar of some matrices of the layers: its name and relative distance.

    None for weights that are read in place, and without common matrices of numbers.
    """
    others = dict(b.matrices())
    common = [n for n, i in a.matrices() if n in others and others[n].shape == i.shape]
    distances = {}
    for name in [] if a.in_place or b.in_place else common[:: max(1, len(common) // SAMPLES)]:
        size = min(a.tensors[name].elements, SAMPLE_ELEMENTS)
        first, second = (_first_elements(checkpoint, name, size) for checkpoint in (a, b))
        if norm := math.hypot(*second):
            distances[name] = math.dist(first, second) / norm
    return min(distances.items(), key=lambda pair: pair[1], default=None)


def _first_elements(checkpoint: Checkpoint, name: str, size: int) -> Sequence[float]:
    """Read the first elements of a tensor; a copy imports no numpy, so plain tensors need none."""
    info = checkpoint.tensors[name]
    if type(info) is TensorInfo and name not in checkpoint.low_rank:
        return first_floats(info, size)
    elements: list[float] = checkpoint.elements(name, 0, size).tolist()
    return elements


def origin_notes(checkpoints: Mapping[str, Checkpoint]) -> list[str]:
    """Note checkpoints that differ from the first one by more than fine-tuning explains."""
    first, *others = checkpoints
    pairs = ((other, _nearest(checkpoints[other], checkpoints[first])) for other in others)
    return [
        f"{first} and {other} are not fine-tuned from one base ({pair[0]!r} differs by "
        f"{pair[1]:.0%} of its norm), so a merge of them seldom works"
        for other, pair in pairs
        if pair is not None and pair[1] > FARTHEST
    ]


def _check_fused(name: str, extra: set[str], other: str, others: set[str]) -> None:
    """Refuse to mix fused experts (one tensor) with experts stored one by one."""
    fused = sorted(filter(FUSED.search, extra))
    if fused and any(map(ONE_BY_ONE.search, others)):
        raise MergeError(
            f"{name} stores its mixture's experts as one tensor ({fused[0]!r}) and {other} one by "
            "one; give both in one form"
        )


def _in_one_tie(
    checkpoints: dict[str, Checkpoint],
) -> tuple[dict[str, Checkpoint], frozenset[str]]:
    """Return the checkpoints with one kind of head, and the heads to leave out of the output.

    If training untied one checkpoint, each tied checkpoint gets a copy of its embedding as head. If
    all heads are such copies, they are left out.
    """
    full = {
        name: c
        for name, c in checkpoints.items()
        if any(c.embeddings) and not (c.only_matrix and c.places[c.only_matrix] == HEAD)
    }
    heads = frozenset(head for c in full.values() for head in c.heads)
    tied = [name for name, c in full.items() if not c.heads or c.tied]
    if not tied:
        return checkpoints, frozenset()
    own = [name for name, c in full.items() if not _has_copy(c)]
    if not own:
        return checkpoints, heads
    name = next((name for name in own if name in tied), own[0])
    if name in tied or len(heads) > 1:
        said = f"{name} has a head of its own ({min(full[name].heads)!r})"
        raise MergeError(
            f"{said} but the config of {name} ties it to the embedding; set tie_word_embeddings to "
            "false if the head is meant"
            if name in tied
            else f"{said} but {tied[0]} ties its head to the embedding; they are not fine-tuned "
            "from one base"
        )
    (head,) = heads
    return {**checkpoints, **{n: _untied(full[n], head, name) for n in tied}}, frozenset()


def _has_copy(checkpoint: Checkpoint) -> bool:
    """True if the stored heads are copies of an embedding."""
    stored = [checkpoint.tensors[head] for head in checkpoint.heads]
    # Read in place, a head of its own shows in a sample: training changes all of its rows.
    equal = partial(same_sample, blocks=SAMPLED_BLOCKS) if checkpoint.in_place else equal_anywhere
    return all(any(equal(h, e) for e in checkpoint.embeddings) for h in stored)


def _untied(checkpoint: Checkpoint, head: str, other: str) -> Checkpoint:
    embedding = next(iter(checkpoint.embeddings))
    given = {} if checkpoint.heads else {head: replace(embedding, name=head)}
    note = f"its head is tied to the embedding, unlike {other}'s; it gets a copy of its embedding"
    own = {"tie_word_embeddings": False}
    return replace(
        checkpoint,
        config={**with_text(checkpoint.config, own), **own},
        tensors={**checkpoint.tensors, **given},
        places={**checkpoint.places, **dict.fromkeys(given, HEAD)},
        notes=(*checkpoint.notes, note),
    )


def rope_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of RoPE, flat, from a configuration of transformers 4 or 5.

    If layers differ in kind, settings of full attention have the bare names. As in transformers,
    `rope_scaling` replaces `rope_parameters`, or changes those of full attention.
    """
    kinds, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    if kinds and all(isinstance(settings, dict) for settings in kinds.values()):
        kinds = {**kinds, "full_attention": {**kinds.get("full_attention", {}), **scaling}}
    elif kinds and not scaling:
        kinds = {"full_attention": kinds}
    else:
        local = config.get("rope_local_base_freq")
        full = {"rope_theta": config.get("rope_theta"), **scaling}
        kinds = {"full_attention": full, "sliding_attention": {"rope_theta": local}}
    flat: dict[str, Any] = {}
    for kind, settings in kinds.items():
        prefix = "" if kind == "full_attention" else f"{kind} "
        typed = {"rope_type": settings.get("type") or "default", **settings}
        flat.update({prefix + key: value for key, value in typed.items() if key != "type"})
    return flat


def some_tensors(names: Iterable[str]) -> str:
    """Name the first of some tensors, and count the others."""
    first, *rest = sorted(names)
    return f"{first!r}" + (f" and {len(rest)} more tensors" if rest else "")


SAMPLE_ELEMENTS, FARTHEST = 1 << 13, 1.2
"""Elements of a sampled matrix, and the largest relative distance of fine-tuning: independent
matrices differ by 141%, and the sampled deltas of full fine-tuning by a few percent."""
SAMPLES = 4
"""Number of matrices that are compared."""
SAMPLED_BLOCKS = 16
"""Blocks of a head on the Hub that are compared with the embedding, the first and the last among
them: rows of new tokens are the last."""


def copy_notes(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> list[str]:
    """A note for every expert that is a copy of another one, or of the base."""
    notes = [
        f"{name} has the weights of its base: its training changed nothing"
        for name, expert in experts.items()
        if base is not None and same_weights(expert, base)
    ]
    return notes + [
        f"{first} and {second} have the same weights: no composition of them changes anything"
        for first, second in combinations(experts, 2)
        if same_weights(experts[first], experts[second])
    ]


def zero_notes(experts: Mapping[str, Checkpoint]) -> list[str]:
    """Note adapters of zeros, and each expert's first matrix of zeros."""
    found = {name: expert.zeros() for name, expert in experts.items() if not expert.in_place}
    return [f"{name} {note}" for name, note in found.items() if note]


def same_weights(first: Checkpoint, second: Checkpoint) -> bool:
    """True if two checkpoints hold the same tensors.

    Compares a few blocks of every tensor, or the Hub's hashes of weights that are read in place.
    """
    tensors = first.own, second.own
    if not tensors[0] or tensors[0].keys() != tensors[1].keys():
        return False
    hashes = [[f.etag for f in c.files if isinstance(f, RemoteFile)] for c in (first, second)]
    if any(hashes):
        return hashes[0] == hashes[1]
    pairs = ((info, tensors[1][name]) for name, info in tensors[0].items())
    return all(same_sample(*pair) for pair in pairs)
