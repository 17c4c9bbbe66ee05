"""Aligns embeddings and heads to one vocabulary, token by token."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from layerswap.checkpoint import Checkpoint, read_json_object
from layerswap.checkpoint.places import pattern_advice
from layerswap.compose import Recipe
from layerswap.errors import MergeError, RecipeError
from layerswap.merge.tokenizers import (
    check_tokenizers,
    differences,
    read_vocabulary,
    vocabulary_of,
)

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
    """The alignment of the checkpoints to one vocabulary; None if they have one vocabulary.

    Tokenizers that differ are a MergeError if the recipe chooses none, or without the
    `tokenizer.json` that rows are aligned by.

    Args:
        recipe: the recipe; its `tokenizer` chooses the vocabulary.
        checkpoints: the experts in their order, and the base.
        base: the base among them.
    """
    sizes = {name: checkpoint.vocabulary_size for name, checkpoint in checkpoints.items()}
    choice = _choice(recipe)
    if choice is not None or len(set(sizes.values())) > 1:
        _refuse_roleless(checkpoints)
    if not all(sizes.values()):
        check_tokenizers(checkpoints)
        return None
    if choice is None or not differences(checkpoints):
        check_tokenizers(checkpoints)
        return _padded(checkpoints, sizes)
    tokens = _vocabularies(checkpoints, sizes)
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


def _refuse_roleless(checkpoints: Mapping[str, Checkpoint]) -> None:
    """Refuse to align rows if a tensor of unknown role may have rows of tokens too."""
    for name, checkpoint in checkpoints.items():
        if checkpoint.numbered is None:
            continue
        for tensor in checkpoint.places:
            if tensor in checkpoint.numbered.roleless and checkpoint.places[tensor].layer is None:
                raise MergeError(
                    f"{name}: the role of {tensor!r} is unknown, so vocabularies cannot be "
                    f"aligned; {pattern_advice(tensor)}"
                )


def _choice(recipe: Recipe) -> str | None:
    """`union`, or the expert with a source that gives the tokenizer."""
    choice = recipe.tokenizer
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


def _padded(checkpoints: Mapping[str, Checkpoint], sizes: Mapping[str, int]) -> Alignment | None:
    """The alignment for one tokenizer and embeddings padded to different sizes."""
    if len(set(sizes.values())) == 1:
        return None
    known = {name: tokens for name, c in checkpoints.items() if (tokens := read_vocabulary(c))}
    owner = max(checkpoints, key=lambda name: sizes[name])
    for name, size in sizes.items():
        if name not in known:
            other = owner if size != sizes[owner] else min(sizes, key=lambda n: sizes[n])
            raise MergeError(
                f"vocabularies differ: {sizes[other]} rows in {other}, {size} in {name}, which has "
                "no tokenizer.json to compare the tokens by"
            )
        last = max(known[name].values(), default=-1)
        if last >= size:
            raise MergeError(
                f"{name} has {size} rows in its embedding, but its tokenizer has token {last}"
            )
    rows: dict[str, RowMap] = {}
    for name, size in sizes.items():
        own: RowMap = ((name, 0, size),)
        more = sizes[owner] - size
        rows[name] = (*own, (owner, size, more)) if more else own
    return Alignment(owner, sizes[owner], rows, rows, {})


def _vocabularies(
    checkpoints: Mapping[str, Checkpoint], sizes: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """Id of every token, per checkpoint."""
    vocabularies: dict[str, dict[str, int]] = {}
    for name, checkpoint in checkpoints.items():
        tokens = read_vocabulary(checkpoint)
        if not tokens:
            # Adapters and bases often have none; equal sizes are assumed to be equal tokens.
            like = next((other for other in vocabularies if sizes[other] == sizes[name]), None)
            if like is None:
                raise MergeError(f"{name} has no tokenizer.json to align its rows by")
            tokens = vocabularies[like]
        last = max(tokens.values(), default=-1)
        if last >= sizes[name]:
            raise MergeError(
                f"{name} has {sizes[name]} rows in its embedding, but its tokenizer has token "
                f"{last}"
            )
        vocabularies[name] = tokens
    return vocabularies


def _union(
    names: Sequence[str], tokens: Mapping[str, Mapping[str, int]], size: int
) -> tuple[dict[str, int], int, dict[str, tuple[str, ...]]]:
    """The tokens of the first name, whose embedding has `size` rows, then those of the others."""
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
    """The sources of the target's rows: for each token the first of `order` that has it.

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
    known_ids = vocabulary_of(path)
    entries, taken = list(data.get("added_tokens") or ()), set(known_ids)
    following = 1 + max(known_ids.values(), default=-1)
    for name, tokens in alignment.added.items():
        other = read_json_object(experts[name].folder / "tokenizer.json")
        known = {entry["content"]: entry for entry in other.get("added_tokens") or ()}
        for i, token in enumerate(tokens):
            entry = known.get(token) or _plain_token(_as_text(token, other))
            if entry["content"] in taken:
                raise MergeError(
                    f"tokenizers cannot be joined: the text of {token!r} of {name} is a token "
                    "already; choose one tokenizer"
                )
            entries.append({**entry, "id": following + i})
            taken.add(entry["content"])
        following += len(tokens)
    path.write_text(json.dumps({**data, "added_tokens": entries}, ensure_ascii=False), "utf-8")


def _plain_token(text: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": text, **flags}


def _as_text(token: str, tokenizer: Mapping[str, Any]) -> str:
    """The text of a token of a byte-level vocabulary; other tokens are their text."""
    if "ByteLevel" not in json.dumps(tokenizer.get("decoder")):
        return token
    from tokenizers.decoders import ByteLevel

    text = str(ByteLevel().decode([token]))
    # Half of a character is no text, so its row is never looked up.
    return token if "\ufffd" in text else text
