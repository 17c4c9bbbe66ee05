"""Slots of joint decoding, and their KV cache.

A row is one composition that answers one prompt. At each level (before the layers, every layer,
after them) the rows are in groups, one per choice of weights; a group has slots, and rows whose
weights and tokens agreed up to there share one. `Slots` keeps the books, `SlotCache` the keys and
values of every slot, and the functions between cut and join what the model computes for them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.split import Call, Entry, transformers_cache
from layerswap.engine.trie import Node, walk
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int64]
    from transformers import Cache


CROWDED = 0.75
"""Share of a group's slots in use from which it is not worth closing the gaps."""


@dataclass
class Level:
    """The slots of one level.

    Attributes:
        keys: the key of each group.
        group: per row, its group.
        slot: per row, its slot in the group.
        counts: per group, the number of its slots, some of them out of use.
    """

    keys: list[Hashable]
    group: Ints
    slot: Ints
    counts: list[int]

    @property
    def starts(self) -> Ints:
        """Per group, the position of its first slot."""
        import numpy as np

        return np.cumsum([0, *self.counts[:-1]])

    @property
    def position(self) -> Ints:
        """Per row, the position of its slot among those of all groups."""
        return self.starts[self.group] + self.slot


@dataclass(frozen=True)
class CopyOp:
    """New slots of a group: copies of old ones, or the old ones that stay.

    Attributes:
        level: of the group.
        group: which one.
        slots: the old slots.
    """

    level: int
    group: int
    slots: Ints


@dataclass(frozen=True)
class SlotLayout:
    """How a level is computed from the one before it.

    Attributes:
        groups: key, first slot and one past the last, of every group with slots.
        parent: per slot, the slot of the level before that it continues.
        first: per slot, the slot of level 0 that it began in.
        row: per slot, one of its rows.
    """

    groups: list[tuple[int, Hashable, int, int]]
    parent: Ints
    first: Ints
    row: Ints


class Slots:
    """The slots of a batch: every composition of a trie answering every prompt.

    Args:
        roots: the trie.
        prompts: how many.

    Attributes:
        member: per row, its composition.
        prompt: per row, its prompt.
        levels: the slots at every level.
        begun: per node of the trie (by `id`), its group and the slot of its first prompt; those
            of the other prompts follow.
    """

    def __init__(self, roots: Sequence[Node], prompts: int) -> None:
        import numpy as np

        nodes = [node for node, _ in walk(roots)]
        members = [m for node in nodes if not node.children for m in node.members]
        self.member: Ints = np.repeat(np.array(members), prompts)
        self.prompt: Ints = np.tile(np.arange(prompts), len(members))
        self.begun: dict[int, tuple[int, int]] = {}
        first_row = {member: index * prompts for index, member in enumerate(members)}
        depth = max(node.depth for node in nodes)
        empty = np.zeros(len(self.member), dtype=np.int64)
        self.levels = [Level([], empty.copy(), empty.copy(), []) for _ in range(depth + 1)]
        for node in nodes:
            level = self.levels[node.depth]
            if node.key not in level.keys:
                level.keys.append(node.key)
                level.counts.append(0)
            group = level.keys.index(node.key)
            self.begun[id(node)] = group, level.counts[group]
            for member in node.members:
                rows = slice(first_row[member], first_row[member] + prompts)
                level.group[rows] = group
                level.slot[rows] = level.counts[group] + np.arange(prompts)
            level.counts[group] += prompts

    def __len__(self) -> int:
        return len(self.member)

    def split(self, tokens: Ints) -> list[CopyOp]:
        """Separate the rows that shared a slot and now write different tokens.

        Args:
            tokens: per row, what it writes, from 0.

        Returns:
            Copies to append to groups, in the order of their new slots.
        """
        import numpy as np

        changes = []
        for number, level in enumerate(self.levels):
            positions = level.position
            _, rows, inverse = np.unique(
                positions * (tokens.max() + 1) + tokens, return_index=True, return_inverse=True
            )
            # Sorted: of the rows of one slot, those with the smallest token keep its slot.
            is_new = np.concatenate([[False], np.diff(positions[rows]) == 0])
            if not is_new.any():
                if number == 0:
                    return []  # levels only refine the first
                continue
            slots = level.slot[rows]
            for group in range(len(level.keys)):
                here = is_new & (level.group[rows] == group)
                if here.any():
                    changes.append(CopyOp(number, group, slots[here].copy()))
                    slots[here] = level.counts[group] + np.arange(here.sum())
                    level.counts[group] += int(here.sum())
            level.slot = slots[inverse.reshape(-1)]
        return changes

    def keep(self, rows: npt.NDArray[np.bool_]) -> list[CopyOp]:
        """Drop the other rows, and close the gaps in groups where many slots are free.

        Returns:
            Per group that is closed up, the old slots that stay, in order.
        """
        import numpy as np

        self.member, self.prompt = self.member[rows], self.prompt[rows]
        changes = []
        for number, level in enumerate(self.levels):
            level.group, level.slot = level.group[rows], level.slot[rows]
            for group, count in enumerate(level.counts):
                here = level.group == group
                used = np.unique(level.slot[here])
                if len(used) <= CROWDED * count and count:
                    changes.append(CopyOp(number, group, used))
                    level.slot[here] = np.searchsorted(used, level.slot[here])
                    level.counts[group] = len(used)
        return changes

    def layout(self) -> list[SlotLayout]:
        """How every level is computed from the one before it."""
        import numpy as np

        found: list[SlotLayout] = []
        before: Ints | None = None
        for level in self.levels:
            positions = level.position
            total = sum(level.counts)
            # A slot out of use takes any row's input; its output is never read.
            row = np.zeros(total, dtype=np.int64)
            row[positions] = np.arange(len(positions))
            parent = np.arange(total) if before is None else before[row]
            first = np.arange(total) if not found else found[-1].first[parent]
            bounds = zip(level.keys, level.starts.tolist(), level.counts, strict=True)
            groups = [(g, k, s, s + n) for g, (k, s, n) in enumerate(bounds) if n]
            found.append(SlotLayout(groups, parent, first, row))
            before = positions
        return found


