"""What is read: rows of requests, batches of rows, and groups of rows that begin alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import NamedTuple

from layerswap.errors import EvaluationError

Question = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of the continuation whose probability is asked for."""


@dataclass(frozen=True)
class TokenRow:
    """One sequence that the model reads.

    Attributes:
        tokens: what is read: a context and all of a continuation but its last token.
        requests: positions of the requests that it answers: those whose own tokens begin it.
        ends: per request, how many of `tokens` are its own.
    """

    tokens: tuple[int, ...]
    requests: tuple[int, ...]
    ends: tuple[int, ...]


def make_rows(
    requests: Sequence[Question], max_length: int | None, *, rotary: int | None = None
) -> list[TokenRow]:
    """The distinct rows of some requests, longest first, equal ones in the order of their tokens.

    Requests that differ in their last token alone, such as the letters of a multiple-choice
    question, share a row; so do those whose tokens begin another's, such as choices of one token
    beside a longer one, since no token reads what follows it.

    Args:
        requests: what is asked.
        max_length: most tokens that the model reads; longer rows lose tokens on the left.
        rotary: tokens beyond which what the model reads depends on the length of a row, which
            then answers for no shorter one.

    Raises:
        EvaluationError: a context or a continuation is empty, or a continuation alone is longer
            than `max_length`.
    """
    asked: dict[tuple[int, ...], list[int]] = {}
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
        asked.setdefault(tokens[-max_length:] if max_length else tokens, []).append(index)
    rows: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    longest: tuple[int, ...] = ()
    # In this order what begins other rows stands directly before one of them.
    for tokens in sorted(asked, reverse=True):
        too_long = rotary is not None and len(longest) > rotary
        if too_long or longest[: len(tokens)] != tokens:
            longest = tokens
        rows.setdefault(longest, []).extend((index, len(tokens)) for index in asked[tokens])
    return longest_first(
        TokenRow(tokens, *zip(*sorted(found), strict=True)) for tokens, found in rows.items()
    )


def make_batches(
    rows: Sequence[TokenRow],
    max_rows: int,
    max_tokens: int | None,
    *,
    rotary: int | None = None,
    prefix: int = 0,
) -> Iterator[list[TokenRow]]:
    """Rows together that are read together.

    Args:
        rows: longest first.
        max_rows: most rows of a batch.
        max_tokens: most tokens of a batch, padding included; a row alone may have more.
        rotary: tokens beyond which what the model reads depends on the longest row of a batch;
            longer rows are read with those of their own length.
        prefix: first tokens of all rows that are read once.
    """

    def reading(row: TokenRow) -> int:
        return len(row.tokens) if rotary is not None and len(row.tokens) > rotary else 0

    for _, alike in groupby(rows, key=reading):
        left = list(alike)
        while left:
            width = len(left[0].tokens)
            fit = max_rows
            if max_tokens is not None:
                fit = min(max_rows, max(1, (max_tokens - prefix) // (width - prefix)))
            yield left[:fit]
            left = left[fit:]


def first_asked(row: TokenRow, requests: Sequence[Question]) -> int:
    """The first position of a row whose logits some request needs."""
    asked = zip(row.requests, row.ends, strict=True)
    return min(end - len(requests[request][1]) for request, end in asked)


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


PASS_TOKENS = {"cpu": 128, "cuda": 2048}
"""Tokens whose reading costs about as much as one more pass through the layers, by device."""
DEEPEST = 64
"""Levels of common prefixes within common prefixes that are looked at."""


class PrefixGroup(NamedTuple):
    """Rows that are read together, longest first, and how many first tokens are read once."""

    rows: list[TokenRow]
    prefix: int


def group_by_prefix(
    rows: Sequence[TokenRow], asked: Sequence[int], size: int, *, device: str = "cpu"
) -> list[PrefixGroup]:
    """Group rows by what they begin with, where reading that once saves more than it costs.

    Args:
        rows: what is read.
        asked: per row, the first position whose logits are needed; a prefix ends before it.
        size: rows of a batch.
        device: its type, which says what a pass through the layers costs.

    Returns:
        Groups, the one with the longest row first; one without a prefix where nothing is saved.
    """
    one_pass = PASS_TOKENS.get(device, PASS_TOKENS["cuda"])

    def cost(group: PrefixGroup) -> int:
        widths = sorted((len(row.tokens) - group.prefix for row in group.rows), reverse=True)
        return sum(
            len(widths[start : start + size]) * widths[start]
            + (group.prefix + 2 * one_pass if group.prefix else one_pass)
            for start in range(0, len(widths), size)
        )

    pairs = sorted(zip(rows, asked, strict=True), key=lambda pair: pair[0].tokens)
    shared = [
        min(_common(one.tokens, two.tokens), bound, other)
        for (one, bound), (two, other) in pairwise(pairs)
    ]
    found = _cheapest([row for row, _ in pairs], shared, cost)
    groups = [PrefixGroup(longest_first(group.rows), group.prefix) for group in found]
    return sorted(groups, key=lambda group: -len(group.rows[0].tokens))


def longest_first(rows: Iterable[TokenRow]) -> list[TokenRow]:
    """Rows by their length, equal ones in the order of their tokens."""
    return sorted(rows, key=lambda row: (-len(row.tokens), row.tokens))


def _common(one: Sequence[int], two: Sequence[int]) -> int:
    """How many first tokens two rows share, by bisection: slices are compared in C."""
    low, high = 0, min(len(one), len(two))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == two[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cheapest(
    rows: list[TokenRow], shared: list[int], cost: Callable[[PrefixGroup], int], level: int = 0
) -> list[PrefixGroup]:
    """Groups of sorted rows: all of them together, or apart those that share more than all do.

    Rows go apart where that costs less than they would by themselves with what all share; the
    others stay together. Whether that is cheaper in all is then seen from the whole cost, for rows
    of one length are together only where all are sorted.

    Args:
        rows: in the order of their tokens.
        shared: per row but the last, how many first tokens it shares with the next.
        cost: of a group, padding and passes included, in tokens.
        level: prefixes within prefixes so far.
    """
    prefix = min(shared, default=0)

    def together(some: list[TokenRow]) -> PrefixGroup:
        return min((PrefixGroup(some, 0), PrefixGroup(some, prefix)), key=cost)

    whole = together(rows)
    if len(rows) < 3 or level == DEEPEST:
        return [whole]
    cuts = [index + 1 for index, value in enumerate(shared) if value == prefix]
    groups: list[PrefixGroup] = []
    rest: list[TokenRow] = []
    for start, stop in pairwise([0, *cuts, len(rows)]):
        part = rows[start:stop]
        found = _cheapest(part, shared[start : stop - 1], cost, level + 1)
        if sum(map(cost, found)) < cost(together(part)):
            groups += found
        else:
            rest += part
    if rest:
        groups.append(together(rest))
    return groups if sum(map(cost, groups)) < cost(whole) else [whole]
