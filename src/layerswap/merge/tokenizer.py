"""Whether two experts read text the same way, told from their tokenizer files alone."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.errors import MergeError

if TYPE_CHECKING:
    pass

RAW_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt",
)  # fmt: skip
"""Files that define a vocabulary where there is no `tokenizer.json`."""
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


def tokenizer_notes(checkpoints: Mapping[str, Checkpoint], owner: str) -> list[str]:
    """What to know of tokenizers that go together: one that is missing, chat templates that differ.

    Args:
        checkpoints: by the name to use.
        owner: whose tokenizer the output has.
    """
    without = [name for name, checkpoint in checkpoints.items() if not _files(checkpoint.folder)]
    notes = [
        f"{name} has no tokenizer; its rows are taken to be the same tokens as the others'"
        for name in without
        if len(without) < len(checkpoints)
    ]
    found = {name: _template(c.folder) for name, c in checkpoints.items()}
    known = [(name, text) for name, text in found.items() if text]
    other = next((name for name, text in known if text != known[0][1]), None)
    if other is not None:
        pair = f"{known[0][0]} and {other}"
        notes.append(f"the chat templates of {pair} differ; the output has that of {owner}")
    return notes


def read_vocabulary(checkpoint: Checkpoint) -> dict[str, int]:
    """Id of every token in `tokenizer.json`, added tokens included; empty without that file."""
    path = checkpoint.folder / "tokenizer.json"
    return vocabulary_of(read_json_object(path)) if path.is_file() else {}


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
        return _json_difference(read_json_object(paths[0]), read_json_object(paths[1]))
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
    from transformers import AutoTokenizer

    found: list[dict[str, int]] = []
    for folder in (first, second):
        try:
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            found.append(tokenizer.get_vocab())
        except Exception as error:  # whatever keeps it from being read keeps it from comparison
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            files = " and ".join(_files(one)[0] for one in (first, second))
            return f"{files} cannot be compared: {_files(folder)[0]} cannot be read ({reason})"
    return None if found[0] == found[1] else _tokens_differ(*found)


def _json_difference(first: dict[str, Any], second: dict[str, Any]) -> str | None:
    a, b = vocabulary_of(first), vocabulary_of(second)
    if a != b:
        return _tokens_differ(a, b)
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


def vocabulary_of(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Id of every token, added tokens included."""
    model = tokenizer.get("model")
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    if isinstance(vocab, list):  # Unigram: [token, score] pairs, the id is the position
        vocab = {pair[0]: i for i, pair in enumerate(vocab)}
    added = {entry["content"]: entry["id"] for entry in tokenizer.get("added_tokens", ())}
    return {**vocab, **added}


def _id(value: int | None) -> str:
    return "missing" if value is None else f"id {value}"