class RowSelector:
    """Cuts what the model calls a layer with, for all first slots, down to those of a group.

    Masks, positions and the like have a row per first slot, or several rows per first slot (ALiBi
    has one per head), or one for all. Results are kept for one step: most layers are called with
    the same tensors, and neighbouring layers have the same groups.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[tuple[bytes, int], Any] = {}

    def __call__(self, call: Call, first: npt.NDArray[np.int64]) -> Call:
        """The call for slots that began in these first slots."""
        import numpy as np

        if len(first) == self._rows and np.array_equal(first, np.arange(self._rows)):
            return call
        index = first.tobytes()
        args = tuple(self._narrow(value, first, index) for value in call.args)
        kwargs = {name: self._narrow(v, first, index) for name, v in call.kwargs.items()}
        return Call(args, kwargs, call.keyword)

    def _narrow(self, value: Any, first: npt.NDArray[np.int64], index: bytes) -> Any:
        import torch

        if isinstance(value, tuple | list):
            return type(value)(self._narrow(part, first, index) for part in value)
        if isinstance(value, dict):
            return {name: self._narrow(part, first, index) for name, part in value.items()}
        if not isinstance(value, torch.Tensor) or value.ndim == 0 or value.shape[0] % self._rows:
            return value
        if self._rows == 1 and value.shape[0] == 1:
            return value  # one row for all, whether it is the slot's or everybody's
        known = index, id(value)
        if known not in self._known:
            by_slot = value.reshape(self._rows, -1, *value.shape[1:])
            chosen = by_slot[torch.from_numpy(first).to(value.device)]
            self._known[known] = chosen.reshape(-1, *value.shape[1:])
        return self._known[known]


def merge_entries(
    entries: Sequence[tuple[int, int, Entry]], slots: int
) -> tuple[torch.Tensor, Sequence[Call]]:
    """What enters the layers, where compositions differ before them.

    Args:
        entries: first slot, one past the last, and what enters the layers if all slots had the
            weights of these.
        slots: how many first slots there are.
    """
    if len(entries) == 1:
        return entries[0][2].hidden, entries[0][2].calls
    bounds = [(start, stop) for start, stop, _ in entries]

    def merge(values: Sequence[Any]) -> Any:
        first = values[0]
        if isinstance(first, tuple | list):
            return type(first)(merge(parts) for parts in zip(*values, strict=True))
        if isinstance(first, dict):
            return {name: merge([value[name] for value in values]) for name in first}
        if not hasattr(first, "ndim") or first.ndim == 0 or first.shape[0] % slots:
            return first
        each = first.shape[0] // slots  # several rows per slot, as ALiBi has
        pairs = zip(values, bounds, strict=True)
        return concatenate([value[a * each : b * each] for value, (a, b) in pairs])

    parts = [entry for _, _, entry in entries]
    calls = []
    for same_layer in zip(*(part.calls for part in parts), strict=True):
        kwargs = merge([dict(call.kwargs) for call in same_layer])
        calls.append(Call(merge([c.args for c in same_layer]), kwargs, same_layer[0].keyword))
    return merge([part.hidden for part in parts]), calls


def select_rows(hidden: torch.Tensor, slots: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of a tensor; the tensor itself where that is all of them in order."""
    import numpy as np
    import torch

    if len(slots) == len(hidden) and np.array_equal(slots, np.arange(len(slots))):
        return hidden
    return hidden[torch.from_numpy(slots).to(hidden.device)]


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other; a single one as it is."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


TOKENS_AHEAD = 64
"""Tokens that room is made for at a time."""


class GroupCache:
    """Keys and values of one group of slots at one layer."""

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

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep keys and values of whole prompts, of the group and slot that are selected."""
        assert self._slot is not None, "no prompts are read"
        self.groups[self._layer][self._group].write_prompt(self._slot, (keys, values))

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """What a layer's attention calls: takes new keys and values, returns all of them."""
        if layer != self._layer:
            raise EvaluationError(f"layer {self._layer} uses the cache of layer {layer}")
        if self._slot is None:
            return self.groups[layer][self._group].write_token(self.length, (keys, values))
        self.store(keys, values)
        return keys, values

    def for_transformers(self) -> Cache:
        """The same, as the cache object that a transformers model takes."""
        return transformers_cache(self, len(self.groups))
