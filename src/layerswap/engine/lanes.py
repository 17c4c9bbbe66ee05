"""Lanes of joint decoding, and their cache of keys and values.

All compositions answer all prompts together. A *row* is one composition that answers one prompt.
At every depth, rows with equal weights and equal tokens up to there share a *lane*, which is
computed once. The lanes of one variant are a *segment*: they run as one batch on the same weights,
and share one cache. (A depth is a part of the model and a variant its weights; see `virtual.py`.)

For example, two compositions answer one prompt, and differ only in layer 1:

    depth                 0 before    1 layer 0   2 layer 1   3 outside
    row of composition 0  segment 0   segment 0   segment 0   segment 0
                          lane 0      lane 0      lane 0      lane 0
    row of composition 1  segment 0   segment 0   segment 1   segment 0
                          lane 0      lane 0      lane 0      lane 1

Layer 0 runs for one lane. When the rows write different tokens, `Lanes.split` moves composition 1
to a new lane 1 at depths 0 and 1, which starts as a copy of lane 0. From then on layer 0 runs for
two lanes. When a row ends, `Lanes.keep` frees its lanes.

The *position* of a lane counts the lanes of all segments of its depth: at depth 2, composition 1
has position 1. `Lanes` does the bookkeeping and `LaneCache` holds keys and values. The functions
between them select and join tensors of the model by lanes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.split import Call, Entry, tree_map
from layerswap.engine.trie import Node, walk
from layerswap.engine.virtual import Variant
from layerswap.ground.errors import EvaluationError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int64]

CROWDED = 0.75
"""Share of a segment's lanes in use above which its free lanes are left where they are."""
TOKENS_AHEAD = 64
"""Tokens for which the cache reserves memory at a time."""


@dataclass
class Level:
    """The lanes at one depth."""

    variants: list[Variant]  # per segment
    counts: list[int]  # per segment, the number of its lanes, free ones included
    segment: Ints  # per row
    lane: Ints  # per row, its lane in the segment

    @property
    def starts(self) -> Ints:
        """Per segment, the position of its first lane."""
        import numpy as np

        return np.cumsum([0, *self.counts[:-1]])

    @property
    def position(self) -> Ints:
        """Per row, the position of its lane."""
        return self.starts[self.segment] + self.lane


@dataclass(frozen=True)
class CacheChange:
    """A change of the lanes of one segment, for its cache."""

    depth: int
    segment: int
    lanes: Ints  # the lanes to copy, or to keep in this order
    append_at: int | None = None  # lanes before copies are appended; None to keep only `lanes`


@dataclass(frozen=True)
class Segment:
    """The lanes of one variant at one depth: positions [start, stop)."""

    number: int
    variant: Variant
    start: int
    stop: int


@dataclass(frozen=True)
class LevelLayout:
    """Mapping of the lanes of one depth to lanes of the previous depth, by position."""

    segments: list[Segment]  # segments with lanes
    parent: Ints  # position at the depth before whose output a lane takes
    first: Ints  # position at depth 0 that a lane started in
    row: Ints  # one row of a lane


