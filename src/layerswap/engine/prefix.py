"""Reads once what many prompts begin with: instructions, and the examples of few-shot prompts.

Rows that begin alike are read in groups. In every batch of a group the common prefix is one row
of its own; at each layer its keys and values stand before those of the rows, which hold the rest.
So a layer reads `prefix + rows x rest` tokens in place of `rows x (prefix + rest)`.

The sums of attention are then taken in another order, so results differ by rounding from those of
whole rows, as they do between batches of different shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from layerswap.engine.split import Call, Entry, SplitModel, takes_positions, transformers_cache

if TYPE_CHECKING:
    import torch
    from transformers import Cache


class Pair(NamedTuple):
    """Hidden states of a prefix, `[1, prefix, width]`, and of what follows it in every row."""

    prefix: torch.Tensor
    rest: torch.Tensor


@dataclass(frozen=True)
class PairCall:
    """Calls a layer for a prefix, and then for the rows that continue it."""

    prefix: Call
    rest: Call
    cache: PrefixCache

    def __call__(self, layer: Any, hidden: Any) -> Any:
        """The layer's outputs."""
        self.cache.length = 0
        prefix = self.prefix(layer, hidden.prefix)
        self.cache.length = self.cache.tokens
        return Pair(prefix, self.rest(layer, hidden.rest))


Store = Callable[["torch.Tensor", "torch.Tensor"], None]
"""Called with all keys and values of a layer's rows, `[rows, heads, tokens, width]` each."""


class PrefixCache:
    """Keys and values of a prefix at the layer that runs.

    Args:
        ids: of the prefix, int64 `(1, tokens)`.
        store: keeps what later tokens will need; nothing when None.

    Attributes:
        tokens: how many tokens the prefix has.
        length: tokens in the cache: as many while rows are read, 0 while the prefix is.
    """

    def __init__(self, ids: torch.Tensor, store: Store | None = None) -> None:
        self.ids, self.tokens, self.length = ids, ids.shape[1], 0
        self._store = store
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None
        self._index: torch.Tensor | None = None

    def shift(self, padding: torch.Tensor) -> None:
        """Have the prefix stand after padding.

        Args:
            padding: int64 `(rows,)`, tokens of padding on the left.
        """
        import torch

        # What stands in place of padding is masked. A row that begins later reads the end of the
        # prefix again.
        places = torch.arange(self.tokens, device=padding.device)
        self._index = (places - padding[:, None]).clamp(min=0)

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """What a layer's attention calls: takes new keys and values, returns all of them."""
        import torch

        del layer  # one runs at a time, and for the prefix first

        if not self.length:
            self._held = keys, values
            return self._held
        held: Any = self._held
        found = tuple(
            torch.cat([self._before(one, len(new)), new], dim=2)
            for one, new in zip(held, (keys, values), strict=True)
        )
        if self._store is not None:
            self._store(*found)
        return found

    def _before(self, held: torch.Tensor, rows: int) -> torch.Tensor:
        """Keys or values of the prefix for every row, `[rows, heads, tokens, width]`."""
        if self._index is None:
            return held.expand(rows, *held.shape[1:])
        return held[0][:, self._index].transpose(0, 1)

    def for_transformers(self, layers: int) -> Cache:
        """The same, as the cache object that a transformers model takes."""
        return transformers_cache(self, layers)


def read_prefix(stack: SplitModel, inputs: Mapping[str, Any], cache: PrefixCache) -> Entry:
    """What enters the layers for rows with a common prefix: pairs of hidden states and of calls.

    Args:
        stack: the model, with the weights before the layers in place.
        inputs: of the model's forward pass: `input_ids`, int64 `(rows, tokens)`, and, with padding
            on the left, `attention_mask`; maybe `position_ids`.
        cache: of the prefix.
    """
    import torch

    ids, mask, positions = (
        inputs["input_ids"], inputs.get("attention_mask"), inputs.get("position_ids")
    )  # fmt: skip
    if positions is None and takes_positions(stack.model):
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    common = {"past_key_values": cache.for_transformers(len(stack.layers)), "use_cache": True}
    first = {"input_ids": cache.ids, **common}
    rest = {"input_ids": ids[:, cache.tokens :], **common}
    if positions is not None:
        first["position_ids"] = torch.arange(cache.tokens, device=ids.device)[None]
        rest["position_ids"] = positions[:, cache.tokens :]
    if mask is not None:
        rest["attention_mask"] = mask
        cache.shift(mask.shape[1] - mask.sum(dim=1))
    cache.length = 0
    one = stack.before(**first)
    cache.length = cache.tokens
    two = stack.before(**rest)
    calls: Any = [PairCall(a, b, cache) for a, b in zip(one.calls, two.calls, strict=True)]
    hidden: Any = Pair(one.hidden, two.hidden)
    return Entry(hidden, calls)
