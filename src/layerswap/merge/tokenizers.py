"""Compares the tokenizers of checkpoints, by their files."""

from __future__ import annotations

import filecmp
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.checkpoint.strict_json import clipped
from layerswap.errors import CheckpointError, MergeError

RAW_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt",
)  # fmt: skip
"""Files that define a vocabulary without a `tokenizer.json`."""
LARGEST_VOCABULARY = 1 << 24
"""Bound on ids, because tables as long as the largest id are built."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
COMPONENTS = ("normalizer", "pre_tokenizer", "model")
"""Parts of `tokenizer.json` that decide the tokens of a text."""


def check_tokenizers(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse experts whose tokenizers differ: their embedding rows mean different things.

    A checkpoint without a tokenizer is assumed to have that of the others.
    """
    difference = differences(checkpoints)
    if difference:
        raise MergeError(
            f"{difference}; choose one with `tokenizer: task`, `language` or `union` (--tokenizer)"
        )


def differences(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """The difference between the first two tokenizers that differ; None if all are equal."""
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
    """Notes on tokenizers that are missing, or whose templates or special tokens differ.

    Args:
        checkpoints: the checkpoints by their names in messages.
        owner: the checkpoint that gives the tokenizer.
    """
    # The tokenizer in a GGUF file's metadata is compared when the file is opened.
    without = [n for n, c in checkpoints.items() if c.gguf is None and not _files(c.folder)]
    notes = [
        f"{name} has no tokenizer; its rows are assumed to have the others' tokens"
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
            each = ", ".join(f"{value!r} in {name}" for name, value in values.items())
            notes.append(f"{key} is {each}; the output has that of {owner.identity}")
    return notes


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
    template = _settings(folder).get("chat_template")
    return template if isinstance(template, str) else None


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
    """The difference between tokenizers in files of different kinds, read by transformers."""
    from layerswap.checkpoint.loading import load_tokenizer

    vocabularies: list[dict[str, int]] = []
    for folder in (first, second):
        try:
            vocabularies.append(load_tokenizer(folder).get_vocab())
        except Exception as error:  # a tokenizer that cannot be read cannot be compared
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            files = " and ".join(_files(one)[0] for one in (first, second))
            return f"{files} cannot be compared: {_files(folder)[0]} cannot be read ({reason})"
    return None if vocabularies[0] == vocabularies[1] else _tokens_differ(*vocabularies)


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
    """The same tokenizer in the form of today's library; older ones wrote merges differently."""
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_str(json.dumps(tokenizer)).to_str()
    except Exception:  # compared unchanged if the library cannot read it
        return tokenizer
    return cast("dict[str, Any]", json.loads(written))


def vocabulary_of(path: Path) -> dict[str, int]:
    """Id of every token in a `tokenizer.json`, added tokens included."""
    tokenizer = read_json_object(path)
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    try:
        if "model" in tokenizer and not isinstance(model, dict):
            raise TypeError
        if isinstance(vocab, list):  # Unigram: [token, score] pairs, the id is the position
            vocab = {token: i for i, (token, _) in enumerate(vocab)}
        added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens") or ()}
        ids: dict[str, int] = {**vocab, **added}
        every = [*vocab.items(), *added.items()]
    except (TypeError, ValueError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: its tokens are not texts with ids") from None
    for token, number in every:
        known = isinstance(token, str) and type(number) is int
        if not known or not 0 <= number < LARGEST_VOCABULARY:
            shown = clipped(f"{token!r} is {number!r}")
            raise CheckpointError(f"{path}: its tokens are not texts with ids ({shown})")
    return ids


def _id(value: int | None) -> str:
    return "missing" if value is None else f"id {value}"


NORMAL = 1
"""The type of an ordinary token in `tokenizer.ggml.token_type`."""


def check_gguf_vocabulary(name: str, checkpoint: Checkpoint, like: Checkpoint) -> None:
    """Refuse a GGUF file whose tokens are not those of a `tokenizer.json`.

    Converters write unused, control and padding tokens in their own way. If the file does not mark
    them, one token in a hundred may differ.
    """
    assert checkpoint.gguf is not None, "only GGUF files are compared so"
    metadata, ids = checkpoint.gguf, read_vocabulary(like)
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not ids or not isinstance(tokens, list):
        return
    wrong = [t for t, i in ids.items() if i < len(tokens) and tokens[i] != t]
    kinds = metadata.get("tokenizer.ggml.token_type")
    known = isinstance(kinds, list) and len(kinds) == len(tokens)
    ordinary = [token for token in wrong if known and kinds[ids[token]] == NORMAL]
    if ordinary or len(wrong) > len(ids) // 100:
        token = min(ordinary or wrong, key=ids.__getitem__)
        raise MergeError(
            f"tokenizers of {name} and {like.identity} differ: token {ids[token]} is "
            f"{clipped(repr(tokens[ids[token]]), 40)} and {clipped(repr(token), 40)}"
        )
