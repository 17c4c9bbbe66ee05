"""Builds the trie of compositions, whose common beginnings are computed once.

Two compositions with equal weights before the layers and in layers 0 to l have equal hidden
states after layer l. A path is a composition's sequence of keys: one for what acts before the
layers, one per layer, one for all that lies outside them; equal keys stand for equal weights.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from layerswap.checkpoint import Place
from layerswap.compose import Composition
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES


@dataclass
class Node:
    """One distinct beginning of some paths.

    Attributes:
        depth: position of its key in the path: 0 before the layers, 1 + l for layer l.
        key: its key.
        members: positions of the compositions that begin so.
        children: the beginnings that are longer by one key. The one whose branch holds most
            hidden states comes last, when the state that it starts from is no longer needed by
            the others.
        open: hidden states that are held at one time below it, its own included; 0 for a leaf.
    """

    depth: int
    key: Hashable
    members: list[int]
    children: list[Node] = field(default_factory=list)
    open: int = 0


@dataclass(frozen=True)
class LayerCounts:
    """How many times a layer runs for one batch.

    Attributes:
        naive: when every composition runs alone.
        distinct: when every distinct beginning runs once.
        open: most hidden states that are held at one time.
    """

    naive: int
    distinct: int
    open: int

    @property
    def ratio(self) -> float:
        """How many times fewer: the speedup if layers were all that costs."""
        return self.naive / self.distinct

    def __str__(self) -> str:
        return f"{self.distinct} layer evaluations instead of {self.naive} ({self.ratio:.1f}x)"


def build_trie(
    paths: Sequence[Sequence[Hashable]], members: Iterable[int] | None = None
) -> list[Node]:
    """The roots of the trie of some paths of one length.

    Args:
        paths: the compositions.
        members: which of them; all when None.
    """
    chosen = list(range(len(paths)) if members is None else members)
    return _branches(paths, chosen, 0)


def walk(roots: Sequence[Node]) -> Iterator[tuple[Node, Node | None]]:
    """Every node after its parent, depth first, with its parent."""
    stack: list[tuple[Node, Node | None]] = [(root, None) for root in reversed(roots)]
    while stack:
        node, parent = stack.pop()
        yield node, parent
        stack.extend((child, node) for child in reversed(node.children))


def count_layers(roots: Sequence[Node]) -> LayerCounts:
    """How often layers run, alone and along the trie."""
    naive = distinct = 0
    for node, _ in walk(roots):
        if node.depth and node.children:
            distinct += 1
            naive += len(node.members)
    return LayerCounts(naive, distinct, max((root.open for root in roots), default=0))


def paths_of(compositions: Iterable[Composition]) -> list[tuple[Hashable, ...]]:
    """Paths from compositions alone, before any checkpoint is opened, to count with.

    Example: the 81 configurations of 32 layers that paper 1 found about equally good (b in 3..5,
    u, t_b and t_u in 0..2) need 398 layer evaluations where one by one it takes 2,592.
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


def _branches(
    paths: Sequence[Sequence[Hashable]], members: Sequence[int], depth: int
) -> list[Node]:
    nodes: dict[Hashable, Node] = {}
    for member in members:
        key = paths[member][depth]
        nodes.setdefault(key, Node(depth, key, [])).members.append(member)
    if depth + 1 < len(paths[members[0]] if members else ()):
        for node in nodes.values():
            node.children = _branches(paths, node.members, depth + 1)
            needs = [child.open for child in node.children]
            # All but the last child run while this node's own state is held for their siblings.
            node.open = max([1, needs[-1], *(1 + need for need in needs[:-1])])
    return sorted(nodes.values(), key=lambda node: node.open)
