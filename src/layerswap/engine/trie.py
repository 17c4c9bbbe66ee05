"""Trie of compositions: layers that they share from the input on run once.

Compositions with equal weights before the layers and in layers 0 to l have equal hidden states
after layer l. The trie is built from paths (see `virtual.py`): a composition is a path of variants,
and equal variants are equal weights. Its layers are called one by one (see `split.py`); where that
is not exact, every composition runs alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES, Composition
from layerswap.engine.prefix import PrefixCache, PrefixedStates, read_prefix
from layerswap.engine.split import (
    Entry,
    SplitModel,
    read_one_token,
    reason_of,
)
from layerswap.engine.transformers_inside import LayerCache
from layerswap.engine.virtual import VirtualModel

if TYPE_CHECKING:
    import torch


@dataclass
class Node:
    """A prefix that some paths share.

    Its children are longer by one variant. The child whose branch holds most hidden states is last:
    by then its siblings no longer need the state that it starts from.
    """

    depth: int  # of its last variant: 0 before the layers, 1 + l for layer l
    variant: Any  # its last variant
    members: list[int]  # numbers of the compositions with this beginning
    children: list[Node] = field(default_factory=list)
    open_states: int = 0  # hidden states held at one time in its branch; 0 for a leaf


@dataclass(frozen=True)
class LayerCounts:
    """Layer evaluations for one batch."""

    naive: int  # if every composition runs alone
    distinct: int  # if every distinct beginning runs once
    open_states: int  # most hidden states held at one time

    @property
    def ratio(self) -> float:
        """The speedup if layers were the only cost."""
        return self.naive / self.distinct

    def __str__(self) -> str:
        return f"{self.distinct} layer evaluations instead of {self.naive} ({self.ratio:.1f}x)"


def build_trie(
    paths: Sequence[Sequence[Hashable]], members: Iterable[int] | None = None
) -> list[Node]:
    """Build the trie of the paths of some compositions, or of all, and return its roots."""
    return _branches(paths, list(range(len(paths)) if members is None else members), 0)


def _branches(
    paths: Sequence[Sequence[Hashable]], members: Sequence[int], depth: int
) -> list[Node]:
    nodes: dict[Hashable, Node] = {}
    for member in members:
        variant = paths[member][depth]
        nodes.setdefault(variant, Node(depth, variant, [])).members.append(member)
    if members and depth + 1 < len(paths[members[0]]):
        for node in nodes.values():
            node.children = _branches(paths, node.members, depth + 1)
            *others, last = (child.open_states for child in node.children)
            # While all children but the last run, this node's own state is held for their siblings.
            node.open_states = max(1, last, *(1 + states for states in others))
    return sorted(nodes.values(), key=lambda node: node.open_states)


def walk(roots: Sequence[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Yield every node with its parent, depth first."""
    stack: list[tuple[Node, Node | None]] = [(root, None) for root in reversed(roots)]
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack.extend((child, node) for child in reversed(node.children))


def count_layers(roots: Sequence[Node]) -> LayerCounts:
    """Count how often layers run, alone and along the trie."""
    naive = distinct = 0
    for node, _ in walk(roots):
        if node.depth and node.children:
            distinct += 1
            naive += len(node.members)
    return LayerCounts(naive, distinct, max((root.open_states for root in roots), default=0))


def paths_of(compositions: Iterable[Composition]) -> list[tuple[Hashable, ...]]:
    """Make paths from compositions alone, to count layers before any checkpoint is opened.

    Example: the 81 configurations of 32 layers that paper 1 found about equally good (b in 3..5,
    u, t_b and t_u in 0..2) need 398 layer evaluations; one by one they need 2,592.
    """
    return [
        (
            composition[Place(None, "embedding")],
            *(
                tuple(composition[Place(layer, role)] for role in LAYER_ROLES)
                for layer in range(composition.layers)
            ),
            tuple(composition[Place(None, role)] for role in OUTSIDE_ROLES),
        )
        for composition in compositions
    ]


CHECKED_ROWS, CHECKED_TOKENS = 2, 32
"""Size of the part of the first batch that is checked: rows, and tokens of a row."""
ROUNDING = {"torch.float32": 1e-3, "torch.bfloat16": 0.1, "torch.float16": 0.02}
"""Largest difference that rounding explains, as a share of the largest logit, by dtype."""


def gap_beyond_rounding(logits: torch.Tensor, expected: torch.Tensor) -> float | None:
    """Return the largest difference between logits if it is more than rounding; else None."""
    gap = _largest_gap(logits, expected)
    return None if gap <= ROUNDING[str(logits.dtype)] * float(expected.abs().max()) else gap


def _largest_gap(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits.float() - expected.float()).abs().max())


@dataclass(frozen=True)
class Leaf:
    """Compositions whose forward pass on a batch has reached the head.

    Compositions share a leaf only if they are equal everywhere. `logits` computes `[chosen,
    vocabulary]` at chosen positions of the flattened batch, or, for None, `[rows, tokens,
    vocabulary]`. Call it before the next leaf is taken, since the model then has another
    composition's weights.
    """

    members: Sequence[int]
    logits: Callable[[torch.Tensor | None], torch.Tensor]


