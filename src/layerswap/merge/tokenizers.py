"""Compares tokenizers, and aligns embeddings and heads to one vocabulary, token by token."""

from __future__ import annotations

import filecmp
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, cast

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.checkpoint.vocabulary import read_vocabulary, vocabulary_of
from layerswap.compose.recipe import Recipe
from layerswap.ground.errors import MergeError, RecipeError
from layerswap.ground.strict_json import read_source
from layerswap.ground.types import counted

RAW_FILES = (
    "tokenizer.model", "sentencepiece.bpe.model", "spiece.model", "vocab.json", "merges.txt",
    "vocab.txt",
)  # fmt: skip
"""Files that define a vocabulary without a `tokenizer.json`."""
TEMPLATES = "additional_chat_templates"
"""The folder of a tokenizer's chat templates besides the default."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
TOKEN_ID = re.compile(r"_token_(?:id|ids|index)$")
"""Matches the keys of token ids in a configuration."""
VOCABULARY_SIZES = ("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input")
AFFIXES = ("continuing_subword_prefix", "end_of_word_suffix")
COMPONENTS = ("normalizer", "pre_tokenizer", "model")
"""Parts of `tokenizer.json` that decide the tokens of a text."""


def differences(checkpoints: Mapping[str, Checkpoint]) -> str | None:
    """Describe the first difference between two tokenizers; None if all are equal."""
    known = [(name, c.folder) for name, c in checkpoints.items() if _files(c.folder)]
    for name, folder in known[1:]:
        if difference := _difference(known[0][1], folder):
            return f"tokenizers of {known[0][0]} and {name} differ: {difference}"
    return None


def tokenizer_notes(checkpoints: Mapping[str, Checkpoint], owner: Checkpoint) -> list[str]:
    """Notes on tokenizers that are missing, or whose templates or special tokens differ."""
    folders = {n: folder for n, c in checkpoints.items() if (folder := c.tokenizer_folder)}
    without = [name for name, folder in folders.items() if not _files(folder)]
    notes = [
        f"{name} has no tokenizer; its rows are assumed to have the others' tokens"
        for name in without
        if len(without) < len(checkpoints)
    ]
    folders = {name: folder for name, folder in folders.items() if name not in without}
    known = [(name, text) for name, folder in folders.items() if (text := _template(folder))]
    other = next((name for name, text in known if text != known[0][1]), None)
    # As they are copied: files come from the first checkpoint with a vocabulary.
    giver = owner if _files(owner.folder) else checkpoints.get(next(iter(folders), ""), owner)
    writer = owner if _template(owner.folder) else giver
    if known and not _template(writer.folder):
        notes.append(
            f"{known[0][0]} has a chat template; the output has none, as {writer.identity} has none"
        )
    elif other is not None:
        pair = f"{known[0][0]} and {other}"
        notes.append(f"the chat templates of {pair} differ; the output uses {writer.identity}'s")
    settings = {name: _settings(folder) for name, folder in folders.items()}
    for key in SPECIAL_TOKENS:
        given = {name: known.get(key) for name, known in settings.items()}
        texts = {n: t.get("content") if isinstance(t, dict) else t for n, t in given.items()}
        if len(set(map(repr, texts.values()))) > 1:
            each = ", ".join(f"{text!r} in {name}" for name, text in texts.items())
            notes.append(f"{key} is {each}; the output uses {giver.identity}'s")
    return notes


def token_id_notes(checkpoints: Mapping[str, Checkpoint], owner: Checkpoint) -> Iterator[str]:
    """Notes on ids that differ and that a model computes with, such as of padding in XLM-R."""
    keys = {key for c in checkpoints.values() for key in c.config if TOKEN_ID.search(key)}
    for key in sorted(keys - {"bos_token_id", "eos_token_id"}):
        ids = {
            n: number for n, c in checkpoints.items() if (number := c.config.get(key)) is not None
        }
        if len(set(map(str, ids.values()))) > 1 and not (key == "pad_token_id" and owner.writes):
            each = ", ".join(f"{number} in {name}" for name, number in ids.items())
            yield f"{key} is {each}; the output uses {owner.identity}'s"


def _settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json_object(path) if path.is_file() else {}


def _template(folder: Path) -> str | None:
    """The chat templates: of files, otherwise of the tokenizer's configuration, also a list."""
    files = [*folder.glob("chat_template.jinja"), *sorted(folder.glob(f"{TEMPLATES}/*.jinja"))]
    if files:
        return b"".join(map(read_source, files)).decode("utf-8", errors="replace")
    given = _settings(folder).get("chat_template")
    if isinstance(given, str):
        return given
    return json.dumps(given) if given else None


