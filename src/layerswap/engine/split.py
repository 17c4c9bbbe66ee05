"""Takes a model apart: what it does before its layers, the call of every layer, what it does after.

What a model does around its layers differs from family to family: scaled embeddings, position
embeddings, masks and windows, rotary tables, ALiBi, soft-capped or scaled logits. None of it is
written again here. The model's own forward pass runs with the layers replaced: before them to
record what every layer would be called with, after them to hand it a hidden state.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from layerswap.errors import EvaluationError

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import Cache, PreTrainedModel


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


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether a model can be told the positions of its tokens."""
    return "position_ids" in inspect.signature(model.forward).parameters


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


def _split(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, Call]:
    """The hidden state that a layer is called with, and the rest of the call."""
    if args:
        return args[0], Call(args[1:], kwargs)
    rest = dict(kwargs)
    return rest.pop("hidden_states"), Call((), rest, "hidden_states")


def other_state(model: PreTrainedModel) -> str | None:
    """Why decoding needs more than keys and values per layer; None if it does not."""
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "it takes no cache of keys and values"
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            return f"its cache has a {type(layer).__name__}"
    return None


class LayerCache(Protocol):
    """Keys and values that a layer's attention reads and adds to.

    Attributes:
        length: tokens in it, padding included.
    """

    length: int

    def update(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Take new keys and values, `[rows, heads, tokens, width]` each, and return all."""


def transformers_cache(cache: LayerCache, layers: int) -> Cache:
    """A cache of ours, as the object that a transformers model of so many layers takes."""
    from transformers import Cache

    layer_class = _cache_layer_class()
    return Cache(layers=[layer_class(cache, index) for index in range(layers)])


@lru_cache
def _cache_layer_class() -> Any:
    """The class is made on first use, because transformers is only imported where it is needed."""
    from transformers.cache_utils import DynamicLayer

    class CacheLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        def __init__(self, cache: LayerCache, index: int) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self._cache, self._index = cache, index

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return self._cache.update(self._index, key_states, value_states)

        def get_seq_length(self) -> int:
            return self._cache.length

    return CacheLayer
