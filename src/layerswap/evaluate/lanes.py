"""Which forward passes of a decoding step are the same, and where each one's cache is.

A row is one composition answering one prompt. After layer l, rows have equal hidden states and
equal caches if their compositions are equal up to layer l, they answer the same prompt, and they
have written the same tokens. Such rows share a lane at that layer: it is computed once. Lanes only
ever split, when rows that shared one write different tokens; the new lane starts from a copy of
the old one's cache. Pure bookkeeping: no tensors of a model.

Levels are those of the trie: 0 before the layers, 1 + l for layer l, and a last one outside. At
each level, the lanes whose compositions have the same key there form a group; a lane has a slot in
its group, and the lanes of a level are numbered group after group.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerswap.evaluate.trie import Node, walk

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints = npt.NDArray[np.int64]

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
class Change:
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
class LevelLayout:
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


class Lanes:
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

    def split(self, tokens: Ints) -> list[Change]:
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
                    changes.append(Change(number, group, slots[here].copy()))
                    slots[here] = level.counts[group] + np.arange(here.sum())
                    level.counts[group] += int(here.sum())
            level.slot = slots[inverse.reshape(-1)]
        return changes

    def keep(self, rows: npt.NDArray[np.bool_]) -> list[Change]:
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
                    changes.append(Change(number, group, used))
                    level.slot[here] = np.searchsorted(used, level.slot[here])
                    level.counts[group] = len(used)
        return changes

    def layout(self) -> list[LevelLayout]:
        """How every level is computed from the one before it."""
        import numpy as np

        found: list[LevelLayout] = []
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
            found.append(LevelLayout(groups, parent, first, row))
            lanes_before = lanes
        return found