def _difference(first: Path, second: Path) -> str | None:
    paths = first / "tokenizer.json", second / "tokenizer.json"
    if all(path.is_file() for path in paths):
        # Equal files are not parsed: 262,144 tokens take seconds.
        return None if filecmp.cmp(*paths, shallow=False) else _json_difference(*paths)
    files = _files(first), _files(second)
    common = [file for file in files[0] if file in files[1]]
    if not common:
        return f"{files[0][0]} and {files[1][0]} cannot be compared"
    for file in common:
        if (first / file).read_bytes() != (second / file).read_bytes():
            return f"{file} is not the same"
    return None


def _files(folder: Path) -> list[str]:
    return [file for file in ("tokenizer.json", *RAW_FILES) if (folder / file).is_file()]


def _json_difference(*paths: Path) -> str | None:
    first, second = (read_json_object(path) for path in paths)
    a, b = vocabulary_of(first, paths[0]), vocabulary_of(second, paths[1])
    if a != b:
        return _tokens_differ(a, b)
    if any(first.get(component) != second.get(component) for component in COMPONENTS):
        first, second = (_by_function(_canonical(each)) for each in (first, second))
    for component in COMPONENTS:
        if first.get(component) != second.get(component):
            return f"the {component.replace('_', '-')} is not the same"
    return None


def _tokens_differ(a: dict[str, int], b: dict[str, int]) -> str:
    changed = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))

    def number(token: str, ids: dict[str, int]) -> str:
        return f"id {ids[token]}" if token in ids else "missing"

    examples = ", ".join(f"{t!r} is {number(t, a)} and {number(t, b)}" for t in changed[:3])
    return f"{counted(len(changed), 'token')} of {len(a)} and {len(b)} ({examples})"


