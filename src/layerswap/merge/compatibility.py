"""Refuses checkpoints that do not fit together, by headers, configurations and tokenizer files."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from layerswap.checkpoint import Checkpoint, Place, read_json_object, text_config
from layerswap.checkpoint.places import pattern_advice
from layerswap.checkpoint.read import same_bytes, same_sample
from layerswap.checkpoint.remote import RemoteFile
from layerswap.checkpoint.strict_json import clipped
from layerswap.compose import Composition
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES
from layerswap.errors import CheckpointError, MergeError, visible

NOT_COMPUTED = frozenset(
    {
        "_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache", "auto_map",
        "bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_position_embeddings",
        "_attn_implementation", "attn_implementation", "_experts_implementation",
        "experts_implementation", "tie_word_embeddings", "vocab_size", "initializer_range",
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
    heads = _heads(reference) - drop
    if not heads and head != embedding:
        raise MergeError(
            f"the head cannot take {head} and the embedding {embedding}: they are one tensor "
            "here (tied); give both the same"
        )


def check_roles(composition: Composition, reference: Checkpoint) -> None:
    """Refuse a composition that tells roles apart where the tensors do not say theirs.

    Raises:
        MergeError: a tensor of unknown role, and what the composition would take for two roles.
    """
    if reference.numbered is None:
        return
    roleless = [name for name in reference.places if name in reference.numbered.roleless]
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
                    f"cannot tell the role of {len(roleless)} of {len(reference.places)} tensors, "
                    f"such as {name!r}, and the composition takes {first} for {roles[0]} and "
                    f"{other} for {role} {where}; {pattern_advice(name)}"
                )


def numbered_notes(reference: Checkpoint) -> list[str]:
    """What to know of layers that were told by their numbers: one line, or none."""
    if reference.numbered is None:
        return []
    stack, roleless = reference.numbered
    return [
        f"takes {stack!r}, the one list of {reference.layers}, for the layers; the roles of "
        f"{len(roleless)} of {len(reference.places)} tensors are not known, so layers are composed "
        "whole"
    ]


def tied_notes(composition: Composition, reference: Checkpoint, drop: frozenset[str]) -> list[str]:
    """What to know of a blended embedding that is the head as well: one line, or none."""
    roles = {name: place.role for name, place in reference.places.items()}
    head = _heads(reference) - drop
    embedding = composition[Place(None, "embedding")]
    if head or "embedding" not in roles.values() or len(embedding.experts) < 2:
        return []
    if reference.adapter is not None:
        return []  # An adapter leaves a tied embedding as it is in the base.
    return [
        "embedding and head are one tensor (tied), so the blend changes both what is read and what "
        "is written; compare it with --outside task"
    ]


def _check_itself(name: str, checkpoint: Checkpoint) -> None:
    """Refuse weights and a configuration that do not go together: nothing could load the output."""
    text, places = text_config(checkpoint.config), checkpoint.places
    writes = any("CausalLM" in str(c) for c in checkpoint.config.get("architectures") or ())
    headless = checkpoint.tensors and not _heads(checkpoint)
    roleless = checkpoint.numbered.roleless if checkpoint.numbered else ()
    if any(places[tensor].layer is None for tensor in roleless):
        return  # what is outside may be head and embedding under other names
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
                f"{lacks} lacks {some_tensors(missing)} that {has} has; they are not fine-tuned "
                "from one base"
            )
    rows = set(a.vocabulary_tensors) if aligned else set()
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
    heads = {name: _heads(checkpoint) for name, checkpoint in checkpoints.items()}
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


def _heads(checkpoint: Checkpoint) -> set[str]:
    """The matrices of the head; a tied head may have a bias of its own."""
    return {
        name
        for name, place in checkpoint.places.items()
        if place.role == "head"
        and (name not in checkpoint.tensors or len(checkpoint.tensors[name].shape) > 1)
    }


def _embeddings(checkpoint: Checkpoint) -> Iterable[Any]:
    """The embeddings, and what may be one under another name."""
    roleless = checkpoint.numbered.roleless if checkpoint.numbered else ()
    return (
        checkpoint.tensors[name]
        for name, place in checkpoint.places.items()
        if place.role == "embedding" or (name in roleless and place.layer is None)
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
    return visible(text if len(text) <= 60 else text[:57] + "...")


def some_tensors(names: Iterable[str]) -> str:
    """The first of some names of tensors, and how many more there are."""
    first, *rest = sorted(names)
    return f"{first!r}" + (f" and {len(rest)} more tensors" if rest else "")


RAW_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt",
)  # fmt: skip
"""Files that define a vocabulary where there is no `tokenizer.json`."""
LARGEST_VOCABULARY = 1 << 24
"""Ids are below this; tables as long as the largest id are made of them."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
COMPONENTS = ("normalizer", "pre_tokenizer", "model")
"""Parts of `tokenizer.json` that decide which tokens a text becomes."""


