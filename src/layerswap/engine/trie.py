"""Builds the trie of compositions, whose common beginnings are computed once, and runs along it.

Two compositions with equal weights before the layers and in layers 0 to l have equal hidden
states after layer l. A path is a composition's sequence of keys: one for what acts before the
layers, one per layer, one for all that lies outside them; equal keys stand for equal weights.

The layers are called one by one (`split.py`); where that is not exact, compositions run alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.compose import Composition
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES
from layerswap.engine.prefix import Pair, PrefixCache, read_prefix
from layerswap.engine.split import Entry, SplitModel, check_head, dynamic_rotary, reset_rotary
from layerswap.engine.virtual import VirtualModel

if TYPE_CHECKING:
    import torch


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


def _one_token(device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(1, 1, dtype=torch.long, device=device)


BeforeLayer = Callable[[Node], None]
"""Called before a layer of the trie runs."""
AfterLayer = Callable[[Node, "torch.Tensor"], None]
"""Called with the hidden state that leaves a layer of the trie."""
CLOSE = {"torch.float32": 1e-3, "torch.bfloat16": 0.1, "torch.float16": 0.02}
"""How far logits may be from those of another batch, as a share of the largest, by dtype."""
NOT_SO_BUILT = (RuntimeError, TypeError, ValueError, LookupError, AttributeError)
"""What calling layers one by one raises where a model is not made for it."""
CHECKED_ROWS, CHECKED_TOKENS = 2, 32
"""How much of the first batch the check of exactness runs: rows, and tokens of a row."""


@dataclass(frozen=True)
class Leaf:
    """Compositions whose forward pass on a batch has reached the head.

    Attributes:
        members: their positions; several only if they are equal everywhere.
        logits: `[chosen, vocabulary]` at chosen positions of the flattened batch, or those of
            the whole batch, `[rows, tokens, vocabulary]`, for None. To be called at once: the
            model is another composition's afterwards.
    """

    members: Sequence[int]
    logits: Callable[[torch.Tensor | None], torch.Tensor]


class Runner:
    """Forward passes of all compositions of a virtual model.

    Attributes:
        virtual: the compositions.
        stack: its model, taken apart.
        exact: True if the trie gave the bits of the compositions alone; None until checked.
        evaluations: layers run along the trie so far.
    """

    def __init__(self, virtual: VirtualModel) -> None:
        self.virtual = virtual
        model = virtual.switch(0)
        self._rotary = dynamic_rotary(model)
        self.exact: bool | None = None
        if virtual.layers:
            self.stack = SplitModel(model, virtual.layers, virtual.device)
        else:
            self.exact = self._give_up("they are not in one list")
            check_head(model, self._alone_on({"input_ids": _one_token(virtual.device)}, 0))
        self._tries: dict[tuple[int, ...], list[Node]] = {}
        self.evaluations = 0

    def run(
        self, inputs: Mapping[str, Any], members: Sequence[int], *, prefix: int = 0
    ) -> Iterator[Leaf]:
        """Every composition's logits for one batch, in the order of the trie.

        The first call checks, on a part of the batch, that the trie gives bit for bit what
        the compositions give alone; where it does not, a warning says so and they run alone.

        Args:
            inputs: of the model's forward pass, `input_ids` among them; without a cache.
            members: positions of the compositions.
            prefix: first tokens, the same in every row, that are read once; logits are then those
                of the tokens after them, in the order of the batch without them. To be given
                where `scoring.why_not_shared` finds no obstacle.
        """
        if self.check(inputs, members):
            yield from self._trie(inputs, members, prefix)
        else:
            yield from self._alone(inputs, members)

    def check(self, inputs: Mapping[str, Any], members: Sequence[int]) -> bool:
        """Whether the trie is exact; found out once, as `run` does."""
        if self.exact is None:
            self.exact = self._check(inputs, members)
        return self.exact

    def trie(self, members: Sequence[int]) -> list[Node]:
        """The trie of some compositions; built once, for it serves every batch."""
        chosen = tuple(members)
        if chosen not in self._tries:
            self._tries = {chosen: build_trie(self.virtual.paths, chosen)}
        return self._tries[chosen]

    def states(
        self,
        roots: Sequence[Node],
        inputs: Mapping[str, Any],
        before_layer: BeforeLayer | None = None,
        after_layer: AfterLayer | None = None,
        prefix: PrefixCache | None = None,
    ) -> Iterator[tuple[Node, torch.Tensor]]:
        """The leaves of a trie, each with the hidden state that comes out of the last layer.

        The model has the leaf's weights outside the layers until the next leaf is asked for. With
        a prefix, hidden states are pairs.
        """
        held: dict[int, tuple[torch.Tensor, Entry]] = {}
        left: dict[int, int] = {}
        for node, parent in walk(roots):
            if parent is None:
                self.virtual.use_before(node.key)  # type: ignore[arg-type]
                if prefix is None:
                    entry = self.stack.before(**inputs)
                else:
                    entry = read_prefix(self.stack, inputs, prefix)
                hidden = entry.hidden
            else:
                left[id(parent)] -= 1
                last = not left[id(parent)]
                hidden, entry = held.pop(id(parent)) if last else held[id(parent)]
                if not node.children:
                    self.virtual.use_outside(node.key)  # type: ignore[arg-type]
                    yield node, hidden
                    del hidden
                    continue
                if before_layer is not None:
                    before_layer(node)
                hidden = self._layer(node, entry, hidden)
                if after_layer is not None:
                    after_layer(node, hidden)
            held[id(node)], left[id(node)] = (hidden, entry), len(node.children)
            del hidden

    def _layer(self, node: Node, entry: Entry, hidden: torch.Tensor) -> torch.Tensor:
        layer = node.depth - 1
        self.virtual.use_layer(layer, node.key)  # type: ignore[arg-type]
        self.evaluations += 1
        return entry.calls[layer](self.stack.layers[layer], hidden)

    def _trie(
        self, inputs: Mapping[str, Any], members: Sequence[int], prefix: int = 0
    ) -> Iterator[Leaf]:
        cache = PrefixCache(inputs["input_ids"][:1, :prefix]) if prefix else None
        for leaf, hidden in self.states(self.trie(members), inputs, prefix=cache):
            state = [hidden.rest if isinstance(hidden, Pair) else hidden]

            def logits(
                chosen: torch.Tensor | None, state: list[torch.Tensor] = state
            ) -> torch.Tensor:
                if chosen is None:
                    return self.stack.after(state[0], **inputs)
                picked = state[0].reshape(-1, state[0].shape[-1])[chosen]
                return self.stack.after(picked)

            yield Leaf(leaf.members, logits)
            # Whoever still holds the leaf must not hold its state while others are computed.
            state.clear()
            del hidden

    def _alone(self, inputs: Mapping[str, Any], members: Sequence[int]) -> Iterator[Leaf]:
        for member in members:
            found = self._alone_on(inputs, member).logits

            def logits(chosen: torch.Tensor | None, found: torch.Tensor = found) -> torch.Tensor:
                return found if chosen is None else found.reshape(-1, found.shape[-1])[chosen]

            yield Leaf([member], logits)

    def reset(self) -> None:
        """Forget what the texts before did to the model's rotary tables."""
        reset_rotary(self._rotary)

    def _alone_on(self, inputs: Mapping[str, Any], member: int) -> Any:
        self.reset()
        return self.virtual.switch(member)(**inputs)

    def _check(self, inputs: Mapping[str, Any], members: Sequence[int]) -> bool:
        """True if three compositions give the same bits along their trie as alone."""
        import torch

        part = {
            name: value[:CHECKED_ROWS, -CHECKED_TOKENS:] if hasattr(value, "shape") else value
            for name, value in inputs.items()
        }
        order = [m for leaf, _ in walk(self.trie(members))
                 if not leaf.children for m in leaf.members]  # fmt: skip
        chosen = sorted({order[0], order[len(order) // 2], order[-1]})
        some = torch.arange(0, part["input_ids"].numel(), 3, device=self.virtual.device)
        try:
            found = {
                leaf.members[0]: (leaf.logits(None), leaf.logits(some))
                for leaf in self._trie(part, chosen)
            }
        except torch.OutOfMemoryError:
            raise
        except NOT_SO_BUILT as error:
            return self._give_up(f"{type(error).__name__}: {error}")
        for member, (whole, picked) in found.items():
            (alone,) = self._alone(part, [member])
            # Rows that are padding alone may hold NaN, which equals nothing.
            expected, logits = alone.logits(None).nan_to_num(), whole.nan_to_num()
            if not torch.equal(logits, expected):
                return self._give_up(f"logits differ by up to {_gap(logits, expected):.2g}")
            same = expected.reshape(-1, expected.shape[-1])[some]
            if _gap(picked.nan_to_num(), same) > CLOSE[str(same.dtype)] * float(same.abs().max()):
                return self._give_up("a hidden state's logits depend on its neighbours")
        return True

    def _give_up(self, why: str) -> bool:
        warnings.warn(
            f"the layers of {type(self.virtual.model).__name__} cannot be run one by one exactly "
            f"({why.splitlines()[0]}); every composition runs alone, at full price",
            stacklevel=2,
        )
        return False


def _gap(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max())
