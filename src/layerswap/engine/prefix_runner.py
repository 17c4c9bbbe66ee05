"""Running many compositions on one batch: along the trie, or one by one where that is not exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerswap.engine.split_model import Entry, SplitModel
from layerswap.engine.trie import Node, build_trie, walk
from layerswap.engine.virtual import VirtualModel

if TYPE_CHECKING:
    import torch

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
        exact: whether the trie gave what the compositions give alone; None until checked.
        evaluations: layers run along the trie so far.
    """

    def __init__(self, virtual: VirtualModel) -> None:
        self.virtual = virtual
        self.stack = SplitModel(virtual.switch(0), virtual.layers, virtual.device)
        self.exact: bool | None = None
        self._tries: dict[tuple[int, ...], list[Node]] = {}
        self.evaluations = 0

    def run(self, inputs: Mapping[str, Any], members: Sequence[int]) -> Iterator[Leaf]:
        """Every composition's logits for one batch, in the order of the trie.

        The first call checks, on a part of the batch, that the trie gives bit for bit what
        the compositions give alone; where it does not, a warning says so and they run alone.

        Args:
            inputs: of the model's forward pass, `input_ids` among them; without a cache.
            members: positions of the compositions.
        """
        if self.exact is None:
            self.exact = self._check(inputs, members)
        yield from self._trie(inputs, members) if self.exact else self._alone(inputs, members)

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
    ) -> Iterator[tuple[Node, torch.Tensor]]:
        """The leaves of a trie, each with the hidden state that comes out of the last layer.

        The model has the leaf's weights outside the layers until the next leaf is asked for.
        """
        held: dict[int, tuple[torch.Tensor, Entry]] = {}
        left: dict[int, int] = {}
        for node, parent in walk(roots):
            if parent is None:
                self.virtual.use_before(node.key)  # type: ignore[arg-type]
                entry = self.stack.before(**inputs)
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

    def _trie(self, inputs: Mapping[str, Any], members: Sequence[int]) -> Iterator[Leaf]:
        for leaf, hidden in self.states(self.trie(members), inputs):
            state = [hidden]

            def logits(
                chosen: torch.Tensor | None, state: list[torch.Tensor] = state
            ) -> torch.Tensor:
                if chosen is None:
                    return self.stack.after(state[0], **inputs)
                picked = state[0].reshape(-1, state[0].shape[-1])[chosen]
                return self.stack.after(picked)

            yield Leaf(leaf.members, logits)
            # Whoever still holds the ending must not hold its state while others are computed.
            state.clear()
            del hidden

    def _alone(self, inputs: Mapping[str, Any], members: Sequence[int]) -> Iterator[Leaf]:
        for member in members:
            found = self.virtual.switch(member)(**inputs).logits

            def logits(chosen: torch.Tensor | None, found: torch.Tensor = found) -> torch.Tensor:
                return found if chosen is None else found.reshape(-1, found.shape[-1])[chosen]

            yield Leaf([member], logits)

    def _check(self, inputs: Mapping[str, Any], members: Sequence[int]) -> bool:
        """Whether three compositions give the same bits along their trie as alone."""
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
                ending.members[0]: (ending.logits(None), ending.logits(some))
                for ending in self._trie(part, chosen)
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
