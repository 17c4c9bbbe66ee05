"""Rows of what a model computes for some lanes, for some others."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.split_model import Call, Entry
from layerswap.engine.trie import Node, walk

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int64]


class RowSelector:
    """Cuts what the model calls a layer with, for all first lanes, down to those of a group.

    Masks, positions and the like have a row per first lane, or several rows per first lane (ALiBi
    has one per head), or one for all. Results are kept for one step: most layers are called with
    the same tensors, and neighbouring layers have the same groups.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._known: dict[tuple[bytes, int], Any] = {}

    def __call__(self, call: Call, first: npt.NDArray[np.int64]) -> Call:
        """The call for lanes that began in these first lanes."""
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
            return value  # one row for all, whether it is the lane's or everybody's
        known = index, id(value)
        if known not in self._known:
            by_lane = value.reshape(self._rows, -1, *value.shape[1:])
            taken = by_lane[torch.from_numpy(first).to(value.device)]
            self._known[known] = taken.reshape(-1, *value.shape[1:])
        return self._known[known]


def merged(
    entries: Sequence[tuple[int, int, Entry]], lanes: int
) -> tuple[torch.Tensor, Sequence[Call]]:
    """What enters the layers, where compositions differ before them.

    Args:
        entries: first lane, one past the last, and what enters the layers if all lanes had the
            weights of these.
        lanes: how many first lanes there are.
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
        if not hasattr(first, "ndim") or first.ndim == 0 or first.shape[0] % lanes:
            return first
        each = first.shape[0] // lanes  # several rows per lane, as ALiBi has
        pairs = zip(values, bounds, strict=True)
        return joined([value[a * each : b * each] for value, (a, b) in pairs])

    parts = [entry for _, _, entry in entries]
    calls = []
    for same_layer in zip(*(part.calls for part in parts), strict=True):
        kwargs = merge([dict(call.kwargs) for call in same_layer])
        calls.append(Call(merge([c.args for c in same_layer]), kwargs, same_layer[0].keyword))
    return merge([part.hidden for part in parts]), calls


def taken(hidden: torch.Tensor, lanes: npt.NDArray[np.int64]) -> torch.Tensor:
    """Rows of a tensor; the tensor itself where that is all of them in order."""
    import numpy as np
    import torch

    if len(lanes) == len(hidden) and np.array_equal(lanes, np.arange(len(lanes))):
        return hidden
    return hidden[torch.from_numpy(lanes).to(hidden.device)]


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Tensors one after the other; a single one as it is."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


CROWDED = 0.75
"""Share of a group's slots in use from which it is not worth closing the gaps."""


@dataclass
class Level:
    """The lanes of one level.

    Attributes:
        keys: the key of each group.
        group: per row, its group.
        slot: per row, its lane's slot in the group.
        counts: per group, how many slots it has, some of them out of use.
    """

    keys: list[Hashable]
    group: Ints
    slot: Ints
    counts: list[int]

    @property
    def starts(self) -> Ints:
        """Per group, the number of its first lane."""
        import numpy as np

        return np.cumsum([0, *self.counts[:-1]])

    @property
    def lane(self) -> Ints:
        """Per row, the number of its lane."""
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
        groups: key, first lane and one past the last, of every group with lanes.
        parent: per lane, the lane of the level before that it continues.
        first: per lane, the lane of level 0 that it began in.
        row: per lane, one of its rows.
    """

    groups: list[tuple[int, Hashable, int, int]]
    parent: Ints
    first: Ints
    row: Ints


class Slots:
    """The lanes of a batch: every composition of a trie answering every prompt.

    Args:
        roots: the trie.
        prompts: how many.

    Attributes:
        member: per row, its composition.
        prompt: per row, its prompt.
        levels: the lanes at every level.
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
        """Part the rows that shared a lane and now write different tokens.

        Args:
            tokens: per row, what it writes, from 0.

        Returns:
            Copies to append to groups, in the order of their new slots.
        """
        import numpy as np

        changes = []
        for number, level in enumerate(self.levels):
            lanes = level.lane
            _, rows, inverse = np.unique(
                lanes * (tokens.max() + 1) + tokens, return_index=True, return_inverse=True
            )
            # Sorted: of the rows of one lane, those with the smallest token keep its slot.
            is_new = np.concatenate([[False], np.diff(lanes[rows]) == 0])
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
        """Forget the other rows, and close the gaps where they leave many.

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
        lanes_before: Ints | None = None
        for level in self.levels:
            lanes = level.lane
            total = sum(level.counts)
            # Lanes out of use go on with what any row has; nobody reads what they compute.
            row = np.zeros(total, dtype=np.int64)
            row[lanes] = np.arange(len(lanes))
            parent = np.arange(total) if lanes_before is None else lanes_before[row]
            first = np.arange(total) if not found else found[-1].first[parent]
            bounds = zip(level.keys, level.starts.tolist(), level.counts, strict=True)
            groups = [(g, k, s, s + n) for g, (k, s, n) in enumerate(bounds) if n]
            found.append(SlotLayout(groups, parent, first, row))
            lanes_before = lanes
        return found
