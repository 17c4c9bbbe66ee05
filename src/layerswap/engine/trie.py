"""Builds the trie of compositions, whose common beginnings are computed once, and runs along it.

Two compositions with equal weights before the layers and in layers 0 to l have equal hidden
states after layer l. A path is a composition's sequence of keys: one for what acts before the
layers, one per layer, one for all that lies outside them; equal keys stand for equal weights.

What a model does around its layers differs from family to family: scaled embeddings, position
embeddings, masks and windows, rotary tables, ALiBi, soft-capped or scaled logits. None of it is
written again here. The model's own forward pass runs with the layers replaced: before them to
record what every layer would be called with, after them to hand it a hidden state. Where that is
not exact, compositions run one by one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerswap.checkpoint import Place
from layerswap.compose import Composition
from layerswap.compose.composition import LAYER_ROLES, OUTSIDE_ROLES
from layerswap.engine.virtual import VirtualModel
from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PreTrainedModel


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


@dataclass(frozen=True)
class Call:
    """What the model calls a layer with, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    keyword: str | None = None

    def __call__(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        """The layer's output for a hidden state, `[rows, tokens, width]`."""
        if self.keyword is None:
            output = layer(hidden, *self.args, **self.kwargs)
        else:
            output = layer(*self.args, **self.kwargs, **{self.keyword: hidden})
        return output[0] if isinstance(output, tuple) else output  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Entry:
    """What enters the layers: the first hidden state, and how every layer is called."""

    hidden: torch.Tensor
    calls: Sequence[Call]


class _Reached(Exception):
    """The last layer was called: nothing after it is wanted."""


class SplitModel:
    """The layers of a model, and what it does before and after them.

    Args:
        model: in evaluation mode.
        layers: its layers, in order.
        device: where it runs.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Sequence[nn.Module], device: torch.device
    ) -> None:
        self.model, self._device = model, device
        self.layers = list(layers)
        # How a layer answers (a tensor, or a tuple that begins with it) is learnt once.
        self._rests: list[tuple[Any, ...] | None] = [None] * len(self.layers)
        self._rotary = dynamic_rotary(model)
        self._learn()

    def before(self, **inputs: Any) -> Entry:
        """Run what the model does before its layers.

        Args:
            inputs: of the model's forward pass.
        """
        reset_rotary(self._rotary)
        calls: list[Call] = []
        first: list[torch.Tensor] = []

        def record(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            hidden, call = _split(args, kwargs)
            first.append(hidden)
            calls.append(call)
            if layer == len(self.layers) - 1:
                raise _Reached
            return self._answer(layer, hidden)

        with self._replaced(record):
            try:
                self.model(**inputs)
            except _Reached:
                return Entry(first[0], calls)
        raise RuntimeError("the model did not call its last layer")

    def after(self, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Logits of hidden states that come out of the last layer: final norm, head and all.

        Args:
            hidden: as the last layer gives it for `inputs`; without them, any number of hidden
                states, `[n, width]`, for nothing after the layers depends on their neighbours.
            inputs: of the model's forward pass.

        Returns:
            `[rows, tokens, vocabulary]` in the model's dtype, or `[n, vocabulary]`.
        """
        # Each hidden state as a text of one token: some models restore the shape of their input.
        state = hidden if inputs else hidden[:, None]

        def inject(layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            del args, kwargs
            return self._answer(layer, state)

        with self._replaced(inject):
            logits = self.model(**(inputs or self._tokens(len(hidden)))).logits
        return logits if inputs else logits.reshape(len(hidden), -1)  # type: ignore[no-any-return]

    def _learn(self) -> None:
        import torch

        handles = []
        for index, layer in enumerate(self.layers):

            def keep(module: Any, args: Any, output: Any, index: int = index) -> None:
                del module, args
                self._rests[index] = output[1:] if isinstance(output, tuple) else None

            handles.append(layer.register_forward_hook(keep))
        try:
            with torch.inference_mode():
                output = self.model(**self._tokens(1))
        finally:
            for handle in handles:
                handle.remove()
        check_head(self.model, output)

    def _tokens(self, rows: int) -> dict[str, Any]:
        import torch

        ids = torch.zeros(rows, 1, dtype=torch.long, device=self._device)
        return {"input_ids": ids, "use_cache": False}

    def _answer(self, layer: int, hidden: torch.Tensor) -> Any:
        rest = self._rests[layer]
        return hidden if rest is None else (hidden, *rest)

    @contextmanager
    def _replaced(
        self, replacement: Callable[[int, tuple[Any, ...], dict[str, Any]], Any]
    ) -> Iterator[None]:
        def forward_of(layer: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: replacement(layer, args, kwargs)

        try:
            for index, layer in enumerate(self.layers):
                layer.forward = forward_of(index)
            yield
        finally:
            for layer in self.layers:
                layer.__dict__.pop("forward", None)


def dynamic_rotary(model: nn.Module) -> list[Any]:
    """The rotary embeddings of a model whose tables depend on the texts that it read before."""
    return [m for m in model.modules() if "dynamic" in str(getattr(m, "rope_type", ""))]


def reset_rotary(modules: Sequence[Any]) -> None:
    """Undo what longer texts did to the tables of `dynamic_rotary` (dynamic NTK scaling)."""
    for module in modules:
        for name, original in list(module.named_buffers(recurse=False)):
            prefix, found, _ = name.partition("original_inv_freq")
            if found:
                module.register_buffer(f"{prefix}inv_freq", original.clone(), persistent=False)
                setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


def check_head(model: PreTrainedModel, output: Any) -> None:
    """Refuse a model without a language-model head, by what it gives for one token.

    Raises:
        EvaluationError: it gives no logits for each token.
    """
    logits = getattr(output, "logits", None)
    if logits is None or logits.ndim != 3:
        raise EvaluationError(
            f"{type(model).__name__} has no language-model head, so there are no logits to "
            "evaluate; its config.json names another architecture than a causal language model's"
        )


def _one_token(device: torch.device) -> torch.Tensor:
    import torch

    return torch.zeros(1, 1, dtype=torch.long, device=device)


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    """The hidden state that a layer is called with, and the rest of the call."""
    if args:
        return args[0], Call(args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), Call((), rest, "hidden_states")


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