class Lanes:
    """The lanes of a batch, in which every composition of a trie answers every prompt.

    Attributes:
        member: per row, its composition.
        prompt: per row, its prompt.
        levels: per depth, its lanes.
    """

    def __init__(self, roots: Sequence[Node], prompts: int) -> None:
        import numpy as np

        nodes = [node for node, _ in walk(roots)]
        members = [m for node in nodes if not node.children for m in node.members]
        self.member: Ints = np.repeat(np.array(members), prompts)
        self.prompt: Ints = np.tile(np.arange(prompts), len(members))
        first_row = {member: index * prompts for index, member in enumerate(members)}
        depths = 1 + max(node.depth for node in nodes)
        empty = np.zeros(len(self.member), dtype=np.int64)
        self.levels = [Level([], [], empty.copy(), empty.copy()) for _ in range(depths)]
        for node in nodes:
            level = self.levels[node.depth]
            if node.variant not in level.variants:
                level.variants.append(node.variant)
                level.counts.append(0)
            segment = level.variants.index(node.variant)
            for member in node.members:
                rows = slice(first_row[member], first_row[member] + prompts)
                level.segment[rows] = segment
                level.lane[rows] = level.counts[segment] + np.arange(prompts)
            level.counts[segment] += prompts

    def __len__(self) -> int:
        return len(self.member)

    def start_of(self, node: Node) -> tuple[int, int]:
        """Return a node's segment and the lane of its first prompt.

        Until texts are written, the lanes of its other prompts follow.
        """
        level, row = self.levels[node.depth], int((self.member == node.members[0]).argmax())
        return int(level.segment[row]), int(level.lane[row])

    def split(self, tokens: Ints) -> list[CacheChange]:
        """Separate rows that share a lane and write different tokens, one per row, from 0."""
        import numpy as np

        changes = []
        for depth, level in enumerate(self.levels):
            position = level.position
            # A cluster is the rows of one lane that write one token. Sorted by lane, then token.
            lane_and_token = position * (tokens.max() + 1) + tokens
            _, example, cluster = np.unique(lane_and_token, return_index=True, return_inverse=True)
            # The first cluster of a lane keeps it; every other one moves to a new lane.
            moves = np.concatenate([[False], np.diff(position[example]) == 0])
            if not moves.any():
                if depth == 0:
                    return []  # rows that share a later lane share the one at depth 0 too
                continue
            segment, lane = level.segment[example], level.lane[example]
            for number, count in enumerate(level.counts):
                moving = moves & (segment == number)
                if moving.any():
                    changes.append(CacheChange(depth, number, lane[moving], append_at=count))
                    lane[moving] = count + np.arange(moving.sum())
                    level.counts[number] += int(moving.sum())
            level.lane = lane[cluster.reshape(-1)]
        return changes

    def keep(self, rows: npt.NDArray[np.bool_]) -> list[CacheChange]:
        """Drop all other rows, and free the lanes of segments where many are unused."""
        import numpy as np

        self.member, self.prompt = self.member[rows], self.prompt[rows]
        changes = []
        for depth, level in enumerate(self.levels):
            level.segment, level.lane = level.segment[rows], level.lane[rows]
            for number, count in enumerate(level.counts):
                here = level.segment == number
                used = np.unique(level.lane[here])
                if count and len(used) <= CROWDED * count:
                    changes.append(CacheChange(depth, number, used))
                    level.lane[here] = np.searchsorted(used, level.lane[here])
                    level.counts[number] = len(used)
        return changes

    def layout(self) -> list[LevelLayout]:
        """Map the lanes of each depth to lanes of the previous depth."""
        import numpy as np

        layouts: list[LevelLayout] = []
        for depth, level in enumerate(self.levels):
            position = level.position
            total = sum(level.counts)
            # A free lane takes the input of row 0; its output is never read.
            row = np.zeros(total, dtype=np.int64)
            row[position] = np.arange(len(position))
            if depth == 0:
                parent = first = np.arange(total)
            else:
                parent = self.levels[depth - 1].position[row]
                first = layouts[-1].first[parent]
            starts = level.starts.tolist()
            segments = [
                Segment(number, level.variants[number], starts[number], starts[number] + count)
                for number, count in enumerate(level.counts)
                if count
            ]
            layouts.append(LevelLayout(segments, parent, first, row))
        return layouts


class CallSelector:
    """Selects a segment's part of a layer's arguments, which cover all lanes of depth 0.

    Masks, positions and the like have one row per lane of depth 0, several rows per lane (ALiBi has
    one per head), or one row for all. Results are kept for one step, since most layers have the
    same arguments and neighbouring layers have the same segments.
    """

    def __init__(self, lanes: int) -> None:
        self._lanes = lanes
        self._selected: dict[tuple[bytes, int], torch.Tensor] = {}

    def __call__(self, call: Call, first: Ints) -> Call:
        """Return the call for lanes that started in these lanes of depth 0."""
        import numpy as np
        import torch

        if len(first) == self._lanes and np.array_equal(first, np.arange(self._lanes)):
            return call
        index = first.tobytes()

        def select(value: Any) -> Any:
            if not _by_lane(value, self._lanes) or self._lanes == len(value) == 1:
                return value  # one row may be for the lane or for all
            key = index, id(value)
            if key not in self._selected:
                by_lane = value.reshape(self._lanes, -1, *value.shape[1:])
                chosen = by_lane[torch.from_numpy(first).to(value.device)]
                self._selected[key] = chosen.reshape(-1, *value.shape[1:])
            return self._selected[key]

        return Call(tree_map(select, call.args), tree_map(select, call.kwargs))


def _by_lane(value: Any, lanes: int) -> bool:
    """True for tensors with one or several rows per lane."""
    return hasattr(value, "ndim") and value.ndim > 0 and value.shape[0] % lanes == 0


