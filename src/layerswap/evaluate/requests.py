"""Loglikelihood requests: rows that the model reads, and what is asked of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from layerswap.errors import EvaluationError

Question = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of the continuation whose probability is asked for."""


@dataclass(frozen=True)
class Row:
    """One sequence that the model reads.

    Attributes:
        tokens: what is read: a context and all of a continuation but its last token.
        requests: positions of the requests that it answers: those with equal `tokens`.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]


def make_rows(requests: Sequence[Question], max_length: int | None) -> list[Row]:
    """The distinct rows of some requests, longest first, equal ones in the order of their tokens.

    Requests that differ in their last token alone, such as the letters of a multiple-choice
    question, share a row.

    Args:
        requests: what is asked.
        max_length: most tokens that the model reads; longer rows lose tokens on the left.

    Raises:
        EvaluationError: a context or a continuation is empty, or a continuation alone is longer
            than `max_length`.
    """
    rows: dict[tuple[int, ...], list[int]] = {}
    for index, (context, continuation) in enumerate(requests):
        if not context or not continuation:
            empty = "continuation" if context else "context"
            raise EvaluationError(
                f"request {index} has an empty {empty}; a context has at least one token, "
                "such as the one that begins every text"
            )
        if max_length is not None and len(continuation) > max_length:
            raise EvaluationError(
                f"request {index} has a continuation of {len(continuation)} tokens, but the "
                f"model reads {max_length}"
            )
        tokens = (*context, *continuation)[:-1]
        rows.setdefault(tokens[-max_length:] if max_length else tokens, []).append(index)
    ordered = sorted(rows.items(), key=lambda item: (-len(item[0]), item[0]))
    return [Row(tokens, tuple(indices)) for tokens, indices in ordered]


def make_batches(rows: Sequence[Row], max_rows: int, max_tokens: int | None) -> Iterator[list[Row]]:
    """Rows together that are read together.

    Args:
        rows: longest first.
        max_rows: most rows of a batch.
        max_tokens: most tokens of a batch, padding included; a row alone may have more.
    """
    start = 0
    while start < len(rows):
        width = len(rows[start].tokens)
        fit = max_rows if max_tokens is None else min(max_rows, max(1, max_tokens // width))
        yield list(rows[start : start + fit])
        start += fit


def rolling_requests(
    tokens: Sequence[int], max_length: int, prefix: int
) -> list[tuple[list[int], list[int]]]:
    """Requests whose log-probabilities sum to that of a whole text.

    The windows of lm-eval: each predicts up to `max_length` tokens, none twice, and reads as many
    tokens before them as fit, at least one.

    Args:
        tokens: the text.
        max_length: most tokens that the model reads.
        prefix: the token that the first window starts from.

    Example: `rolling_requests([5, 6, 7, 8, 9], 3, 0)` asks for `5 6 7` after `0`, and for `8 9`
    after `6 7`.
    """
    found = []
    for start in range(0, len(tokens), max_length):
        stop = min(start + max_length, len(tokens))
        # The window ends at `stop` and is full, so the last one reads further back.
        first = max(0, stop - max_length - 1) if start else 0
        context = [prefix] if not start else list(tokens[first:start])
        found.append((context, list(tokens[start:stop])))
    return found