def _canonical(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Convert a tokenizer to the present format; older libraries wrote merges differently."""
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_str(json.dumps(tokenizer)).to_str()
    except Exception:  # compared unchanged if the library cannot read it
        return tokenizer
    return cast("dict[str, Any]", json.loads(written))


def _by_function(part: Any) -> Any:
    """Return a tokenizer without settings that change no id: offsets, and empty affixes."""
    if isinstance(part, list):
        return [_by_function(each) for each in part]
    if not isinstance(part, dict):
        return part
    affixes = AFFIXES if part.get("type") == "BPE" else ()
    return {
        key: None if key in affixes and value == "" else _by_function(value)
        for key, value in part.items()
        if key != "trim_offsets"
    }


UNION = "union"
RowMap = tuple[tuple[str, int, int], ...]
"""Runs of rows: the checkpoint that has them, the first row, and their number."""


@dataclass(frozen=True)
class Alignment:
    """One vocabulary for all experts.

    Attributes:
        owner: the checkpoint whose tokenizer is written.
        size: rows of the embedding in the output.
        rows: for each checkpoint the sources of its rows in that vocabulary. Missing rows are
            copied from the first expert that has the token, so that a blend uses only experts
            that have it.
        deltas: the same for methods that take deltas. Missing rows are copied from the base, so
            that their delta is 0.
        added: tokens that the owner's tokenizer lacks, by the expert that has them, in the order
            of their new ids.
    """

    owner: str
    size: int
    rows: Mapping[str, RowMap]
    deltas: Mapping[str, RowMap]
    added: Mapping[str, tuple[str, ...]]

    def is_identity(self, name: str, count: int) -> bool:
        """True if a checkpoint's `count` rows stay unchanged."""
        return count == self.size and self.rows[name] == ((name, 0, count),)


def align(
    recipe: Recipe, checkpoints: Mapping[str, Checkpoint], base: Checkpoint | None
) -> Alignment | None:
    """Align the checkpoints to one vocabulary; None if they already share it.

    Refuses tokenizers that differ if the recipe chooses none: their embedding rows mean different
    things. A checkpoint without a tokenizer is assumed to use the others'.
    """
    sizes = {name: checkpoint.vocabulary_size for name, checkpoint in checkpoints.items()}
    one_size, difference = len(set(sizes.values())) == 1, differences(checkpoints)
    own = "language" if recipe.instruct and difference else None
    choice = chosen_tokenizer(recipe, own)
    compared = {} if one_size and not difference else checkpoints
    known = {n: ids for n, c in compared.items() if (ids := read_vocabulary(c.folder))}
    unread = next((n for n, c in compared.items() if n not in known and _files(c.folder)), None)
    if difference and unread:
        raise MergeError(
            f"{difference}; {unread} has no tokenizer.json to align rows by: save its tokenizer "
            "again with transformers"
        )
    if difference and all(sizes.values()):
        for name, ids in known.items():  # no choice mends tokens without rows
            _check_rows(name, ids, sizes[name])
    if difference and (choice is None or not all(sizes.values())):
        raise MergeError(
            f"{difference}; choose one with `tokenizer: task`, `language` or `union` (--tokenizer)"
        )
    if not all(sizes.values()) or (one_size and not difference):
        return None
    tokens = _vocabularies(known, sizes)
    if choice is None or not difference:
        return _padded(sizes)
    owner = recipe.experts_in_order[0] if choice == UNION else choice
    joined = [owner, *(name for name in checkpoints if choice == UNION and name != owner)]
    target, size, added = _union(joined, tokens, sizes[owner])
    experts = [name for name in checkpoints if checkpoints[name] is not base]
    bases = [name for name in checkpoints if name not in experts]
    rows = {
        name: _rows([name, *experts, *bases], owner, (target, size), tokens) for name in checkpoints
    }
    deltas = {
        name: _rows([name, *bases, *experts], owner, (target, size), tokens) for name in checkpoints
    }
    return Alignment(owner, size, rows, deltas, added)


def chosen_tokenizer(recipe: Recipe, default: str | None = None) -> str | None:
    """`union`, or the expert with a source that gives the tokenizer; None without a choice."""
    choice = recipe.tokenizer or default
    if choice is None or choice == UNION:
        return choice
    if choice not in recipe.experts:
        choice = getattr(recipe.method, choice, None)
    if not isinstance(choice, str) or choice not in recipe.experts:
        raise RecipeError(
            f"tokenizer: no expert {recipe.tokenizer!r}; write the name of an expert, or union"
        )
    if recipe.experts[choice].source is not None:
        return choice
    return str(recipe.flat_experts()[choice].experts[0])


def _padded(sizes: Mapping[str, int]) -> Alignment:
    """The alignment for one tokenizer and embeddings padded to different sizes."""
    owner = max(sizes, key=lambda name: sizes[name])
    rows: dict[str, RowMap] = {}
    for name, size in sizes.items():
        more = sizes[owner] - size
        rows[name] = ((name, 0, size), *([(owner, size, more)] if more else []))
    return Alignment(owner, sizes[owner], rows, rows, {})


def _vocabularies(
    known: Mapping[str, dict[str, int]], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Id of every token, per checkpoint."""
    vocabularies: dict[str, dict[str, int]] = {}
    for name, size in sizes.items():
        # Adapters and bases often have none; equal sizes are assumed to be equal tokens.
        like = name if name in known else next((n for n in known if sizes[n] == size), None)
        if like is None:
            rows = ", ".join(f"{count} rows in {owner}" for owner, count in sizes.items())
            raise MergeError(
                f"vocabularies differ: {rows}; {name} has no tokenizer.json to align its rows by"
            )
        _check_rows(name, known[like], size)
        vocabularies[name] = known[like]
    return vocabularies


def _check_rows(name: str, tokens: Mapping[str, int], size: int) -> None:
    """Refuse a tokenizer with tokens behind the last row of the embedding."""
    last = max(tokens.values(), default=-1)
    if last >= size:
        raise MergeError(
            f"{name} has {size} rows in its embedding, but its tokenizer has token {last}; "
            "save the model or the adapter with the rows of its new tokens (in PEFT "
            "`save_embedding_layers=True`), or give it the tokenizer of its base"
        )


def _union(
    names: Sequence[str], tokens: Mapping[str, Mapping[str, int]], size: int
) -> tuple[dict[str, int], int, dict[str, tuple[str, ...]]]:
    """Join the tokens of the first name (`size` rows), then new tokens of the others."""
    target = dict(tokens[names[0]])
    added: dict[str, tuple[str, ...]] = {}
    following = 1 + max(target.values(), default=-1)
    for name in names[1:]:
        ids = tokens[name]
        new = [token for token in sorted(ids, key=ids.__getitem__) if token not in target]
        target.update({token: following + i for i, token in enumerate(new)})
        following += len(new)
        if new:
            added[name] = tuple(new)
    return target, max(size, following), added


def _rows(
    order: Sequence[str],
    owner: str,
    target: tuple[Mapping[str, int], int],
    tokens: Mapping[str, Mapping[str, int]],
) -> RowMap:
    """Choose each target row's source: the first of `order` that has the token.

    Rows without a token are padding, taken from the owner.
    """
    vocabulary, size = target
    places: list[tuple[str, int]] = [(owner, row) for row in range(size)]
    for token, row in vocabulary.items():
        source = next(name for name in order if token in tokens[name])
        places[row] = (source, tokens[source][token])
    return tuple(_runs(places))


def _runs(places: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Neighbouring rows of one checkpoint as one run."""
    numbered = enumerate(places)
    for (name, _), group in groupby(numbered, key=lambda item: (item[1][0], item[1][1] - item[0])):
        rows = [row for _, (_, row) in group]
        yield name, rows[0], len(rows)


def add_tokens(folder: Path, alignment: Alignment, experts: Mapping[str, Checkpoint]) -> None:
    """Add the tokens that only other experts have to the tokenizer in `folder`.

    They become added tokens, which are matched before a text is split further. A token of a
    byte-level vocabulary is added as its text.
    """
    path = folder / "tokenizer.json"
    data = read_json_object(path)
    known_ids = vocabulary_of(data, path)
    entries, taken = list(data.get("added_tokens") or ()), set(known_ids)
    following = 1 + max(known_ids.values(), default=-1)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    for name, tokens in alignment.added.items():
        tokenizer = read_json_object(experts[name].folder / "tokenizer.json")
        known = {entry["content"]: entry for entry in tokenizer.get("added_tokens") or ()}
        for i, token in enumerate(tokens):
            entry = known.get(token) or {"content": _as_text(token, tokenizer), **plain}
            if entry["content"] in taken:
                raise MergeError(
                    f"tokenizers cannot be joined: the text of {token!r} of {name} is a token "
                    "already; choose one tokenizer"
                )
            entries.append({**entry, "id": following + i})
            taken.add(entry["content"])
        following += len(tokens)
    path.write_bytes(json.dumps({**data, "added_tokens": entries}, ensure_ascii=False).encode())


def _as_text(token: str, tokenizer: Mapping[str, Any]) -> str:
    """Decode a token of a byte-level vocabulary; other tokens are text already."""
    if "ByteLevel" not in json.dumps(tokenizer.get("decoder")):
        return token
    from tokenizers.decoders import ByteLevel

    text = str(ByteLevel().decode([token]))
    # Half of a character is no text, so its row is never looked up.
    return token if "\ufffd" in text else text