def merge_entries(entries: Sequence[tuple[Segment, Entry]], lanes: int) -> Entry:
    """Join the inputs of the layers, where compositions differ before the layers.

    Each segment of depth 0 has computed the input for all lanes, with its weights.
    """
    if len(entries) == 1:
        return entries[0][1]
    segments = [segment for segment, _ in entries]

    def merge(*values: Any) -> Any:
        if not _by_lane(values[0], lanes):
            return values[0]
        each = len(values[0]) // lanes  # several rows per lane, as with ALiBi
        pairs = zip(values, segments, strict=True)
        return concatenate([value[s.start * each : s.stop * each] for value, s in pairs])

    calls = [
        Call(tree_map(merge, *(c.args for c in same)), tree_map(merge, *(c.kwargs for c in same)))
        for same in zip(*(entry.calls for _, entry in entries), strict=True)
    ]
    return Entry(merge(*(entry.hidden for _, entry in entries)), calls)


def select_rows(tensor: torch.Tensor, rows: Ints) -> torch.Tensor:
    """Return rows of a tensor; the tensor itself if they are all rows in order."""
    import numpy as np
    import torch

    if len(rows) == len(tensor) and np.array_equal(rows, np.arange(len(rows))):
        return tensor
    return tensor[torch.from_numpy(rows).to(tensor.device)]


def concatenate(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate tensors; a single tensor is not copied."""
    import torch

    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


class SegmentCache:
    """Keys and values of one segment at one layer, with memory reserved to grow."""

    def __init__(self, lanes: int, tokens: int) -> None:
        self._lanes, self._tokens = lanes, tokens
        self._tensors: list[torch.Tensor] = []  # keys and values, [lanes, heads, tokens, width]

    def write_prompt(self, start: int, new: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Write keys and values of prompts, `[prompts, heads, tokens, width]`, from a lane on."""
        if not self._tensors:
            self._tensors = [
                part.new_empty(self._lanes, part.shape[1], self._tokens, part.shape[3])
                for part in new
            ]
        for cached, part in zip(self._tensors, new, strict=True):
            cached[start : start + part.shape[0], :, : part.shape[2]] = part

    def write_token(
        self, position: int, new: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append one token to every lane; return all keys and values up to it."""
        if position == self._tokens:
            self._resize(self._lanes, self._tokens + max(TOKENS_AHEAD, self._tokens // 4))
        used = new[0].shape[0]
        for cached, part in zip(self._tensors, new, strict=True):
            cached[:used, :, position] = part[:, :, 0]
        keys, values = (cached[:used, :, : position + 1] for cached in self._tensors)
        return keys, values

    def append(self, count: int, lanes: torch.Tensor) -> None:
        """Append copies of lanes to the `count` lanes in use."""
        needed = count + len(lanes)
        if needed > self._lanes:
            self._resize(max(needed, self._lanes + self._lanes // 2), self._tokens)
        for cached in self._tensors:
            cached[count:needed] = cached[lanes]

    def keep(self, lanes: torch.Tensor) -> None:
        """Keep only these lanes, in this order."""
        self._tensors = [cached[lanes] for cached in self._tensors]
        self._lanes = len(lanes)

    def _resize(self, lanes: int, tokens: int) -> None:
        wider = []
        for cached in self._tensors:
            new = cached.new_empty(lanes, cached.shape[1], tokens, cached.shape[3])
            new[: self._lanes, :, : self._tokens] = cached
            wider.append(new)
        self._tensors, self._lanes, self._tokens = wider, lanes, tokens


class LaneCache:
    """The caches of all layers and segments, and the segment that runs now.

    `length` counts the tokens in the cache, with padding; `layers` has the caches of the segments.
    """

    def __init__(self, counts: list[list[int]], width: int, max_new_tokens: int) -> None:
        tokens = width + min(max_new_tokens, TOKENS_AHEAD)
        self.length = 0
        self.layers = [[SegmentCache(count, tokens) for count in layer] for layer in counts]
        self._layer = self._segment = 0
        self._prompt_lane: int | None = None

    def select(self, layer: int, segment: int, prompt_lane: int | None = None) -> None:
        """Select the segment that runs next, and the lane of its first prompt if it reads any."""
        self._layer, self._segment, self._prompt_lane = layer, segment, prompt_lane

    def store(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Keep keys and values of whole prompts, for the selected segment."""
        assert self._prompt_lane is not None, "no prompts are read"
        self.layers[self._layer][self._segment].write_prompt(self._prompt_lane, (keys, values))

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Take new keys and values of the selected segment, and return all of them."""
        if layer != self._layer:
            raise EvaluationError(f"layer {self._layer} uses the cache of layer {layer}")
        if self._prompt_lane is None:
            return self.layers[layer][self._segment].write_token(self.length, (keys, values))
        self.store(keys, values)
        return keys, values