def check_tokenizers(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse experts whose tokenizers differ: their embedding rows mean different things.

    A checkpoint without a tokenizer is taken to use the others'.

    Raises:
        MergeError: how they differ, with the number of tokens and examples.
    """
    found = differences(checkpoints)
    if found:
        raise MergeError(
            f"{found}; say which the output has with `tokenizer: task`, `language` or `union` "
            "(--tokenizer)"
        )


def differences(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """How the tokenizers of the first two checkpoints that differ do so; None where none do."""
    seen: tuple[str, Path] | None = None
    for name, checkpoint in checkpoints.items():
        folder = checkpoint.folder
        if not _files(folder):
            continue
        if seen is None:
            seen = name, folder
            continue
        difference = _difference(seen[1], folder)
        if difference:
            more = "".join(f"; {text}" for text in _settings_differences(seen[1], folder))
            return f"tokenizers of {seen[0]} and {name} differ: {difference}{more}"
    return None


def tokenizer_notes(checkpoints: Mapping[str, Checkpoint], owner: Checkpoint) -> list[str]:
    """Notes on tokenizers that go together: one is missing, templates or special tokens differ.

    Args:
        checkpoints: by the name to use.
        owner: whose tokenizer the output has.
    """
    # A GGUF file has one in its metadata, which is compared when it is opened.
    without = [n for n, c in checkpoints.items() if c.gguf is None and not _files(c.folder)]
    notes = [
        f"{name} has no tokenizer; its rows are taken to be the same tokens as the others'"
        for name in without
        if len(without) < len(checkpoints)
    ]
    folders = {n: c.folder for n, c in checkpoints.items() if c.gguf is None and n not in without}
    known = [(name, text) for name, at in folders.items() if (text := _template(at))]
    other = next((name for name, text in known if text != known[0][1]), None)
    if other is not None:
        pair = f"{known[0][0]} and {other}"
        notes.append(
            f"the chat templates of {pair} differ; the output has that of {owner.identity}"
        )
    elif known and not _template(owner.folder):
        notes.append(
            f"{known[0][0]} has a chat template; the output has none, as {owner.identity} has none"
        )
    for key in SPECIAL_TOKENS:
        values = {name: _content(_settings(at).get(key)) for name, at in folders.items()}
        if len({repr(value) for value in values.values()}) > 1:
            said = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            notes.append(f"{key} is {said}; the output has that of {owner.identity}")
    return notes


SAMPLES, SAMPLE_BYTES = 4, 4096
"""Blocks of each tensor that are compared to find copies, and their length."""


def copy_notes(experts: Mapping[str, Checkpoint], base: Checkpoint | None) -> list[str]:
    """A line for every expert that is a copy of another one, or of the base.

    Compares a few blocks of every tensor, and stops at the first that differs. Of weights that are
    read in place it compares the hashes that the Hub says, and elsewhere the addresses.

    Args:
        experts: by name.
        base: what they were fine-tuned from.
    """
    notes = [
        f"{name} has the weights of its base: its training changed nothing"
        for name, expert in experts.items()
        if base is not None and same_weights(expert, base)
    ]
    names = list(experts)
    return notes + [
        f"{first} and {second} have the same weights: no composition of them changes anything"
        for position, first in enumerate(names)
        for second in names[position + 1 :]
        if same_weights(experts[first], experts[second])
    ]


def same_weights(first: Checkpoint, second: Checkpoint) -> bool:
    """True if two checkpoints hold the same tensors, by a few blocks of each."""
    one, other = (
        {info.name: info for low in c.low_rank.values() for info in (low.a, low.b)}
        if c.adapter is not None
        else c.tensors
        for c in (first, second)
    )
    if (first.adapter is None) != (second.adapter is None) or not one or one.keys() != other.keys():
        return False
    remote = [[f for f in c.files if isinstance(f, RemoteFile)] for c in (first, second)]
    if any(remote):
        # Elsewhere an ETag tells versions of one address apart, and may be of two the same.
        marks = [[file.etag if file.commit else file.url for file in files] for files in remote]
        return bool(marks[0]) and marks[0] == marks[1]
    return all(same_sample(one[name], other[name], SAMPLES, SAMPLE_BYTES) for name in one)


def read_vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Id of every token in `tokenizer.json`, added tokens included; empty without that file."""
    path = checkpoint.folder / "tokenizer.json"
    return vocabulary_of(path) if path.is_file() else {}


def _settings_differences(first: Path, second: Path) -> Iterator[str]:
    a, b = (_settings(folder) for folder in (first, second))
    for key in SPECIAL_TOKENS:
        if _content(a.get(key)) != _content(b.get(key)):
            yield f"{key} is {_content(a.get(key))!r} and {_content(b.get(key))!r}"
    if _template(first) != _template(second):
        yield "the chat templates differ"


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.is_file() else {}


def _content(token: object) -> object:
    return token.get("content") if isinstance(token, dict) else token


def _template(folder: Path) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8", errors="replace")
    found = _settings(folder).get("chat_template")
    return found if isinstance(found, str) else None


def _difference(first: Path, second: Path) -> str | None:
    paths = first / "tokenizer.json", second / "tokenizer.json"
    if all(path.is_file() for path in paths):
        # Files that are equal are not parsed: those of 262,144 tokens take seconds.
        return None if filecmp.cmp(*paths, shallow=False) else _json_difference(*paths)
    files = _files(first), _files(second)
    common = [file for file in files[0] if file in files[1]]
    if not common:
        return _loaded_difference(first, second)
    for file in common:
        if (first / file).read_bytes() != (second / file).read_bytes():
            return f"{file} is not the same"
    return None


def _files(folder: Path) -> list[str]:
    return [file for file in ("tokenizer.json", *RAW_FILES) if (folder / file).is_file()]


def _loaded_difference(first: Path, second: Path) -> str | None:
    """Of tokenizers in files of unlike kinds, as transformers reads them."""
    from layerswap.checkpoint.loading import load_tokenizer

    found: list[dict[str, int]] = []
    for folder in (first, second):
        try:
            found.append(load_tokenizer(folder).get_vocab())
        except Exception as error:  # whatever keeps it from being read keeps it from comparison
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            files = " and ".join(_files(one)[0] for one in (first, second))
            return f"{files} cannot be compared: {_files(folder)[0]} cannot be read ({reason})"
    return None if found[0] == found[1] else _tokens_differ(*found)


def _json_difference(*paths: Path) -> str | None:
    a, b = (vocabulary_of(path) for path in paths)
    if a != b:
        return _tokens_differ(a, b)
    first, second = (read_json_object(path) for path in paths)
    if all(first.get(component) == second.get(component) for component in COMPONENTS):
        return None
    first, second = _canonical(first), _canonical(second)
    for component in COMPONENTS:
        if first.get(component) != second.get(component):
            return f"the {component.replace('_', '-')} is not the same"
    return None


def _tokens_differ(a: dict[str, int], b: dict[str, int]) -> str:
    changed = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
    examples = ", ".join(
        f"{token!r} is {_id(a.get(token))} and {_id(b.get(token))}" for token in changed[:3]
    )
    return f"{len(changed)} tokens of {len(a)} and {len(b)} ({examples})"


def _canonical(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer as today's library writes it: older ones wrote merges another way."""
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_str(json.dumps(tokenizer)).to_str()
    except Exception:  # what the library cannot read is compared as it stands
        return tokenizer
    return cast("dict[str, Any]", json.loads(written))


def vocabulary_of(path: Path) -> dict[str, int]:
    """Id of every token in a `tokenizer.json`, added tokens included.

    Raises:
        CheckpointError: the file cannot be read, or something in it is no token with an id.
    """
    tokenizer = read_json_object(path)
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    try:
        if "model" in tokenizer and not isinstance(model, dict):
            raise TypeError
        if isinstance(vocab, list):  # Unigram: [token, score] pairs, the id is the position
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        added = {one["content"]: one["id"] for one in tokenizer.get("added_tokens") or ()}
        found: dict[str, int] = {**vocab, **added}
        every = [*vocab.items(), *added.items()]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: its tokens are not texts with ids") from None
    for token, number in every:
        known = isinstance(token, str) and type(number) is int
        if not known or not 0 <= number < LARGEST_VOCABULARY:
            shown = clipped(f"{token!r} is {number!r}")
            raise CheckpointError(f"{path}: its tokens are not texts with ids ({shown})")
    return found


def _id(value: int | None) -> str:
    return "missing" if value is None else f"id {value}"