class Runner:
    """Forward passes of all compositions of a virtual model.

    Attributes:
        stack: its model, split at its layers.
        exact: True if the trie gives the same bits as the compositions alone; None until checked.
        evaluations: layers run along the trie so far.
    """

    def __init__(self, virtual: VirtualModel) -> None:
        self.virtual = virtual
        model = virtual.switch(0)
        self.exact: bool | None = None
        if virtual.layers:
            self.stack = SplitModel(model, virtual.layers, virtual.device)
        else:
            self.exact = self._give_up("they are not in one list")
            read_one_token(model, virtual.device)
        self._tries: dict[tuple[int, ...], list[Node]] = {}
        self.evaluations = 0

    def run(
        self, inputs: Mapping[str, Any], members: Sequence[int], *, prefix: int = 0
    ) -> Iterator[Leaf]:
        """Yield every composition's logits for one batch, in the order of the trie.

        The first call checks a part of the batch: the trie must give bit for bit the logits of the
        compositions alone. If it does not, a warning says so and they run alone. `inputs` have no
        cache. The first `prefix` tokens of all rows are common and read once; logits are of the
        tokens after it.
        """
        if self.check(inputs, members):
            yield from self._run_trie(inputs, members, prefix)
        else:
            yield from self._run_alone(inputs, members)

    def check(self, inputs: Mapping[str, Any], members: Sequence[int]) -> bool:
        """Check once, on a part of a batch, that the trie is exact."""
        if self.exact is None:
            reason = reason_of(lambda: self._why_not_exact(inputs, members))
            self.exact = reason is None or self._give_up(reason)
        return self.exact

    def trie(self, members: Sequence[int]) -> list[Node]:
        """Return the trie of some compositions, cached for the next batches."""
        chosen = tuple(members)
        if chosen not in self._tries:
            self._tries = {chosen: build_trie(self.virtual.paths, chosen)}
        return self._tries[chosen]

    def states(
        self,
        roots: Sequence[Node],
        inputs: Mapping[str, Any],
        before_layer: Callable[[Node], None] | None = None,
        *,
        cache: LayerCache | None = None,
        prefix: PrefixCache | None = None,
    ) -> Iterator[tuple[Node, torch.Tensor]]:
        """Yield the leaves of a trie, each with the output of its last layer; pairs with a prefix.

        The model has the leaf's weights outside the layers until the next leaf is taken.
        """
        held: dict[int, tuple[torch.Tensor, Entry]] = {}  # of nodes whose children are left
        for node, parent in walk(roots):
            self.virtual.use(node.depth, node.variant)
            if parent is None:
                if prefix is None:
                    entry = self.stack.before(cache, **inputs)
                else:
                    entry = read_prefix(self.stack, inputs, prefix)
                hidden = entry.hidden
            else:
                last = node is parent.children[-1]
                hidden, entry = held.pop(id(parent)) if last else held[id(parent)]
                if not node.children:
                    yield node, hidden
                    del hidden
                    continue
                if before_layer is not None:
                    before_layer(node)
                self.evaluations += 1
                layer = node.depth - 1
                hidden = entry.calls[layer](self.stack.layers[layer], hidden)
            held[id(node)] = hidden, entry
            del hidden

    def _run_trie(
        self, inputs: Mapping[str, Any], members: Sequence[int], prefix: int = 0
    ) -> Iterator[Leaf]:
        cache = PrefixCache(inputs["input_ids"][:1, :prefix]) if prefix else None
        for leaf, hidden in self.states(self.trie(members), inputs, prefix=cache):
            state = [hidden.rest if isinstance(hidden, PrefixedStates) else hidden]

            def logits(
                chosen: torch.Tensor | None, state: list[torch.Tensor] = state
            ) -> torch.Tensor:
                if chosen is None:
                    return self.stack.after(state[0], **inputs)
                return self.stack.after(state[0].reshape(-1, state[0].shape[-1])[chosen])

            yield Leaf(leaf.members, logits)
            # A caller that keeps the leaf must not keep its state while others are computed.
            state.clear()
            del hidden

    def _run_alone(self, inputs: Mapping[str, Any], members: Sequence[int]) -> Iterator[Leaf]:
        for member in members:
            whole = self.logits_alone(inputs, member)

            def logits(chosen: torch.Tensor | None, whole: torch.Tensor = whole) -> torch.Tensor:
                return whole if chosen is None else whole.reshape(-1, whole.shape[-1])[chosen]

            yield Leaf([member], logits)

    def logits_alone(self, inputs: Mapping[str, Any], member: int) -> torch.Tensor:
        """Return `[rows, tokens, vocabulary]` of a composition, by the model's own forward pass."""
        return self.virtual.switch(member)(**inputs).logits  # type: ignore[no-any-return]

    def _why_not_exact(self, inputs: Mapping[str, Any], members: Sequence[int]) -> str | None:
        """Compare the bits of three compositions along their trie with those alone."""
        import torch

        part = {
            name: value[:CHECKED_ROWS, -CHECKED_TOKENS:] if hasattr(value, "shape") else value
            for name, value in inputs.items()
        }
        leaves = [node for node, _ in walk(self.trie(members)) if not node.children]
        order = [member for leaf in leaves for member in leaf.members]
        chosen = sorted({order[0], order[len(order) // 2], order[-1]})
        some = torch.arange(0, part["input_ids"].numel(), 3, device=self.virtual.device)
        results = {
            leaf.members[0]: (leaf.logits(None), leaf.logits(some))
            for leaf in self._run_trie(part, chosen)
        }
        for member, (whole, picked) in results.items():
            # Rows of padding alone may hold NaN, which equals nothing.
            expected, logits = self.logits_alone(part, member).nan_to_num(), whole.nan_to_num()
            if not torch.equal(logits, expected):
                return f"logits differ by up to {_largest_gap(logits, expected):.2g}"
            same = expected.reshape(-1, expected.shape[-1])[some]
            if gap_beyond_rounding(picked.nan_to_num(), same) is not None:
                return "a hidden state's logits depend on its neighbours"
        return None

    def _give_up(self, reason: str) -> bool:
        warnings.warn(
            f"the layers of {type(self.virtual.model).__name__} cannot be run one by one exactly "
            f"({reason}); every composition runs alone, at full cost",
            stacklevel=2,
        )
        return False
