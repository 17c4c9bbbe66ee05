"""Rows of tokens that a model reads: built from requests, checked, batched and padded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.ground.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

Question = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of the continuation to score after it."""
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Configuration keys for the longest text that a model reads, in tokens."""


@dataclass(frozen=True)
class TokenRow:
    """One sequence that the model reads: a context and its continuation without the last token."""

    tokens: tuple[int, ...]
    requests: tuple[int, ...]  # numbers of the requests that the row answers
    ends: tuple[int, ...]  # per request, how many of `tokens` belong to it


def make_rows(
    requests: Sequence[Question], max_length: int | None, *, share: bool = True
) -> list[TokenRow]:
    """Make the distinct rows of some requests, longest first.

    Requests that differ only in their last token share a row, such as the letters of a
    multiple-choice question. So do requests whose tokens begin another's, because no token reads
    the tokens after it.

    Rows longer than `max_length` lose tokens on the left. Without `share`, a row answers only
    requests of its own length.
    """
    requests_of: dict[tuple[int, ...], list[int]] = {}
    for number, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            raise EvaluationError(
                f"request {number} has an empty {'continuation' if context else 'context'}; a "
                "context has at least one token, such as the one that begins every text"
            )
        if max_length is not None and len(continuation) > max_length:
            raise EvaluationError(
                f"request {number} has a continuation of {len(continuation)} tokens, but the "
                f"model reads {max_length}"
            )
        tokens = (*context, *continuation)[:-1]
        tokens = tokens[-max_length:] if max_length else tokens
        requests_of.setdefault(tokens, []).append(number)
    answers: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    row: tuple[int, ...] = ()
    # In descending order, the beginnings of a row come directly after it.
    for tokens in sorted(requests_of, reverse=True):
        if not share or row[: len(tokens)] != tokens:
            row = tokens
        answers.setdefault(row, []).extend((n, len(tokens)) for n in requests_of[tokens])
    return longest_first(
        TokenRow(tokens, *zip(*sorted(pairs), strict=True)) for tokens, pairs in answers.items()
    )


def rows_for(
    model: PreTrainedModel,
    requests: Sequence[Question],
    max_length: int | None,
    *,
    share: bool = True,
) -> list[TokenRow]:
    """Make the rows of some requests (see `make_rows`), checked against the limits of a model."""
    if not requests:
        raise EvaluationError("there are no requests to score")
    vocabulary = vocabulary_size(model)
    check_tokens([c for c, _ in requests], vocabulary, "the context of request")
    check_tokens([c for _, c in requests], vocabulary, "the continuation of request")
    longest = model_max_length(model) if max_length is None else max_length
    if longest is not None and longest < 1:
        raise EvaluationError(f"max_length is {longest}; it must be at least 1")
    return make_rows(requests, longest, share=share)


def make_batches(rows: Sequence[TokenRow], size: int) -> Iterator[list[TokenRow]]:
    """Cut rows, longest first, into batches of at most `size` rows."""
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def longest_first(rows: Iterable[TokenRow]) -> list[TokenRow]:
    """Sort rows by descending length, equal lengths by their tokens."""
    return sorted(rows, key=lambda row: (-len(row.tokens), row.tokens))


def first_scored(row: TokenRow, requests: Sequence[Question]) -> int:
    """Return the first position with logits that a request needs."""
    pairs = zip(row.requests, row.ends, strict=True)
    return min(end - len(requests[request][1]) for request, end in pairs)


# --- the limits of a model ---


def model_max_length(model: PreTrainedModel) -> int | None:
    """Return a model's context length, in tokens; None if its configuration sets no limit."""
    config = model.config.get_text_config()
    lengths = (getattr(config, key, None) for key in LENGTH_KEYS)
    return next((length for length in lengths if isinstance(length, int)), None)


def one_table_length(model: PreTrainedModel) -> int | None:
    """Return the most tokens with the rotary tables of shorter texts; None without a limit.

    Dynamic NTK scaling and LongRoPE compute tables from the longest text of a batch.
    """
    config = model.config.get_text_config()
    given = getattr(config, "rope_parameters", None) or {}
    tables = [given] if "rope_type" in given else given.values()  # or one for each type of layer
    limits = {"dynamic": "max_position_embeddings", "longrope": "original_max_position_embeddings"}
    known = [{**config.to_dict(), **table}[limits[table["rope_type"]]]
             for table in tables if table and table["rope_type"] in limits]  # fmt: skip
    return min(known, default=None)


def learns_positions(model: PreTrainedModel, positions: int) -> bool:
    """True if a model embeds positions, as GPT-2 does; OPT's embedding has two more rows."""
    from torch.nn import Embedding

    tables = (module for module in model.modules() if isinstance(module, Embedding))
    own = model.get_input_embeddings()
    return any(t.num_embeddings - positions in (0, 2) for t in tables if t is not own)


def check_batch_size(size: int | None) -> None:
    """Refuse a batch size below 1; None stands for a default."""
    if size is not None and size < 1:
        raise EvaluationError(f"batch_size is {size}; it must be at least 1")


def vocabulary_size(model: PreTrainedModel) -> int:
    """Return the number of rows in a model's embedding."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def eos_tokens(model: PreTrainedModel) -> frozenset[int]:
    """Return the tokens that end a text, from the generation configuration."""
    # A model without a head has no generation configuration; `read_one_token` reports that.
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def check_prompts(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> None:
    """Refuse an empty list, and prompts that are empty, too long or outside the vocabulary."""
    if not prompts:
        raise EvaluationError("there are no prompts to generate after")
    check_tokens(prompts, vocabulary_size(model), "prompt")
    limit = model_max_length(model)
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise EvaluationError(f"prompt {number} is empty; give it at least one token")
        if limit is not None and len(prompt) + max_new_tokens > limit:
            raise EvaluationError(
                f"prompt {number} has {len(prompt)} tokens, which with {max_new_tokens} new ones "
                f"is more than the {limit} that the model reads"
            )


def check_tokens(texts: Sequence[Sequence[int]], vocabulary: int, label: str) -> None:
    """Refuse token ids outside the model's embedding."""
    for number, text in enumerate(texts):
        for token in text:
            if not 0 <= token < vocabulary:
                raise EvaluationError(
                    f"{label} {number} holds token {token}, but the model has {vocabulary}; "
                    "tokenise with the experts' tokenizer, or enlarge an embedding that lacks it"
                )


# --- padding ---


def pad(
    texts: Sequence[Sequence[int]], *, fill: int = 0, left: bool = False, width: int | None = None
) -> torch.Tensor:
    """Pad texts to one tensor, int64 `(texts, width)`; by default as wide as the longest."""
    import torch

    width = max(map(len, texts)) if width is None else width
    padded = torch.full((len(texts), width), fill, dtype=torch.long)
    for row, text in enumerate(texts):
        start = width - len(text) if left else 0
        padded[row, start : start + len(text)] = torch.as_tensor(text, dtype=torch.long)
    return padded


def pad_with_mask(
    texts: Sequence[Sequence[int]], *, left: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad texts to token ids and an attention mask, int64 `(texts, longest)` each."""
    return pad(texts, left=left), pad([[1] * len(text) for text in texts], left=left)


def batches(
    texts: Sequence[Sequence[int]], size: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ids and mask of `size` texts at a time, longest first, padded on the right."""
    ordered = sorted(texts, key=lambda text: (-len(text), tuple(text)))
    for start in range(0, len(ordered), size):
        yield pad_with_mask(ordered[start : start + size])
