"""Common prefixes of many prompts, such as few-shot examples, read once in a batch.

Rows with the same beginning are read in groups. In every batch of a group the common prefix is a
row of its own. At each layer its keys and values precede those of the other rows, which hold only
their remaining tokens. So a layer reads `prefix + rows x rest` tokens instead of
`rows x (prefix + rest)`.

Attention then adds its terms in another order. Results differ from whole rows by
rounding, as they do between batches of different shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import eq
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.engine.rows import TokenRow, longest_first
from layerswap.engine.split import Call, Entry, SplitModel

if TYPE_CHECKING:
    import torch

PASS_TOKENS = {"cpu": 128, "other": 2048}
"""Tokens that take as long to read as one more pass through the layers, by type of device."""
DEEPEST = 64
"""Levels of prefixes within prefixes that grouping considers."""


class PrefixGroup(NamedTuple):
    """Rows to read together, longest first, and the length of the prefix that is read once."""

    rows: list[TokenRow]
    prefix: int


def group_by_prefix(
    rows: Sequence[TokenRow], limits: Sequence[int], size: int, *, device: str = "cpu"
) -> list[PrefixGroup]:
    """Group rows by their beginnings where that saves more than it costs.

    The prefix of a row ends before its limit (see `rows.first_scored`). The group of the longest
    row comes first; the prefix of a group is 0 where nothing is saved. `size` is the batch size.
    """
    one_pass = PASS_TOKENS.get(device, PASS_TOKENS["other"])

    def cost(group: PrefixGroup) -> int:
        widths = sorted((len(row.tokens) - group.prefix for row in group.rows), reverse=True)
        per_batch = group.prefix + 2 * one_pass if group.prefix else one_pass
        return sum(
            len(widths[start : start + size]) * widths[start] + per_batch
            for start in range(0, len(widths), size)
        )

    pairs = sorted(zip(rows, limits, strict=True), key=lambda pair: pair[0].tokens)
    shared = [
        # The common length is the number of equal tokens before the first unequal pair.
        min([*map(eq, a.tokens, b.tokens), False].index(False), a_limit, b_limit)
        for (a, a_limit), (b, b_limit) in pairwise(pairs)
    ]
    groups = [
        PrefixGroup(longest_first(group.rows), group.prefix)
        for group in _cheapest_groups([row for row, _ in pairs], shared, cost)
    ]
    return sorted(groups, key=lambda group: -len(group.rows[0].tokens))


def _cheapest_groups(
    rows: list[TokenRow], shared: list[int], cost: Callable[[PrefixGroup], int], level: int = 0
) -> list[PrefixGroup]:
    """Keep sorted rows together, or split off those with a longer common prefix.

    Splits off rows that are cheaper to score separately, if that lowers the whole cost. A split can
    cost padding: rows of one length meet in a batch only if all rows are sorted together. `shared`
    has the length of the common prefix of each row with the next row.
    """
    prefix = min(shared, default=0)

    def together(some: list[TokenRow]) -> PrefixGroup:
        return min((PrefixGroup(some, 0), PrefixGroup(some, prefix)), key=cost)

    whole = together(rows)
    if len(rows) < 3 or level == DEEPEST:
        return [whole]
    cuts = [index + 1 for index, length in enumerate(shared) if length == prefix]
    groups: list[PrefixGroup] = []
    remaining: list[TokenRow] = []
    for start, stop in pairwise([0, *cuts, len(rows)]):
        part = rows[start:stop]
        apart = _cheapest_groups(part, shared[start : stop - 1], cost, level + 1)
        if sum(map(cost, apart)) < cost(together(part)):
            groups += apart
        else:
            remaining += part
    if remaining:
        groups.append(together(remaining))
    return groups if sum(map(cost, groups)) < cost(whole) else [whole]


# --- reading ---


class PrefixedStates(NamedTuple):
    """Hidden states of a prefix, `[1, prefix, width]`, and of the rest of every row."""

    prefix: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class PrefixedCall:
    """The call of a layer for a prefix, then for the rows that continue it."""

    prefix: Call
    rest: Call
    cache: PrefixCache

    def __call__(self, layer: Any, hidden: Any) -> Any:
        """Run the layer on both."""
        self.cache.length = 0
        prefix = self.prefix(layer, hidden.prefix)
        self.cache.length = self.cache.tokens
        return PrefixedStates(prefix, self.rest(layer, hidden.rest))


class PrefixCache:
    """Keys and values of a prefix, int64 `(1, tokens)`, at the layer that runs.

    `length` is 0 while the prefix is read, then `tokens`. `padding` is the number of tokens on the
    left of each row, int64 `(rows,)`. `store` receives all keys and values of a layer's rows,
    `[rows, heads, tokens, width]` each, where decoding needs them later.
    """

    def __init__(
        self,
        ids: torch.Tensor,
        padding: torch.Tensor | None = None,
        store: Callable[[torch.Tensor, torch.Tensor], None] | None = None,
    ) -> None:
        import torch

        self.ids, self.tokens, self.length = ids, ids.shape[1], 0
        self._store = store
        self._prefix: tuple[torch.Tensor, torch.Tensor] | None = None
        self._index: torch.Tensor | None = None
        if padding is not None:
            # Padding is masked; a row with padding ends on repeats of the prefix's last tokens.
            self._index = (torch.arange(self.tokens, device=ids.device) - padding[:, None]).clamp(0)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Take new keys and values of the running layer, and return all of them."""
        import torch

        del layer  # one layer runs at a time, first for the prefix
        if not self.length:
            self._prefix = keys, values
            return self._prefix
        assert self._prefix is not None
        joined = tuple(
            torch.cat([self._repeat(prefix, len(new)), new], dim=2)
            for prefix, new in zip(self._prefix, (keys, values), strict=True)
        )
        if self._store is not None:
            self._store(*joined)
        return joined

    def _repeat(self, prefix: torch.Tensor, rows: int) -> torch.Tensor:
        """Keys or values of the prefix for every row, `[rows, heads, tokens, width]`."""
        if self._index is None:
            return prefix.expand(rows, *prefix.shape[1:])
        return prefix[0][:, self._index].transpose(0, 1)


def read_prefix(stack: SplitModel, inputs: Mapping[str, Any], cache: PrefixCache) -> Entry:
    """Compute the input of the layers for rows with a common prefix, as pairs.

    `stack` has the weights before the layers in place. `inputs` are `input_ids`, int64 `(rows,
    tokens)`, and, with left padding, `attention_mask`; optionally `position_ids`.
    """
    import torch

    ids, mask = inputs["input_ids"], inputs.get("attention_mask")
    positions = inputs.get("position_ids")
    if positions is None and stack.takes_positions:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    prefix_inputs, rest_inputs = {"input_ids": cache.ids}, {"input_ids": ids[:, cache.tokens :]}
    if positions is not None:
        prefix_inputs["position_ids"] = torch.arange(cache.tokens, device=ids.device)[None]
        rest_inputs["position_ids"] = positions[:, cache.tokens :]
    if mask is not None:
        rest_inputs["attention_mask"] = mask
    cache.length = 0
    prefix = stack.before(cache, **prefix_inputs)
    cache.length = cache.tokens
    rest = stack.before(cache, **rest_inputs)
    calls: Any = [PrefixedCall(a, b, cache) for a, b in zip(prefix.calls, rest.calls, strict=True)]
    hidden: Any = PrefixedStates(prefix.hidden, rest.hidden)
    return Entry(hidden, calls)
