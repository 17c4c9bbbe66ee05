"""Keys and values of attention, per layer and group of lanes, as transformers' layers ask for them.

Every layer of a sweep keeps a tensor of keys and one of values per group: `[slots, heads, tokens,
width]`, with room to grow in slots and in tokens. Windows are left to the attention masks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from transformers import Cache

TOKENS_AHEAD = 64
"""Tokens that room is made for at a time."""


class GroupCache:
    """Keys and values of one group of lanes at one layer."""

    def __init__(self, slots: int, tokens: int) -> None:
        self._slots, self._tokens = slots, tokens
        self._parts: list[torch.Tensor] = []

    def write_prompt(self, start: int, parts: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Keys and values of prompts, `[prompts, heads, tokens, width]` each, from a slot on."""
        if not self._parts:
            self._parts = [
                part.new_empty(self._slots, part.shape[1], self._tokens, part.shape[3])
                for part in parts
            ]
        for room, part in zip(self._parts, parts, strict=True):
            room[start : start + part.shape[0], :, : part.shape[2]] = part

    def write_token(
        self, position: int, parts: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token to every slot; returns all keys and values up to it."""
        if position == self._tokens:
            self._resize(self._slots, self._tokens + max(TOKENS_AHEAD, self._tokens // 4))
        used = parts[0].shape[0]
        for room, part in zip(self._parts, parts, strict=True):
            room[:used, :, position] = part[:, :, 0]
        keys, values = (room[:used, :, : position + 1] for room in self._parts)
        return keys, values

    def append(self, count: int, sources: torch.Tensor) -> None:
        """Copy slots to the end of the `count` that are in use."""
        needed = count + len(sources)
        if needed > self._slots:
            self._resize(max(needed, self._slots + self._slots // 2), self._tokens)
        for room in self._parts:
            room[count:needed] = room[sources]

    def keep(self, slots: torch.Tensor) -> None:
        """Keep only these slots, in this order."""
        self._parts = [room[slots] for room in self._parts]
        self._slots = len(slots)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, room to grow included."""
        return sum(room.numel() * room.element_size() for room in self._parts)

    def _resize(self, slots: int, tokens: int) -> None:
        wider = []
        for room in self._parts:
            new = room.new_empty(slots, room.shape[1], tokens, room.shape[3])
            new[: self._slots, :, : self._tokens] = room
            wider.append(new)
        self._parts, self._slots, self._tokens = wider, slots, tokens


class SlotCache:
    """The caches of all layers, and which group the layer that runs now belongs to.

    Attributes:
        length: tokens in the cache, padding included.
        groups: per layer, the caches of its groups.
    """

    def __init__(self, slots: list[list[int]], width: int, max_new_tokens: int) -> None:
        room = width + min(max_new_tokens, TOKENS_AHEAD)
        self.length = 0
        self.groups = [[GroupCache(count, room) for count in layer] for layer in slots]
        self._layer = self._group = 0
        self._slot: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values of all layers."""
        return sum(group.nbytes for layer in self.groups for group in layer)

    def select(self, layer: int, group: int, slot: int | None = None) -> None:
        """Which group runs next; `slot` is where its prompts begin, None while decoding."""
        self._layer, self._group, self._slot = layer, group, slot

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """What a layer's attention calls: takes new keys and values, returns all of them."""
        if layer != self._layer:
            raise EvaluationError(f"layer {self._layer} uses the cache of layer {layer}")
        group = self.groups[layer][self._group]
        if self._slot is None:
            return group.write_token(self.length, (keys, values))
        group.write_prompt(self._slot, (keys, values))
        return keys, values

    def for_transformers(self) -> Cache:
        """The same, as the cache object that a transformers model takes."""
        from transformers import Cache

        layer_class = _cache_layer_class()
        return Cache(layers=[layer_class(self, index) for index in range(len(self.groups))])


@lru_cache
def _cache_layer_class() -> Any:
    """The class is made on first use, because transformers is only imported where it is needed."""
    from transformers.cache_utils import DynamicLayer

    class LaneCacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        def __init__(self, cache: SlotCache, index: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._cache, self._index = cache, index

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return self._cache.update(self._index, key_states, value_states)

        def get_seq_length(self) -> int:
            return self._cache.length

    return LaneCacheLayer
